// A warpgroup: four warps, the first of them of a number that is a multiple of 4. Introduced by: forward
// stage 21, warp_specialized. (PTX ISA, sections "setmaxnreg" and "bar".)
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__

// Registers of a thread move from warpgroups that need few to those that need many (sm_90a). A kernel starts
// with as many for all, as its __launch_bounds__ allow: threads * registers is the pool. `inc` waits until
// the pool has enough. All warps of a warpgroup call it together; a multiple of 8, from 24 to 240.
template <int registers> __device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
}

template <int registers> __device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
}

// Barriers 1 to 15 of a block (0 is that of __syncthreads), for so many threads, whole warps: those that wait
// and those that only arrive, together.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
}

#else
#include "sim/hopper.h"
#endif
