// The softmax of one row of a lane under that of the other. Introduced by: forward stage 40, row_by_row.
#pragma once
#include "both_rows.cuh"
#include "lazy_maximum.cuh"

// As lazy_maximum; or, by_rows, the warp votes for each of a lane's two rows, and row 0's exponentials follow
// at once: row 1's maximum is found while the unit for exponentials is at work.
template <bool by_rows, int n_tiles>
__device__ __forceinline__ bool maximum_by_rows(float (&S)[n_tiles][4], float (&m)[2], float (&l)[2],
                                                float (&alpha)[2], float (&shift)[2], float c, bool cut) {
  if (!by_rows) return lazy_maximum(S, m, alpha, shift, c, cut);
  bool grows = false;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const bool row_grows = __any_sync(0xffffffff, !may_stay(S, r, m[r], c));
    alpha[r] = 1.f, shift[r] = m[r];
    if (row_grows) alpha[r] = row_maximum(S, r, m[r], shift[r], c, cut, slack);
    grows |= row_grows;
    if (r == 0) row_exponentials(S, 0, l[0], alpha[0], c, shift[0]);
  }
  return grows;
}

// Those that are left
template <bool by_rows, int n_tiles>
__device__ __forceinline__ void other_exponentials(float (&S)[n_tiles][4], float (&l)[2],
                                                   const float (&alpha)[2], float c,
                                                   const float (&shift)[2]) {
  if (by_rows) row_exponentials(S, 1, l[1], alpha[1], c, shift[1]);
  else exponentials(S, l, alpha, c, shift);
}

// 0, as l is a sum of powers; but no compiler knows until l is there. By rows what asks for it comes later.
template <bool by_rows>
__device__ __forceinline__ int never(float l) { return by_rows && __any_sync(0xffffffff, l < 0.f); }
