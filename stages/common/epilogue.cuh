// The end of a tile of Q, lines 13 to 15 of Algorithm 1, for a warp's 16 rows. Introduced by: forward stage
// 20, wgmma.
#pragma once
#include "exp2.cuh"
#include "mask.cuh"
#include "mma.cuh"

// An accumulator's rows times alpha
template <int n_tiles>
__device__ __forceinline__ void rescale(float (&acc)[n_tiles][4], const float (&alpha)[2]) {
  #pragma unroll
  for (int r = 0; r < 2; r++) for_row(acc, r, [&](float& x) { x *= alpha[r]; });
}

// Lines 13 and 15: store L. Line 12 asks for O / l: inv_l is what rescale() is to multiply it by.
// warp_row: the warp's first row. m and l are those of this lane's two rows; l is the sum over its columns.
__device__ __forceinline__ void store_L(const FwdParams& p, const float (&m)[2], const float (&l)[2],
                                        float (&inv_l)[2], int bh, int warp_row) {
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int lane = threadIdx.x % 32, row = warp_row + lane / 4 + 8 * r;
    const float sum = quad_sum(l[r]);
    inv_l[r] = sum == 0.f ? 0.f : __fdividef(dropout_scale(p), sum);     // 1 or more: the fast one will do
    if (lane % 4 == 0 && row < p.N_q)
      p.L[(int64_t)bh * all_rows_of_L(p) + row] = sum == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(sum));
  }
}

// Line 14
template <int n_tiles>
__device__ __forceinline__ void store_rows(const FwdParams& p, const float (&O)[n_tiles][4], int bh,
                                           int warp_row) {
  ELEMENT* head = p.O.head(bh / p.H, bh % p.H);
  for_each_pair(O, [&](uint32_t packed, int row, int col) {
    if (warp_row + row < p.N_q && col < HEAD_DIM)
      *reinterpret_cast<uint32_t*>(head + (warp_row + row) * p.O.stride_n + col) = packed;
  });
}
