// Masks that change scores, in the backward pass of the tensor cores. Introduced by: backward stage 10,
// split_warps.
#pragma once
#include "pairs.cuh"

// S^T of a tile whose element (0, 0) is of query `row` and key `key` becomes what the mask makes of it, times
// log2(e). slope: its derivative by S.
template <int strips, int n_tiles>
__device__ __forceinline__ void change_scores(float (&S)[strips][n_tiles][4],
                                              float (&slope)[strips][n_tiles][4], const Mask& mask,
                                              float scale, int row, int key) {
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int e = 0; e < 4 * strips; e++) {
      const int query = row + 8 * n + threadIdx.x % 4 * 2 + e % 2;
      const int k = key + 8 * (e / 2) + threadIdx.x % 32 / 4;
      const float x = scale * S[e / 4][n][e % 4];
      slope[e / 4][n][e % 4] = mask.slope(x, query, k);
      S[e / 4][n][e % 4] = LOG2_E * mask.score(x, query, k);
    }
  }
}

// To where two neighbours of a row are, at(row, col): those of x, times y
template <int strips, int n_tiles, class At>
__device__ __forceinline__ void store_times(const float (&x)[strips][n_tiles][4],
                                            const float (&y)[strips][n_tiles][4], At at) {
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int e = 0; e < 4 * strips; e += 2)
      *at(8 * (e / 2) + threadIdx.x % 32 / 4, 8 * n + threadIdx.x % 4 * 2) =
          pack<ELEMENT>(x[e / 4][n][e % 4] * y[e / 4][n][e % 4],
                        x[e / 4][n][e % 4 + 1] * y[e / 4][n][e % 4 + 1]);
  }
}
