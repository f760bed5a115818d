// Dropout of accumulators of tensor cores. Introduced by: forward stage 17, ampere_tuned.
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

// Zeros for what is dropped of the two elements of a word
__device__ __forceinline__ void drop(float& first, float& second, uint32_t word, const Dropout& dropout) {
  zero_if_less(first, second, word, dropout.threshold << 16 | dropout.threshold, !dropout.less_is_dropped);
}

// Zeros for what is dropped of P, a tile whose element (0, 0) is of query `row` and key `col`, multiples of
// 16 (with two strips, `row` of 32). (The others' factor 1 / (1 - p) is applied to O, at the end.) A lane has
// 2 * strips rows, 8 apart, and of every 8 columns two neighbours: of 32 columns two groups, or half of them.
template <int strips, int n_tiles>
__device__ __forceinline__ void drop(float (&P)[strips][n_tiles][4], const Mask& mask, int row, int col) {
  row += threadIdx.x % 32 / 4;                     // this lane's
  col += threadIdx.x % 4 * 2;
  constexpr int together = n_tiles % 4 == 0 ? 4 : 2;     // tiles of 8 columns that share words
  #pragma unroll
  for (int first = 0; first < n_tiles; first += together) {
    #pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint4 w = mask.dropout.words(row, col + 8 * first + c);
      #pragma unroll
      for (int r = 0; r < 2 * strips; r++) {
        #pragma unroll
        for (int n = 0; n < together; n += 2) {
          const int group_row = strips == 2 ? r : row / 16 % 2 * 2 + r, e = r % 2 * 2 + c;
          const bool right = together == 4 ? n / 2 : (col / 16 + first / 2) % 2;
          float(&x)[n_tiles][4] = P[r / 2];
          drop(x[first + n][e], x[first + n + 1][e], Dropout::word(w, group_row, right), mask.dropout);
        }
      }
    }
  }
}

// The same of one strip
template <int n_tiles>
__device__ __forceinline__ void drop(float (&P)[n_tiles][4], const Mask& mask, int row, int col) {
  drop(reinterpret_cast<float (&)[1][n_tiles][4]>(P), mask, row, col);
}
