// Shared memory that passes from some warps to others. Introduced by: backward stage 23, consumer_roles.
#pragma once
#include "hopper.cuh"

// A place that some warps fill and others empty, by turns. Its mbarriers are as those of a ring that has one
// buffer (ring.cuh), but threads fill it: an arrival a warp at `full`, too.
struct Place {
  uint64_t *full, *empty;

  __device__ explicit Place(uint64_t* barriers) : full(barriers), empty(barriers + 1) {}

  // By the block, before a barrier
  __device__ __forceinline__ void init(int filling_warps, int emptying_warps) const {
    if (threadIdx.x > 0) return;
    mbarrier_init(full, filling_warps);
    mbarrier_init(empty, emptying_warps);
  }
  __device__ __forceinline__ void wait_until_empty(unsigned n) const { mbarrier_wait(empty, n % 2 ^ 1); }
  __device__ __forceinline__ void wait_until_full(unsigned n) const { mbarrier_wait(full, n % 2); }
  // This warp has filled it, or emptied it
  __device__ __forceinline__ void filled() const { arrive(full); }
  __device__ __forceinline__ void emptied() const { arrive(empty); }

 private:
  __device__ __forceinline__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
  }
};
