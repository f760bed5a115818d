// What happens to a tile of S between the two products. Introduced by: forward stage 14, exp2.
#pragma once
#include "exp2.cuh"
#include "mask.cuh"
#include "mma.cuh"

// c = scale * log2(e), so that 2^(c x) = e^(scale x); without the scale's sign, which is given to S. Not 0,
// as 0 times -infinity is NaN: then the least normal number instead.
__device__ __forceinline__ float scale_log2(float scale) { return fmaxf(fabsf(scale) * LOG2_E, 1.2e-38f); }

// What softmax_step multiplies S by. A mask that changes scores has done it.
__device__ __forceinline__ float exponent_scale(float scale) {
  return Mask::scores ? 1.f : scale_log2(scale);
}

// The mask's say on a tile of S whose element (0, 0) is of query `row` and key `col`: what it makes of scores
// (times log2(e), from there on), and, if it cuts the tile, -infinity for those that do not count. group: so
// many rows, one after the other, are of one query (split_kv).
template <int n_tiles>
__device__ __forceinline__ void mask_tile(float (&S)[n_tiles][4], const Mask& mask, float scale, int row,
                                          int col, bool cut, int group = 1) {
  if (Mask::sides == 2 && !Mask::scores && mask.sees_all(row / group, (row + 15) / group, col, 8 * n_tiles))
    return;                                        // of a window most of a tile's rows may
  row += threadIdx.x % 32 / 4;                     // this lane's
  col += threadIdx.x % 4 * 2;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int query = (row + 8 * r) / group;
    const unsigned seen = Mask::sides == 2 && cut ? mask.seen_keys<n_tiles>(query, col) : 0;
    #pragma unroll
    for (int n = 0; n < n_tiles; n++) {
      #pragma unroll
      for (int c = 0; c < 2; c++) {
        float& x = S[n][2 * r + c];
        if (Mask::scores) x = score2(mask, scale_log2(scale) * x, query, col + 8 * n + c);
        const bool sees = Mask::sides == 2 ? seen >> (2 * n + c) & 1 : mask.sees_key(query, col, 8 * n + c);
        if (cut && !sees) x = -INFINITY;
      }
    }
  }
}

// m, the maximum of c x in this lane's r-th row of S (r = 0, 1) and those before, and `shift`, what is to be
// subtracted: m again. Returns 2^(m_old - m), what l and O so far are to be multiplied by.
// cut: of a tile that is not, each row has seen a key, and m is no -infinity. slack: m stays as it is until
// it would grow by more (lazy_rescale).
template <int n_tiles>
__device__ __forceinline__ float row_maximum(float (&S)[n_tiles][4], int r, float& m, float& shift, float c,
                                             bool cut, float slack) {
  float x_max = -INFINITY;
  for_row(S, r, [&](float& x) { x_max = fmaxf(x_max, x); });
  float m_new = fmaxf(m, c * quad_max(x_max));
  // --- m may stay
  if (slack > 0.f && m_new - m <= slack) m_new = m;
  // ---
  const bool may_be_none = cut || Mask::scores;      // a mask may make -infinity of a score, too
  shift = may_be_none && m_new == -INFINITY ? 0.f : m_new;               // no key: -inf - -inf is NaN
  const float alpha = fast_exp2(m - shift);
  m = m_new;
  return alpha;
}

// Then the row becomes P~ = 2^(c x - shift), and l follows, the sum of P~ over this lane's columns.
template <int n_tiles>
__device__ __forceinline__ void row_exponentials(float (&S)[n_tiles][4], int r, float& l, float alpha,
                                                 float c, float shift) {
  float l_tile = 0.f;
  for_row(S, r, [&](float& x) {
    x = fast_exp2(c * x - shift);
    l_tile += x;
  });
  l = alpha * l + l_tile;
}

// Both
template <int n_tiles>
__device__ __forceinline__ float softmax_step(float (&S)[n_tiles][4], int r, float& m, float& l, float c,
                                              bool cut, float slack = 0.f) {
  float shift;
  const float alpha = row_maximum(S, r, m, shift, c, cut, slack);
  row_exponentials(S, r, l, alpha, c, shift);
  return alpha;
}
