// What the 128 threads of a warpgroup do together; registers that move between warpgroups; barriers with a
// number. (PTX ISA, "Miscellaneous Instructions: setmaxnreg", "Parallel Synchronization and Communication
// Instructions: bar".)
#include <algorithm>
#include <cstring>

#include "checker.h"
#include "engines.h"

namespace sim {

constexpr int REGISTERS = 64 * 1024;        // of a multiprocessor
constexpr int MOST_REGISTERS = 256;         // of a thread

static Warpgroup& warpgroup_of(Worker& w, const Fiber& f) {
  return engines_of(w).warpgroups[f.number / WARPGROUP_SIZE];
}

static void wake_all(Worker& w, const Fiber* but) {
  const size_t first = &warpgroup_of(w, *but) - w.engines->warpgroups.data();
  for (int i = WARPGROUP_SIZE - 1; i >= 0; i--)
    if (Fiber* f = &w.fibers[first * WARPGROUP_SIZE + i]; f != but) wake(f, true);
}

// "All threads in the warpgroup must execute the same" instruction (PTX ISA, on .aligned).
void warpgroup_together(const char* name, void* operands, Site site, void (*act)(Worker&, Warpgroup&)) {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);
  Fiber& self = *w.current;
  const size_t first = size_t(self.number) / WARPGROUP_SIZE * WARPGROUP_SIZE;
  if (w.fibers.size() - first < WARPGROUP_SIZE)
    fail(std::string(name) + " needs the 128 threads of a warpgroup; the block's last one has " +
             std::to_string(w.fibers.size() - first), site);
  Warpgroup& g = warpgroup_of(w, self);
  if (g.arrived && strcmp(g.name, name))
    fail(std::string("threads of one warpgroup are at different operations: ") + g.name + at(g.site) +
             ", and " + name + " here", site);
  g.name = name;
  g.site = site;
  g.operands[self.number - first] = operands;
  if (++g.arrived < WARPGROUP_SIZE) return wait_until_woken(State::AT_WARPGROUP_OPERATION, name, site);
  if (act) act(w, g);
  if (w.launch->checked) {
    Fiber* firsts[WARPGROUP_SIZE / WARP_SIZE];
    for (int i = 0; i < WARPGROUP_SIZE / WARP_SIZE; i++) {
      firsts[i] = &w.fibers[first + size_t(i) * WARP_SIZE];
      flush_requests(firsts[i]->number / WARP_SIZE);
    }
    steps_meet(firsts, WARPGROUP_SIZE / WARP_SIZE);
  }
  g.arrived = 0;
  wake_all(w, &self);
}

// -------------------------------------------------------------------------------- registers
// How many a thread starts with, the simulator cannot know: it takes the most that a compiler can give to a
// block of this size, a multiple of 8. (Kernels that move registers are compiled so: __launch_bounds__.)
static int registers_at_start(const Worker& w) {
  return std::min(REGISTERS / int(w.fibers.size()) / 8 * 8, MOST_REGISTERS);
}

static int registers_of(const Worker& w, const Warpgroup& g) {
  return g.registers ? g.registers : registers_at_start(w);
}

static bool give_registers(Worker& w, Warpgroup& to) {
  const auto& all = w.engines->warpgroups;
  int used = to.wanted;
  for (const Warpgroup& g : all)
    if (&g != &to) used += registers_of(w, g);
  if (used > int(all.size()) * registers_at_start(w)) return false;
  to.registers = to.wanted;
  to.wanted = 0;
  return true;
}

extern "C" void sim_set_registers(const char* name, int registers, bool more, const char* file, int line) {
  const Site site{file, line};
  struct Operands { int registers; bool more; Site site; } mine{registers, more, site};
  warpgroup_together(name, &mine, site, [](Worker& w, Warpgroup& g) {
    const auto& o = *static_cast<Operands*>(g.operands[0]);
    for (const void* other : g.operands)
      if (static_cast<const Operands*>(other)->registers != o.registers)
        fail(std::string(g.name) + ": the threads of a warpgroup ask for different numbers", o.site);
    const int before = g.registers;
    if (before && (o.more ? o.registers < before : o.registers > before))
      fail(std::string(g.name) + ": " + std::to_string(o.registers) + " registers, where a thread has " +
               std::to_string(before) + (o.more ? "; setmaxnreg_dec() takes some away" :
                                         "; setmaxnreg_inc() asks for more"), o.site);
    g.wanted = o.registers;
    give_registers(w, g);
    for (Warpgroup& other : w.engines->warpgroups)
      if (other.wanted && give_registers(w, other)) {
        const size_t first = (&other - w.engines->warpgroups.data()) * WARPGROUP_SIZE;
        for (int i = WARPGROUP_SIZE - 1; i >= 0; i--)
          if (w.fibers[first + i].state == State::AT_REGISTERS) wake(&w.fibers[first + i], true);
      }
  });
  const Warpgroup& g = warpgroup_of(*worker, *worker->current);
  while (g.wanted) wait_until_woken(State::AT_REGISTERS, name, site);
}

// -------------------------------------------------------------------------------- named barriers
extern "C" void sim_named_barrier(const char* name, int id, int threads, bool waits, const char* file,
                                  int line) {
  const Site site{file, line};
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);
  auto wrong = [&](const std::string& what) { fail(std::string(name) + ": " + what, site); };
  if (id < 1 || id >= NAMED_BARRIERS)
    wrong("barrier " + std::to_string(id) + "; 1 to 15 are possible (0 is that of __syncthreads())");
  if (threads <= 0 || threads % WARP_SIZE || threads > int((w.fibers.size() + 31) / 32 * 32))
    wrong(std::to_string(threads) + " threads; a multiple of 32 is possible, no more than the block has");
  NamedBarrier& b = engines_of(w).named_barriers[id];
  if (b.arrived && b.threads != threads)
    wrong("barrier " + std::to_string(id) + " for " + std::to_string(threads) +
          " threads; others have come to it for " + std::to_string(b.threads));
  b.threads = threads;
  b.site = site;
  // PTX ISA, "barrier": "Care must be taken to keep a warp from executing more barrier{.cta} instructions
  // than intended (...) prior to the reset of the barrier. (...) Execution in this case is unpredictable."
  if (b.by.test(w.current->number))
    wrong("this thread has come to barrier " + std::to_string(id) + " before, and the barrier still waits " +
          "for " + std::to_string(b.threads - b.arrived) + " of " + std::to_string(b.threads) + " threads");
  b.by.set(w.current->number);
  if (w.launch->checked) {
    phase_entered(b, *w.current, name, id);
    hand_over(b.released, *w.current);
    hand_over_steps(b.steps, *w.current);
  }
  if (++b.arrived == threads) {
    if (w.launch->checked) phase_over(b);
    b.arrived = 0;
    b.by.reset();
    std::vector<Fiber*> all;
    all.swap(b.waiting);
    for (Fiber* f : all) wake(f);
    if (!w.launch->checked) return;
    const std::shared_ptr<const Past> known = std::make_shared<Past>(*b.released);
    if (waits) all.push_back(w.current);
    for (Fiber* f : all) {
      take_over(*f, known);
      take_over_steps(*f, b.steps);
    }
  } else if (waits) {
    b.waiting.push_back(w.current);
    w.current->waits_at = &b;
    wait_until_woken(State::AT_NAMED_BARRIER, name, site);
  }
}

// " (so many of how many threads are there)"
std::string describe_meeting(const Worker& w, const Fiber& waits) {
  const auto* b = static_cast<const NamedBarrier*>(waits.waits_at);
  const bool named = waits.state == State::AT_NAMED_BARRIER;
  const int there = named ? b->arrived : w.engines->warpgroups[waits.number / WARPGROUP_SIZE].arrived;
  return " (" + std::to_string(there) + " of " + std::to_string(named ? b->threads : WARPGROUP_SIZE) +
         " threads are there)";
}

}  // namespace sim
