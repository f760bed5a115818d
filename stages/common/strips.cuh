// Visitors of an accumulator that has more than 16 rows. Introduced by: forward stage 16, wide_warps.
//
// It is float acc[strips][n][4]: strips of 16 rows, each as in mma.cuh. A lane holds 2 * strips rows, 8
// apart: its r-th one is in acc[r / 2], and is the r % 2-th there.
#pragma once
#include "mma.cuh"

template <int strips, int n_tiles, class F>
__device__ __forceinline__ void for_each(float (&acc)[strips][n_tiles][4], F f) {
  #pragma unroll
  for (int s = 0; s < strips; s++)
    for_each(acc[s], [&](float& x, int row, int col) { f(x, 16 * s + row, col); });
}

template <int strips, int n_tiles, class F>
__device__ __forceinline__ void for_each_pair(const float (&acc)[strips][n_tiles][4], F f) {
  #pragma unroll
  for (int s = 0; s < strips; s++)
    for_each_pair(acc[s], [&](uint32_t packed, int row, int col) { f(packed, 16 * s + row, col); });
}
