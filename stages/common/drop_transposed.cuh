// Dropout of transposed accumulators of tensor cores, as the backward pass has them. Introduced by: backward
// stage 15, ampere_tuned.
#pragma once
#include "drop.cuh"

// Which of 16 keys x 16 queries are dropped? dropped[e], of two queries next to each other, is for the
// register e of an operand A of P^T. words: of these queries, by words_of_lane_T() and words_of_rows(). Of
// the 128 keys that have them, these are the n-th 16.
//
// A word is for an even key and the next one, and a lane has only one of them. Another lane has the other
// one, and needs the same words. So each makes those of one query, and they exchange them.
__device__ __forceinline__ void find_dropped(uint32_t (&dropped)[4], const uint4& words, unsigned n,
                                             const Mask& mask) {
  const uint4 of_columns = Dropout::words_of_columns(words, n);
  const uint32_t mine[4] = {of_columns.x, of_columns.y, of_columns.z, of_columns.w};
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, mine[e], 4);
    // the lower halves of both; or the upper ones, where `other` is the first query's
    dropped[e] = mask.dropout.dropped(__byte_perm(mine[e], other, threadIdx.x & 4 ? 0x3276 : 0x5410));
  }
}

// This lane's words, for 128 keys, of which `col`, a multiple of 16, is one, and 64 queries, of which `row`
// is one
__device__ __forceinline__ uint4 words_of_lane_T(const Mask& mask, int row, int col) {
  const int lane = threadIdx.x % 32;
  return mask.dropout.words(row + lane % 4 * 2 + lane / 4 % 2, col + lane / 4);
}

// Zeros for what is dropped of P^T or dP^T, a tile whose element (0, 0) is of query `row` and key `col`,
// multiples of 32 and 16 (with two strips, of 32): rows are keys, columns queries. (The others' factor
// 1 / (1 - p) is applied later.)
template <int strips, int n_tiles>
__device__ __forceinline__ void drop_transposed(float (&XT)[strips][n_tiles][4], const Mask& mask, int row,
                                                int col) {
  uint4 words;                            // of 64 queries
  #pragma unroll
  for (int n = 0; n < n_tiles; n += 4) {
    if (n % 8 == 0) words = words_of_lane_T(mask, row + 8 * n, col);
    #pragma unroll
    for (int m = 0; m < 2 * strips; m++) {
      uint32_t dropped[4];
      find_dropped(dropped, Dropout::words_of_rows(words, row / 16 + n / 2 + m % 2), col / 16 + m / 2, mask);
      #pragma unroll
      for (int e = 0; e < 8; e++) {
        const uint32_t two = dropped[e / 4 * 2 + e / 2 % 2];
        if (e % 2 ? two >> 16 : two & 0xffff) XT[m / 2][n + m % 2 * 2 + e / 4][e % 4] = 0.f;
      }
    }
  }
}
