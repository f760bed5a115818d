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
struct Dropout {
  uint2 seed;
  uint32_t head;
  uint32_t threshold;        // 2^32 p: an element is dropped whose 16 bits, taken for upper ones, are less
  float scale;               // of the others

  template <class Params>
  __device__ Dropout(const Params& p, int b, int h) {
    if constexpr (DROPOUT) {
      // By a shuffle the compiler knows that all lanes have the same, and keeps the key of each round in the
      // registers that a warp has once, out of the loops.
      const uint32_t low = *p.seed, high = *p.seed >> 32;
      seed = make_uint2(__shfl_sync(0xffffffff, low, 0), __shfl_sync(0xffffffff, high, 0));
      head = b * p.H + h;
      threshold = min(uint32_t(rintf(p.dropout * 65536.f)), 0xffffu) << 16;
      scale = dropout_scale(p);
    }
  }

  // The words of the group that an element belongs to
  __device__ uint4 words(int row, int col) const {
    return philox(make_uint4(row / 16 * 8 + row % 8, col / 32 * 8 + col % 8, head, 0), seed);
  }

  // Which of the two elements of a word are dropped: the first one's number is in its lower half.
  __device__ bool drops_first(uint32_t word) const { return word << 16 < threshold; }
  __device__ bool drops_second(uint32_t word) const { return word < threshold; }

  // keep of an element. Of its group it is the one in row row / 8 % 2 and column col / 8 % 4.
  __device__ float keep(int row, int col) const {
    if (!DROPOUT) return 1.f;
    const uint4 w = words(row, col);
    const bool lower = row / 8 % 2, right = col / 16 % 2, second = col / 8 % 2;
    const uint32_t word = lower ? right ? w.w : w.z : right ? w.y : w.x;
    return (second ? drops_second(word) : drops_first(word)) ? 0.f : scale;
  }
};
