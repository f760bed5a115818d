// Whether a wait at an mbarrier may miss its phase. A wait names a parity, "of either the current phase or
// the immediately preceding phase of the mbarrier object" (PTX ISA, mbarrier.test_wait). A thread that is
// slow, and asks when the phase after is over as well, waits for a later one, or for ever. So all waits for a
// phase must have ended before the next one is complete: an arrival in that, or a copy whose bytes it counts,
// must come after each of them. Nor may an arrival count in another phase than in the one that is meant: at a
// named barrier neither.
//
// Order is all that matters here, not memory. It is known by warps, as their lanes go on together, and their
// steps are counted. What a warp knows to be over it hands on by arrivals, barriers, products of its
// warpgroup and atomics.
#include <algorithm>

#include "checker.h"
#include "engines.h"

namespace sim {

static Steps& steps_of(const Fiber& f) {
  auto& known = engines_of(*worker).known;
  if (known.empty()) {
    known.assign(worker->warps.size(), Steps(worker->warps.size()));
    for (size_t warp = 0; warp < known.size(); warp++) known[warp][warp] = 1;
  }
  return known[f.number / WARP_SIZE];
}

static void add(Steps& to, const Steps& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

void hand_over_steps(Steps& to, const Fiber& f) {
  Steps& mine = steps_of(f);
  add(to, mine);
  mine[f.number / WARP_SIZE]++;
}

void take_over_steps(const Fiber& f, const Steps& from) { add(steps_of(f), from); }

void exchange_steps(const void* address, const Fiber& f) {
  Steps& there = engines_of(*worker).known_by_atomic[address];
  take_over_steps(f, there);
  hand_over_steps(there, f);
}

void steps_meet(Fiber* const* fibers, size_t count) {
  Steps all;
  auto begins_a_warp = [&](size_t i) {
    return i == 0 || fibers[i]->number / WARP_SIZE != fibers[i - 1]->number / WARP_SIZE;
  };
  for (size_t i = 0; i < count; i++)
    if (begins_a_warp(i)) hand_over_steps(all, *fibers[i]);
  for (size_t i = 0; i < count; i++)
    if (begins_a_warp(i)) take_over_steps(*fibers[i], all);
}

// A thread arrives. If it does not know that the phase before is over, it might have been in time for that.
static void entered(Phases& p, const Fiber& f, const std::string& arrival, Site site) {
  const Steps& known = steps_of(f);
  const size_t warp = size_t(f.number) / WARP_SIZE;
  bool knows = true;
  for (size_t i = 0; i < p.came_before.size(); i++)
    knows &= i == warp || p.came_before[i] <= known[i];
  if (!knows && !worker->cluster)
    mistake_found(arrival + " may count in the phase before: the thread has not waited until others have "
                      "made theirs in that", site);
  if (p.came.size() <= warp) p.came.resize(warp + 1);
  p.came[warp] = known[warp];
}

static void over(Phases& p) {
  p.came_before = std::move(p.came);
  p.came.clear();
}

void phase_entered(Mbarrier& m, const Fiber& f, Site site) {
  entered(m.phases, f, "mbarrier_arrive(): this arrival in phase " + std::to_string(m.phase) + " of " +
                           shared_element(*worker, int64_t(m.offset)), site);
}

void phase_entered(NamedBarrier& b, const Fiber& f, const std::string& name, int id) {
  entered(b.phases, f, name + "(): this arrival at barrier " + std::to_string(id), b.site);
}

void phase_over(NamedBarrier& b) { over(b.phases); }

void phase_seen(Mbarrier& m, const Fiber& f, Site site) {
  const int warp = f.number / WARP_SIZE;
  take_over_steps(f, m.steps_over);
  Seen& seen = m.seen[warp];
  if (!seen.step) seen = {steps_of(f)[warp], site};
}

// One is complete. Those that wait for it have not seen it yet.
void phase_over(Mbarrier& m) {
  Worker& w = *worker;
  for (const auto& [warp, seen] : m.seen) {
    const bool is_known = seen.step && size_t(warp) < m.steps.size() && seen.step <= m.steps[warp];
    if (is_known || w.cluster) continue;             // of other blocks of a cluster too little is known
    Fiber* const running = w.current;
    w.current = &w.fibers[size_t(warp) * WARP_SIZE];
    const std::string barrier = shared_element(w, int64_t(m.offset));
    const std::string before = m.phase > 1 ? "phase " + std::to_string(m.phase - 2) : "the one before that";
    mistake_found("mbarrier_wait(): phase " + std::to_string(m.phase - 1) + " of " + barrier +
                      " may be over before this thread has seen that " + before + " is: no arrival in it "
                      "comes after this wait, which then waits for a later phase of the same parity",
                  seen.site);
    w.current = running;
  }
  over(m.phases);
  m.steps_over = m.steps;
  m.seen.clear();
  for (const Fiber* f : m.waiting) m.seen[f->number / WARP_SIZE] = {0, f->site};
}

}  // namespace sim
