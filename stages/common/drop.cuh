// Dropout of accumulators of tensor cores. Introduced by: forward stage 17, ampere_tuned.
#pragma once
#include "mask.cuh"
#include "ptx.cuh"

// Zeros for what is dropped of the two elements of a word
__device__ __forceinline__ void drop(float& first, float& second, uint32_t word, const Dropout& dropout) {
  zero_if_less(first, second, word, dropout.threshold << 16 | dropout.threshold, !dropout.less_is_dropped);
}

// drop() for a lane whose first element is of query `row` and key `col`. A lane has 2 * strips rows, 8 apart,
// and of every 8 columns two neighbours: of 32 columns, counted from key 0 on, two groups, or half of them.
// before: how many of its first 32 columns are before the tile.
template <int before, int strips, int n_tiles>
__device__ __forceinline__ void drop_groups(float (&P)[strips][n_tiles][4], const Mask& mask, int row,
                                            int col) {
  #pragma unroll
  for (int first = -before / 8; first < n_tiles; first += 4) {     // four tiles of 8 columns share words
    #pragma unroll
    for (int c = 0; c < 2; c++) {
      uint4 w = mask.dropout.words(row, col + 8 * first + c);
      if (strips == 1 && row / 16 % 2)               // the lower two of a group's four rows
        w = make_uint4(Dropout::word(w, 2, false), Dropout::word(w, 2, true), Dropout::word(w, 3, false),
                       Dropout::word(w, 3, true));
      #pragma unroll
      for (int r = 0; r < 2 * strips; r++) {
        #pragma unroll
        for (int n = first; n < first + 4; n += 2) {
          if (n < 0 || n >= n_tiles) continue;
          float(&x)[n_tiles][4] = P[r / 2];
          const int e = r % 2 * 2 + c;
          drop(x[n][e], x[n + 1][e], Dropout::word(w, r, n > first), mask.dropout);
        }
      }
    }
  }
}

// Zeros for what is dropped of P, a tile whose element (0, 0) is of query `row` and key `col`, multiples of
// 16 (with two strips, `row` of 32; with a multiple of 32 columns, `col`, too). The others' factor,
// 1 / (1 - p), is applied to O, at the end.
template <int strips, int n_tiles>
__device__ __forceinline__ void drop(float (&P)[strips][n_tiles][4], const Mask& mask, int row, int col) {
  const int lane_row = row + threadIdx.x % 32 / 4, lane_col = col + threadIdx.x % 4 * 2;
  if (n_tiles % 4 && col % 32) drop_groups<16>(P, mask, lane_row, lane_col);
  else drop_groups<0>(P, mask, lane_row, lane_col);
}

// The same of one strip
template <int n_tiles>
__device__ __forceinline__ void drop(float (&P)[n_tiles][4], const Mask& mask, int row, int col) {
  drop(reinterpret_cast<float (&)[1][n_tiles][4]>(P), mask, row, col);
}
