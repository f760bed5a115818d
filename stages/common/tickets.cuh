// Work that a cluster of two blocks draws together. Introduced by: forward stage 31, multicast_tuned.
#pragma once
#include "cluster.cuh"

// One thread of each block asks for the number of the cluster's next work. Block 0's draws it from a counter,
// and hands it to block 1's, through the shared memory of that. There is one place, `number`: it is full by a
// phase of `full`, in block 1, and empty again by one of `empty`, in block 0.
struct Tickets {
  uint64_t *full, *empty;
  int* number;

  // Before a cluster_sync()
  __device__ explicit Tickets(uint64_t* barriers)
      : full(barriers), empty(barriers + 1), number(reinterpret_cast<int*>(barriers + 2)) {
    if (threadIdx.x > 0) return;
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    fence_mbarrier_init();
  }

  // The n-th
  __device__ __forceinline__ int next(unsigned n, int* counter) const {
    const bool draws = cluster_rank() == 0;
    if (draws && n == 0) wait_for_previous_kernel();         // which has cleared the counter
    int ticket = draws ? atomicAdd(counter, 1) : 0;
    mbarrier_wait_for_blocks(draws ? empty : full, n % 2 ^ draws);
    if (draws) *in_block(number, 1) = ticket;
    else ticket = *number;
    mbarrier_arrive_in_block(draws ? full : empty, draws);
    return ticket;
  }
};
