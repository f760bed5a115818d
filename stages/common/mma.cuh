// Fragments of mma.m16n8k16 and their accumulators. Introduced by: forward stage 11, mma, whose header draws
// which lane holds which element.
//
// An accumulator here is float acc[n][4]: 16 rows x 8 n columns, spread over a warp. A lane holds two rows of
// it, lane / 4 and lane / 4 + 8, and of each 8 columns the two from lane % 4 * 2 on.
#pragma once
#include "ptx.cuh"

// Two floats, rounded, as a register of two elements
template <class T> __device__ uint32_t pack(float low, float high);

template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 packed = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&packed);
}

// D += A B for B of 16 columns, all that an ldmatrix.x4 brings: two instructions, for the left half of D and
// the right one.
__device__ __forceinline__ void mma_m16n16k16(float (&D_left)[4], float (&D_right)[4], const uint32_t (&A)[4],
                                              const uint32_t (&B)[4]) {
  const uint32_t B_left[2] = {B[0], B[1]}, B_right[2] = {B[2], B[3]};
  mma_m16n8k16<ELEMENT>(D_left, A, B_left);
  mma_m16n8k16<ELEMENT>(D_right, A, B_right);
}

// Hand every element that this lane holds to f(value, row, col).
template <int n_tiles, class F>
__device__ __forceinline__ void for_each(float (&acc)[n_tiles][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int e = 0; e < 4; e++) f(acc[n][e], lane_row + e / 2 * 8, 8 * n + lane_col + e % 2);
  }
}

// The same, of the lane's r-th row only (r = 0, 1): f(value)
template <int n_tiles, class F>
__device__ __forceinline__ void for_row(float (&acc)[n_tiles][4], int r, F f) {
  #pragma unroll
  for (int c = 0; c < 2 * n_tiles; c++) f(acc[c / 2][2 * r + c % 2]);
}

// Neighbouring elements two at a time, rounded, as a register: f(packed, row, col)
template <int n_tiles, class F>
__device__ __forceinline__ void for_each_pair(const float (&acc)[n_tiles][4], F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int r = 0; r < 2; r++)
      f(pack<ELEMENT>(acc[n][2 * r], acc[n][2 * r + 1]), lane_row + 8 * r, 8 * n + lane_col);
  }
}

// Columns 16 k to 16 k + 15 of an accumulator, rounded, as the operand A of the next product: no data moves
// between lanes.
template <int n_tiles>
__device__ __forceinline__ void to_A(uint32_t (&A)[4], const float (&acc)[n_tiles][4], int k) {
  // --- from an accumulator to A
  #pragma unroll
  for (int n = 0; n < 2; n++) {
    A[2 * n] = pack<ELEMENT>(acc[2 * k + n][0], acc[2 * k + n][1]);
    A[2 * n + 1] = pack<ELEMENT>(acc[2 * k + n][2], acc[2 * k + n][3]);
  }
  // ---
}

// Over the 4 lanes that hold a row between them: lanes 4 * lane_row to 4 * lane_row + 3
__device__ __forceinline__ float quad_max(float x) {
  for (int distance : {1, 2}) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float quad_sum(float x) {
  for (int distance : {1, 2}) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}
