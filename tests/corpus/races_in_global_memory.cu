// Races in global memory: between blocks, which nothing orders, and within one.
#include <cuda_runtime.h>

//! race <<<2, 32>>>
__global__ void two_blocks_write(const float* x, float* out, unsigned* count) {
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  //! buggy: out[threadIdx.x] = x[blockIdx.x * 32 + threadIdx.x];
}

//! race <<<2, 32>>>
__global__ void blocks_overlap_by_1(const float* x, float* out, unsigned* count) {
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  //! buggy: out[blockIdx.x * 31 + threadIdx.x] = x[threadIdx.x];
}

//! race <<<3, 32>>>
__global__ void blocks_overlap_by_31(const float* x, float* out, unsigned* count) {
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  //! buggy: out[blockIdx.x + threadIdx.x] = x[threadIdx.x];
}

// What the block before has written may be there or not.
//! race <<<2, 32>>>
__global__ void reads_the_block_before(const float* x, float* out, unsigned* count) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = x[i];
  if (blockIdx.x) out[64 + i] = x[i - 32];
  //! buggy: if (blockIdx.x) out[64 + i] = out[i - 32];
}

// In place, and the neighbour across the border of two blocks reads what was there.
//! race <<<2, 32>>>
__global__ void stencil_in_place(const float* x, float* out, unsigned* count) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  out[i] = x[i];
  __syncthreads();
  const float left = i > 0 ? x[i - 1] : 0.f;
  //! buggy: const float left = i == 32 ? out[i - 1] : 0.f;
  out[100 + i] = left + x[i];
}

// A block sets to zero what all blocks add to: that has to be a kernel before.
//! race <<<2, 32>>>
__global__ void zeros_by_the_first_block(const float* x, float* out, unsigned* count) {
  if (blockIdx.x == 0) out[100 + threadIdx.x] = 0.f;
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  //! buggy: atomicAdd(&out[100 + threadIdx.x], x[threadIdx.x]);
}

//! race <<<4, 32>>>
__global__ void sum_of_blocks_without_atomics(const float* x, float* out, unsigned* count) {
  if (threadIdx.x == 0) atomicAdd(&count[0], blockIdx.x);
  //! buggy: if (threadIdx.x == 0) count[0] += blockIdx.x;
}

//! race <<<1, 32>>>
__global__ void lanes_through_global_memory(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  //! buggy:
  out[100 + threadIdx.x] = out[threadIdx.x ^ 1];
}

//! race <<<1, 64>>>
__global__ void warps_through_global_memory(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: __syncwarp();
  out[100 + threadIdx.x] = out[threadIdx.x ^ 32];
}

//! race <<<1, 64>>>
__global__ void write_after_read_in_global_memory(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float other = out[63 - threadIdx.x];
  __syncthreads();
  //! buggy:
  out[threadIdx.x] = other;
}

//! race <<<2, 64>>>
__global__ void rows_of_another_head(const float* x, float* out, unsigned* count) {
  const int head = blockIdx.x, row = threadIdx.x;
  out[head * 64 + row] = x[row];
  //! buggy: out[head * 60 + row] = x[row];
}
