// Dropout of P, by random numbers that are made anew wherever they are needed. Introduced by: forward stage
// 4, flash2.
//
// O = (keep * P) V, where keep_ij is 0 with probability p, else 1 / (1 - p). L knows nothing of it. Storing
// keep for the backward pass would take N x N numbers. Instead it is a function of a seed and of where the
// element is: head, row, column. A generator with a state could not give that; one that scrambles a counter
// can. So both passes, all tiles and all stages see the same keep.
#pragma once
#include <stdint.h>

// Philox4x32: four random words, of a counter and a key. With 7 rounds it passes all tests of BigCrush.
// (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
  #pragma unroll
  for (int round = 0; round < 7; round++) {
    const uint64_t a = (uint64_t)counter.x * 0xD2511F53u, b = (uint64_t)counter.z * 0xCD9E8D57u;
    counter = make_uint4(uint32_t(b >> 32) ^ counter.y ^ key.x, uint32_t(b),
                         uint32_t(a >> 32) ^ counter.w ^ key.y, uint32_t(a));
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return counter;
}

// 1 / (1 - p)
template <class Params>
__device__ __forceinline__ float dropout_scale(const Params& p) {
  if constexpr (!DROPOUT) return 1.f;
  else return p.dropout < 1.f ? 1.f / (1.f - p.dropout) : 0.f;
}

// 16 bits an element: four words serve eight elements, which are one group. The groups are chosen for tensor
// cores (common/drop.cuh), where a lane has whole ones: 2 x 4 elements, 8 rows and 8 columns apart. So a tile
// of 16 x 32 has 8 x 8 groups.
//
// Of its 16 bits an element uses the lower 15. As the bits of an fp16 number without its sign, they have the
// order of integers (NaN aside), so that one instruction compares both elements of a word. For that the
// threshold must be a number: it is at most 1/2, as for p > 1/2 what is below it is kept.
struct Dropout {
  uint2 seed;
  uint32_t head;
  uint32_t threshold;        // 2^15 min(p, 1 - p)
  bool less_is_dropped;      // p <= 1/2: what is below the threshold is dropped; else it is kept
  float scale;               // of what is kept

  template <class Params>
  __device__ Dropout(const Params& p, int b, int h) {
    if constexpr (DROPOUT) {
      // By a shuffle the compiler knows that all lanes have the same, and keeps the key of each round in the
      // registers that a warp has once, out of the loops.
      const uint32_t low = *p.seed, high = *p.seed >> 32;
      seed = make_uint2(__shfl_sync(0xffffffff, low, 0), __shfl_sync(0xffffffff, high, 0));
      head = b * p.H + h;
      threshold = rintf(fminf(p.dropout, 1.f - p.dropout) * 32768.f);
      less_is_dropped = p.dropout <= 0.5f;
      scale = dropout_scale(p);
    }
  }

  // The words of the group that an element belongs to. The counter's order is for speed: like this, row and
  // column meet in the third round. What comes before is the same for all groups of a row, or of a column.
  __device__ uint4 words(int row, int col) const {
    return philox(make_uint4(head, col / 32 * 8 + col % 8, 0, row / 16 * 8 + row % 8), seed);
  }

  // Of these, the one for rows 8 to 15 of its 16, or the upper ones, and for columns 16 to 31 of 32, or the
  // left ones. The first 8 of these columns have its lower half.
  __device__ static uint32_t word(const uint4& w, bool lower, bool right) {
    return lower ? right ? w.w : w.z : right ? w.y : w.x;
  }

  // keep of an element. Of its group it is the one in row row / 8 % 2 and column col / 8 % 4.
  __device__ float keep(int row, int col) const {
    if (!DROPOUT) return 1.f;
    const uint32_t number = word(words(row, col), row / 8 % 2, col / 16 % 2) >> col / 8 % 2 * 16 & 0x7fff;
    return (number < threshold) == less_is_dropped ? 0.f : scale;
  }

  // Of the eight elements of the group that an element belongs to, which are kept? Bit 4 r + c: the one in
  // row row / 8 % 2 = r and column col / 8 % 4 = c.
  __device__ uint32_t kept(int row, int col) const {
    const uint4 w = words(row, col);
    uint32_t bits = 0;
    #pragma unroll
    for (int e = 0; e < 8; e++) {
      const uint32_t number = word(w, e / 4, e / 2 % 2) >> e % 2 * 16 & 0x7fff;
      bits |= uint32_t(number < threshold) << e;
    }
    return less_is_dropped ? bits ^ 0xff : bits;
  }
};
