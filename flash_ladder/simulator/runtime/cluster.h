// A cluster: blocks of one launch that run together, by turns on one OS thread, and reach into each other's
// shared memory (cluster.cpp).
#pragma once
#include <map>

#include "checker.h"

namespace sim {

struct Visit {              // for the checker: what was last done in a block, by a thread of another one
  uint32_t time = 0;        // or by an engine of that
  Party by;
  int64_t offset = 0;       // in shared memory
};

struct Cluster {
  std::vector<Worker*> blocks;                         // by rank
  size_t arrived = 0;                                  // at its barrier, in the phase under way
  uint32_t phase = 0;
  std::vector<std::pair<Worker*, Fiber*>> waiting;
  // For the checker, by rank: what has been handed to the barrier, and in complete phases
  std::vector<std::shared_ptr<Past>> released;
  std::vector<std::shared_ptr<const Past>> complete;
  std::vector<std::map<std::pair<uint32_t, unsigned>, Visit>> visits;   // by block and number of who it was
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
void visited(const Worker& w, uint32_t block, unsigned number, const Visit& visit);
void check_visits_at_end(Worker& w);

}  // namespace sim
