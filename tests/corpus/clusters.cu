// Clusters: blocks that reach into each other too early, too late or not at all.
#include <cuda_runtime.h>

#include "common/cluster.cuh"

constexpr int cols = 32, rows = 8;                      // of a box: 1024 bytes
constexpr int box_bytes = rows * cols * sizeof(float);

struct InClusters {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  InClusters(int blocks_together, int blocks, int threads) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = blocks_together;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  InClusters(const InClusters&) = delete;        // config points to the attribute
  operator const cudaLaunchConfig_t*() const { return &config; }
};

// 16 rows of 32 floats, in boxes of 8 rows, with the 128-byte swizzle
static CUtensorMap map_of(const float* x) {
  CUtensorMap map;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  const cuuint64_t sizes[] = {cols, 16, 1, 1}, strides[] = {128, 16, 16};
  const cuuint32_t box[] = {cols, rows, 1, 1}, steps[] = {1, 1, 1, 1};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, const_cast<float*>(x), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

//! race or out of bounds <<<2, 64, cluster 2>>>
__global__ void read_before_the_other_has_written(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  cluster_sync();
  //! buggy: __syncthreads();
  out[64 * cluster_rank() + threadIdx.x] = *in_block(tile + threadIdx.x, 1 - cluster_rank());
  cluster_sync();
}

//! race <<<2, 64, cluster 2>>>
__global__ void written_while_the_other_reads(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  cluster_sync();
  out[64 * cluster_rank() + threadIdx.x] = *in_block(tile + threadIdx.x, 1 - cluster_rank());
  cluster_sync();
  //! buggy: __syncthreads();
  tile[threadIdx.x] = 0.f;
  cluster_sync();
}

//! race <<<2, 64, cluster 2>>>
__global__ void arrival_without_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  cluster_sync();
  *in_block(tile + threadIdx.x, 1 - cluster_rank()) = x[threadIdx.x];
  cluster_arrive();
  cluster_wait();
  //! buggy:
  out[64 * cluster_rank() + threadIdx.x] = tile[threadIdx.x];
  //! buggy: out[64 * cluster_rank() + threadIdx.x] = tile[threadIdx.x]; cluster_wait();
}

//! race <<<2, 64, cluster 2>>>
__global__ void write_after_the_arrival(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  cluster_sync();
  *in_block(tile + threadIdx.x, 1 - cluster_rank()) = x[threadIdx.x];
  //! buggy: cluster_arrive();
  cluster_arrive();
  //! buggy: *in_block(tile + threadIdx.x, 1 - cluster_rank()) = x[threadIdx.x];
  cluster_wait();
  out[64 * cluster_rank() + threadIdx.x] = tile[threadIdx.x];
  cluster_sync();
}

// Block 1 may have ended when block 0 reads.
//! ended block or error <<<2, 64, cluster 2>>>
__global__ void end_before_the_other_has_read(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  cluster_sync();
  if (cluster_rank() == 0) {
    const float* there = in_block(tile + threadIdx.x, 1);
    for (int i = 0; i < 10; i++) __nanosleep(100);
    out[threadIdx.x] = *there;
  }
  cluster_sync();
  //! buggy:
}

//! deadlock <<<2, 64, cluster 2>>>
__global__ void barrier_of_one_block(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  cluster_sync();
  //! buggy: if (cluster_rank() == 0 || threadIdx.x > 0) cluster_sync(); else while (true) __syncthreads();
  out[64 * cluster_rank() + threadIdx.x] = *in_block(tile + threadIdx.x, 1 - cluster_rank());
  cluster_sync();
}

// Each block copies half of a tile to both.
//! deadlock or error or race <<<2, 64, cluster 2>>> (map_of(x), out, count)
__global__ void bytes_of_its_own_half(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[2 * rows * cols];
  __shared__ uint64_t full;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&full, 2 * box_bytes);
    //! buggy: mbarrier_arrive_expect(&full, box_bytes);
    tma_load_multicast(tile + rank * rows * cols, x, &full, 0, 8 * rank, 0, 0, 3);
  }
  mbarrier_wait(&full, 0);
  out[64 * rank + threadIdx.x] = tile[threadIdx.x] + tile[rows * cols + threadIdx.x];
  cluster_sync();
}

//! deadlock <<<2, 64, cluster 2>>> (map_of(x), out, count)
__global__ void copy_for_one_block(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[2 * rows * cols];
  __shared__ uint64_t full;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&full, 2 * box_bytes);
    tma_load_multicast(tile + rank * rows * cols, x, &full, 0, 8 * rank, 0, 0, 3);
    //! buggy: tma_load_multicast(tile + rank * rows * cols, x, &full, 0, 8 * rank, 0, 0, 1 << rank);
  }
  mbarrier_wait(&full, 0);
  out[64 * rank + threadIdx.x] = tile[threadIdx.x] + tile[rows * cols + threadIdx.x];
  cluster_sync();
}

// The other block has not initialised its barrier yet.
//! error or race or out of bounds <<<2, 64, cluster 2>>> (map_of(x), out, count)
__global__ void copy_before_the_other_is_ready(const __grid_constant__ CUtensorMap x, float* out,
                                               unsigned* count) {
  __shared__ __align__(1024) float tile[2 * rows * cols];
  __shared__ uint64_t full;
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 1);
    fence_mbarrier_init();
  }
  cluster_sync();
  //! buggy: __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&full, 2 * box_bytes);
    tma_load_multicast(tile + rank * rows * cols, x, &full, 0, 8 * rank, 0, 0, 3);
  }
  mbarrier_wait(&full, 0);
  out[64 * rank + threadIdx.x] = tile[threadIdx.x] + tile[rows * cols + threadIdx.x];
  cluster_sync();
}

// Block 0 copies to both, round after round: both must have read before.
//! race or deadlock or error <<<2, 96, cluster 2>>> (map_of(x), out, count)
__global__ void given_back_by_its_own_block(const __grid_constant__ CUtensorMap x, float* out,
                                            unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int rank = cluster_rank(), t = threadIdx.x;
  if (t == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, 128);
    //! buggy: mbarrier_init(&empty, 64);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int i = 0; i < 3; i++) {
    if (t == 64) {
      mbarrier_arrive_expect(&full, box_bytes);
      if (rank == 0) {
        mbarrier_wait(&empty, (i + 1) % 2);
        tma_load_multicast(tile, x, &full, 0, 8 * (i % 2), 0, 0, 3);
      }
      mbarrier_wait(&full, i % 2);
    }
    if (t >= 64) continue;
    mbarrier_wait(&full, i % 2);
    out[128 * i + 64 * rank + t] = tile[t];
    mbarrier_arrive_in_block(&empty, 0);
    //! buggy: if (rank == 0) mbarrier_arrive(&empty);
  }
  cluster_sync();
}

//! race <<<2, 96, cluster 2>>> (map_of(x), out, count)
__global__ void given_back_before_the_read(const __grid_constant__ CUtensorMap x, float* out,
                                           unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int rank = cluster_rank(), t = threadIdx.x;
  if (t == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, 128);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int i = 0; i < 3; i++) {
    if (t == 64) {
      mbarrier_arrive_expect(&full, box_bytes);
      if (rank == 0) {
        mbarrier_wait(&empty, (i + 1) % 2);
        tma_load_multicast(tile, x, &full, 0, 8 * (i % 2), 0, 0, 3);
      }
      mbarrier_wait(&full, i % 2);
    }
    if (t >= 64) continue;
    mbarrier_wait(&full, i % 2);
    out[128 * i + 64 * rank + t] = tile[t];
    //! buggy: mbarrier_arrive_in_block(&empty, 0);
    mbarrier_arrive_in_block(&empty, 0);
    //! buggy: out[128 * i + 64 * rank + t] = tile[t];
  }
  cluster_sync();
}
