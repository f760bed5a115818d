// Accumulators, two neighbours of a row at a time. Introduced by: backward stage 9, transposed.
#pragma once
#include "mma.cuh"

// Two elements of a register, as floats. A bf16 is the upper half of a float: an instruction for each.
__device__ __forceinline__ float2 unpack(uint32_t packed, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}
__device__ __forceinline__ float2 unpack(uint32_t packed, __nv_bfloat16) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000));
}
__device__ __forceinline__ float2 unpack(uint32_t packed) { return unpack(packed, ELEMENT()); }

// An operand A of `multiply` that is in registers already. (So this file comes before product.cuh.)
template <int strips, int n_tiles>
__device__ __forceinline__ void load_A(uint32_t (&A_frag)[4], const uint32_t (&A)[strips][n_tiles][4],
                                       int row, int k) {
  #pragma unroll
  for (int e = 0; e < 4; e++) A_frag[e] = A[row / 16][k / 16][e];
}

// Round an accumulator to fragments of A; hand their elements on, two neighbours of a row in a register:
// f(packed, row, col).
template <int strips, int n_frags, class F>
__device__ __forceinline__ void round_to_A(uint32_t (&A_frag)[strips][n_frags][4],
                                           const float (&acc)[strips][2 * n_frags][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int k = 0; k < n_frags; k++) {
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      to_A(A_frag[s][k], acc[s], k);
      #pragma unroll
      for (int e = 0; e < 4; e++)
        f(A_frag[s][k][e], 16 * s + e % 2 * 8 + lane_row, 16 * k + e / 2 * 8 + lane_col);
    }
  }
}

// Hand the elements of an accumulator on, two neighbours of a row at a time: f(x, y, row, col), where y is in
// col + 1.
template <int strips, int n_tiles, class F>
__device__ __forceinline__ void for_each_two(float (&acc)[strips][n_tiles][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int r = 0; r < 2 * strips; r++)
      f(acc[r / 2][n][r % 2 * 2], acc[r / 2][n][r % 2 * 2 + 1], 8 * r + lane_row, 8 * n + lane_col);
  }
}
