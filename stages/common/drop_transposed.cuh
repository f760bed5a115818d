// Dropout of transposed accumulators of tensor cores, as the backward pass has them. Introduced by: backward
// stage 15, ampere_tuned.
#pragma once
#include "drop.cuh"
#include "pairs.cuh"

// Zeros for what is dropped of P^T or dP^T, a tile whose element (0, 0) is of query `row`, a multiple of 32,
// and key `col`, of 16 (with two strips, of 32): rows are keys, columns queries. (The others' factor
// 1 / (1 - p) is applied later.) A lane has 2 * strips keys, 8 apart: of a group all four, or two.
template <int strips, int n_tiles>
__device__ __forceinline__ void drop_transposed(float (&XT)[strips][n_tiles][4], const Mask& mask, int row,
                                                int col) {
  row += threadIdx.x % 4 * 2;
  col += threadIdx.x % 32 / 4;
  #pragma unroll
  for (int first = 0; first < n_tiles; first += 4) {     // of 8 queries: four share words
    #pragma unroll
    for (int c = 0; c < 2; c++) {
      const uint4 w = mask.dropout.words(row + 8 * first + c, col);
      #pragma unroll
      for (int s = 0; s < strips; s++) {
        const bool right = strips == 2 ? s : col / 16 % 2;
        #pragma unroll
        for (int r = 0; r < 4; r++) {
          float(&x)[4] = XT[s][first + r];
          drop(x[c], x[2 + c], Dropout::word(w, r, right), mask.dropout);
        }
      }
    }
  }
}
