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

// Sixteen elements are one group, which has four random words and makes four more of them. The groups are
// chosen for tensor cores (common/drop.cuh), where a lane has whole ones: 4 x 4 elements, 8 rows and 8
// columns apart. So a tile of 32 x 32 has 8 x 8 groups, whose elements have these words:
//
//      column       0   1       2   3
//         row 0       x           y           A word made of two others, c x + y with an odd c, is uniform
//             1       z           w           whatever x is, and whatever y is. So any two of the eight are
//             2   c x + y     c y + z         independent, and any two elements; and in a row or a column all
//             3   c z + w     c w + x         are. So a row of O, dQ or dV is what it would be if all were.
//
// Three elements in two rows and two columns, of x, y and c x + y, hardly depend on each other, as c
// scrambles x: for p >= 0.05 their correlation is below 1e-4 (tests/test_extras.py).
//
// An element has 16 bits of a word and uses the lower 15. As the bits of an fp16 number without its sign,
// they have the order of integers (NaN aside), so that one instruction compares both elements of a word. For
// that the threshold must be a number: it is at most 1/2, as for p > 1/2 what is below it is kept.
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

  // The words x, y, z, w of the group that an element belongs to. The counter's order is for speed: like
  // this, row and column meet in the third round. What comes before is the same for all groups of a row, or
  // of a column.
  __device__ uint4 words(int row, int col) const {
    return philox(make_uint4(head, col / 32 * 8 + col % 8, 0, row / 32 * 8 + row % 8), seed);
  }

  // The word of row r of a group: its halves, the lower one first, are columns 0 and 1, or 2 and 3 (right)
  __device__ static uint32_t word(const uint4& w, int r, bool right) {
    const uint32_t x = r % 2 ? right ? w.w : w.z : right ? w.y : w.x;
    const uint32_t y = r % 2 ? right ? w.x : w.w : right ? w.z : w.y;
    return r / 2 ? 0xCD9E8D57 * x + y : x;
  }

  // keep of an element. Of its group it is the one in row row / 8 % 4 and column col / 8 % 4.
  __device__ float keep(int row, int col) const {
    if (!DROPOUT) return 1.f;
    const uint32_t number = word(words(row, col), row / 8 % 4, col / 16 % 2) >> col / 8 % 2 * 16 & 0x7fff;
    return (number < threshold) == less_is_dropped ? 0.f : scale;
  }

  // Of the sixteen elements of the group that an element belongs to, which are kept? Bit 4 r + c: the one in
  // row row / 8 % 4 = r and column col / 8 % 4 = c.
  __device__ uint32_t kept(int row, int col) const {
    const uint4 w = words(row, col);
    uint32_t bits = 0;
    #pragma unroll
    for (int e = 0; e < 16; e++) {
      const uint32_t number = word(w, e / 4, e / 2 % 2) >> e % 2 * 16 & 0x7fff;
      bits |= uint32_t(number < threshold) << e;
    }
    return less_is_dropped ? bits ^ 0xffff : bits;
  }
};
