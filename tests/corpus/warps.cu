// What the lanes of a warp do together: masks that name lanes which are elsewhere, or leave out some.
#include <cuda_runtime.h>

#include "common/ptx.cuh"

//! error or deadlock <<<1, 32>>>
__global__ void shuffle_in_a_branch(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  float value = __shfl_xor_sync(0xffffffff, x[lane], 1);
  //! buggy: float value = 0.f; if (lane < 16) value = __shfl_xor_sync(0xffffffff, x[lane], 1);
  __syncwarp();
  out[lane] = value;
}

//! error or deadlock <<<1, 32>>>
__global__ void shuffle_from_a_lane_outside_of_the_mask(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  if (lane >= 16) return;
  out[lane] = __shfl_xor_sync(0x0000ffff, x[lane], 1);
  //! buggy: out[lane] = __shfl_xor_sync(0x0000ffff, x[lane], 16);
}

//! error or deadlock <<<1, 32>>>
__global__ void shuffle_without_the_caller(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  out[lane] = __shfl_xor_sync(0xffffffff, x[lane], 1);
  //! buggy: out[lane] = __shfl_xor_sync(0x7fffffff, x[lane], 1);
}

// The loop ends at different rounds; a full mask names lanes that have gone on.
//! error or deadlock <<<1, 32>>>
__global__ void shuffle_in_a_ragged_loop(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x, rounds = 2;
  //! buggy: const int lane = threadIdx.x, rounds = 1 + lane / 16;
  float sum = x[lane];
  for (int i = 0; i < rounds; i++) sum += __shfl_xor_sync(0xffffffff, sum, 1);
  out[lane] = sum;
  __syncwarp();
}

//! error or deadlock <<<1, 32>>>
__global__ void ballot_in_a_branch(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  unsigned seen = 0;
  if (lane < 16) seen = __ballot_sync(0x0000ffff, x[lane] > 2.f);
  //! buggy: if (lane < 16) seen = __ballot_sync(0xffffffff, x[lane] > 2.f);
  __syncwarp();
  out[lane] = seen;
}

//! error or deadlock <<<1, 32>>>
__global__ void vote_of_two_branches(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  if (lane % 2) out[lane] = __any_sync(0xaaaaaaaa, x[lane] > 2.f);
  //! buggy: if (lane % 2) out[lane] = __any_sync(0xffffffff, x[lane] > 2.f);
  else out[lane] = __all_sync(0x55555555, x[lane] > 2.f);
  //! buggy: else out[lane] = __all_sync(0xffffffff, x[lane] > 2.f);
}

// Each lane passes another mask, and none gets what it asks for.
//! error or deadlock <<<1, 32>>>
__global__ void masks_that_differ(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  const unsigned mask = lane < 16 ? 0x0000ffff : 0xffff0000;
  //! buggy: const unsigned mask = lane < 16 ? 0x0001ffff : 0xffff0000;
  out[lane] = __shfl_xor_sync(mask, x[lane], 1);
  __syncwarp();
}

// A block of 48 threads: in its second warp there are 16 lanes.
//! error or deadlock <<<1, 48>>>
__global__ void lanes_that_never_were(const float* x, float* out, unsigned* count) {
  const int t = threadIdx.x;
  const unsigned mask = t < 32 ? 0xffffffff : 0x0000ffff;
  //! buggy: const unsigned mask = 0xffffffff;
  out[t] = __shfl_xor_sync(mask, x[t], 1);
}

//! error or deadlock or uninitialised <<<1, 48>>>
__global__ void shuffle_from_a_lane_that_never_was(const float* x, float* out, unsigned* count) {
  const int t = threadIdx.x;
  const unsigned mask = t < 32 ? 0xffffffff : 0x0000ffff;
  out[t] = __shfl_xor_sync(mask, x[t], t < 32 ? 16 : 8);
  //! buggy: out[t] = __shfl_xor_sync(mask, x[t], 16);
}

//! error or deadlock <<<1, 32>>>
__global__ void shuffle_from_a_lane_that_left(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  if (lane >= 24) return;
  const unsigned mask = 0x00ffffff;
  out[lane] = __shfl_sync(mask, x[lane], 23);
  //! buggy: out[lane] = __shfl_sync(mask, x[lane], 24);
}

// Half of the warp has no rows, and the reduction is over all of it.
//! error or deadlock <<<1, 32>>>
__global__ void reduction_with_lanes_missing(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  float sum = x[lane];
  if (lane < 32) {
    //! buggy: if (lane < 20) {
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  __syncwarp();
  out[lane] = sum;
}

//! error or deadlock or barrier <<<1, 32>>>
__global__ void syncwarp_in_a_branch(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  tile[lane] = x[lane];
  if (lane < 16) __syncwarp(0x0000ffff);
  //! buggy: if (lane < 16) __syncwarp();
  out[lane] = lane < 16 ? tile[lane ^ 1] : 0.f;
  __syncwarp();
}

//! error or deadlock or barrier <<<1, 32>>>
__global__ void syncwarps_of_two_branches(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  tile[lane] = x[lane];
  if (lane < 16) {
    __syncwarp(0x0000ffff);
    //! buggy: __syncwarp();
    out[lane] = tile[lane ^ 1];
  } else {
    __syncwarp(0xffff0000);
    //! buggy: __syncwarp();
    out[lane] = tile[lane ^ 2];
  }
}

//! error or deadlock <<<1, 32>>>
__global__ void syncwarp_without_the_caller(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  tile[lane] = x[lane];
  __syncwarp();
  //! buggy: __syncwarp(0x7fffffff);
  out[lane] = tile[31 - lane];
}

// A full mask where lanes have left the kernel is legal.
//! race <<<1, 32>>>
__global__ void full_mask_after_an_exit(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  if (lane >= 24) return;
  tile[lane] = x[lane];
  __syncwarp();
  //! buggy:
  out[lane] = tile[23 - lane];
}

//! error or deadlock <<<1, 32>>>
__global__ void ldmatrix_by_half_a_warp(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  for (int k = 0; k < 2; k++) rows[lane / 2][lane % 2 * 2 + k] = x[2 * lane + k];
  __syncwarp();
  uint32_t fragment[2] = {0, 0};
  ldmatrix_x2(fragment, shared_address(rows[lane % 16]));
  //! buggy: if (lane < 16) ldmatrix_x2(fragment, shared_address(rows[lane % 16]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]);
  __syncwarp();
}

//! error or deadlock <<<1, 32>>>
__global__ void mma_by_half_a_warp(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  const uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  if (lane < 32) mma_m16n8k16<__half>(d, a, b);
  //! buggy: if (lane < 16) mma_m16n8k16<__half>(d, a, b);
  out[lane] = d[0];
  __syncwarp();
}

//! error <<<1, 32>>>
__global__ void exited_lane_is_read(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  if (lane >= 24) return;
  out[lane] = __shfl_sync(0xffffffff, x[lane], 23);
  //! buggy: out[lane] = __shfl_sync(0xffffffff, x[lane], 24);
}

// ldmatrix and mma need the whole warp: exited lanes are not made up for (PTX ISA, mma).
//! error or deadlock <<<1, 32>>>
__global__ void mma_after_an_exit(const float* x, float* out, unsigned* count) {
  const int lane = threadIdx.x;
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  const uint32_t a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  if (lane >= 32) return;
  //! buggy: if (lane >= 31) return;
  mma_m16n8k16<__half>(d, a, b);
  out[lane] = d[0];
}
