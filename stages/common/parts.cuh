// A float as a sum of parts. Introduced by: backward stage 37, augmented.
#pragma once
#include "tensor.cuh"

// A bf16 has 8 bits, a float 24. So a float is a sum of three bf16, each the nearest to what those before
// have left; and of two, but for 2^-17 of it. (Large ones do not fit into fp16. A product has a type of its
// own.)
using Part = __nv_bfloat16;
constexpr int L_parts = 3, D_parts = DROPOUT ? 0 : 2, all_parts = L_parts + D_parts;

// Parts `first` to end - 1, of 8 rows next to each other: in turn those of a part
__device__ __forceinline__ void store_parts_of(Part* to, float x, int first, int end) {
  #pragma unroll
  for (int n = first; n < end; n++) {
    to[8 * n] = Part(x);
    x -= float(Part(x));
  }
}
