// Dropout of transposed accumulators of tensor cores, as the backward pass has them. Introduced by: backward
// stage 15, ampere_tuned.
#pragma once
#include "drop.cuh"

// Which of 16 keys x 16 queries are dropped? dropped[e], of two queries next to each other, is for the
// register e of an operand A of P^T. words: see words_of_lane(). right: of the 32 keys that have them, these
// are the last 16.
//
// A word is for an even key and the next one, and a lane has only one of them. Another lane has the other
// one, and needs the same words. So each makes those of one query, and they exchange them.
__device__ __forceinline__ void find_dropped(uint32_t (&dropped)[4], const uint4& words, bool right,
                                             const Mask& mask) {
  const uint4 of_half = Dropout::words_of_half(words, right);
  const uint32_t mine[4] = {of_half.x, of_half.y, of_half.z, of_half.w};
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, mine[e], 4);
    // the lower halves of both; or the upper ones, where `other` is the first query's
    dropped[e] = mask.dropout.dropped(__byte_perm(mine[e], other, threadIdx.x & 4 ? 0x3276 : 0x5410));
  }
}

// This lane's words, for 32 keys, of which `col`, a multiple of 16, is one, and 16 queries, from `row` on
__device__ __forceinline__ uint4 words_of_lane_T(const Mask& mask, int row, int col) {
  const int lane = threadIdx.x % 32;
  return mask.dropout.words(row + lane % 4 * 2 + lane / 4 % 2, col + lane / 4);
}

// Zeros for what is dropped of P^T or dP^T, a tile whose element (0, 0) is of query `row` and key `col`,
// multiples of 16 (with two strips, `col` of 32): rows are keys, columns queries. (The others' factor
// 1 / (1 - p) is applied later.)
template <int strips, int n_tiles>
__device__ __forceinline__ void drop_transposed(float (&XT)[strips][n_tiles][4], const Mask& mask, int row,
                                                int col) {
  #pragma unroll
  for (int n = 0; n < n_tiles; n += 2) {
    const uint4 words = words_of_lane_T(mask, row + 8 * n, col);
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      uint32_t dropped[4];
      find_dropped(dropped, words, strips == 2 ? s : col / 16 % 2, mask);
      #pragma unroll
      for (int e = 0; e < 8; e++) {
        const uint32_t two = dropped[e / 4 * 2 + e / 2 % 2];
        if (e % 2 ? two >> 16 : two & 0xffff) XT[s][n + e / 4][e % 4] = 0.f;
      }
    }
  }
}
