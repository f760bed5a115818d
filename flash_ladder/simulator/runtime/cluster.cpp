// Clusters: their blocks, their barrier, and what reaches from one block into another. (CUDA C++ Programming
// Guide, "Thread Block Clusters"; PTX ISA, "barrier.cluster", "mapa".)
//
// The blocks of a cluster run on one OS thread: each until none of its threads can go on, then the next one.
// When none of them all can, that is a deadlock.
#include "cluster.h"

#include <algorithm>

#include "engines.h"

namespace sim {

// -------------------------------------------------------------------------------- running one
static uint3 index_of(size_t number, dim3 of) {
  return {unsigned(number % of.x), unsigned(number / of.x % of.y), unsigned(number / of.x / of.y)};
}

// Blocks of a cluster are neighbours in the grid; their ranks count x fastest, then y, then z.
void begin_cluster(const std::vector<Worker*>& blocks, size_t number) {
  const dim3 grid = blocks[0]->launch->grid, size = blocks[0]->launch->cluster;
  const uint3 place = index_of(number, dim3(grid.x / size.x, grid.y / size.y, grid.z / size.z));
  auto cluster = std::make_shared<Cluster>();
  cluster->blocks = blocks;
  cluster->released.resize(blocks.size());
  cluster->complete.resize(blocks.size());
  cluster->visits.resize(blocks.size());
  for (size_t rank = 0; rank < blocks.size(); rank++) {
    const uint3 i = index_of(rank, size);
    const size_t x = place.x * size.x + i.x, y = place.y * size.y + i.y, z = place.z * size.z + i.z;
    Worker& w = *(worker = blocks[rank]);
    begin_block(w, x + grid.x * (y + grid.y * z));
    w.cluster = cluster;
    w.rank = int(rank);
  }
}

void run_cluster(const std::vector<Worker*>& blocks) {
  std::vector<Worker*> left = blocks;
  while (!left.empty()) {
    bool all_wait = true;
    for (size_t i = 0; i < left.size();) {
      Worker& w = *(worker = left[i]);
      if (w.ready.empty() && !land_next_load(w)) {
        i++;
        continue;
      }
      all_wait = false;
      const bool ended = continue_block(w);
      if (!w.error.empty()) return;
      if (ended) left.erase(left.begin() + ptrdiff_t(i));
      else i++;
    }
    if (all_wait) {
      std::string reports;
      for (Worker* w : left) reports += (reports.empty() ? "" : "\n") + deadlock_report(*w);
      worker = left[0];
      worker->error = reports;
    }
    if (all_wait) return;
  }
}

// -------------------------------------------------------------------------------- its blocks
Worker& block_of_rank(int rank, const char* name, Site site) {
  const auto& cluster = worker->cluster;
  const int size = cluster ? int(cluster->blocks.size()) : 1;
  if (rank < 0 || rank >= size)
    fail(std::string(name) + ": block " + std::to_string(rank) + " of a cluster of " + std::to_string(size),
         site);
  Worker& w = cluster ? *cluster->blocks[rank] : *worker;
  if (!w.alive)
    fail(std::string(name) + ": block " + std::to_string(rank) + " of the cluster has ended already: a "
         "cluster_sync() must come before the end", site);
  return w;
}

Worker* block_that_holds(const Worker& w, const char* address) {
  for (Worker* other : w.cluster->blocks)
    if (size_t(address - other->shared) < ARENA_BYTES) return other;
  return nullptr;
}

extern "C" int sim_cluster_rank() { return worker->cluster ? worker->rank : 0; }

static size_t shared_offset(const void* p, const char* name, Site site) {
  const size_t offset = static_cast<const char*>(p) - worker->shared;
  if (offset >= ARENA_BYTES) fail(std::string(name) + ": this is not in the block's shared memory", site);
  return offset;
}

extern "C" void* sim_in_block(const void* p, int rank, const char* file, int line) {
  const size_t offset = shared_offset(p, "in_block()", {file, line});
  return block_of_rank(rank, "in_block()", {file, line}).shared + offset;
}

extern "C" void sim_mbarrier_arrive_in_block(uint64_t* barrier, int rank, const char* file, int line) {
  const Site site{file, line};
  const char* name = "mbarrier_arrive_in_block()";
  const size_t offset = shared_offset(barrier, name, site);
  Worker& there = block_of_rank(rank, name, site);
  Fiber* const self = worker->current;
  auto& all = engines_of(there).mbarriers;
  const auto m = all.find(offset);
  if (m == all.end()) fail(std::string(name) + ": nothing has initialised this mbarrier there", site);
  if (!m->second.missing)
    fail(std::string(name) + ": all arrivals have been made in this phase", site);
  std::shared_ptr<Past> known;
  if (worker->launch->checked) {
    known = knowledge_in(there, *self);
    visited(there, worker->block, unsigned(self->number),
            {self->now, {self->thread_index, worker->block_index, Kind::ATOMIC, 0, site}, int64_t(offset)});
    self->now++;
  }
  InBlock in_it(&there, self);
  if (known) hand_over(m->second.released, *known);
  m->second.missing--;
  complete_if_all_is_there(m->second);
}

// -------------------------------------------------------------------------------- what others do in a block
void visited(const Worker& w, uint32_t block, unsigned number, const Visit& visit) {
  Visit& last = w.cluster->visits[size_t(w.rank)][{block, number}];
  if (visit.time >= last.time) last = visit;
}

// The block has ended. One of its threads must have known of all that others have done in it: else it might
// have ended before.
void check_visits_at_end(Worker& w) {
  if (!w.cluster || !w.error.empty()) return;
  for (const auto& [who, visit] : w.cluster->visits[size_t(w.rank)]) {
    const bool is_known = std::any_of(w.fibers.begin(), w.fibers.end(), [&](const Fiber& f) {
      return has_happened(f, who.first, who.second, visit.time);
    });
    if (!is_known) found({"ended block", "", SHARED, "", visit.offset, 4, {visit.by}, "", 0});
  }
}

// -------------------------------------------------------------------------------- its barrier
static void complete(Cluster& c) {
  size_t alive = 0;
  for (const Worker* w : c.blocks) alive += size_t(w->alive);
  if (!alive || c.arrived < alive) return;
  c.arrived = 0;
  c.phase++;
  for (size_t rank = 0; rank < c.blocks.size(); rank++)
    if (c.released[rank]) c.complete[rank] = std::make_shared<Past>(*c.released[rank]);
  std::vector<std::pair<Worker*, Fiber*>> all;
  all.swap(c.waiting);
  for (auto& [w, f] : all) {
    InBlock in_it(w, w->current);
    wake(f);
  }
}

static Cluster& cluster_of(const Worker& w, const char* name, Site site) {
  if (!w.cluster) fail(std::string(name) + ": the kernel has been launched without clusters", site);
  return *w.cluster;
}

extern "C" void sim_cluster_arrive(const char* file, int line) {
  Worker& w = *worker;
  Fiber& f = *w.current;
  Cluster& c = cluster_of(w, "cluster_arrive()", {file, line});
  if (f.at_cluster_barrier)
    fail("cluster_arrive(): the thread has arrived already; cluster_wait() must come between", {file, line});
  f.at_cluster_barrier = true;
  f.cluster_phase = c.phase;
  if (w.launch->checked) {
    for (size_t rank = 0; rank < c.blocks.size(); rank++)
      hand_over(c.released[rank], *knowledge_in(*c.blocks[rank], f));
    f.now++;
  }
  c.arrived++;
  complete(c);
}

extern "C" void sim_cluster_wait(const char* file, int line) {
  Worker& w = *worker;
  Fiber& f = *w.current;
  if (interrupted()) fail(why_interrupted(), {file, line});
  Cluster& c = cluster_of(w, "cluster_wait()", {file, line});
  if (!f.at_cluster_barrier)
    fail("cluster_wait(): the thread has not arrived; cluster_arrive() must come first", {file, line});
  while (c.phase == f.cluster_phase) {
    c.waiting.emplace_back(&w, &f);
    wait_until_woken(State::AT_CLUSTER_BARRIER, "cluster_wait()", {file, line});
  }
  f.at_cluster_barrier = false;
  if (w.launch->checked) take_over(f, c.complete[w.rank]);
}

// The running thread has returned from the kernel: nobody waits for it any more.
void leave_cluster(Worker& w) {
  if (!w.cluster) return;
  if (w.current->at_cluster_barrier && w.current->cluster_phase == w.cluster->phase) w.cluster->arrived--;
  complete(*w.cluster);
}

}  // namespace sim
