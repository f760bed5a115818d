// Dropout of P, by random numbers that are made anew wherever they are needed. Introduced by: forward stage
// 4, flash2.
//
// O = (keep * P) V, where keep_ij is 0 with probability p, else 1 / (1 - p). L knows nothing of it. Storing
// keep for the backward pass would take N x N numbers. Instead it is a function of a seed and of where the
// element is: head, row, column. A generator with a state could not give that; one that scrambles a counter
// can. So both passes, all tiles and all stages see the same keep.
#pragma once
#include "ptx.cuh"

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

// 1 / (1 - p); if nothing is kept any number does that is more than 2 (see Dropout::dropped())
template <class Params>
__device__ __forceinline__ float dropout_scale(const Params& p) {
  if constexpr (!DROPOUT) return 1.f;
  else return p.dropout < 1.f ? 1.f / (1.f - p.dropout) : 65536.f;
}

// Sixteen elements are one group, which has four random words and makes four more of them. The groups are
// chosen for tensor cores, where a lane has whole ones (common/drop.cuh): two rows that are 8 apart, and two
// neighbours of every 8 of 32 columns. So a tile of 16 x 32 has 8 x 4 groups. The words of their elements:
//
//      column     0 1       8 9      16 17       24 25
//         row 0     x         y         z           w
//             8  c x + y   c y + z   c z + w   c w + c x + y
//
// A word made of two others, c x + y with an odd c, is uniform whatever x is, and whatever y is. So any two
// of the eight are independent, and the four of a row are: any two elements, and all of a row, and of a
// column. So a row of O, dQ or dV is what it would be if all were.
//
// Three elements in two rows, of x, y and c x + y, hardly depend on each other, as c scrambles x: for
// p >= 0.05 their correlation is below 1e-4 (tests/test_extras.py).
//
// An element has 16 bits of a word, the left one of two the lower half. They are compared as fp16 numbers, as
// one instruction does that for both. In the order of these, 0xfc00 (minus infinity) is the lowest. Then come
// 0xfbff down to 0x8001, 0x8000 and 0 (both are zero), and 1 up to 0x7c00. NaN is never less. So of all 65536
// `count` are less than the number 0xfc00 - count, or, past the zeros, than count - 0x7c01.
struct Dropout {
  uint2 seed;
  uint32_t head;
  uint32_t threshold;        // an fp16 number, twice. So many are less: 65536 min(p, 1 - p)
  float scale;               // of what is kept

  template <class Params>
  __device__ Dropout(const Params& p, int b, int h) {
    if constexpr (DROPOUT) {
      // By a shuffle the compiler knows that all lanes have the same, and keeps the key of each round in the
      // registers that a warp has once, out of the loops.
      const uint32_t low = *p.seed, high = *p.seed >> 32;
      seed = make_uint2(__shfl_sync(0xffffffff, low, 0), __shfl_sync(0xffffffff, high, 0));
      head = b * p.H + h;
      const uint32_t count = rintf(fminf(p.dropout, 1.f - p.dropout) * 65536.f);
      threshold = (count <= 0x7c01 ? 0xfc00 - min(count, 0x7c00) : count - 0x7c01) * 0x10001;
      scale = dropout_scale(p);
    }
  }

  // The words x, y, z, w of the group that an element belongs to. The counter's order is for speed: like
  // this, row and column meet in the third round. What comes before is the same for all groups of a row, or
  // of a column.
  __device__ uint4 words(unsigned row, unsigned col) const {
    return philox(make_uint4(head, col / 32 * 4 + col % 8 / 2, 0, row / 16 * 8 + row % 8), seed);
  }

  // The words of a group's first 16 columns, or its last ones (right): two of row 0, then two of row 1
  __device__ static uint4 words_of_half(const uint4& w, bool right) {
    constexpr uint32_t c = 0xCD9E8D57;
    const uint32_t first = right ? w.z : w.x, second = right ? w.w : w.y, third = right ? c * w.x + w.y : w.z;
    return make_uint4(first, second, c * first + second, c * second + third);
  }

  // Of the two elements of a word: 0xffff in the half of one that is dropped. With p > 1/2 those that are
  // less are the kept ones. (A constant for that would spare nothing, and ptxas would schedule the kernel
  // worse: at d=128 dropout would cost 1.43x, not 1.28x.)
  __device__ uint32_t dropped(uint32_t word) const { return where_less(word, threshold, scale > 2.f); }

  // keep of an element; and of one in an even column and the next one
  __device__ float keep(int row, int col) const {
    const float2 two = keep_two(row, col);
    return col % 2 ? two.y : two.x;
  }
  __device__ float2 keep_two(int row, int col) const {
    if (!DROPOUT) return make_float2(1.f, 1.f);
    const uint4 w = words_of_half(words(row, col), col / 16 % 2);
    const uint32_t two = dropped(row / 8 % 2 ? col / 8 % 2 ? w.w : w.z : col / 8 % 2 ? w.y : w.x);
    return make_float2(two & 1 ? 0.f : scale, two >> 16 ? 0.f : scale);
  }

  // Of the sixteen elements of the group that an element belongs to, which are kept? Bit 8 r + c: the one in
  // its row r and column c.
  __device__ uint32_t kept(int row, int col) const {
    const uint4 w = words(row, col);
    uint32_t bits = 0;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 of_half = words_of_half(w, half);
      const uint32_t words[4] = {of_half.x, of_half.y, of_half.z, of_half.w};
      #pragma unroll
      for (int n = 0; n < 4; n++) {
        const uint32_t two = ~dropped(words[n]);
        bits |= (two & 1 | two >> 15 & 2) << (n / 2 * 8 + half * 4 + n % 2 * 2);
      }
    }
    return bits;
  }
};
