// Dropout of operands A of tensor cores. Introduced by: forward stage 17, ampere_tuned.
#pragma once
#include "mask.cuh"

// The random words of the group that this lane has in 16 rows and 32 columns. `row` is the first row; `col`
// any of the columns that is a multiple of 16.
__device__ __forceinline__ uint4 words_of_lane(const Mask& mask, int row, int col) {
  return mask.dropout.words(row + threadIdx.x % 32 / 4, col + threadIdx.x % 4 * 2);
}

// Zeros for what is dropped of P, rounded: of the first 16 of these columns, or the last ones (right). (The
// others' factor, 1 / (1 - p), is applied to O, at the end.)
__device__ __forceinline__ void drop(uint32_t (&A)[4], const uint4& words, bool right, const Mask& mask) {
  const uint4 of_half = Dropout::words_of_half(words, right);
  A[0] &= ~mask.dropout.dropped(of_half.x);
  A[1] &= ~mask.dropout.dropped(of_half.z);
  A[2] &= ~mask.dropout.dropped(of_half.y);
  A[3] &= ~mask.dropout.dropped(of_half.w);
}

// The same of a row of operands, from key `col` on, of which `before` (0 or 1) is in the columns before
template <int before, int k_steps>
__device__ __forceinline__ void drop_from(uint32_t (&A)[k_steps][4], const Mask& mask, int row, int col) {
  #pragma unroll
  for (int first = -before; first < k_steps; first += 2) {
    const uint4 words = words_of_lane(mask, row, col + 16 * first);
    #pragma unroll
    for (int n = 0; n < 2; n++)
      if (first + n >= 0 && first + n < k_steps) drop(A[first + n], words, n, mask);
  }
}

template <int k_steps>
__device__ __forceinline__ void drop(uint32_t (&A)[k_steps][4], const Mask& mask, int row, int col) {
  if (k_steps % 2 && col % 32) drop_from<1>(A, mask, row, col);
  else drop_from<0>(A, mask, row, col);
}
