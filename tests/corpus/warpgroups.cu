// Warpgroups: products under way, their operands and fences; named barriers; registers that change hands.
#include <cuda_runtime.h>

#define ELEMENT __half
#include "common/wgmma.cuh"

// Tiles of 64 rows and 64 columns, a panel, with the 128-byte swizzle (which is nothing to these products)
constexpr int tile_size = 64 * 64;

__device__ __forceinline__ void fill(__half* tile, const float* x) {
  for (int i = threadIdx.x % 128; i < tile_size; i += 128) tile[i] = x[i % 900];
}

// D += A B^T for 16 of the columns
__device__ __forceinline__ void multiply(float (&D)[8][4], const __half* A, const __half* B, int k = 0) {
  wgmma(D, K_major(matrix_at(A), k, 64), K_major(matrix_at(B), k, 64));
}

__device__ __forceinline__ float sum(const float (&D)[8][4]) {
  float all = 0.f;
  for (int n = 0; n < 8; n++)
    for (int e = 0; e < 4; e++) all += D[n][e];
  return all;
}

// ----------------------------------------------------------------------------------------- accumulators
//! accumulator <<<1, 128>>>
__global__ void sum_before_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  //! buggy: out[threadIdx.x] = sum(D);
  out[threadIdx.x] = sum(D);
  //! buggy: wgmma_wait<0>();
}

//! accumulator <<<1, 128>>>
__global__ void wait_that_leaves_the_group(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  //! buggy: wgmma_wait<1>();
  out[threadIdx.x] = sum(D);
}

// What is not committed belongs to no group, and no wait is for it.
//! accumulator <<<1, 128>>>
__global__ void product_not_committed(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  //! buggy:
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// Two accumulators: one group may be left, but not that of the one which is read.
//! accumulator <<<1, 128>>>
__global__ void the_other_accumulator(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float S[8][4] = {}, O[8][4] = {};
  wgmma_fence();
  multiply(S, A, B);
  wgmma_commit();
  multiply(O, A, B, 1);
  wgmma_commit();
  wgmma_wait<1>();
  out[threadIdx.x] = sum(S);
  //! buggy: out[threadIdx.x] = sum(O);
  wgmma_wait<0>();
  out[128 + threadIdx.x] = sum(O);
}

// O is scaled while P V adds to it.
//! accumulator <<<1, 128>>>
__global__ void scaled_while_it_is_summed(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float O[8][4] = {};
  wgmma_fence();
  multiply(O, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  //! buggy:
  for (int n = 0; n < 8; n++) O[n][0] *= 0.5f;
  wgmma_wait<0>();
  out[threadIdx.x] = sum(O);
}

//! wgmma <<<1, 128>>>
__global__ void product_that_nobody_needs(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  for (int i = 0; i < 2; i++) {
    wgmma_fence();
    multiply(D, A, B);
    wgmma_commit();
    wgmma_wait<0>();
    //! buggy: if (i == 0) wgmma_wait<0>();
    if (i == 0) out[threadIdx.x] = sum(D);
  }
}

//! register fence <<<1, 128>>>
__global__ void no_fence_before_the_product(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  //! buggy:
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! register fence <<<1, 128>>>
__global__ void fence_before_the_scaling(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  for (int i = 0; i < 2; i++) {
    for (int n = 0; n < 8; n++) D[n][0] *= 0.5f;
    //! buggy: wgmma_fence();
    wgmma_fence();
    //! buggy: for (int n = 0; n < 8; n++) D[n][0] *= 0.5f;
    multiply(D, A, B);
    wgmma_commit();
    wgmma_wait<0>();
  }
  out[threadIdx.x] = sum(D);
}

// A in registers counts as well.
//! register fence <<<1, 128>>>
__global__ void fence_before_the_fragment(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half B[tile_size];
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  uint32_t A[4] = {};
  for (int i = 0; i < 2; i++) {
    A[i] = threadIdx.x;
    //! buggy: wgmma_fence();
    wgmma_fence();
    //! buggy: A[i] = threadIdx.x;
    wgmma(D, A, K_major(matrix_at(B), 0, 64));
    wgmma_commit();
    wgmma_wait<0>();
  }
  out[threadIdx.x] = sum(D);
}

// ----------------------------------------------------------------------------------------------- operands
//! proxy fence <<<1, 128>>>
__global__ void operand_without_a_fence(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  //! buggy:
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! proxy fence <<<1, 128>>>
__global__ void fence_between_the_operands(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  //! buggy: fence_proxy_async();
  fence_proxy_async();
  //! buggy: fill(B, x);
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! race <<<1, 128>>>
__global__ void operand_without_a_barrier(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  //! buggy:
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// Of A, a warp multiplies its own 16 rows: who writes these needs no more than the warp's barrier.
//! race <<<1, 128>>>
__global__ void rows_of_the_warp(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = lane; i < 16 * 64; i += 32) A[16 * 64 * warp + i] = x[i % 900];
  fence_proxy_async();
  __syncwarp();
  //! buggy:
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// The same for B would be too little: each warp multiplies all of it.
//! race <<<1, 128>>>
__global__ void barrier_of_the_warp_for_all(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  //! buggy: __syncwarp();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! race <<<1, 128>>>
__global__ void operand_changed_under_way(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ __align__(1024) __half B[tile_size];
  fill(A, x);
  fill(B, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, B);
  wgmma_commit();
  wgmma_wait<0>();
  //! buggy: A[64 * threadIdx.x / 2] = 0.f;
  A[64 * threadIdx.x / 2] = 0.f;
  //! buggy: wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// Warpgroup 1 fills the tile again while warpgroup 0 still multiplies it.
//! race <<<1, 256>>>
__global__ void given_back_before_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 128);
    mbarrier_init(&empty, 1);
  }
  __syncthreads();
  float D[8][4] = {};
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x >= 128) {
      mbarrier_wait(&empty, (i + 1) % 2);
      fill(A, x + i);
      fence_proxy_async();
      mbarrier_arrive(&full);
    } else {
      mbarrier_wait(&full, i % 2);
      wgmma_fence();
      multiply(D, A, A);
      wgmma_commit();
      wgmma_wait<0>();
      //! buggy: if (threadIdx.x == 0) mbarrier_arrive(&empty);
      if (threadIdx.x == 0) mbarrier_arrive(&empty);
      //! buggy: wgmma_wait<0>();
    }
  }
  if (threadIdx.x < 128) out[threadIdx.x] = sum(D);
}

// The product of the round before is still under way: what it reads is not the older one's.
//! race <<<1, 256>>>
__global__ void the_wrong_buffer_given_back(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[2][tile_size];
  __shared__ uint64_t full[2];
  __shared__ uint64_t empty[2];
  if (threadIdx.x < 2) {
    mbarrier_init(full + threadIdx.x, 128);
    mbarrier_init(empty + threadIdx.x, 1);
  }
  __syncthreads();
  float D[8][4] = {};
  for (int i = 0; i < 4; i++) {
    if (threadIdx.x >= 128) {
      mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2);
      fill(A[i % 2], x + i);
      fence_proxy_async();
      mbarrier_arrive(full + i % 2);
    } else {
      mbarrier_wait(full + i % 2, i / 2 % 2);
      wgmma_fence();
      multiply(D, A[i % 2], A[i % 2]);
      wgmma_commit();
      wgmma_wait<1>();
      if (threadIdx.x == 0 && i > 0) mbarrier_arrive(empty + (i + 1) % 2);
      //! buggy: if (threadIdx.x == 0) mbarrier_arrive(empty + i % 2);
    }
  }
  if (threadIdx.x >= 128) return;
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! uninitialised <<<1, 128>>>
__global__ void columns_that_nothing_has_written(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[2 * tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, A, 3);
  //! buggy: multiply(D, A, A, 4);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! out of bounds <<<1, 128>>>
__global__ void rows_past_the_tile(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, A);
  //! buggy: multiply(D, A, A + 8 * 64);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// ------------------------------------------------------------------------------------- all together
//! error <<<1, 128>>>
__global__ void descriptors_that_differ(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, A);
  //! buggy: multiply(D, A, A, threadIdx.x / 32);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! error <<<1, 128>>>
__global__ void bits_that_mean_nothing(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  const uint64_t d = K_major(matrix_at(A), 0, 64);
  //! buggy: const uint64_t d = K_major(matrix_at(A), 0, 64) | 1 << 14;
  wgmma(D, d, d);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! deadlock or error <<<1, 128>>>
__global__ void product_of_half_a_warpgroup(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  multiply(D, A, A);
  //! buggy: if (threadIdx.x < 64) multiply(D, A, A);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

//! error <<<1, 128>>>
__global__ void products_in_another_order(const float* x, float* out, unsigned* count) {
  __shared__ __align__(1024) __half A[tile_size];
  fill(A, x);
  fence_proxy_async();
  __syncthreads();
  float D[8][4] = {};
  wgmma_fence();
  for (int k = 0; k < 2; k++) multiply(D, A, A, k);
  //! buggy: for (int k = 0; k < 2; k++) multiply(D, A, A, threadIdx.x < 64 ? k : 1 - k);
  wgmma_commit();
  wgmma_wait<0>();
  out[threadIdx.x] = sum(D);
}

// ---------------------------------------------------------------------------------------- named barriers
//! race <<<1, 128>>>
__global__ void no_named_barrier(const float* x, float* out, unsigned* count) {
  __shared__ float tile[128];
  const int half = threadIdx.x / 64, t = threadIdx.x % 64;
  tile[threadIdx.x] = x[threadIdx.x];
  named_barrier_sync(1 + half, 64);
  //! buggy:
  out[threadIdx.x] = tile[64 * half + 63 - t];
}

// The halves of the block have barriers of their own; what the other half does they do not order.
//! race <<<1, 128>>>
__global__ void barrier_of_the_other_half(const float* x, float* out, unsigned* count) {
  __shared__ float tile[128];
  const int half = threadIdx.x / 64, t = threadIdx.x % 64;
  tile[threadIdx.x] = x[threadIdx.x];
  named_barrier_sync(1 + half, 64);
  out[threadIdx.x] = tile[64 * half + 63 - t];
  //! buggy: out[threadIdx.x] = tile[127 - threadIdx.x];
}

//! race <<<1, 128>>>
__global__ void arrival_where_a_wait_is_needed(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x < 64) {
    tile[threadIdx.x] = x[threadIdx.x];
    named_barrier_arrive(1, 128);
  } else {
    named_barrier_sync(1, 128);
    //! buggy: named_barrier_arrive(1, 128);
    out[threadIdx.x] = tile[127 - threadIdx.x];
  }
}

//! race <<<1, 128>>>
__global__ void arrival_before_the_write_of_half(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x < 64) {
    tile[threadIdx.x] = x[threadIdx.x];
    //! buggy: named_barrier_arrive(1, 128);
    named_barrier_arrive(1, 128);
    //! buggy: tile[threadIdx.x] = x[threadIdx.x];
  } else {
    named_barrier_sync(1, 128);
    out[threadIdx.x] = tile[127 - threadIdx.x];
  }
}

//! deadlock <<<1, 128>>>
__global__ void barrier_for_too_many(const float* x, float* out, unsigned* count) {
  __shared__ float tile[128];
  const int half = threadIdx.x / 64, t = threadIdx.x % 64;
  tile[threadIdx.x] = x[threadIdx.x];
  named_barrier_sync(1 + half, 64);
  //! buggy: named_barrier_sync(1 + half, 128);
  out[threadIdx.x] = tile[64 * half + 63 - t];
}

// It opens for the first half, when the second one has not come.
//! race <<<1, 128>>>
__global__ void barrier_for_too_few(const float* x, float* out, unsigned* count) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  named_barrier_sync(1, 128);
  //! buggy: named_barrier_sync(1, 64);
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

// Warps 0 and 1 do not wait until the others have taken what they announced before.
//! error <<<1, 128>>>
__global__ void second_arrival_in_a_phase(const float* x, float* out, unsigned* count) {
  __shared__ float tile[2][64];
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x < 64) {
      tile[i][threadIdx.x] = x[64 * i + threadIdx.x];
      named_barrier_arrive(1, 128);
      named_barrier_sync(2, 128);
      //! buggy: named_barrier_arrive(2, 128);
    } else {
      named_barrier_sync(1, 128);
      out[64 * i + threadIdx.x - 64] = tile[i][127 - threadIdx.x];
      named_barrier_arrive(2, 128);
      //! buggy: named_barrier_sync(2, 128);
    }
  }
}

// Two halves take turns. The first one gives the other a turn that it does not take.
//! error <<<1, 128>>>
__global__ void a_turn_that_nobody_takes(const float* x, float* out, unsigned* count) {
  __shared__ float sum[1];
  const int half = threadIdx.x / 64;
  if (half == 1) named_barrier_arrive(1, 128);
  for (int i = 0; i < 2; i++) {
    named_barrier_sync(1 + half, 128);
    if (threadIdx.x % 64 == 0) sum[0] = half + i == 0 ? x[0] : sum[0] + x[half + i];
    named_barrier_arrive(2 - half, 128);
  }
  if (half == 0) named_barrier_sync(1, 128);
  //! buggy:
  if (threadIdx.x == 0) out[0] = x[0];
}

//! deadlock <<<1, 128>>>
__global__ void barrier_of_another_number(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x < 64) {
    tile[threadIdx.x] = x[threadIdx.x];
    named_barrier_arrive(1, 128);
    //! buggy: named_barrier_arrive(2, 128);
  } else {
    named_barrier_sync(1, 128);
    out[threadIdx.x] = tile[127 - threadIdx.x];
  }
}

//! error <<<1, 128>>>
__global__ void counts_that_differ(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  if (threadIdx.x < 64) {
    tile[threadIdx.x] = x[threadIdx.x];
    named_barrier_arrive(1, 128);
    //! buggy: named_barrier_arrive(1, 96);
  } else {
    named_barrier_sync(1, 128);
    out[threadIdx.x] = tile[127 - threadIdx.x];
  }
}

// Number 0 is that of __syncthreads().
//! error <<<1, 128>>>
__global__ void the_blocks_own_barrier(const float* x, float* out, unsigned* count) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  named_barrier_sync(1, 128);
  //! buggy: named_barrier_sync(0, 128);
  out[threadIdx.x] = tile[127 - threadIdx.x];
}

// --------------------------------------------------------------------------------------------- registers
// The producer keeps what the consumers ask for.
//! deadlock <<<1, 384>>>
__global__ void __launch_bounds__(384) registers_that_nobody_gives(const float* x, float* out,
                                                                   unsigned* count) {
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    //! buggy: setmaxnreg_dec<160>();
  } else {
    setmaxnreg_inc<240>();
    out[threadIdx.x] = x[threadIdx.x];
  }
}

//! deadlock <<<1, 384>>>
__global__ void __launch_bounds__(384) registers_of_one_thread(const float* x, float* out, unsigned* count) {
  if (threadIdx.x < 128) {
    setmaxnreg_dec<24>();
    //! buggy: if (threadIdx.x == 0) setmaxnreg_dec<24>();
  } else {
    setmaxnreg_inc<240>();
    out[threadIdx.x] = x[threadIdx.x];
  }
}
