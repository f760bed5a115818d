// Kernels that start before the one ahead has ended (cudaLaunchKernelEx with programmatic stream
// serialization): here they run one after the other, and the checker asks what may still run on a GPU.
//
// A kernel that starts early does so when each block of the one ahead has called start_next_kernel(), or has
// ended. Its wait_for_previous_kernel() returns when the one ahead has ended. (PTX ISA, griddepcontrol.) What
// came before that has ended if the one ahead has waited for it: before it let the next one start, or else
// only before its own end.
#include "checker.h"

namespace sim {

void begin_early_launch(const Launch& launch) {
  StillRunning& s = checker->still_running;
  const uint64_t start = s.next_starts_after ? s.after_wait : s.at_start;
  const uint64_t end = s.a_thread_waited ? s.after_wait : s.at_start;
  s = {};
  if (!launch.early) return;
  s.at_start = start << 1 | 1;
  s.after_wait = end << 1;
}

// One that lets nobody start does so by its end.
void end_of_block(const Worker& w) {
  StillRunning& s = checker->still_running;
  if (w.let_next_start) return;
  for (const Fiber& f : w.fibers) s.next_starts_after |= f.knows_previous_kernel;
}

bool may_still_run(const Agent& f, unsigned launches_ago) {
  const StillRunning& s = checker->still_running;
  return (f.knows_previous_kernel ? s.after_wait : s.at_start) >> (launches_ago - 1) & 1;
}

extern "C" void sim_start_next_kernel() {
  Worker& w = *worker;
  if (!w.launch->checked || w.let_next_start) return;
  w.let_next_start = true;
  checker->still_running.next_starts_after |= w.current->knows_previous_kernel;
}

extern "C" void sim_wait_for_previous_kernel() {
  worker->current->knows_previous_kernel = true;
  if (worker->launch->checked) checker->still_running.a_thread_waited = true;
}

}  // namespace sim
