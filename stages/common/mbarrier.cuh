// Barriers in shared memory that count threads and bytes. Introduced by: forward stage 19, tma. (PTX ISA,
// section "Parallel Synchronization and Communication Instructions: mbarrier"; sm_90.)
//
// An mbarrier is a word of 64 bits in shared memory. It goes through phases 0, 1, 2, ... A phase is complete
// when as many threads have arrived as its initialisation says, and as many bytes have come as these threads
// have announced. Then the next phase begins by itself, for as many arrivals. Whoever waits names the parity
// of the phase that is to be complete, 0 or 1: of the t-th use of a barrier that is t % 2. (So a barrier that
// is new counts as if a phase of parity 1 had been completed.)
#pragma once
#include "ptx.cuh"

#ifdef __CUDACC__

// By one thread. Others may use it after fence_mbarrier_init() and a barrier of the block.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Afterwards the copy engine sees this thread's new barriers, too.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// This thread has arrived. What it did before is seen by those that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// The same, and the phase is to wait for so many bytes more.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Is the phase of this parity complete? (May take a while: the hardware lets the thread sleep for some time.)
__device__ __forceinline__ bool mbarrier_test(uint64_t* barrier, int parity) {
  uint32_t complete;
  asm volatile("{.reg .pred complete;\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
               "selp.u32 %0, 1, 0, complete;}"
               : "=r"(complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  return complete;
}

// Wait until it is.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity) {
  while (!mbarrier_test(barrier, parity)) {}
}

#else
#include "sim/hopper.h"
#endif
