// What a warpgroup hands over to another one, through shared memory. Introduced by: backward stage 23,
// consumer_roles.
#pragma once
#include "place.cuh"
#include "tma.cuh"

// Operands A that are in registers. The thread of the same number in the other warpgroup takes them: both
// have the same elements of their accumulators. A warp stores and loads 512 bytes in a row.
template <int k_steps>
__device__ __forceinline__ void hand_over(uint4* to, const uint32_t (&A)[k_steps][4]) {
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    to[128 * k + threadIdx.x % 128] = make_uint4(A[k][0], A[k][1], A[k][2], A[k][3]);
}

template <int k_steps>
__device__ __forceinline__ void take(uint32_t (&A)[k_steps][4], const uint4* from) {
  #pragma unroll
  for (int k = 0; k < k_steps; k++) {
    const uint4 x = from[128 * k + threadIdx.x % 128];
    A[k][0] = x.x;
    A[k][1] = x.y;
    A[k][2] = x.z;
    A[k][3] = x.w;
  }
}

// Operands A of a tile's transpose: their rows are its columns from `col` on, 16 of them. The tile is a panel
// of 16 k_steps rows, as store_fragments() leaves it (warpgroup_products.cuh).
template <int k_steps>
__device__ __forceinline__ void load_transposed(uint32_t (&A)[k_steps][4], const ELEMENT* tile, int col) {
  const int row = threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, lane_col = col + threadIdx.x % 16 / 8 * 8;
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    ldmatrix_x4_trans(A[k], shared_address(tile + panel_index(16 * k + row, lane_col, 16 * k_steps)));
}
