// What the checker asks of Hopper's engines. What an engine does has happened for those alone who have waited
// for it; so it is an agent with a time of its own, which they learn:
//
//   an mbarrier           the copies whose bytes it counts, by its phases; learnt where a wait for one ends
//   a warpgroup           the reads of its products, by groups; learnt in wgmma_wait()
//   a thread that stores  the reads and the writes of its stores, by groups; learnt in bulk_wait_read() and
//   by the copy engine    in bulk_wait()
//
// The rest is as between threads: an engine's access must not meet another one that nothing orders with it.
// Mbarriers and named barriers hand on what threads know (clock.cpp).
//
// Engines see what threads have written only after fence_proxy_async() ("async proxy": PTX ISA, "Memory
// Consistency Model: Proxies"). What an engine has written, and threads have waited for, they see.
#include <algorithm>

#include "checker.h"
#include "cluster.h"
#include "engines.h"

namespace sim {

// `behind`: the thread that has asked, for what reaches HBM
static Agent engine(int number, uint32_t time, std::shared_ptr<const Past> past,
                    const Fiber* behind = nullptr) {
  Agent a;
  a.number = number;
  a.warp = number / WARP_SIZE;
  a.lane = number % WARP_SIZE;
  a.now = ENGINE_TIME + time;
  a.past = std::move(past);
  a.knows_previous_kernel = behind && behind->knows_previous_kernel;
  return a;
}

// Its number, given at its first use; after those of the threads. `of`: the block of the thread behind it
static int number_of_engine(Worker& w, int& number, const Fiber& behind, const Worker& of) {
  if (number < 0) number = int(w.warps.size()) * WARP_SIZE + engines_of(w).agents++;
  checker->threads_behind[{w.block, unsigned(number)}] = {of.block, unsigned(behind.number)};
  return number;
}

static int number_of_engine(Worker& w, int& number, const Fiber& behind) {
  return number_of_engine(w, number, behind, w);
}

// The thread in whose name a number works, and its block
std::pair<uint32_t, unsigned> thread_behind(uint32_t block, unsigned number) {
  const auto found = checker->threads_behind.find({block, number});
  return found == checker->threads_behind.end() ? std::make_pair(block, number) : found->second;
}

static void learn(Past& past, int number, uint32_t time) {
  if (past.until.size() <= size_t(number)) past.until.resize(number + 1);
  past.until[number] = std::max(past.until[number], ENGINE_TIME + time);
}

static void learn(Fiber& f, int number, uint32_t time) {
  const auto known = knowledge(f);
  known->until[f.number] = f.past->until[f.number];
  learn(*known, number, time);
  f.past = known;
}

static Party party(const Fiber& f, Kind kind, int access, Site site = {}) {
  return {f.thread_index, worker->block_index, kind, access, site};
}

// -------------------------------------------------------------------------------- one access
static void check_proxy_fence(const Agent& a, const Memory& m, uint64_t offset, size_t bytes,
                              uint16_t access) {
  const Worker& w = *worker;
  for (uint64_t i = offset >> m.shift; i <= (offset + bytes - 1) >> m.shift; i++) {
    const Cell& c = m.cells[i];
    if (c.epoch != w.epoch || !c.write.lanes || c.write.time >= ENGINE_TIME) continue;
    if (c.write.block != w.block) continue;       // of a cluster: not looked at
    const unsigned thread = c.write.warp * WARP_SIZE + __builtin_ctz(c.write.lanes);
    if (!has_happened(a, w.block, thread, c.write.time) || is_fenced(a, thread, c.write.time)) continue;
    const int writer = c.write.access;
    return found({"proxy fence", "", SHARED, "", int64_t(i << m.shift), bytes,
                  {party(w.fibers[thread], checker->accesses[writer].kind, writer),
                   party(*w.current, checker->accesses[access].kind, access)}, "", 0});
  }
}

// The number of the access; 0: of memory that is not watched.
static uint16_t check_access(const Agent& a, const char* p, size_t bytes, Kind kind, const void* pc) {
  Worker& w = *worker;
  int array = SHARED;
  if (size_t(p - w.shared) >= ARENA_BYTES) {
    array = find_array(p);
    if (array == NO_ARRAY && is_known_otherwise(w, p)) return 0;
    if (array == NO_ARRAY) forbid(p, bytes, kind, pc);
  }
  Memory& m = array == SHARED ? *w.shadow : *checker->arrays[array];
  if (p + bytes > m.base + m.bytes) forbid(p, bytes, kind, pc);
  const uint64_t offset = p - m.base;
  if (m.granule() > bytes) m.refine(bytes == 1 ? 0 : 1);
  const uint16_t access = number_of(pc, array, kind);
  if (!m.allows(offset, bytes)) {
    found_about("out of bounds", access, array, int64_t(offset), bytes);
    return access;
  }
  if (kind == Kind::TMA_READ || kind == Kind::WGMMA) check_proxy_fence(a, m, offset, bytes, access);
  check_cells(a, m, array, access, kind, offset, bytes, true);
  return access;
}

// The same of 16 bytes that a thread sends, in its block's shared memory: read by an engine of this block.
static uint16_t check_sent(const Agent& a, const BulkCopy& c, const char* p) {
  Memory& m = *c.sender->shadow;
  const uint64_t offset = p - m.base;
  const uint16_t access = number_of(c.pc, SHARED, Kind::SEND);
  {
    InBlock in_it(c.sender, c.fiber);
    if (!m.allows(offset, 16)) {
      found_about("out of bounds", access, SHARED, int64_t(offset), 16);
      return access;
    }
    check_proxy_fence(engine(c.fiber->number, 0, knowledge(*c.fiber)), m, offset, 16, access);
  }
  check_cells(a, m, SHARED, access, Kind::SEND, offset, 16, true);
  visited(*c.sender, worker->block, unsigned(a.number),
          {a.now, {c.fiber->thread_index, c.sender->block_index, Kind::SEND, access, {}}, int64_t(offset)});
  return access;
}

// Chunks of 16 bytes or less, as sectors of HBM or wavefronts of shared memory
struct Tally {
  uint16_t access = 0;
  uint64_t bytes = 0, sectors = 0, last_sector = ~uint64_t(0), first = ~uint64_t(0);

  void add(uint16_t number, const char* p, size_t count) {
    if (!number) return;
    access = number;
    const int array = checker->accesses[number].array;
    const uint64_t offset = p - (array == SHARED ? worker->shared : checker->arrays[array]->base);
    first = std::min(first, offset);
    bytes += count;
    for (const uint64_t sector : {offset / 32, (offset + count - 1) / 32}) {
      sectors += sector != last_sector;
      last_sector = sector;
    }
  }
  void count() const {
    if (!access) return;
    const bool shared = checker->accesses[access].array == SHARED;
    const uint64_t units = shared ? (bytes + 127) / 128 : sectors;
    count_by_engine(access, bytes, units, shared ? units : (bytes + 31) / 32, uint32_t(first));
  }
};

// -------------------------------------------------------------------------------- mbarriers
void mbarrier_initialised(Mbarrier& m, const void* pc) {
  Worker& w = *worker;
  m.initialised_by = w.current;
  number_of_engine(w, m.agent, *w.current);
  check_access(*w.current, w.shared + m.offset, sizeof(uint64_t), Kind::WRITE, pc);
}

void mbarrier_used(const Mbarrier& m, const void* pc) {
  check_access(*worker->current, worker->shared + m.offset, sizeof(uint64_t), Kind::ATOMIC, pc);
}

void fence_mbarriers(Fiber& f) {
  for (auto& [offset, m] : worker->engines->mbarriers) m.is_visible |= m.initialised_by == &f;
}

void arrived(Mbarrier& m, Fiber& f, Site site) {
  hand_over(m.released, f);
  phase_entered(m, f, site);
  hand_over_steps(m.steps, f);
}

void phase_completed(Mbarrier& m) {
  auto complete = std::make_shared<Past>(*m.released);
  learn(*complete, m.agent, m.phase);
  m.complete = complete;
  phase_over(m);
}

void waited(Mbarrier& m, Fiber& f, Site site) {
  phase_seen(m, f, site);
  if (m.complete) take_over(f, m.complete);
  m.waited = std::max(m.waited, m.phase);
}

// -------------------------------------------------------------------------------- the copy engine
static std::string name_of_load(const BulkCopy& c) {
  return c.map.rank ? "tma_load(): " : c.sender ? "bulk_send(): " : "bulk_load(): ";
}

void load_started(BulkCopy& c) {
  Worker& w = *worker;
  Mbarrier& m = *c.mbarrier;
  check_access(c.known ? engine(c.fiber->number, 0, c.known) : *c.fiber, w.shared + m.offset,
               sizeof(uint64_t), Kind::ATOMIC, c.pc);
  if (!m.is_visible)
    mistake_found(name_of_load(c) + "the copy engine may not see the mbarrier yet: fence_mbarrier_init() "
                  "must follow its initialisation" + at(m.site), c.site);
  const std::shared_ptr<const Past> known = c.known ? c.known : knowledge(*c.fiber);
  const Worker& asking = c.sender ? *c.sender : w;
  const Agent a = engine(number_of_engine(w, m.agent, *c.fiber, asking), c.phase + 1, known, c.fiber);
  Tally from, to;
  each_chunk_of(w, c, [&](char* shared, char* global, size_t, size_t count) {
    if (c.sender) from.add(check_sent(a, c, global), w.shared + (global - c.sender->shared), count);
    else if (count) from.add(check_access(a, global, count, Kind::READ, c.pc), global, count);
    to.add(check_access(a, shared, 16, Kind::TMA_WRITE, c.pc), shared, 16);
  });
  if (!c.is_again) from.count();
  to.count();
  if (!c.known) hand_over_steps(m.steps, *c.fiber);
  m.last_load = c.phase + 1;
  m.last_load_by = c.fiber;
  m.last_load_pc = c.pc;
  m.last_load_to = c.shared;
}

// Its bytes come in a later phase than the one in which it has started.
void load_came_late(const BulkCopy& c) {
  mistake_found(name_of_load(c) + "its bytes come when the phase of " +
                    shared_element(*worker, int64_t(c.mbarrier->offset)) +
                    " in which it has started is complete: too few bytes have been announced "
                    "(mbarrier_arrive_expect)", c.site);
}

void store_started(BulkCopy& c) {
  Worker& w = *worker;
  Stores& stores = engines_of(w).stores[c.fiber->number];
  const auto past = knowledge(*c.fiber);
  const uint32_t time = uint32_t(c.group) + 1;
  const Agent reads = engine(number_of_engine(w, stores.reads, *c.fiber), time, past);
  const Agent writes = engine(number_of_engine(w, stores.writes, *c.fiber), time, past, c.fiber);
  const Kind kind = c.kind == Bulk::ADD ? Kind::ATOMIC : Kind::WRITE;
  Tally from, to;
  auto chunk = [&](char* shared, char* global, size_t skip, size_t count) {
    if (!count) return;            // past the tensor's end: whatever it is, it goes nowhere
    from.add(check_access(reads, shared + skip, count, Kind::TMA_READ, c.pc), shared + skip, count);
    for (size_t i = 0; i < count; i += kind == Kind::ATOMIC ? 4 : count) {
      const size_t bytes = kind == Kind::ATOMIC ? 4 : count;
      to.add(check_access(writes, global + i, bytes, kind, c.pc), global + i, bytes);
    }
  };
  each_chunk_of(w, c, chunk);
  from.count();
  to.count();
  stores.last = time;
  stores.pc = c.pc;
  stores.from = c.shared;
}

void stores_waited_for(Fiber& f, int groups_left, bool read_only) {
  auto& all = worker->engines->stores;
  const auto found = all.find(f.number);
  if (found == all.end() || f.bulk_groups <= groups_left) return;
  Stores& stores = found->second;
  stores.waited = uint32_t(f.bulk_groups - groups_left);
  learn(f, stores.reads, stores.waited);
  if (!read_only) learn(f, stores.writes, stores.waited);
}

// -------------------------------------------------------------------------------- wgmma
static void register_used(Fiber& f, const void* start, size_t bytes, const Wgmma& p) {
  auto* first = static_cast<const char*>(start);
  auto same = std::find_if(f.registers.begin(), f.registers.end(),
                           [&](const Registers& r) { return r.start == first; });
  if (same == f.registers.end()) same = f.registers.insert(same, {first, 0, false});
  same->bytes = std::max(same->bytes, bytes);
  if (f.has_fenced_registers && !same->touched) return;
  found({"register fence", "", NO_ARRAY, "", 0, 0,
         {party(f, Kind::WGMMA, number_of(p.pc, NO_ARRAY, Kind::WGMMA))}, "", 0});
  same->touched = false;
}

void fence_registers(Fiber& f) {
  f.has_fenced_registers = true;
  for (Registers& r : f.registers) r.touched = false;
}

void product_started(Worker& w, Warpgroup& g, const Wgmma& p, const uint32_t* const* A_registers) {
  Fiber* const first = &w.fibers[(&g - w.engines->warpgroups.data()) * WARPGROUP_SIZE];
  for (int i = 0; i < WARPGROUP_SIZE; i++) {
    register_used(first[i], p.D[i], size_t(p.shape.n) / 2 * sizeof(float), p);
    if (p.A_in_registers) register_used(first[i], A_registers[i], 4 * sizeof(uint32_t), p);
  }
  const int number = number_of_engine(w, g.agent, *first);
  const uint32_t time = uint32_t(p.group) + 1;
  Tally read;                    // a request, at B's address
  // A warp multiplies its own 16 rows of A, and all of B.
  for (int warp = 0; warp < 4 && !p.A_in_registers; warp++) {
    const Agent a = engine(number, time, common_knowledge(first + warp * WARP_SIZE, WARP_SIZE));
    each_operand_chunk(p.A, p.shape.A_mn_major, 16 * warp, 16, [&](size_t offset) {
      read.add(check_access(a, w.shared + offset, 16, Kind::WGMMA, p.pc), w.shared + offset, 16);
    });
  }
  read.first = ~uint64_t(0);
  const Agent a = engine(number, time, common_knowledge(first, WARPGROUP_SIZE));
  each_operand_chunk(p.B, p.shape.B_mn_major, 0, p.shape.n, [&](size_t offset) {
    read.add(check_access(a, w.shared + offset, 16, Kind::WGMMA, p.pc), w.shared + offset, 16);
  });
  read.count();
}

void products_waited_for(Worker& w, const Warpgroup& g, int groups) {
  if (g.agent < 0 || groups <= 0) return;
  auto done = std::make_shared<Past>();
  learn(*done, g.agent, uint32_t(groups));
  const size_t first = (&g - w.engines->warpgroups.data()) * WARPGROUP_SIZE;
  for (int i = 0; i < WARPGROUP_SIZE; i++) take_over(w.fibers[first + i], done);
}

// A thread reads or writes a local variable, which may be registers that it has given to wgmma.
void check_registers(Fiber& f, const char* address, size_t bytes, Kind kind, const void* pc) {
  auto within = [&](const char* start, size_t size) {
    return address < start + size && start < address + bytes;
  };
  for (Registers& r : f.registers) r.touched |= within(r.start, r.bytes);
  const int lane = f.number % WARPGROUP_SIZE;
  for (const Wgmma& p : worker->engines->warpgroups[f.number / WARPGROUP_SIZE].products) {
    if (!within(reinterpret_cast<const char*>(p.D[lane]), size_t(p.shape.n) / 2 * sizeof(float))) continue;
    return found({"accumulator", "", NO_ARRAY, "", 0, bytes,
                  {party(f, Kind::WGMMA, number_of(p.pc, NO_ARRAY, Kind::WGMMA)),
                   party(f, kind, number_of(pc, NO_ARRAY, kind))}, "", 0});
  }
}

// -------------------------------------------------------------------------------- the end of a block
static void found_left(const char* what, const Fiber& f, Kind kind, const void* pc, const char* shared) {
  const Worker& w = *worker;
  found({what, "", SHARED, "", shared ? shared - w.shared : 0, size_t(shared ? 16 : 0),
         {party(f, kind, number_of(pc, SHARED, kind))}, "", 0});
}

void check_engines_at_end(Worker& w) {
  if (!w.error.empty()) return;
  Engines& e = *w.engines;
  for (size_t i = 0; i < e.warpgroups.size(); i++)
    for (const Wgmma& p : e.warpgroups[i].products)
      found_left("wgmma", w.fibers[i * WARPGROUP_SIZE], Kind::WGMMA, p.pc, nullptr);
  for (auto& [thread, s] : e.stores)
    if (s.last > s.waited) found_left("copy", w.fibers[thread], Kind::TMA_READ, s.pc, s.from);
  for (auto& [offset, m] : e.mbarriers) {
    if (m.last_load > m.waited)
      found_left("copy", *m.last_load_by, Kind::TMA_WRITE, m.last_load_pc, m.last_load_to);
    if (m.bytes >= 0) continue;
    w.current = m.initialised_by;
    mistake_found("the kernel ends, and " + std::to_string(-m.bytes) + " bytes more than were announced have "
                  "come to " + shared_element(w, int64_t(m.offset)), m.site);
    w.current = nullptr;
  }
  // The PTX ISA does not say what becomes of them. Who arrives once too often, or waits once too little, has
  // miscounted.
  for (int id = 1; id < NAMED_BARRIERS; id++) {
    const NamedBarrier& b = e.named_barriers[id];
    if (!b.arrived) continue;
    size_t first = 0;
    while (!b.by.test(first)) first++;
    w.current = &w.fibers[first];
    mistake_found("the kernel ends, and barrier " + std::to_string(id) + " is left with " +
                  std::to_string(b.arrived) + " of " + std::to_string(b.threads) +
                  " threads: nobody has waited for them", b.site);
    w.current = nullptr;
  }
}

}  // namespace sim
