// Instructions of Hopper, as in ptx.cuh: mbarriers, the copy engine, named barriers, registers that change
// hands, and what goes with wgmma (wgmma.cuh). (PTX ISA, sections "mbarrier", "Data Movement and Conversion
// Instructions: Bulk copy", "bar", "setmaxnreg", "Asynchronous Warpgroup Level Matrix Instructions".)
#pragma once
#include "ptx.cuh"
#include <cuda.h>

// -------------------------------------------------------------------------------- mbarriers (sm_90)
// An mbarrier is a word of 64 bits in shared memory. It goes through phases 0, 1, 2, ... A phase is complete
// when as many threads have arrived as its initialisation says, and as many bytes have come as these threads
// have announced. Then the next phase begins by itself, for as many arrivals. Whoever waits names the parity
// of the phase that is to be complete, 0 or 1: of the t-th use of a barrier that is t % 2. (So a barrier that
// is new counts as if a phase of parity 1 had been completed.)

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

// -------------------------------------------------------------------------------- copies (sm_90)
// Ask for a box. It comes at any time; then its bytes (all of the box, zeros too) count at the barrier.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int col,
                                         int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(col), "r"(row),
                  "r"(head), "r"(batch) : "memory");
}

// The same of what nobody reads again: L2 gives its place away first. Introduced by: forward stage 36,
// split_kv_wgmma.
__device__ __forceinline__ void tma_load_once(void* to, const CUtensorMap& map, uint64_t* barrier, int col,
                                              int row, int head, int batch) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(col), "r"(row),
                  "r"(head), "r"(batch), "l"(policy) : "memory");
}

// Ask for so many bytes, a multiple of 16, as they lie. They count at the barrier, too.
__device__ __forceinline__ void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Store a box. The copy reads shared memory until this thread has waited for it: bulk_commit(), bulk_wait().
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int col, int row,
                                          int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(shared_address(from)), "r"(col), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Store so many bytes, a multiple of 16, as they lie; or add as many of floats to those there: copies of the
// same kind.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_add(float* to, const void* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// The stores that this thread has started since the last commit are now a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all of this thread's groups but the last `groups_left` are done: written, or, with _read, read.
template <int groups_left> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(groups_left) : "memory");
}

template <int groups_left> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(groups_left) : "memory");
}

// Fetch the map into its cache, before the first copy needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// The copy engine and wgmma reach shared memory on another path than loads and stores. What this thread has
// written is seen there after this fence (and what others have: after theirs and a barrier).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same of global memory
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// -------------------------------------------------------------------------------- warpgroups (sm_90a)
// A warpgroup is four warps, the first of them of a number that is a multiple of 4.

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

// Products (wgmma.cuh). What was written to the registers of D and A is there for those that follow
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Those since the last commit are now a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Wait until all groups but the last `groups_left` are done.
template <int groups_left> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(groups_left) : "memory");
}

#else
#include "sim/hopper.h"
#endif
