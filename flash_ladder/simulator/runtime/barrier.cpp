// Barriers, and fences. __syncthreads: nobody goes on before everybody has come. A thread that has returned
// from the kernel never comes, so the others wait for ever, and the scheduler reports a deadlock. (Hardware
// since Volta lets the remaining threads through; the programming model promises nothing.)
#include "checker.h"

namespace sim {

static int barrier(int predicate, const char* name, Site site) {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);   // a block of one thread never waits
  Barrier& b = w.barrier;
  b.sum += predicate != 0;
  b.waiting.push_back(w.current);
  if (b.waiting.size() < w.fibers.size()) {
    wait_until_woken(State::AT_BARRIER, name, site);
  } else {
    b.result = b.sum;
    b.sum = 0;
    std::vector<Fiber*> all;
    all.swap(b.waiting);
    w.current->site = site;
    if (w.launch->checked) barrier_reached(w, all, name);
    for (Fiber* f : all)
      if (f != w.current) wake(f);
  }
  return b.result;
}

extern "C" void sim_syncthreads(const char* file, int line) { barrier(0, "__syncthreads()", {file, line}); }

extern "C" int sim_syncthreads_count(int predicate, const char* name, const char* file, int line) {
  return barrier(predicate, name, {file, line});
}

extern "C" void sim_threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (worker->launch->checked) fence(*worker->current);
}

}  // namespace sim
