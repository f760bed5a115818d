// The copy engine (TMA): boxes of tensors to shared memory and back, bytes as they lie, and sums into global
// memory. One thread asks, the engine does the rest at any time. (PTX ISA, "Data Movement and Conversion
// Instructions: cp.async.bulk.tensor", "cp.async.bulk", "cp.reduce.async.bulk",
// "cp.async.bulk.wait_group"; of the swizzle "Tensors: Swizzling Modes".)
#include <algorithm>
#include <cstring>

#include "checker.h"
#include "cluster.h"
#include "engines.h"

namespace sim {

constexpr size_t CHUNK = 16;      // bytes that stay together under a swizzle

// The place of a chunk in shared memory: bits 4 to 6 of its address are changed by bits 7 to 9; with the
// shorter swizzles fewer of them. The address is the real one, so a box at the wrong multiple shows.
static size_t swizzled(size_t offset, int swizzle) {
  const size_t chunks = swizzle ? swizzle / CHUNK : 1;
  return offset ^ (offset / 128 % chunks * CHUNK);
}

// f(shared, global, skip, count) for each chunk of a copy: of its 16 bytes, `count` from the skip-th on are
// in the tensor, and begin at `global`.
template <class F> static void each_chunk(const Worker& w, const BulkCopy& c, F f) {
  const TensorMap& m = c.map;
  if (m.rank == 0) {                // no box
    for (size_t i = 0; i < c.bytes; i += CHUNK) f(c.shared + i, c.global + i, 0, CHUNK);
    return;
  }
  const int64_t row_bytes = int64_t(m.box[0]) * m.element_bytes;
  const int64_t tensor_row = int64_t(m.sizes[0]) * m.element_bytes, first = c.corner[0] * m.element_bytes;
  size_t offset = c.shared - w.shared;
  for (size_t row = 0; row < c.bytes / row_bytes; row++) {
    char* global = m.address;
    bool inside = true;
    size_t rest = row;
    for (int i = 1; i < m.rank; i++) {
      const int64_t x = c.corner[i] + int64_t(rest % m.box[i]);
      rest /= m.box[i];
      inside &= x >= 0 && x < int64_t(m.sizes[i]);
      global += x * int64_t(m.strides[i - 1]);
    }
    for (int64_t byte = first; byte < first + row_bytes; byte += CHUNK, offset += CHUNK) {
      const int64_t from = std::max<int64_t>(byte, 0), to = std::min<int64_t>(byte + CHUNK, tensor_row);
      const size_t count = inside && to > from ? to - from : 0;
      f(w.shared + swizzled(offset, m.swizzle), global + from, count ? from - byte : 0, count);
    }
  }
}

void each_chunk_of(const Worker& w, const BulkCopy& c,
                   const std::function<void(char*, char*, size_t, size_t)>& f) {
  each_chunk(w, c, f);
}

static void add_floats(char* to, const char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += sizeof(float)) {
    auto* p = reinterpret_cast<uint32_t*>(to + i);
    uint32_t seen = __atomic_load_n(p, __ATOMIC_RELAXED), desired;
    float sum, addend;
    memcpy(&addend, from + i, sizeof addend);
    do {
      memcpy(&sum, &seen, sizeof sum);
      sum += addend;
      memcpy(&desired, &sum, sizeof sum);
    } while (!__atomic_compare_exchange_n(p, &seen, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  }
}

// -------------------------------------------------------------------------------- what the engine does
static void load(Worker& w, BulkCopy& c) {
  each_chunk(w, c, [](char* shared, const char* global, size_t skip, size_t count) {
    memset(shared, 0, CHUNK);
    memcpy(shared + skip, global, count);
  });
  c.done = true;
  if (w.launch->checked && c.mbarrier->phase != c.phase) load_came_late(c);
  bytes_have_come(*c.mbarrier, c.bytes);
}

static void read_source(Worker& w, BulkCopy& c) {
  if (c.done) return;
  c.buffer.clear();
  each_chunk(w, c, [&](const char* shared, char*, size_t, size_t) {
    c.buffer.insert(c.buffer.end(), shared, shared + CHUNK);
  });
  c.done = true;
}

static void write_destination(Worker& w, BulkCopy& c) {
  read_source(w, c);
  if (c.kind == Bulk::ADD) return add_floats(c.global, c.buffer.data(), c.bytes);
  const char* from = c.buffer.data();
  each_chunk(w, c, [&](char*, char* global, size_t skip, size_t count) {
    memcpy(global, from + skip, count);
    from += CHUNK;
  });
}

static void take_out(Engines& e, size_t i) { e.copies.erase(e.copies.begin() + ptrdiff_t(i)); }

// In the name of the thread that has asked: a fault is its mistake.
static void land(Worker& w, size_t i) {
  Engines& e = *w.engines;
  Fiber* const self = w.current;
  BulkCopy copy = std::move(e.copies[i]);
  take_out(e, i);
  w.current = copy.fiber;
  if (copy.kind == Bulk::LOAD) load(w, copy);
  else write_destination(w, copy);
  w.current = self;
  w.vain_yields = w.vain_tests = 0;
}

// No thread of the block can go on: the oldest load is made. False: there is none.
bool land_next_load(Worker& w) {
  if (!w.engines) return false;
  const auto& copies = w.engines->copies;
  for (size_t i = 0; i < copies.size(); i++)
    if (copies[i].kind == Bulk::LOAD) {
      land(w, i);
      return true;
    }
  return false;
}

void land_some_bulk_copies(Worker& w) {
  for (size_t i = 0; i < w.engines->copies.size();)
    if (next_random(w.copy_random) % 4) i++;
    else land(w, i);
}

// The block has ended: what has been read arrives, if nobody has waited for that.
void finish_bulk_copies(Worker& w) {
  if (!w.engines) return;
  for (BulkCopy& c : w.engines->copies)
    if (c.kind != Bulk::LOAD && c.done) write_destination(w, c);
}

// -------------------------------------------------------------------------------- what threads ask for
static size_t bytes_of_box(const TensorMap& m) {
  size_t bytes = m.element_bytes;
  for (int i = 0; i < m.rank; i++) bytes *= m.box[i];
  return bytes;
}

static const TensorMap& valid_map(const CUtensorMap* map, const char* name, Site site) {
  const TensorMap* m = tensor_map(map);
  if (!m) fail(std::string(name) + ": this is no tensor map that cuTensorMapEncodeTiled has made", site);
  return *m;
}

static void check_shared(const char* p, size_t bytes, size_t alignment, const char* name, Site site) {
  const size_t offset = p - worker->shared;
  const size_t end = worker->launch->checked ? ARENA_BYTES : SHARED_MEMORY_PER_BLOCK;
  if (offset >= end || bytes > end - offset)
    fail(std::string(name) + ": " + std::to_string(bytes) + " bytes from here on are not in shared memory",
         site);
  if (offset % alignment)
    fail(std::string(name) + ": the address in shared memory must be a multiple of " +
             std::to_string(alignment), site);
}

static void start(BulkCopy&& copy) {
  Worker& w = *worker;
  if (w.launch->checked) {
    if (copy.kind == Bulk::LOAD) load_started(copy);
    else store_started(copy);
  }
  Engines& e = engines_of(w);
  e.copies.push_back(std::move(copy));
  const bool now = w.copies_land == CopiesLand::EARLY ||
                   (w.copies_land == CopiesLand::RANDOM && next_random(w.copy_random) % 4 == 0);
  if (now) land(w, e.copies.size() - 1);
}

// Where a box may begin. In no document; an H100 calls the rest illegal instructions (tests/test_hopper.py).
static void check_corner(Bulk kind, const TensorMap& m, const int* corner, const char* name, Site site) {
  const int64_t byte = int64_t(corner[0]) * m.element_bytes;
  if (byte % 16)
    fail(std::string(name) + ": the box begins at byte " + std::to_string(byte) +
             " of a row; a multiple of 16 is possible", site);
  for (int i = 0; i < m.rank && kind == Bulk::STORE; i++)
    if (corner[i] < 0)
      fail(std::string(name) + ": coordinate " + std::to_string(i) + " is " + std::to_string(corner[i]) +
               "; a box that is stored must not begin before the tensor", site);
}

static BulkCopy box_copy(Bulk kind, const CUtensorMap* map, const void* shared, const int* corner,
                         const char* name, Site site, const void* pc) {
  const TensorMap& m = valid_map(map, name, site);
  if (m.rank != 4)
    fail(std::string(name) + ": a map of " + std::to_string(m.rank) + " dimensions; it takes 4", site);
  check_corner(kind, m, corner, name, site);
  BulkCopy c{};
  c.kind = kind;
  c.shared = static_cast<char*>(const_cast<void*>(shared));
  c.map = m;
  std::copy(corner, corner + 4, c.corner);
  c.bytes = bytes_of_box(m);
  c.fiber = worker->current;
  c.group = c.fiber->bulk_groups;
  c.site = site;
  c.pc = pc;
  check_shared(c.shared, c.bytes, 128, name, site);
  return c;
}

extern "C" void sim_tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, const int* corner,
                             const char* file, int line) {
  const Site site{file, line};
  BulkCopy c = box_copy(Bulk::LOAD, map, to, corner, "tma_load()", site, __builtin_return_address(0));
  c.mbarrier = &mbarrier_at(barrier, "tma_load()", site);
  c.phase = c.mbarrier->phase;
  start(std::move(c));
}

// A load for another block: to the same place there
static void start_in_block(int rank, BulkCopy copy, const uint64_t* barrier, const char* name) {
  const Worker& w = *worker;
  Worker& there = block_of_rank(rank, name, copy.site);
  auto& all = engines_of(there).mbarriers;
  const auto m = all.find(reinterpret_cast<const char*>(barrier) - w.shared);
  if (m == all.end())
    fail(std::string(name) + ": block " + std::to_string(rank) + " has not initialised this mbarrier",
         copy.site);
  copy.shared = there.shared + (copy.shared - w.shared);
  copy.mbarrier = &m->second;
  copy.phase = m->second.phase;
  if (w.launch->checked) copy.known = knowledge_in(there, *w.current);
  InBlock in_it(&there, copy.fiber);
  start(std::move(copy));
}

// One load for several blocks: to each of them as a load of its own, which counts at its own mbarrier.
extern "C" void sim_tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, const int* corner,
                                       int ranks, const char* file, int line) {
  const Site site{file, line};
  const char* name = "tma_load_multicast()";
  const BulkCopy c = box_copy(Bulk::LOAD, map, to, corner, name, site, __builtin_return_address(0));
  if (ranks <= 0) fail(std::string(name) + ": no block of the cluster is named", site);
  BulkCopy copy = c;
  for (int rank = 0; ranks >> rank; rank++) {
    if (!(ranks >> rank & 1)) continue;
    start_in_block(rank, copy, barrier, name);
    copy.is_again = true;
  }
}

extern "C" void sim_tma_store(const CUtensorMap* map, const void* from, const int* corner, const char* file,
                              int line) {
  start(box_copy(Bulk::STORE, map, from, corner, "tma_store()", {file, line}, __builtin_return_address(0)));
}

static BulkCopy plain_copy(Bulk kind, const void* shared, const void* global, int bytes, const char* name,
                           Site site, const void* pc) {
  if (bytes < 0 || bytes % 16)
    fail(std::string(name) + ": " + std::to_string(bytes) + " bytes; a multiple of 16 is possible", site);
  if (reinterpret_cast<uintptr_t>(global) % 16)
    fail(std::string(name) + ": the address in global memory must be a multiple of 16", site);
  BulkCopy c{};
  c.kind = kind;
  c.shared = static_cast<char*>(const_cast<void*>(shared));
  c.global = static_cast<char*>(const_cast<void*>(global));
  c.bytes = size_t(bytes);
  c.fiber = worker->current;
  c.group = c.fiber->bulk_groups;
  c.site = site;
  c.pc = pc;
  check_shared(c.shared, c.bytes, 16, name, site);
  return c;
}

extern "C" void sim_bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, const char* file,
                              int line) {
  const Site site{file, line};
  const char* name = "bulk_load()";
  BulkCopy c = plain_copy(Bulk::LOAD, to, from, bytes, name, site, __builtin_return_address(0));
  c.mbarrier = &mbarrier_at(barrier, name, site);
  c.phase = c.mbarrier->phase;
  start(std::move(c));
}

// A load for another block, from this one's shared memory. (PTX ISA, cp.async.bulk: shared::cta to
// shared::cluster has the mbarrier as its only completion mechanism; it lies where the bytes go.)
extern "C" void sim_bulk_send(void* to, const void* from, int bytes, uint64_t* barrier, int rank,
                              const char* file, int line) {
  const Site site{file, line};
  const char* name = "bulk_send()";
  BulkCopy c = plain_copy(Bulk::LOAD, to, from, bytes, name, site, __builtin_return_address(0));
  check_shared(c.global, c.bytes, 16, name, site);
  c.sender = worker;
  start_in_block(rank, std::move(c), barrier, name);
}

extern "C" void sim_bulk_store(void* to, const void* from, int bytes, const char* file, int line) {
  start(plain_copy(Bulk::STORE, from, to, bytes, "bulk_store()", {file, line}, __builtin_return_address(0)));
}

extern "C" void sim_bulk_add(float* to, const void* from, int bytes, const char* file, int line) {
  start(plain_copy(Bulk::ADD, from, to, bytes, "bulk_add()", {file, line}, __builtin_return_address(0)));
}

extern "C" void sim_bulk_commit() { worker->current->bulk_groups++; }

// Until at most the last `groups_left` groups of this thread's stores are under way. read_only: until they
// have been read, so that their place in shared memory is free.
extern "C" void sim_bulk_wait(int groups_left, bool read_only) {
  Worker& w = *worker;
  if (!w.engines) return;
  auto& copies = w.engines->copies;
  const Fiber& f = *w.current;
  for (size_t i = 0; i < copies.size();) {
    BulkCopy& c = copies[i];
    const bool waited_for = c.kind != Bulk::LOAD && c.fiber == &f && c.group + groups_left < f.bulk_groups;
    if (!waited_for || read_only) {
      if (waited_for) read_source(w, c);
      i++;
    } else {
      land(w, i);
    }
  }
  if (w.launch->checked) stores_waited_for(*w.current, groups_left, read_only);
}

extern "C" void sim_prefetch_map(const CUtensorMap* map, const char* file, int line) {
  valid_map(map, "prefetch_map()", {file, line});
}

// What this thread has written, and what it knows of others', engines see from now on.
extern "C" void sim_fence_proxy_async() {
  Worker& w = *worker;
  if (!w.launch->checked) return;
  fence_proxy(*w.current);
  if (w.engines) fence_mbarriers(*w.current);
}

}  // namespace sim
