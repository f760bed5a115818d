// Dropout of operands A of tensor cores. Introduced by: forward stage 17, ampere_tuned.
#pragma once
#include "mask.cuh"

// The random words of the group of which this lane has a quarter, in 16 rows and 128 columns: those of its
// n-th two rows. `row` is the first row; `col` any of the columns that is a multiple of 16.
__device__ __forceinline__ uint4 words_of_lane(const Mask& mask, int row, int col, unsigned n) {
  const uint4 words = mask.dropout.words(row + threadIdx.x % 32 / 4, col + threadIdx.x % 4 * 2);
  return Dropout::words_of_rows(words, n);
}

// Zeros for what is dropped of P, rounded: of the n-th 16 of these columns. (The others' factor, 1 / (1 - p),
// is applied to O, at the end.)
__device__ __forceinline__ void drop(uint32_t (&A)[4], const uint4& words, unsigned n, const Mask& mask) {
  const uint4 of_columns = Dropout::words_of_columns(words, n);
  A[0] &= ~mask.dropout.dropped(of_columns.x);
  A[1] &= ~mask.dropout.dropped(of_columns.z);
  A[2] &= ~mask.dropout.dropped(of_columns.y);
  A[3] &= ~mask.dropout.dropped(of_columns.w);
}

// The same of a row of operands, from key `col` on, where the block's warps have the rows in their order.
// before: how many 16 of 64 columns come before `col`
template <int before, int k_steps>
__device__ __forceinline__ void drop_from(uint32_t (&A)[k_steps][4], const Mask& mask, int row, int col) {
  constexpr bool whole_groups = k_steps % 8 == 0;
  const unsigned two_rows = threadIdx.x / 32;       // row / 16, but ptxas schedules that worse
  uint4 words;
  #pragma unroll
  for (int first = -before; first < k_steps; first += 4) {
    const unsigned last_64 = whole_groups ? first / 4 % 2 : (col + 16 * first) / 64 % 2;
    if (!whole_groups || first % 8 == 0) words = words_of_lane(mask, row, col + 16 * first, two_rows);
    #pragma unroll
    for (int n = 0; n < 4; n++)
      if (first + n >= 0 && first + n < k_steps) drop(A[first + n], words, 4 * last_64 + n, mask);
  }
}

template <int k_steps>
__device__ __forceinline__ void drop(uint32_t (&A)[k_steps][4], const Mask& mask, int row, int col) {
  if (k_steps % 4 == 0 || col % 64 == 0) drop_from<0>(A, mask, row, col);
  else if (col % 64 == 32) drop_from<2>(A, mask, row, col);
  else if (k_steps % 2 == 0) return;
  else if (col % 64 == 16) drop_from<1>(A, mask, row, col);
  else drop_from<3>(A, mask, row, col);
}
