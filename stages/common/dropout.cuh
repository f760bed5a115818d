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
__host__ __device__ __forceinline__ float dropout_scale(const Params& p) {
  if constexpr (!DROPOUT) return 1.f;
  else return p.dropout < 1.f ? 1.f / (1.f - p.dropout) : 65536.f;
}

// 256 elements are one group: eight rows that are 8 apart, and two neighbours of every 8 of 128 columns. So a
// tile of 64 x 128 has 8 x 4 groups. (A lane of tensor cores has a quarter of a group in the 16 rows of a
// warp in the forward pass, common/drop.cuh, and an eighth in its 16 columns in the backward pass,
// common/drop_transposed.cuh.) A group has four random words, and makes 128 of them, each for two neighbours.
// Its first two rows have the four as x, y, z, w, the next two as z, x, w, y. The last four rows have the
// same, but y and z of the group times an odd number. Then
//
//      columns     0 1       8 9       16 17      24 25      32 33      40 41      48 49      56 57
//                 s + c x   s + c y   s + c z    s + c w    t + e z    t + e w    t + e x    t + e y
//
// with s = x + y, t = z + w, and odd numbers c and e: of each one for the first of two rows and one for the
// second, and others for columns from 64 on. A word made like this is uniform. Two or three together are, if
// their numbers of x, y, z, w are independent modulo 2. Those of any three words in the same row and half
// are, and those of any two but for 960 pairs of 8128. These have up to four bits in common, the last ones
// of their lower halves, which seldom tell what is dropped from what is kept: they are correlated by less
// than 1e-6. So a row of O or dQ has the mean and the variance that it would have if all elements were
// independent, and so has a column's dK and dV. (What three depend on each other: tests/test_extras.py.)
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
    return philox(make_uint4(head, col / 128 * 4 + col % 8 / 2, 0, row / 64 * 8 + row % 8), seed);
  }

  // As the n-th two rows of the group have them
  __device__ static uint4 words_of_rows(const uint4& w, unsigned n) {
    const bool second = n % 2;
    // (by ?: ptxas would serialise the forward pass's wgmma, C7511)
    const uint32_t factor = n / 2 % 2 * 0x85EBCA6A + 1, y = factor * w.y, z = factor * w.z;
    return make_uint4(second ? z : w.x, second ? w.x : y, second ? w.w : z, second ? y : w.w);
  }

  // Of these, what the n-th 16 of the columns have: two words of the first row, then two of the second
  __device__ static uint4 words_of_columns(const uint4& w, unsigned n) {
    const bool last_64 = n / 4 % 2, right = n / 2 % 2, first = right == n % 2;
    const uint32_t sum = right ? w.z + w.w : w.x + w.y, x = first ? w.x : w.z, y = first ? w.y : w.w;
    const uint32_t c = last_64 ? right ? 0xC2B2AE35 : 0x85EBCA77 : right ? 0x9E3779B9 : 0x297A2D39;
    const uint32_t c2 = last_64 ? right ? 0xD2511F53 : 0xBB67AE85 : right ? 0xCD9E8D57 : 0x1B873593;
    return make_uint4(sum + c * x, sum + c * y, sum + c2 * x, sum + c2 * y);
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
    const uint4 w = words_of_columns(words_of_rows(words(row, col), row / 16), col / 16);
    const uint32_t two = dropped(row / 8 % 2 ? col / 8 % 2 ? w.w : w.z : col / 8 % 2 ? w.y : w.x);
    return make_float2(two & 1 ? 0.f : scale, two >> 16 ? 0.f : scale);
  }

  // Of the group of these words, of its two_rows-th two rows, and of the n-th 32 of its columns: which of
  // these sixteen elements are kept? Bit 8 r + c: the one in the r-th row and the c-th column.
  __device__ uint32_t kept(const uint4& words, unsigned two_rows, unsigned n) const {
    const uint4 of_rows = words_of_rows(words, two_rows);
    uint32_t bits = 0;
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 w = words_of_columns(of_rows, 2 * n + half);
      const uint32_t each[4] = {w.x, w.y, w.z, w.w};
      #pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint32_t two = ~dropped(each[k]);
        bits |= (two & 1 | two >> 15 & 2) << (k / 2 * 8 + half * 4 + k % 2 * 2);
      }
    }
    return bits;
  }
};
