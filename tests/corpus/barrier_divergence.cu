// Barriers that some threads do not reach, or not the same one. Threads that have left the kernel do not
// count at a barrier (CUDA C++ Programming Guide: "all non-exited threads in the thread block").
#include <cuda_runtime.h>

//! deadlock or barrier <<<1, 64>>>
__global__ void barrier_in_a_branch(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
  __syncthreads();
  out[100 + threadIdx.x] = out[threadIdx.x] + tile[threadIdx.x];
}

//! deadlock or barrier or error <<<1, 32>>>
__global__ void barrier_in_half_a_warp(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: if (threadIdx.x < 16) __syncthreads();
  out[threadIdx.x] = __shfl_xor_sync(0xffffffff, tile[threadIdx.x], 16);
}

//! barrier <<<1, 64>>>
__global__ void two_barriers(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x < 64) {
    //! buggy: if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! deadlock or barrier <<<1, 64>>>
__global__ void rounds_of_different_number(const float* x, float* out, unsigned* count) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  const int rounds = 2;
  //! buggy: const int rounds = 1 + threadIdx.x / 32;
  for (int i = 0; i < rounds; i++) {
    __syncthreads();
    if (threadIdx.x == i) sum += x[i];
  }
  __syncthreads();
  out[threadIdx.x] = x[threadIdx.x];
}

// A causal kernel whose warps see different numbers of tiles.
//! deadlock or barrier <<<1, 64>>>
__global__ void break_before_a_barrier(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  const int warp = threadIdx.x / 32;
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    if (j > 2) break;
    //! buggy: if (j > warp + 1) break;
    __syncthreads();
    tile[threadIdx.x] = x[64 * j + threadIdx.x];
    __syncthreads();
    sum += tile[63 - threadIdx.x] * warp;
  }
  __syncthreads();
  out[threadIdx.x] = sum;
}

//! deadlock or barrier <<<1, 64>>>
__global__ void count_in_a_branch(const float* x, float* out, unsigned* count) {
  const int i = threadIdx.x;
  int seen = __syncthreads_count(x[i] > 2.f);
  //! buggy: int seen = i >= 32 ? __syncthreads_count(x[i] > 2.f) : 0;
  out[i] = seen;
  __syncthreads();
}

// Producers and consumers meet at one barrier, not at one of each role's own.
//! barrier <<<1, 64>>>
__global__ void barriers_of_two_roles(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  if (threadIdx.x < 32) {
    tile[threadIdx.x] = x[threadIdx.x];
    //! buggy: tile[threadIdx.x] = x[threadIdx.x], __syncthreads();
  }
  __syncthreads();
  //! buggy: if (threadIdx.x >= 32) __syncthreads();
  if (threadIdx.x >= 32) out[threadIdx.x] = tile[63 - threadIdx.x];
}

// Legal: the threads without a row have left. They are not waited for.
//! race <<<1, 64>>>
__global__ void threads_that_left(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x >= 50) return;
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: __syncwarp(threadIdx.x < 32 ? 0xffffffffu : 0x3ffffu);
  out[threadIdx.x] = tile[49 - threadIdx.x];
}

//! race <<<1, 96>>>
__global__ void a_warp_that_left(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x >= 64) return;
  for (int j = 0; j < 2; j++) {
    tile[threadIdx.x] = x[64 * j + threadIdx.x];
    __syncthreads();
    out[64 * j + threadIdx.x] = tile[63 - threadIdx.x];
    __syncthreads();
    //! buggy: __syncwarp();
  }
}
