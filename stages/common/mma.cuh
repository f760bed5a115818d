// Introduced by: forward stage 7, mma, whose header draws which lane holds which element of a fragment.
#pragma once
#include "ptx.cuh"

// Two floats, rounded, as a register of two elements
template <class T> __device__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// D += A B for B of 16 columns, all that an ldmatrix.x4 brings: two instructions, for the left half of D and
// the right one.
__device__ __forceinline__ void mma_m16n16k16(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[4]) {
  const uint32_t b_left[2] = {b[0], b[1]}, b_right[2] = {b[2], b[3]};
  mma_m16n8k16<ELEMENT>(left, a, b_left);
  mma_m16n8k16<ELEMENT>(right, a, b_right);
}

// Over the 4 lanes that hold a row of D between them: lanes 4 * group to 4 * group + 3
__device__ __forceinline__ float quad_max(float x) {
  for (int distance : {1, 2}) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float quad_sum(float x) {
  for (int distance : {1, 2}) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}
