// Visitors of accumulators with more than 16 rows a warp. Introduced by: forward stage 15, wide_warps.
//
// float acc[strips][n][4]: strips of 16 rows, each as in mma.cuh. So a lane holds 2 * strips rows, 8 apart.
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
    for_each_pair(acc[s], [&](uint32_t both, int row, int col) { f(both, 16 * s + row, col); });
}
