// Is an access allowed? The compiler has put a call of observe() before every load and store of a checked
// build; what a finding needs is known at that moment, and a store outside of all arrays can be prevented.
#include "checker.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <new>
#include <unordered_set>

namespace sim {

Checker* checker;
std::mutex checker_mutex;

// -------------------------------------------------------------------------------- memory
void FreeCells::operator()(Cell* p) const { free(p); }

static Cell* new_cells(size_t count) {       // zero, and untouched until they are used
  void* p = calloc(count, sizeof(Cell));
  if (!p) throw std::bad_alloc();
  return static_cast<Cell*>(p);
}

Memory::Memory(std::string name, char* base, size_t bytes, int shift)
    : name(std::move(name)), base(base), bytes(bytes), shift(shift), state((bytes >> shift) + 1),
      cells(new_cells((bytes >> shift) + 1)) {}

// From now on with a cell for every 2^new_shift bytes. What is known of a cell holds for each of its parts.
void Memory::refine(int new_shift) {
  const int parts = 1 << (shift - new_shift);
  const size_t count = state.size();
  std::vector<uint8_t> new_state(count * parts);
  std::unique_ptr<Cell[], FreeCells> finer(new_cells(count * parts));
  for (size_t i = 0; i < count * parts; i++) {
    new_state[i] = state[i / parts];
    finer[i] = cells[i / parts];
  }
  state = std::move(new_state);
  cells = std::move(finer);
  shift = new_shift;
}

// Memory that a kernel may use although no array was declared for it: the launch's arguments, threadIdx and
// its like, and what the kernel's own library holds (__device__ variables, constants). None of it is checked.
static bool is_known_otherwise(const Worker& w, const char* p) {
  static std::unordered_set<uintptr_t> pages_of_library;
  if (size_t(p - static_cast<const char*>(w.launch->arguments)) < w.launch->argument_bytes) return true;
  for (auto* own : {reinterpret_cast<const char*>(&threadIdx), reinterpret_cast<const char*>(&blockIdx),
                    reinterpret_cast<const char*>(&blockDim), reinterpret_cast<const char*>(&gridDim)})
    if (size_t(p - own) < sizeof(dim3)) return true;
  const uintptr_t page = reinterpret_cast<uintptr_t>(p) / 4096;
  if (pages_of_library.count(page)) return true;
  Dl_info here, kernel;
  if (!dladdr(p, &here) || !dladdr(w.launch->kernel, &kernel)) return false;
  if (here.dli_fbase != kernel.dli_fbase) return false;
  pages_of_library.insert(page);
  return true;
}

// The number of the array that an address lies in: of one that may be used there, if arrays overlap.
static int find_array(const char* p) {
  static size_t last = 0;
  auto& arrays = checker->arrays;
  auto holds = [&](size_t i) { return arrays[i] && size_t(p - arrays[i]->base) < arrays[i]->bytes; };
  auto allows = [&](size_t i) {
    return holds(i) && arrays[i]->state[size_t(p - arrays[i]->base) >> arrays[i]->shift] & Memory::VALID;
  };
  if (last < arrays.size() && allows(last)) return int(last);
  for (size_t i = 0; i < arrays.size(); i++)
    if (allows(i)) return int(last = i);
  for (size_t i = 0; i < arrays.size(); i++)
    if (holds(i)) return int(i);
  return NO_ARRAY;
}

// The number of an access: of an instruction and the array that it touches.
static uint16_t number_of(const void* pc, int array, Kind kind) {
  static uint16_t cache[1 << 12];
  auto& accesses = checker->accesses;
  uint16_t& number = cache[(reinterpret_cast<uintptr_t>(pc) * 31 + size_t(array)) % (1 << 12)];
  auto same = [&](const Access& a) { return a.pc == pc && a.array == array && a.kind == kind; };
  if (number < accesses.size() && same(accesses[number])) return number;
  size_t i = 1;
  while (i < accesses.size() && !same(accesses[i])) i++;
  if (i > UINT16_MAX) fail("too many calls in one flash.inspect(): divide them among several");
  if (i == accesses.size()) accesses.push_back({pc, array, kind});
  return number = uint16_t(i);
}

// -------------------------------------------------------------------------------- findings
static uint3 block_index(const Worker& w, uint32_t number) {
  const dim3 g = w.launch->grid;
  return {number % g.x, number / g.x % g.y, number / g.x / g.y};
}

static int64_t end_of(const Worker& w, const SharedArray& a) {
  return int64_t(a.bytes ? a.offset + a.bytes : w.launch->dynamic_shared);
}

// The array that an offset in shared memory belongs to. Between two arrays: the one whose end is nearer.
static const SharedArray* shared_array(const Worker& w, int64_t offset) {
  const SharedArray *before = nullptr, *after = nullptr;   // the nearest ones; of two names the later
  for (const SharedArray& a : w.arrays) {
    if (int64_t(a.offset) > offset) after = !after || a.offset <= after->offset ? &a : after;
    else before = !before || a.offset >= before->offset ? &a : before;
  }
  if (!before || !after) return before ? before : after;
  return offset - end_of(w, *before) < int64_t(after->offset) - offset ? before : after;
}

// x / y, rounded down, for a y above 0; x becomes what is left.
static int64_t divide(int64_t& x, int64_t y) {
  const int64_t rest = (x % y + y) % y, quotient = (x - rest) / y;
  x = rest;
  return quotient;
}

// The element of shared memory at an offset, such as tile[3][5], or tile[-1][5], outside of its 8 x 8
// elements.
std::string shared_element(const Worker& w, int64_t offset) {
  const SharedArray* array = shared_array(w, offset);
  if (!array) return "shared memory, outside of all arrays";
  const bool inside = offset >= int64_t(array->offset) && offset < end_of(w, *array);
  const bool fixed = array->identity;                        // in size: else a part of the dynamic array
  if (fixed && inside && array->extents.empty()) return array->name;     // __shared__ float x;

  int64_t rest = offset - int64_t(array->offset);
  int64_t index = divide(rest, int64_t(array->element_bytes));
  std::string subscripts, sizes;
  for (size_t i = array->extents.size(); i-- > 1;) {
    rest = index;
    index = divide(rest, int64_t(array->extents[i]));
    subscripts = "[" + std::to_string(rest) + "]" + subscripts;
    sizes = " x " + std::to_string(array->extents[i]) + sizes;
  }
  const std::string element = array->name + ("[" + std::to_string(index) + "]") + subscripts;
  if (inside) return element;
  if (!fixed)
    return element + ", outside of the " + std::to_string(w.launch->dynamic_shared) +
           " bytes of dynamic shared memory";
  if (array->extents.empty()) return element + ", outside of its 1 element";
  return element + ", outside of its " + std::to_string(array->extents[0]) + sizes + " elements";
}

constexpr size_t MOST_FINDINGS = 100;   // of different instructions

static Finding* find_same(const std::string& what, const std::vector<Party>& parties) {
  auto matches = [&](const Finding& f, bool swapped) {
    if (f.what != what || f.parties.size() != parties.size()) return false;
    for (size_t i = 0; i < parties.size(); i++) {
      const Party& p = f.parties[swapped ? parties.size() - 1 - i : i];
      if (p.access != parties[i].access || p.site.line != parties[i].site.line) return false;
    }
    return true;
  };
  for (Finding& f : checker->findings)
    if (f.kernel == checker->kernel->name && (matches(f, false) || matches(f, true))) return &f;
  return nullptr;
}

static void found(Finding finding) {
  if (Finding* same = find_same(finding.what, finding.parties)) {
    same->count++;
    return;
  }
  if (checker->findings.size() >= MOST_FINDINGS) {
    checker->more_findings = true;
    return;
  }
  const Worker& w = *worker;
  finding.kernel = w.launch->name;
  finding.count = 1;
  if (finding.array == SHARED && finding.element.empty() && finding.bytes)
    finding.element = shared_element(w, finding.offset);
  checker->findings.push_back(std::move(finding));
}

static Party self(int access) {
  const Worker& w = *worker;
  return {w.current->thread_index, w.block_index, checker->accesses[access].kind, access, {}};
}

static void found_about(const char* what, int access, int array, int64_t offset, size_t bytes,
                        std::string text = "") {
  found({what, "", array, "", offset, bytes, {self(access)}, std::move(text), 0});
}

// -------------------------------------------------------------------------------- races
static void found_race(int access, int array, int64_t offset, size_t bytes, unsigned thread, uint32_t block,
                       int other) {
  const Worker& w = *worker;
  const Kind kind = checker->accesses[other].kind;
  const Party before{w.fibers[thread].thread_index, block_index(w, block), kind, other, {}};
  found({"race", "", array, "", offset, bytes, {before, self(access)}, "", 0});
}

// Does the thread know that everybody's work of that time is done?
static bool is_past(const Fiber& f, const Lanes& l) {
  return l.block == checker->block && l.time <= f.past->all_until;
}

static void check_race_with(const Lanes& l, const Fiber& f, int access, int array, uint64_t offset,
                            size_t bytes) {
  if (!l.lanes || is_past(f, l)) return;
  for (unsigned lanes = l.lanes; lanes; lanes &= lanes - 1) {
    const unsigned thread = l.warp * WARP_SIZE + __builtin_ctz(lanes);
    if (!has_happened(f, l.block, thread, l.time))
      return found_race(access, array, offset, bytes, thread, l.block, l.access);
  }
}

// Who has started a copy from here, and has not waited for it?
static void found_race_with_source(int access, int array, uint64_t offset, size_t bytes) {
  const char* p = checker->arrays[array]->base + offset;
  for (const Fiber& f : worker->fibers)
    for (const Copy& c : f.copies)
      if (p < c.from + c.valid && c.from < p + bytes)
        return found_race(access, array, offset, bytes, f.number, checker->block,
                          number_of(c.pc, array, Kind::SOURCE));
}

static void check_races(const Cell& c, const Fiber& f, int access, int array, uint64_t offset, size_t bytes) {
  const Kind kind = checker->accesses[access].kind;
  if (c.copying) {
    const unsigned thread = c.write.warp * WARP_SIZE + __builtin_ctz(c.write.lanes);
    found_race(access, array, offset, bytes, thread, c.write.block, c.write.access);
  } else {
    check_race_with(c.write, f, access, array, offset, bytes);
  }
  if (c.sources && kind != Kind::READ) found_race_with_source(access, array, offset, bytes);
  if (!is_atomic(kind))
    for (const Lanes& l : c.atomics) check_race_with(l, f, access, array, offset, bytes);
  if (kind != Kind::READ)
    for (const Lanes& l : c.reads) check_race_with(l, f, access, array, offset, bytes);
}

template <size_t size> static void note(Lanes (&done)[size], const Fiber& f, uint16_t access) {
  const uint32_t block = checker->block;
  const unsigned lane = 1u << f.lane;
  Lanes *place = nullptr, *own = nullptr;
  for (Lanes& l : done) {
    const bool is_own = l.lanes && l.warp == f.warp && l.block == block;
    if (is_own && l.time == f.now) {
      l.lanes |= lane;
      l.access = access;
      return;
    }
    if (is_own) own = &l;
    if (!l.lanes || is_past(f, l)) place = &l;       // what all know of can be forgotten
  }
  if (!place) place = own ? own : &done[size - 1];
  *place = {lane, f.now, block, uint16_t(f.warp), access};
}

static void note_write(Cell& c, const Fiber& f, uint16_t access, size_t bytes) {
  c.write = {1u << f.lane, f.now, checker->block, uint16_t(f.warp), access};
  c.bytes = uint8_t(bytes);
  for (Lanes& l : c.reads) l.lanes = 0;
  for (Lanes& l : c.atomics) l.lanes = 0;
  c.copying = checker->accesses[access].kind == Kind::COPY;
}

// -------------------------------------------------------------------------------- one access
// With a bit for each of the array's cells.
static Counters& counters_of(uint16_t access, const Memory& m) {
  auto& all = checker->kernel->counters;
  if (all.size() <= access) all.resize(access + 1);
  Counters& c = all[access];
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

static void check_cells(const Fiber& f, Memory& m, int array, uint16_t access, uint64_t offset, size_t bytes,
                        bool all_written) {
  const Kind kind = checker->accesses[access].kind;
  const uint32_t epoch = array == SHARED ? checker->block_epoch : checker->launch;
  Traffic* traffic = array == SHARED ? nullptr : &checker->kernel->traffic[array];
  Counters* counters = array == SHARED ? nullptr : &counters_of(access, m);
  const size_t first = offset >> m.shift, last = (offset + bytes - 1) >> m.shift;
  const bool needs_value = kind == Kind::READ || kind == Kind::ATOMIC;
  size_t initialised = 0;
  for (size_t i = first; i <= last; i++) {
    Cell& c = m.cells[i];
    if (c.epoch != epoch) {
      c = {};
      c.epoch = epoch;
    }
    if (counters && !counters->touched[i]) {
      counters->touched[i] = true;
      counters->unique += m.granule();
    }
    check_races(c, f, access, array, std::max<uint64_t>(offset, i << m.shift), bytes);
    initialised += (m.state[i] & Memory::INITIALISED) != 0;
    if (kind != Kind::WRITE) {
      if (traffic && !c.read) traffic->unique_read += m.granule();
      c.read = true;
    }
    if (kind != Kind::READ) {
      if (traffic && !c.written) traffic->unique_written += m.granule();
      c.written = true;
      m.state[i] |= Memory::INITIALISED;
    }
    if (kind == Kind::READ) note(c.reads, f, access);
    else if (is_atomic(kind)) note(c.atomics, f, access);
    else note_write(c, f, access, bytes);
  }
  if (needs_value && initialised <= last - first &&
      (!initialised || (all_written && lacks_a_part(m, first, last, bytes))))
    found_about("uninitialised", access, array, offset, bytes, initialised ? "a part" : "");
}

// The array nearest to an address that is in none, if one is near; else null.
static const Memory* nearest_array(const char* p) {
  const Memory* nearest = nullptr;
  ptrdiff_t least = 1 << 16;
  for (auto& m : checker->arrays) {
    if (!m) continue;
    const ptrdiff_t distance = std::max({m->base - p, p - (m->base + m->bytes) + 1, ptrdiff_t(0)});
    if (distance < least) {
      least = distance;
      nearest = m.get();
    }
  }
  return nearest;
}

// Before it does harm: the launch ends here.
[[noreturn]] static void forbid(const char* p, size_t bytes, Kind kind, const void* pc) {
  Worker& w = *worker;
  const bool shared = size_t(p - (w.shared - GUARD_BYTES)) < ARENA_BYTES + 2 * GUARD_BYTES;
  const Memory* near = shared ? checker->shared.get() : nearest_array(p);
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

static bool within(const Memory& m, uint64_t offset, size_t bytes) {
  const size_t first = offset >> m.shift, last = (offset + bytes - 1) >> m.shift;
  return std::all_of(m.state.begin() + first, m.state.begin() + last + 1,
                     [](uint8_t state) { return state & Memory::VALID; });
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
  const Memory& m = array == SHARED ? *checker->shared : *checker->arrays[array];
  found_poison(f.stored_access, array, p - m.base, f.stored_bytes);
}

// A value that came from a local variable which nothing has written is made one of 16 bits.
extern "C" void sim_poison_rounded() {
  if (!checker || !worker || !worker->current || !worker->launch->checked) return;
  found_poison(number_of(__builtin_return_address(0), NO_ARRAY, Kind::READ), NO_ARRAY, 0, 0);
}

void observe(const void* address, size_t bytes, Kind kind, const void* pc, Asks asks, const void* operand) {
  if (!is_watched(address)) return;
  if (interrupted()) fail(why_interrupted());
  Worker* w = worker;
  Fiber& f = *w->current;
  if (f.stored) look_at_stored(f);
  const char* p = static_cast<const char*>(address);

  int array = SHARED;
  if (size_t(p - w->shared) >= ARENA_BYTES) {
    array = find_array(p);
    if (array == NO_ARRAY && is_known_otherwise(*w, p)) return;
    if (array == NO_ARRAY) forbid(p, bytes, kind, pc);
  }
  Memory& m = array == SHARED ? *checker->shared : *checker->arrays[array];
  if (p + bytes > m.base + m.bytes) forbid(p, bytes, kind, pc);
  const uint16_t access = number_of(pc, array, kind);
  const uint64_t offset = p - m.base;
  if (m.granule() > bytes) m.refine(bytes == 1 ? 0 : 1);
  checker->kernel->accesses++;
  count_access(access, f.warp, f.lane, offset, bytes);
  const bool aligned = asks == Asks::ALIGNMENT || asks == Asks::BOTH;
  if (aligned && reinterpret_cast<uintptr_t>(p) % bytes)
    found_about("misaligned", access, array, offset, bytes);
  if (!within(m, offset, bytes)) return found_about("out of bounds", access, array, offset, bytes);
  check_cells(f, m, array, access, offset, bytes, asks == Asks::ALL_WRITTEN || asks == Asks::BOTH);
  f.worked = f.now;
  if (kind == Kind::WRITE && bytes >= 4) {
    f.stored = p;
    f.stored_bytes = uint16_t(bytes);
    f.stored_access = access;
  }
  if (operand && is_poison(static_cast<const char*>(operand), bytes))
    found_poison(access, array, offset, bytes);
}

// A lane of the running thread's warp gets what another one has asked for, by ldmatrix: it reads it, too.
void observe_for_lane(int lane, const void* address, size_t bytes, const void* pc) {
  Worker& w = *worker;
  const char* p = static_cast<const char*>(address);
  const bool shared = size_t(p - w.shared) < ARENA_BYTES;
  const int array = shared ? SHARED : find_array(p);
  Memory& m = shared ? *checker->shared : *checker->arrays[array];
  const uint64_t offset = p - m.base;
  if (!within(m, offset, bytes)) return;                  // found already
  Fiber* const self = w.current;
  w.current = &w.fibers[size_t(self->warp) * WARP_SIZE + lane];
  check_races(m.cells[offset >> m.shift], *w.current, number_of(pc, array, Kind::READ), array, offset, bytes);
  note(m.cells[offset >> m.shift].reads, *w.current, number_of(pc, array, Kind::READ));
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
  Memory& m = *checker->shared;
  const uint64_t offset = copy.to - m.base;
  const uint16_t access = number_of(copy.pc, SHARED, Kind::COPY);
  for (uint64_t i = offset >> m.shift; i <= (offset + copy.bytes - 1) >> m.shift; i++) {
    note_write(m.cells[i], f, access, 16);
    m.cells[i].copying = false;
  }
  each_source(copy, [&](Cell& c, int array) {
    c.sources--;
    note(c.reads, f, number_of(copy.pc, array, Kind::SOURCE));
  });
  f.worked = f.now;
}

// -------------------------------------------------------------------------------- a launch
void begin_checked_launch(Worker& w) {
  const Launch& launch = *w.launch;
  checker->launch++;
  forget_atomics();
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
  if (!checker->shared || checker->shared->base != w.shared || checker->shared->shift != 2)
    checker->shared = std::make_unique<Memory>("shared memory", w.shared, ARENA_BYTES);
}

void begin_checked_block(Worker& w) {
  const dim3 g = w.launch->grid;
  checker->block = w.block_index.x + g.x * (w.block_index.y + g.y * w.block_index.z);
  checker->block_epoch++;
  checker->kernel->blocks++;
  std::fill(checker->shared->state.begin(), checker->shared->state.end(), 0);
  begin_time(w);
}

void end_checked_block(Worker& w) {
  checker->kernel->shared_bytes = std::max(checker->kernel->shared_bytes, w.shared_bytes);
  flush_all_requests(w.warps.size());
  for (Fiber& f : w.fibers) {
    f.stored = nullptr;
    for (const Copy& copy : f.copies) {
      each_source(copy, [](Cell& c, int) { c.sources--; });
      if (!w.error.empty()) continue;
      const int access = number_of(copy.pc, SHARED, Kind::COPY);
      found({"copy", "", SHARED, "", copy.to - w.shared, copy.bytes,
             {{f.thread_index, w.block_index, Kind::COPY, access, {}}}, "", 0});
    }
  }
}

// It can wait for nothing any more, and nobody for it.
void thread_has_ended(Worker& w) {
  Fiber& f = *w.current;
  if (f.stored) look_at_stored(f);
}

void shared_array_declared(Worker&, const SharedArray& a) {
  Memory& m = *checker->shared;
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

// Of a local array, or of a __device__ variable: the compiler knows how long they are (-fsanitize=bounds).
void index_outside(Site site, int64_t index, const std::string& name, const std::string& type) {
  Worker& w = *worker;
  const std::string element = (name.empty() ? "an array" : name) + "[" + std::to_string(index) + "]";
  const std::string text = element + ", outside of its type " + type;
  found({"out of bounds", "", NO_ARRAY, "", index, 0,
         {{w.current->thread_index, w.block_index, Kind::READ, 0, site}}, text, 0});
  w.error_is_found = true;
  fail("access out of bounds, " + text, site);
}

// Of the running thread, which goes on.
void mistake_found(const std::string& message, Site site) {
  const Worker& w = *worker;
  found({"error", "", SHARED, "", 0, 0, {{w.current->thread_index, w.block_index, Kind::READ, 0, site}},
         describe(w) + at(site) + ": " + message, 0});
}

// What ended the launch, unless it is a finding already.
void error_found(const Worker& w) {
  const std::string interrupted = ": interrupted";   // Ctrl-C is no mistake of the kernel's
  const size_t start = w.error.size() - std::min(w.error.size(), interrupted.size());
  if (w.error_is_found || w.error.substr(start) == interrupted) return;
  std::vector<Party> parties;
  for (auto& [thread, site] : w.error_sites)
    if (site.line) parties.push_back({thread, w.block_index, Kind::READ, 0, site});
  const bool deadlock = w.error.find(": deadlock: ") != std::string::npos;
  found({deadlock ? "deadlock" : "error", "", SHARED, "", 0, 0, parties, w.error, 0});
}

}  // namespace sim
