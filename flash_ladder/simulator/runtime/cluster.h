// A cluster: blocks of one launch that run together, by turns on one OS thread, and reach into each other's
// shared memory (cluster.cpp).
#pragma once
#include "runtime.h"

namespace sim {

struct Cluster {
  std::vector<Worker*> blocks;                         // by rank
  size_t arrived = 0;                                  // at its barrier, in the phase under way
  uint32_t phase = 0;
  std::vector<std::pair<Worker*, Fiber*>> waiting;
  // For the checker, by rank: what has been handed to the barrier, and in complete phases
  std::vector<std::shared_ptr<Past>> released;
  std::vector<std::shared_ptr<const Past>> complete;
};

// While it exists, the code acts in another block, in the name of a thread.
class InBlock {
  Worker* const before;
  Fiber* const current;

 public:
  InBlock(Worker* w, Fiber* f) : before(worker), current(w->current) {
    worker = w;
    w->current = f;
  }
  ~InBlock() {
    worker->current = current;
    worker = before;
  }
};

Worker& block_of_rank(int rank, const char* name, Site site);
Worker* block_that_holds(const Worker& w, const char* address);   // of its cluster; null: none
void begin_cluster(const std::vector<Worker*>& blocks, size_t number);
void run_cluster(const std::vector<Worker*>& blocks);             // to its end; an error is in one of them
void leave_cluster(Worker& w);

}  // namespace sim
