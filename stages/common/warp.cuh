// Reductions over the lanes of a warp. Introduced by: forward stage 2, tiled.
#pragma once

// Over all 32 lanes, or over each group of `lanes` neighbours, a power of 2. After the first shuffle every
// lane has the maximum of 2 lanes, then of 4, 8, 16 and 32: after five, all lanes have the result.
__device__ __forceinline__ float warp_max(float x, int lanes = 32) {
  for (int distance = 1; distance < lanes; distance *= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float warp_sum(float x, int lanes = 32) {
  for (int distance = 1; distance < lanes; distance *= 2) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}
