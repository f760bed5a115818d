// Accumulators that start from statistics. Introduced by: backward stage 21, seeded.
#pragma once
#include "early_prepare.cuh"
#include "exp2.cuh"
#include "mask.cuh"
#include "warpgroup_products.cuh"

// --- c, and how a row of statistics becomes an accumulator
// P = 2^(c (S - L / c)), c = scale * log2(e). Not 0, and not so small that L / c would be infinite: then S
// counts for nothing. (A mask that changes scores needs them first: c is 1 then, and L stays as it is.)
__host__ __device__ inline float factor_of_S(float scale) {
  const float c = scale * LOG2_E;
  return Mask::scores ? 1.f : copysignf(fmaxf(fabsf(c), 1e-18f), c);
}

// prepare_kernel is to write -L / c, and -D, over the scale of dropout
inline void prepare_seeds(Workspace& w, float scale, float dropout_scale = 1.f) {
  if (!Mask::scores) w.times_L = -1.f / factor_of_S(scale);
  w.times_D = -1.f / dropout_scale;
}

// Of each column its number in `row`
template <int n_tiles>
__device__ __forceinline__ void seed(float (&acc)[n_tiles][4], const float* row) {
  for_each_two(one_strip(acc), [&](float& x, float& y, int, int col) {
    const float2 two = *reinterpret_cast<const float2*>(row + col);
    x = pinned(two.x);
    y = pinned(two.y);
  });
}
// ---

// Of a mask that changes scores: S = Q K^T becomes log2(e) times the new score, less L; and its slope there
template <int n_tiles>
__device__ __forceinline__ void change_scores(float (&S_reg)[n_tiles][4], float (&slope_reg)[n_tiles][4],
                                              const Mask& mask, float scale, int first_row, int first_key,
                                              const float* L) {
  for_both(S_reg, slope_reg, [&](float& S, float& slope, int r, int col) {
    const int row = first_row + col, key = first_key + r;
    slope = mask.slope(scale * S, row, key);
    S = score2(mask, scale * LOG2_E * S, row, key) - L[col];
  });
}
