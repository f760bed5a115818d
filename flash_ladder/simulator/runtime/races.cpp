// Races, and reads of what nothing has written: each cell of memory remembers who has used it last.
#include "checker.h"

#include <algorithm>

namespace sim {

// An agent, with what each look at a cell asks of it
struct Viewer {
  const Agent& f;
  const uint32_t block, all_until;
  explicit Viewer(const Agent& f) : f(f), block(worker->block), all_until(f.past->all_until) {}
  // Does it know that everybody's work of that time is done?
  bool is_past(const Lanes& l) const { return l.block == block && l.time <= all_until; }
};

// One of these lanes whose work it does not know of; or -1
static int unordered(const Lanes& l, const Viewer& v) {
  const std::vector<uint32_t>& until = v.f.past->until;
  for (unsigned lanes = l.lanes; lanes; lanes &= lanes - 1) {
    const unsigned thread = l.warp * WARP_SIZE + __builtin_ctz(lanes);
    if (l.block == v.block && thread < until.size() && l.time <= until[thread]) continue;
    if (!has_happened(v.f, l.block, thread, l.time)) return int(thread);
  }
  return -1;
}

static inline void check_race_with(const Lanes& l, const Viewer& v, int access, int array, uint64_t offset,
                                   size_t bytes) {
  if (!l.lanes || v.is_past(l)) return;
  if (const int thread = unordered(l, v); thread >= 0)
    found_race(access, array, offset, bytes, unsigned(thread), l.block, l.access);
}

// Who has started a copy from here, and has not waited for it?
static void found_race_with_source(int access, int array, uint64_t offset, size_t bytes) {
  const char* p = checker->arrays[array]->base + offset;
  for (const Fiber& f : worker->fibers)
    for (const Copy& c : f.copies)
      if (p < c.from + c.valid && c.from < p + bytes)
        return found_race(access, array, offset, bytes, f.number, worker->block,
                          number_of(c.pc, array, Kind::SOURCE));
}

[[gnu::always_inline]] static inline void check_races(const Cell& c, const Viewer& v, Kind kind, int access,
                                                      int array, uint64_t offset, size_t bytes) {
  if (c.copying) {
    const unsigned thread = c.write.warp * WARP_SIZE + __builtin_ctz(c.write.lanes);
    found_race(access, array, offset, bytes, thread, c.write.block, c.write.access);
  } else {
    check_race_with(c.write, v, access, array, offset, bytes);
  }
  if (c.sources && !is_read(kind)) found_race_with_source(access, array, offset, bytes);
  if (c.has_atomics && !is_atomic(kind))
    for (const Lanes& l : c.atomics) check_race_with(l, v, access, array, offset, bytes);
  if (!is_read(kind))
    for (const Lanes& l : c.reads) check_race_with(l, v, access, array, offset, bytes);
}

template <size_t size> static inline void note(Lanes (&done)[size], const Viewer& v, uint16_t access) {
  const Agent& f = v.f;
  const unsigned lane = 1u << f.lane;
  Lanes *place = nullptr, *own = nullptr;
  for (Lanes& l : done) {
    const bool is_own = l.lanes && l.warp == f.warp && l.block == v.block;
    if (is_own && l.time == f.now) {
      l.lanes |= lane;
      l.access = access;
      return;
    }
    if (is_own) own = &l;
    if (!l.lanes || v.is_past(l)) place = &l;       // what all know of can be forgotten
  }
  if (!place) place = own ? own : &done[size - 1];
  *place = {lane, f.now, v.block, uint16_t(f.warp), access};
}

static inline void note_write(Cell& c, const Agent& f, uint16_t access, size_t bytes, bool copying) {
  c.write = {1u << f.lane, f.now, worker->block, uint16_t(f.warp), access};
  c.bytes = uint8_t(bytes);
  for (Lanes& l : c.reads) l.lanes = 0;
  if (c.has_atomics)
    for (Lanes& l : c.atomics) l.lanes = 0;
  c.has_atomics = false;
  c.copying = copying;
}

// -------------------------------------------------------------------------------- one access
// With a bit for each of the array's cells.
static Counters& counters_of(uint16_t access, const Memory& m) {
  auto& all = checker->kernel->counters;
  if (all.size() <= access) all.resize(access + 1);
  Counters& c = all[access];
  if (c.touched.size() == m.state.size()) return c;
  if (c.touched.empty()) c.touched.resize(m.state.size());
  if (const size_t parts = m.state.size() / c.touched.size(); parts > 1) {   // the cells have been divided
    std::vector<bool> finer(m.state.size());
    for (size_t i = 0; i < finer.size(); i++) finer[i] = c.touched[i / parts];
    c.touched = finer;
  }
  return c;
}

// Whether something is read that nothing has written, though a part of it may have been. Of 16 bytes, four
// may be the padding of a struct, beside a number of 8.
static bool lacks_a_part(const Memory& m, size_t first, size_t last, size_t bytes) {
  const size_t half = (last + 1 - first) / 2;
  size_t lacking[2] = {0, 0};
  bool as_in_a_struct = false;
  for (size_t i = first; i <= last; i++) {
    lacking[half && i - first >= half] += !(m.state[i] & Memory::INITIALISED);
    as_in_a_struct |= m.cells[i].bytes == 8;
  }
  if (bytes < 16 || lacking[0] == half || lacking[1] == half) return lacking[0] + lacking[1];
  return !as_in_a_struct && (lacking[0] + lacking[1]) << m.shift >= 4;
}

// A cell in which nothing has happened since this block, or launch, began
static void begin_cell(Cell& c, uint32_t epoch, bool shared) {
  const uint32_t ago = epoch - c.epoch;
  const uint8_t used = shared || ago > 64 ? 0 : c.read * Cell::READ | c.written * Cell::WRITTEN;
  c = {};
  c.epoch = epoch;
  c.used_before = used;
  c.launches_ago = used ? uint8_t(ago) : 0;
}

void check_cells(const Agent& f, Memory& m, int array, uint16_t access, Kind kind, uint64_t offset,
                 size_t bytes, bool all_written) {
  const bool reads = is_read(kind), atomic = is_atomic(kind), shared = array == SHARED;
  const uint32_t epoch = shared ? m.epoch : checker->launch;
  Traffic* const traffic = shared ? nullptr : &checker->kernel->traffic[array];
  Counters* const counters = shared ? nullptr : &counters_of(access, m);
  const size_t first = offset >> m.shift, last = (offset + bytes - 1) >> m.shift;
  const bool changes = !reads && kind != Kind::SOURCE;
  const uint8_t clashes = changes ? Cell::READ | Cell::WRITTEN : Cell::WRITTEN;
  const Viewer viewer(f);
  size_t initialised = 0;
  for (size_t i = first; i <= last; i++) {
    Cell& c = m.cells[i];
    uint8_t& state = m.state[i];
    if (c.epoch != epoch) begin_cell(c, epoch, shared);
    const uint64_t at = std::max<uint64_t>(offset, i << m.shift);
    if (c.used_before & clashes && may_still_run(f, c.launches_ago))
      found_about("too early", access, array, at, bytes, f.knows_previous_kernel ? "waited" : "");
    if (counters && !counters->touched[i]) {
      counters->touched[i] = true;
      counters->unique += m.granule();
    }
    check_races(c, viewer, kind, access, array, at, bytes);
    initialised += (state & Memory::INITIALISED) != 0;
    if (kind != Kind::WRITE) {
      if (traffic && !c.read) traffic->unique_read += m.granule();
      c.read = true;
    }
    if (!reads) {
      if (traffic && !c.written) traffic->unique_written += m.granule();
      c.written = true;
      state |= Memory::INITIALISED;
    }
    if (reads) {
      note(c.reads, viewer, access);
    } else if (atomic) {
      c.has_atomics = true;
      note(c.atomics, viewer, access);
    } else {
      note_write(c, f, access, bytes, kind == Kind::COPY);
    }
  }
  const bool needs_value = reads || kind == Kind::ATOMIC;
  if (needs_value && initialised <= last - first &&
      (!initialised || (all_written && lacks_a_part(m, first, last, bytes))))
    found_about("uninitialised", access, array, offset, bytes, initialised ? "a part" : "");
}

// A lane of the running thread's warp gets what another one has asked for, by ldmatrix: it reads it, too.
void observe_for_lane(int lane, const void* address, size_t bytes, const void* pc) {
  Worker& w = *worker;
  const char* p = static_cast<const char*>(address);
  const bool shared = size_t(p - w.shared) < ARENA_BYTES;
  const int array = shared ? SHARED : find_array(p);
  Memory& m = shared ? *worker->shadow : *checker->arrays[array];
  const uint64_t offset = p - m.base;
  if (!m.allows(offset, bytes)) return;                  // found already
  Fiber* const self = w.current;
  w.current = &w.fibers[size_t(self->warp) * WARP_SIZE + lane];
  Cell& c = m.cells[offset >> m.shift];
  const Viewer viewer(*w.current);
  const uint16_t access = number_of(pc, array, Kind::READ);
  check_races(c, viewer, Kind::READ, access, array, offset, bytes);
  note(c.reads, viewer, access);
  w.current = self;
}

// The cells that a copy reads, and the number of their array.
template <class F> static void each_source(const Copy& copy, F f) {
  if (!copy.valid) return;
  const int array = find_array(copy.from);
  if (array == NO_ARRAY) return;             // a __device__ variable
  Memory& m = *checker->arrays[array];
  const uint64_t offset = copy.from - m.base;
  for (uint64_t i = offset >> m.shift; i <= (offset + copy.valid - 1) >> m.shift; i++) f(m.cells[i], array);
}

// From now on until its thread has waited for it, its source is read.
void copy_has_started(const Copy& copy) {
  each_source(copy, [](Cell& c, int) { c.sources++; });
}

// Its thread has waited for it: for that thread it is written, for others once they synchronise with it.
void copy_has_landed(Fiber& f, const Copy& copy) {
  Memory& m = *worker->shadow;
  const uint64_t offset = copy.to - m.base;
  const uint16_t access = number_of(copy.pc, SHARED, Kind::COPY);
  for (uint64_t i = offset >> m.shift; i <= (offset + copy.bytes - 1) >> m.shift; i++) {
    note_write(m.cells[i], f, access, 16, false);
  }
  each_source(copy, [&](Cell& c, int array) {
    c.sources--;
    note(c.reads, Viewer(f), number_of(copy.pc, array, Kind::SOURCE));
  });
  f.worked = f.now;
}

// The block has ended.
void copy_was_not_waited_for(const Fiber& f, const Copy& copy) {
  const Worker& w = *worker;
  each_source(copy, [](Cell& c, int) { c.sources--; });
  if (!w.error.empty()) return;
  const int access = number_of(copy.pc, SHARED, Kind::COPY);
  found({"copy", "", SHARED, "", copy.to - w.shared, copy.bytes,
         {{f.thread_index, w.block_index, Kind::COPY, access, {}}}, "", 0});
}

}  // namespace sim
