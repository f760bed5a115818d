// What the backward's products by warpgroups have beside them. Introduced by: backward stage 17, wgmma.
//
//   S^T = K Q^T, dP^T = V dO^T         wgmma_QK (wgmma.cuh): 64 keys, all queries of the tile
//   dV += P^T dO, dK += dS^T Q         wgmma_PV: the operand A from registers, as to_A() makes it
//   dQ = dS K                          wgmma_dQ: 64 queries; both operands from shared memory, MN-major
#pragma once
#include "pairs.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

// An accumulator of 16 rows a warp as one of several strips (strips.cuh) that has a single one
template <int n_tiles>
__device__ __forceinline__ auto& one_strip(float (&acc)[n_tiles][4]) {
  return reinterpret_cast<float (&)[1][n_tiles][4]>(acc);
}

// Hand the elements of two accumulators that are at the same place on together: f(x, y, row, col).
template <int n_tiles, class F>
__device__ __forceinline__ void for_both(float (&X)[n_tiles][4], float (&Y)[n_tiles][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int e = 0; e < 4; e++) f(X[n][e], Y[n][e], lane_row + e / 2 * 8, 8 * n + lane_col + e % 2);
  }
}

// The same of one that has been rounded to operands A, and one that has not
template <int k_steps, class F>
__device__ __forceinline__ void for_both(const uint32_t (&A)[k_steps][4], float (&Y)[2 * k_steps][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < 2 * k_steps; n++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const float2 x = unpack(A[n / 2][n % 2 * 2 + r]);
      f(x.x, Y[n][2 * r], lane_row + 8 * r, 8 * n + lane_col);
      f(x.y, Y[n][2 * r + 1], lane_row + 8 * r, 8 * n + lane_col + 1);
    }
  }
}

// Store this warp's operands A: to rows [row, row + 16) of a tile of tile_rows rows, in panels. Then wgmma
// sees them after fence_proxy_async() and a barrier.
template <int k_steps>
__device__ __forceinline__ void store_fragments(ELEMENT* tile, const uint32_t (&A)[k_steps][4], int tile_rows,
                                                int row) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    stmatrix_x4(shared_address(tile + panel_index(row + lane % 16, 16 * k + lane / 16 * 8, tile_rows)), A[k]);
}

// A group of products, dQ = dS K, over 16 k_steps keys: a row of either tile, dS^T or K, is a key. So both
// are MN-major. dST: the panel of 64 queries; K: from some panel on, as many columns as dQ has.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void wgmma_dQ(float (&dQ)[n_tiles][4], uint32_t dST, uint32_t K) {
  wgmma_fence();
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    wgmma<true, true>(dQ, MN_major(dST, k), MN_major(K, k), k > 0);
  wgmma_commit();
}

// The same with dS in registers, as operands A; with `accumulate` dQ += dS K. (From zeros and always adding
// it would be the same, but the next product's zeros would take registers while this one is under way.)
template <int n_tiles, int k_steps>
__device__ __forceinline__ void wgmma_dQ_registers(float (&dQ)[n_tiles][4], const uint32_t (&dS)[k_steps][4],
                                                   uint32_t K, bool accumulate = false) {
  wgmma_fence();
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    wgmma<true>(dQ, dS[k], MN_major(K, k), accumulate || k > 0);
  wgmma_commit();
}
