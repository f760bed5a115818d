// Clusters: a few blocks that run at the same time on neighbouring multiprocessors, and reach each other's
// shared memory. (PTX ISA, sections "barrier.cluster", "mapa", "mbarrier.arrive", "cp.async.bulk.tensor";
// sm_90.) The launch says how many: ClusterLaunch.
//
// A block must not end while others may still reach into it: cluster_sync() before that.
#pragma once
#include "hopper.cuh"

#ifdef __CUDACC__

// Which block of its cluster this is
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Barrier of all threads of the cluster, in two parts: what threads have done before they arrive, all see
// that have waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Where block `rank` of the cluster has what is at p in this one's shared memory: to be read and written as
// any other memory
template <class T> __device__ __forceinline__ T* in_block(T* p, int rank) {
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(there);
}

// This thread has arrived at the mbarrier that block `rank` has there.
__device__ __forceinline__ void mbarrier_arrive_in_block(uint64_t* barrier, int rank) {
  asm volatile("{.reg .b32 there;\n\t"
               "mapa.shared::cluster.u32 there, %0, %1;\n\t"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];}"
               :: "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// The same, of a thread that has only read what the barrier guards: nothing that it has written is seen there
// for it. (The other one is a fence first, MEMBAR.ALL.GPU, as it must be seen from another multiprocessor.)
__device__ __forceinline__ void mbarrier_arrive_as_reader(uint64_t* barrier, int rank) {
  asm volatile("{.reg .b32 there;\n\t"
               "mapa.shared::cluster.u32 there, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}"
               :: "r"(shared_address(barrier)), "r"(rank) : "memory");
}

// Wait for a phase in which threads of other blocks arrive, too, and see what they have done before.
// (mbarrier_wait() is for this block's threads: at its scope it costs less.)
__device__ __forceinline__ void mbarrier_wait_for_blocks(uint64_t* barrier, int parity) {
  uint32_t complete = 0;
  while (!complete)
    asm volatile("{.reg .pred complete;\n\t"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, complete;}"
                 : "=r"(complete) : "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Ask for a box once, for all blocks whose bit of `ranks` is set: each finds it at `to` in its own shared
// memory, and its bytes at its own barrier. (sm_90a: quick there only)
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap& map, uint64_t* barrier,
                                                   int col, int row, int head, int batch, int ranks) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(col), "r"(row),
                  "r"(head), "r"(batch), "h"(uint16_t(ranks)) : "memory");
}

// Send so many bytes, a multiple of 16, to where block `rank` has `to`. They count at the barrier that it has
// there. Nothing else says that `from` has been read: that block has to tell.
__device__ __forceinline__ void bulk_send(void* to, const void* from, int bytes, uint64_t* barrier,
                                          int rank) {
  asm volatile("{.reg .b32 there, its_barrier;\n\t"
               "mapa.shared::cluster.u32 there, %0, %4;\n\t"
               "mapa.shared::cluster.u32 its_barrier, %3, %4;\n\t"
               "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
               "[there], [%1], %2, [its_barrier];}"
               :: "r"(shared_address(to)), "r"(shared_address(from)), "r"(bytes),
                  "r"(shared_address(barrier)), "r"(rank) : "memory");
}

#else
#include "sim/cluster.h"
#endif

// cudaLaunchKernelEx(ClusterLaunch(together, blocks, threads, bytes, stream), kernel, arguments) is
// kernel<<<blocks, threads, bytes, stream>>>(arguments), and so many neighbouring blocks are a cluster.
// early: an EarlyLaunch (launch.cuh), too.
struct ClusterLaunch {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};

  ClusterLaunch(int together, int blocks, int threads, size_t bytes, cudaStream_t stream,
                bool early = false) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = together;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = early ? 2 : 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;      // config points to the attributes
  operator const cudaLaunchConfig_t*() const { return &config; }
};
