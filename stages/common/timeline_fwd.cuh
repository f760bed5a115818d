// Marks of a forward stage (timeline.cuh): the softmax, and stores of O.
#pragma once
#include "both_rows.cuh"
#include "epilogue.cuh"
#include "timeline.cuh"

namespace timeline {

// Of a tile's softmax: r is 0, then 1.
template <int n_tiles>
__device__ __forceinline__ float softmax_step(float (&S)[n_tiles][4], int r, float& m, float& l, float c,
                                              bool cut, float slack = 0.f, int line = __builtin_LINE()) {
  if (r == 0) mark(SOFTMAX, BEGIN, line, 8 * n_tiles);
  const float alpha = ::softmax_step(S, r, m, l, c, cut, slack);
  if (r == 1) mark(SOFTMAX, END, line, 8 * n_tiles);
  return alpha;
}

template <int n_tiles>
__device__ __forceinline__ void maximum_step(float (&S)[n_tiles][4], float (&m)[2], float (&alpha)[2],
                                             float (&shift)[2], float c, bool cut, float slack,
                                             int line = __builtin_LINE()) {
  mark(MAXIMUM, BEGIN, line, 8 * n_tiles);
  ::maximum_step(S, m, alpha, shift, c, cut, slack);
  mark(MAXIMUM, END, line, 8 * n_tiles);
}

template <int n_tiles>
__device__ __forceinline__ void exponentials(float (&S)[n_tiles][4], float (&l)[2], const float (&alpha)[2],
                                             float c, const float (&shift)[2], int line = __builtin_LINE()) {
  mark(EXPONENTIAL, BEGIN, line, 8 * n_tiles);
  ::exponentials(S, l, alpha, c, shift);
  mark(EXPONENTIAL, END, line, 8 * n_tiles);
}

template <int n_tiles>
__device__ __forceinline__ void store_rows(const FwdParams& p, const float (&O)[n_tiles][4], int bh,
                                           int warp_row, int line = __builtin_LINE()) {
  mark(STORE, BEGIN, line, 8 * n_tiles);
  ::store_rows(p, O, bh, warp_row);
  mark(STORE, END, line, 8 * n_tiles);
}

}  // namespace timeline

#define softmax_step timeline::softmax_step
#define maximum_step timeline::maximum_step
#define exponentials timeline::exponentials
#define store_rows timeline::store_rows
