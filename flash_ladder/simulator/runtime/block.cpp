// The scheduler: runs the fibers of one block until all have returned, or reports that none can go on.
#include "checker.h"
#include "cluster.h"
#include "guard.h"

#include <exception>
#include <map>
#include <new>
#include <utility>

__thread uint3 threadIdx, blockIdx;
__thread dim3 blockDim, gridDim;

namespace sim {

SIM_THREAD_LOCAL Worker* worker;

uint64_t next_random(uint64_t& state) {   // xorshift64 (Marsaglia 2003)
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static Fiber* take_ready(Worker& w) {
  if (w.ready.empty()) return nullptr;
  if (w.random) std::swap(w.ready[0], w.ready[next_random(w.random) % w.ready.size()]);
  Fiber* fiber = w.ready.front();
  w.ready.pop_front();
  return fiber;
}

static void resume(Worker& w, Fiber* fiber, void** save_stack_pointer) {
  w.current = fiber;
  threadIdx = fiber->thread_index;
  sim_switch(save_stack_pointer, fiber->stack_pointer);
}

static void return_to_scheduler(Worker& w) {
  Fiber* self = w.current;
  w.current = nullptr;
  sim_switch(&self->stack_pointer, w.scheduler_stack_pointer);
}

// Give the core to the next fiber that can run, or to the scheduler when there is none.
static void give_way() {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted());
  Fiber* self = w.current;
  if (w.copies_land == CopiesLand::RANDOM) {
    land_some_copies(w, *self);
    if (w.engines) land_some_bulk_copies(w), multiply_some(w);
  }
  Fiber* next = take_ready(w);
  while (!next && land_next_load(w)) next = take_ready(w);
  if (next == self) return;
  if (next) resume(w, next, &self->stack_pointer);
  else return_to_scheduler(w);
}

void wait_until_woken(State state, const char* waits_for, Site site) {
  Fiber* self = worker->current;
  self->state = state;
  self->waits_for = waits_for;
  self->site = site;
  give_way();
}

void wake(Fiber* fiber, bool next) {
  fiber->state = State::READY;
  worker->vain_yields = worker->vain_tests = 0;
  if (next) worker->ready.push_front(fiber);
  else worker->ready.push_back(fiber);
}

extern "C" void sim_check_interrupt() {
  if (worker && worker->current && interrupted()) fail(why_interrupted());
}

// Of a thread that waits for others without a barrier. When each that can run has only yielded, it is another
// block's turn.
extern "C" void sim_yield() {
  Worker& w = *worker;
  w.ready.push_back(w.current);
  if (++w.vain_yields <= w.ready.size() || land_next_load(w)) return give_way();
  if (interrupted()) fail(why_interrupted());
  w.set_aside = true;
  return_to_scheduler(w);
}

// -------------------------------------------------------------------------------- errors
static std::string triple(uint3 v) {
  return "(" + std::to_string(v.x) + ", " + std::to_string(v.y) + ", " + std::to_string(v.z) + ")";
}

std::string at(Site site) {
  return site.line ? std::string(" at ") + site.file + ":" + std::to_string(site.line) : "";
}

std::string describe(const Worker& w) {
  std::string s = std::string("kernel ") + w.launch->name + ", block " + triple(w.block_index);
  if (w.current) s += ", thread " + triple(w.current->thread_index);
  return s;
}

void fail(const std::string& message, Site site) {
  if (worker->current) worker->error_sites = {{worker->current->thread_index, site}};
  abandon_block(describe(*worker) + at(site) + ": " + message);
}

// The block's fibers are left where they are: their stacks are used anew by the next block.
void abandon_block(const std::string& report) {
  Worker& w = *worker;
  if (w.error.empty()) w.error = report;
  w.current = nullptr;
  admit_interruptions();
  void* never_resumed;
  sim_switch(&never_resumed, w.scheduler_stack_pointer);
  __builtin_unreachable();
}

extern "C" void sim_fail(const char* message, const char* file, int line) { fail(message, {file, line}); }

static std::string ranges(const std::vector<int>& numbers) {   // 0 1 2 5 -> "0-2, 5"
  std::string s;
  for (size_t i = 0, j; i < numbers.size(); i = j + 1) {
    for (j = i; j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1;) j++;
    s += (s.empty() ? "" : ", ") + std::to_string(numbers[i]) +
         (j > i ? "-" + std::to_string(numbers[j]) : "");
  }
  return s;
}

std::string deadlock_report(Worker& w) {
  std::map<std::string, std::vector<int>> threads_by_state;
  for (const Fiber& f : w.fibers) {
    std::string state = "have returned from the kernel";
    if (f.state != State::RETURNED) {
      state = std::string("wait at ") + f.waits_for + at(f.site);
      if (f.state == State::AT_BARRIER)
        state += " (" + std::to_string(w.barrier.waiting.size()) + " of " + std::to_string(w.alive) +
                 " threads are there)";
      if (f.state == State::AT_MBARRIER) state += describe_mbarrier(w, f);
      if (f.state == State::AT_NAMED_BARRIER || f.state == State::AT_WARPGROUP_OPERATION)
        state += describe_meeting(w, f);
    }
    if (threads_by_state[state].empty()) w.error_sites.emplace_back(f.thread_index, f.site);
    threads_by_state[state].push_back(f.number);
  }
  std::string s = "deadlock: no thread of the block can go on";
  for (auto& [state, threads] : threads_by_state) s += "\n  threads " + ranges(threads) + " " + state;
  return describe(w) + ": " + s;
}

// -------------------------------------------------------------------------------- one block
extern "C" void sim_fiber_main() {   // the first function on every fiber's stack
  Worker& w = *worker;
  try {
    w.launch->run_thread(w.launch->arguments);
  } catch (const std::bad_alloc&) {
    make_room();
    fail("out of memory: an allocation without an end?");
  } catch (const std::exception& e) {
    fail(std::string("C++ exception: ") + e.what());
  } catch (...) {
    fail("C++ exception");
  }
  w.current->state = State::RETURNED;
  w.alive--;
  if (w.launch->checked) thread_has_ended(w);
  leave_warp(w);
  leave_barrier(w);
  leave_cluster(w);
  give_way();
  __builtin_unreachable();
}

// Not at the same place of each page: for that caches have few lines, and all threads would compete for them.
static char* stack_top(const Fiber& f) { return f.stack + STACK_BYTES - f.number % 16 * 256; }

void begin_block(Worker& w, size_t number) {
  const dim3 grid = w.launch->grid, block = w.launch->block;
  w.block = uint32_t(number);
  w.block_index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
                   unsigned(number / grid.x / grid.y)};
  clear_shared_memory(w);
  w.barrier = {};
  w.engines.reset();
  w.cluster.reset();
  w.vain_tests = 0;
  w.warps.assign(w.warps.size(), {});
  w.ready.clear();
  w.random = w.seed ? w.seed ^ (number + 1) * 0xBF58476D1CE4E5B9ull : 0;
  w.copy_random = w.random + 0x94D049BB133111EBull;
  w.alive = int(w.fibers.size());
  for (Fiber& f : w.fibers) {
    const unsigned n = f.number;
    f.thread_index = {n % block.x, n / block.x % block.y, n / (block.x * block.y)};
    f.state = State::READY;
    f.site = {};
    f.copies.clear();
    f.copy_groups = f.bulk_groups = 0;
    f.registers.clear();
    f.has_fenced_registers = f.at_cluster_barrier = f.knows_previous_kernel = false;
    f.stack_pointer = fresh_stack(stack_top(f));
    w.ready.push_back(&f);
  }
  if (w.launch->checked) begin_checked_block(w);
}

bool continue_block(Worker& w) {
  blockIdx = w.block_index;
  blockDim = w.launch->block;
  gridDim = w.launch->grid;
  w.set_aside = false;
  w.vain_yields = 0;
  while (Fiber* fiber = w.error.empty() && !w.set_aside ? take_ready(w) : nullptr)
    resume(w, fiber, &w.scheduler_stack_pointer);
  w.current = nullptr;
  const bool waits_for_cluster = w.cluster && w.alive && w.error.empty();
  if (w.set_aside || waits_for_cluster) {
    if (w.launch->checked) flush_all_requests(w.warps.size());
    return false;
  }
  if (w.error.empty() && w.alive) w.error = deadlock_report(w);
  if (w.error.empty()) finish_bulk_copies(w);
  if (w.launch->checked) end_checked_block(w);
  return true;
}

}  // namespace sim
