// Rows whose m stays are not searched for their maximum. Introduced by: forward stage 38, lazy_maximum.
#pragma once
#include "softmax.cuh"

constexpr float slack = 8.f;                         // how far scores may pass m, base 2

// Whether none of the scores that this lane has of its r-th row (r = 0, 1) raises m. It is false if m is
// -infinity: the difference is infinity, or no number.
template <int n_tiles>
__device__ __forceinline__ bool may_stay(float (&S)[n_tiles][4], int r, float m, float c) {
  float x_max = -INFINITY;
  for_row(S, r, [&](float& x) { x_max = fmaxf(x_max, x); });
  return c * x_max - m <= slack;
}

// As maximum_step (early_wait), but lanes ask each other for no maximum if no score of the warp's rows is
// more than `slack` above m. Returns whether one is, the same in all lanes: else m stays, alpha is 1.
template <int n_tiles>
__device__ __forceinline__ bool lazy_maximum(float (&S)[n_tiles][4], float (&m)[2], float (&alpha)[2],
                                             float (&shift)[2], float c, bool cut) {
  const bool stay[2] = {may_stay(S, 0, m[0], c), may_stay(S, 1, m[1], c)};
  const bool grows = __any_sync(0xffffffff, !(stay[0] && stay[1]));
  #pragma unroll
  for (int r = 0; r < 2; r++) alpha[r] = 1.f, shift[r] = m[r];
  if (grows)
    #pragma unroll
    for (int r = 0; r < 2; r++) alpha[r] = row_maximum(S, r, m[r], shift[r], c, cut, slack);
  return grows;
}
