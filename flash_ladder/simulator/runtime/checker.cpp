// Is an access allowed? The compiler has put a call of observe() before every load and store of a checked
// build; what a finding needs is known at that moment, and a store outside of all arrays can be prevented.
#include "checker.h"
#include "cluster.h"
#include "engines.h"

#include <algorithm>
#include <cstring>

namespace sim {

Checker* checker;
std::mutex checker_mutex;

// The number of an access: of an instruction and the array that it touches.
static bool is(const Access& a, const void* pc, int array, Kind kind) {
  return a.pc == pc && a.array == array && a.kind == kind;
}
[[gnu::noinline]] static uint16_t find_number(const void* pc, int array, Kind kind) {
  auto& accesses = checker->accesses;
  size_t i = 1;
  while (i < accesses.size() && !is(accesses[i], pc, array, kind)) i++;
  if (i > UINT16_MAX) fail("too many calls in one flash.inspect(): divide them among several");
  if (i == accesses.size()) accesses.push_back({pc, array, kind});
  return uint16_t(i);
}
uint16_t number_of(const void* pc, int array, Kind kind) {
  static uint16_t cache[1 << 12];
  auto& accesses = checker->accesses;
  uint16_t& number = cache[(reinterpret_cast<uintptr_t>(pc) * 31 + size_t(array)) % (1 << 12)];
  if (number < accesses.size() && is(accesses[number], pc, array, kind)) return number;
  return number = find_number(pc, array, kind);
}

// Before it does harm: the launch ends here.
void forbid(const char* p, size_t bytes, Kind kind, const void* pc) {
  Worker& w = *worker;
  const bool shared = size_t(p - (w.shared - GUARD_BYTES)) < ARENA_BYTES + 2 * GUARD_BYTES;
  const Memory* near = shared ? w.shadow.get() : nearest_array(p);
  int array = shared ? SHARED : NO_ARRAY;
  char text[200];
  if (shared) {
    snprintf(text, sizeof text, "%s", shared_element(w, p - w.shared).c_str());
  } else if (near) {
    const bool before = p < near->base;
    const ptrdiff_t distance = before ? near->base - p : p - (near->base + near->bytes);
    const char* where = before ? "before the start" : "past the end";
    if (distance < 0) snprintf(text, sizeof text, "partly past the end of %s", near->name.c_str());
    else snprintf(text, sizeof text, "%td bytes %s of %s", distance, where, near->name.c_str());
    for (size_t i = 0; i < checker->arrays.size(); i++)
      if (checker->arrays[i].get() == near) array = int(i);
  } else {
    snprintf(text, sizeof text, "at address %p, in no array that the kernel was given",
             static_cast<const void*>(p));
  }
  found_about("out of bounds", number_of(pc, array, kind), array, near ? p - near->base : 0, bytes, text);
  w.error_is_found = true;
  abandon_block(describe(w) + source_line(pc) + ": access out of bounds, " + text);
}

bool is_watched(const void* address) {
  const Worker* w = worker;
  if (!checker || !w || !w->current || !w->launch->checked) return false;               // the host's code
  return size_t(static_cast<const char*>(address) - w->current->stack) >= STACK_BYTES;  // a local variable
}

// A local variable starts as this NaN (device.h), and so does what is computed from it.
static bool is_poison(const char* value, size_t bytes) {
  for (; bytes >= 4; value += 4, bytes -= 4) {
    uint32_t bits;
    memcpy(&bits, value, 4);
    if ((bits & 0x7fffffffu) == POISON) return true;
  }
  return false;
}

static void found_poison(uint16_t access, int array, int64_t offset, size_t bytes) {
  found_about("uninitialised", access, array, offset, bytes, "a local variable");
}

static void look_at_stored(Fiber& f) {
  const char* p = f.stored;
  f.stored = nullptr;
  if (!is_poison(p, f.stored_bytes)) return;
  const int array = checker->accesses[f.stored_access].array;
  const Memory& m = array == SHARED ? *worker->shadow : *checker->arrays[array];
  found_poison(f.stored_access, array, p - m.base, f.stored_bytes);
}

// A value that came from a local variable which nothing has written is made one of 16 bits.
extern "C" void sim_poison_rounded() {
  if (!checker || !worker || !worker->current || !worker->launch->checked) return;
  found_poison(number_of(__builtin_return_address(0), NO_ARRAY, Kind::READ), NO_ARRAY, 0, 0);
}

void observe(const void* address, size_t bytes, Kind kind, const void* pc, Asks asks, const void* operand) {
  Worker* w = worker;
  if (!is_watched(address)) {
    if (w && w->current && !w->current->registers.empty())
      check_registers(*w->current, static_cast<const char*>(address), bytes, kind, pc);
    return;
  }
  if (interrupted()) fail(why_interrupted());
  Fiber& f = *w->current;
  if (f.stored) look_at_stored(f);
  const char* p = static_cast<const char*>(address);

  int array = SHARED;
  const Worker* other = nullptr;        // a block of the cluster, in whose shared memory it is
  if (size_t(p - w->shared) >= ARENA_BYTES) {
    other = w->cluster ? block_that_holds(*w, p) : nullptr;
    if (!other) array = find_array(p, pc);
    if (array == NO_ARRAY && is_known_otherwise(*w, p)) return;
    if (array == NO_ARRAY) forbid(p, bytes, kind, pc);
    if (other && !other->alive)
      return found_about("ended block", number_of(pc, array, kind), array, p - other->shared, bytes);
  }
  Memory& m = array != SHARED ? *checker->arrays[array] : other ? *other->shadow : *w->shadow;
  if (p + bytes > m.base + m.bytes) forbid(p, bytes, kind, pc);
  const uint16_t access = number_of(pc, array, kind);
  const uint64_t offset = p - m.base;
  if (m.granule() > bytes) m.refine(bytes == 1 ? 0 : 1);
  checker->kernel->accesses++;
  count_access(access, f.warp, f.lane, offset, bytes);
  const bool aligned = asks == Asks::ALIGNMENT || asks == Asks::BOTH;
  if (aligned && reinterpret_cast<uintptr_t>(p) & (bytes - 1))   // sizes are powers of two
    found_about("misaligned", access, array, offset, bytes);
  if (!m.allows(offset, bytes)) return found_about("out of bounds", access, array, offset, bytes);
  check_cells(f, m, array, access, kind, offset, bytes, asks == Asks::ALL_WRITTEN || asks == Asks::BOTH);
  f.worked = f.now;
  if (other)
    visited(*other, w->block, unsigned(f.number),
            {f.now, {f.thread_index, w->block_index, kind, access, {}}, int64_t(offset)});
  if (kind == Kind::WRITE && bytes >= 4 && !other) {
    f.stored = p;
    f.stored_bytes = uint16_t(bytes);
    f.stored_access = access;
  }
  if (operand && is_poison(static_cast<const char*>(operand), bytes))
    found_poison(access, array, offset, bytes);
}

// -------------------------------------------------------------------------------- a launch
void begin_checked_launch(const Launch& launch) {
  checker->launch++;
  begin_early_launch(launch);
  forget_atomics();
  checker->threads_behind.clear();
  auto& kernels = checker->kernels;
  auto same = std::find_if(kernels.begin(), kernels.end(),
                           [&](const Kernel& k) { return k.function == launch.kernel; });
  if (same == kernels.end()) same = kernels.insert(kernels.end(), Kernel{});
  checker->kernel = &*same;
  Kernel& k = *same;
  k.function = launch.kernel;
  k.name = launch.name;
  k.grid = launch.grid;
  k.block = launch.block;
  k.launches++;
  for (Counters& c : k.counters) c.touched.clear();
  k.traffic.resize(checker->arrays.size());
}

void begin_checked_block(Worker& w) {
  w.epoch = ++checker->blocks;
  checker->kernel->blocks++;
  if (!w.shadow) w.shadow = std::make_shared<Memory>("shared memory", w.shared, ARENA_BYTES);
  w.shadow->epoch = w.epoch;
  std::fill(w.shadow->state.begin(), w.shadow->state.end(), 0);
  w.let_next_start = false;
  begin_time(w);
}

void end_checked_block(Worker& w) {
  checker->kernel->shared_bytes = std::max(checker->kernel->shared_bytes, w.shared_bytes);
  flush_all_requests(w.warps.size());
  for (Fiber& f : w.fibers) {
    f.stored = nullptr;
    for (const Copy& copy : f.copies) copy_was_not_waited_for(f, copy);
  }
  if (w.engines) check_engines_at_end(w);
  check_visits_at_end(w);
  end_of_block(w);
}

// It can wait for nothing any more, and nobody for it.
void thread_has_ended(Worker& w) {
  Fiber& f = *w.current;
  if (f.stored) look_at_stored(f);
}

void shared_array_declared(Worker& w, const SharedArray& a) {
  Memory& m = *w.shadow;
  if (a.bytes % m.granule()) m.refine(0);
  for (size_t i = a.offset >> m.shift; i < (a.offset + a.bytes) >> m.shift; i++) m.state[i] |= Memory::VALID;
}

// -------------------------------------------------------------------------------- synchronisation
// Whether the block's threads, or lanes of a warp, wait at the same barrier of the source.
static void check_one_barrier(const Worker& w, const std::vector<Fiber*>& fibers, const char* of_a_warp) {
  std::vector<Party> parties;
  for (const Fiber* f : fibers) {
    const bool known = std::any_of(parties.begin(), parties.end(), [&](const Party& p) {
      return p.site.line == f->site.line && !strcmp(p.site.file, f->site.file);
    });
    if (!known) parties.push_back({f->thread_index, w.block_index, Kind::READ, 0, f->site});
  }
  if (parties.size() < 2) return;
  std::sort(parties.begin(), parties.end(),
            [](const Party& a, const Party& b) { return a.site.line < b.site.line; });
  found({"barrier", "", SHARED, "", 0, 0, parties, of_a_warp, 0});
}

// Not a mistake: a GPU since Volta goes on without the threads that have returned from the kernel.
static void note_exits(const Worker& w, const Fiber& here) {
  const auto exited = std::find_if(w.fibers.begin(), w.fibers.end(),
                                   [](const Fiber& f) { return f.state == State::RETURNED; });
  if (exited == w.fibers.end()) return;
  const Party gone{exited->thread_index, w.block_index, Kind::READ, 0, here.site};
  found({"portability", "", SHARED, "", 0, 0, {gone}, here.waits_for, 0});
}

static void count_barrier(Site site, const char* name) {
  auto& barriers = checker->kernel->barriers;
  auto same = std::find_if(barriers.begin(), barriers.end(), [&](const Barriers& b) {
    return b.site.line == site.line && !strcmp(b.site.file, site.file) && !strcmp(b.name, name);
  });
  if (same == barriers.end()) same = barriers.insert(barriers.end(), Barriers{site, name, 0});
  same->count++;
}

void barrier_reached(Worker& w, const std::vector<Fiber*>& all) {
  count_barrier(all.back()->site, all.back()->waits_for);
  flush_all_requests(w.warps.size());
  check_one_barrier(w, all, "");
  if (all.size() < w.fibers.size()) note_exits(w, *all.back());
  synchronise(all);
  if (w.engines) steps_meet(all.data(), all.size());
}

void warp_synchronised(Worker& w, int warp, const WarpOperation& op) {
  unsigned lanes = op.arrived;
  const size_t first = size_t(warp) * WARP_SIZE;
  const size_t count = std::min<size_t>(w.fibers.size() - first, WARP_SIZE);
  const size_t left = count - size_t(__builtin_popcount(w.warps[warp].exited));
  if (size_t(__builtin_popcount(lanes)) == left) flush_requests(warp);
  std::vector<Fiber*> fibers;
  for (; lanes; lanes &= lanes - 1) fibers.push_back(&w.fibers[first + __builtin_ctz(lanes)]);
  check_one_barrier(w, fibers, op.name);
  if (!op.orders_memory) return;
  count_barrier(op.site, op.name);
  synchronise(fibers);
}

}  // namespace sim
