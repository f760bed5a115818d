// Four numbers at a time. Introduced by: forward stage 6, vectorized.
#pragma once

// One instruction for 16 bytes, at a multiple of 16
__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ void store4(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
}

// n numbers of a row of a tile, four by four, from columns `first`, first + step, first + 2 * step, ...
// Column x is at x ^ swizzle: 0 until conflict_free, which has its columns change places.
template <int n>
__device__ __forceinline__ void load(float (&to)[n], const float* row, int first, int step, int swizzle = 0) {
  #pragma unroll
  for (int x = 0; x < n; x += 4) {
    const float4 four = load4(row + ((first + x / 4 * step) ^ swizzle));
    to[x] = four.x;
    to[x + 1] = four.y;
    to[x + 2] = four.z;
    to[x + 3] = four.w;
  }
}
