// Blocks of a cluster that send shared memory to each other too early, or not all of it, or end too early.
#include <cuda_runtime.h>

#include "common/cluster.cuh"

static ClusterLaunch InClusters(int blocks_together, int blocks, int threads) {
  return ClusterLaunch(blocks_together, blocks, threads, 0, nullptr);
}

// Each block sends what it has to the other one, round after round. `empty` says that a block's tile, and the
// copy of it that it has sent, have both been read.
struct Exchange {
  uint64_t full, empty;
};

__device__ void begin_exchange(Exchange& e, int arrivals) {
  if (threadIdx.x == 0) {
    mbarrier_init(&e.full, 1);
    mbarrier_init(&e.empty, arrivals);
    fence_mbarrier_init();
  }
  cluster_sync();
}

//! race <<<2, 64, cluster 2>>>
__global__ void sent_before_it_is_given_back(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 128);
  for (int i = 0; i < 3; i++) {
    mbarrier_wait_for_blocks(&e.empty, (i + 1) % 2);
    //! buggy:
    mine[t] = x[64 * i + t];
    fence_proxy_async();
    __syncthreads();
    if (t == 0) {
      mbarrier_arrive_expect(&e.full, sizeof mine);
      bulk_send(others, mine, sizeof mine, &e.full, peer);
    }
    mbarrier_wait(&e.full, i % 2);
    out[128 * i + 64 * peer + t] = others[t];
    mbarrier_arrive(&e.empty);
    mbarrier_arrive_in_block(&e.empty, peer);
  }
  cluster_sync();
}

// The sender's own tile is still being sent.
//! race <<<2, 64, cluster 2>>>
__global__ void overwritten_while_it_is_sent(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[3][64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 64);
  for (int i = 0; i < 3; i++) {
    mine[t] = x[64 * i + t];
    fence_proxy_async();
    __syncthreads();
    if (t == 0) {
      mbarrier_arrive_expect(&e.full, sizeof mine);
      bulk_send(others[i], mine, sizeof mine, &e.full, peer);
    }
    mbarrier_wait(&e.full, i % 2);
    mbarrier_arrive_in_block(&e.empty, peer);
    mbarrier_wait_for_blocks(&e.empty, i % 2);
    //! buggy:
    out[128 * i + 64 * peer + t] = others[i][t];
  }
  cluster_sync();
}

//! race <<<2, 64, cluster 2>>>
__global__ void answered_before_it_is_read(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 128);
  for (int i = 0; i < 3; i++) {
    mbarrier_wait_for_blocks(&e.empty, (i + 1) % 2);
    mine[t] = x[64 * i + t];
    fence_proxy_async();
    __syncthreads();
    if (t == 0) {
      mbarrier_arrive_expect(&e.full, sizeof mine);
      bulk_send(others, mine, sizeof mine, &e.full, peer);
    }
    mbarrier_wait(&e.full, i % 2);
    //! buggy: mbarrier_arrive(&e.empty); mbarrier_arrive_in_block(&e.empty, peer);
    out[128 * i + 64 * peer + t] = others[t];
    mbarrier_arrive(&e.empty);
    //! buggy:
    mbarrier_arrive_in_block(&e.empty, peer);
    //! buggy:
  }
  cluster_sync();
}

//! proxy fence <<<2, 64, cluster 2>>>
__global__ void sent_without_a_fence(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 1);
  mine[t] = x[t];
  fence_proxy_async();
  //! buggy:
  __syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect(&e.full, sizeof mine);
    bulk_send(others, mine, sizeof mine, &e.full, peer);
  }
  mbarrier_wait(&e.full, 0);
  out[64 * peer + t] = others[t];
  cluster_sync();
}

//! deadlock <<<2, 64, cluster 2>>>
__global__ void half_of_it_is_sent(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 1);
  mine[t] = x[t];
  fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect(&e.full, sizeof mine);
    bulk_send(others, mine, sizeof mine, &e.full, peer);
    //! buggy: bulk_send(others, mine, sizeof mine / 2, &e.full, peer);
  }
  mbarrier_wait(&e.full, 0);
  out[64 * peer + t] = others[t];
  cluster_sync();
}

// The other block may have ended when this one arrives there.
//! ended block or error <<<2, 64, cluster 2>>>
__global__ void end_before_the_other_has_arrived(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float mine[64];
  __shared__ __align__(16) float others[64];
  __shared__ Exchange e;
  const int peer = 1 - cluster_rank(), t = threadIdx.x;
  begin_exchange(e, 64);
  mine[t] = x[t];
  fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    mbarrier_arrive_expect(&e.full, sizeof mine);
    bulk_send(others, mine, sizeof mine, &e.full, peer);
  }
  mbarrier_wait(&e.full, 0);
  out[64 * peer + t] = others[t];
  mbarrier_arrive_in_block(&e.empty, peer);
  cluster_sync();
  //! buggy:
}
