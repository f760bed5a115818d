// Barriers, and fences. __syncthreads: nobody goes on before everybody has come who has not returned from the
// kernel. Since Volta it "will not succeed until reached by all non-exited threads in the block" (CUDA C++
// Programming Guide, compute capability 7.x, independent thread scheduling); "if the exiting threads are
// holding up the barrier, the barrier is released" (PTX ISA, exit). The checker notes it, as earlier GPUs
// count warps.
#include "checker.h"

namespace sim {

static void complete(Worker& w) {
  Barrier& b = w.barrier;
  b.result = b.sum;
  b.sum = 0;
  std::vector<Fiber*> all;
  all.swap(b.waiting);
  if (w.launch->checked) barrier_reached(w, all);
  for (Fiber* f : all)
    if (f != w.current) wake(f);
}

static int barrier(int predicate, const char* name, Site site) {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);   // a block of one thread never waits
  Barrier& b = w.barrier;
  b.sum += predicate != 0;
  b.waiting.push_back(w.current);
  w.current->waits_for = name;
  w.current->site = site;
  if (b.waiting.size() < size_t(w.alive)) wait_until_woken(State::AT_BARRIER, name, site);
  else complete(w);
  return b.result;
}

void leave_barrier(Worker& w) {
  if (w.alive && w.barrier.waiting.size() == size_t(w.alive)) complete(w);
}

extern "C" void sim_syncthreads(const char* file, int line) { barrier(0, "__syncthreads()", {file, line}); }

extern "C" int sim_syncthreads_count(int predicate, const char* name, const char* file, int line) {
  return barrier(predicate, name, {file, line});
}

extern "C" void sim_threadfence(Scope scope) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (worker->launch->checked) fence(*worker->current, scope);
}

}  // namespace sim
