// The CPU's side of stages/common/cluster.cuh: the same functions, done by the run-time library. What each of
// them means is said there.
#pragma once
#include "hopper.h"

namespace sim {
extern "C" {
int sim_cluster_rank();
void sim_cluster_arrive(const char* file, int line);
void sim_cluster_wait(const char* file, int line);
void* sim_in_block(const void* p, int rank, const char* file, int line);
void sim_mbarrier_arrive_in_block(uint64_t* barrier, int rank, const char* file, int line);
void sim_tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, const int* corner, int ranks,
                            const char* file, int line);
void sim_bulk_send(void* to, const void* from, int bytes, uint64_t* barrier, int rank, const char* file,
                   int line);
}
}  // namespace sim

inline int cluster_rank() { return sim::sim_cluster_rank(); }
inline void cluster_arrive(SIM_SITE) { sim::sim_cluster_arrive(file, line); }
inline void cluster_wait(SIM_SITE) { sim::sim_cluster_wait(file, line); }
inline void cluster_sync(SIM_SITE) {
  sim::sim_cluster_arrive(file, line);
  sim::sim_cluster_wait(file, line);
}
template <class T> inline T* in_block(T* p, int rank, SIM_SITE) {
  return static_cast<T*>(sim::sim_in_block(p, rank, file, line));
}
SIM_ALWAYS_INLINE void mbarrier_arrive_in_block(uint64_t* barrier, int rank, SIM_SITE) {
  sim::sim_mbarrier_arrive_in_block(barrier, rank, file, line);
}
SIM_ALWAYS_INLINE void mbarrier_arrive_as_reader(uint64_t* barrier, int rank, SIM_SITE) {
  sim::sim_mbarrier_arrive_in_block(barrier, rank, file, line);
}
SIM_ALWAYS_INLINE void tma_load_multicast(void* to, const CUtensorMap& map, uint64_t* barrier, int col,
                                          int row, int head, int batch, int ranks, SIM_SITE) {
  const int corner[] = {col, row, head, batch};
  sim::sim_tma_load_multicast(to, &map, barrier, corner, ranks, file, line);
}
SIM_ALWAYS_INLINE void bulk_send(void* to, const void* from, int bytes, uint64_t* barrier, int rank,
                                 SIM_SITE) {
  sim::sim_bulk_send(to, from, bytes, barrier, rank, file, line);
}
SIM_ALWAYS_INLINE void mbarrier_wait_for_blocks(uint64_t* barrier, int parity, SIM_SITE) {
  sim::sim_mbarrier_wait(barrier, parity, file, line);
}
