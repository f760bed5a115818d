// Misaligned vectors, and the addresses and rows of ldmatrix and stmatrix.
#include <cuda_runtime.h>

#include "common/ptx.cuh"

//! misaligned <<<1, 32>>>
__global__ void float4_of_an_odd_row(const float* x, float* out, unsigned* count) {
  const float* row = x + 4 * threadIdx.x;
  //! buggy: const float* row = x + 5 * threadIdx.x;
  const float4 four = *reinterpret_cast<const float4*>(row);
  out[threadIdx.x] = four.x + four.w;
}

//! misaligned <<<1, 32>>>
__global__ void float4_at_8_bytes(const float* x, float* out, unsigned* count) {
  const float4 four = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x + 4);
  //! buggy: const float4 four = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x + 2);
  out[threadIdx.x] = four.x + four.w;
}

//! misaligned <<<1, 32>>>
__global__ void float2_at_4_bytes(const float* x, float* out, unsigned* count) {
  *reinterpret_cast<float2*>(out + 2 * threadIdx.x) = make_float2(x[0], x[1]);
  //! buggy: *reinterpret_cast<float2*>(out + 2 * threadIdx.x + 1) = make_float2(x[0], x[1]);
}

//! misaligned <<<1, 32>>>
__global__ void padded_rows_by_float4(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[32][36];
  //! buggy: __shared__ __align__(16) float tile[32][33];
  for (int k = 0; k < 4; k++) tile[threadIdx.x][k] = x[k];
  __syncthreads();
  const float4 four = *reinterpret_cast<const float4*>(tile[31 - threadIdx.x]);
  out[threadIdx.x] = four.x + four.w;
}

//! misaligned <<<1, 32>>>
__global__ void half2_at_an_odd_half(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) __half tile[66];
  for (int k = threadIdx.x; k < 66; k += 32) tile[k] = __float2half(x[k]);
  __syncthreads();
  const __half2 two = *reinterpret_cast<const __half2*>(tile + 2 * threadIdx.x);
  //! buggy: const __half2 two = *reinterpret_cast<const __half2*>(tile + 2 * threadIdx.x + 1);
  out[threadIdx.x] = __half2float(__low2half(two));
}

//! misaligned <<<1, 32>>>
__global__ void int_of_bytes(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) unsigned char bytes[132];
  for (int k = threadIdx.x; k < 132; k += 32) bytes[k] = k;
  __syncthreads();
  out[threadIdx.x] = *reinterpret_cast<const unsigned*>(bytes + 4 * threadIdx.x);
  //! buggy: out[threadIdx.x] = *reinterpret_cast<const unsigned*>(bytes + 4 * threadIdx.x + 1);
}

//! misaligned or error <<<1, 32>>>
__global__ void source_of_a_copy(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_16(shared_address(tile + 4 * t), x + 4 * t + 1);
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! misaligned or error <<<1, 32>>>
__global__ void target_of_a_copy(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[132];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_16(shared_address(tile + 4 * t + 2), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  out[t] = tile[4 * t + 3];
}

//! misaligned or error <<<1, 32>>>
__global__ void rows_of_ldmatrix(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][8];
  const int lane = threadIdx.x;
  for (int k = 0; k < 4; k++) rows[lane / 2][lane % 2 * 4 + k] = x[k];
  __syncwarp();
  uint32_t fragment[2];
  ldmatrix_x2(fragment, shared_address(rows[lane % 16]));
  //! buggy: ldmatrix_x2(fragment, shared_address(rows[lane % 16] + 1));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]);
}

//! out of bounds <<<1, 32>>>
__global__ void ldmatrix_past_the_end(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  for (int k = 0; k < 2; k++) rows[lane / 2][lane % 2 * 2 + k] = x[k];
  __syncwarp();
  uint32_t fragment[2];
  ldmatrix_x2(fragment, shared_address(rows[lane % 16]));
  //! buggy: ldmatrix_x2(fragment, shared_address(rows[lane % 16 + 1]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]);
}

//! out of bounds <<<1, 32>>>
__global__ void ldmatrix_before_the_start(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float first[16][4];
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  for (int k = 0; k < 2; k++) first[lane / 2][lane % 2 * 2 + k] = rows[lane / 2][lane % 2 * 2 + k] = x[k];
  __syncwarp();
  uint32_t fragment[2];
  ldmatrix_x2(fragment, shared_address(rows[lane % 16]));
  //! buggy: ldmatrix_x2(fragment, shared_address(rows[lane % 16 - 1]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]) + first[lane % 16][0];
}

// Four matrices take the rows of all 32 lanes, two those of 16.
//! out of bounds <<<1, 32>>>
__global__ void four_matrices_of_two(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  for (int k = 0; k < 2; k++) rows[lane / 2][lane % 2 * 2 + k] = x[k];
  __syncwarp();
  uint32_t fragment[4];
  ldmatrix_x4(fragment, shared_address(rows[lane % 16]));
  //! buggy: ldmatrix_x4(fragment, shared_address(rows[lane]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[3]);
}

//! uninitialised <<<1, 32>>>
__global__ void ldmatrix_of_a_row_not_filled(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  if (lane < 16)
    //! buggy: if (lane < 15)
    for (int k = 0; k < 4; k++) rows[lane][k] = x[k];
  __syncwarp();
  uint32_t fragment[2];
  ldmatrix_x2_trans(fragment, shared_address(rows[lane % 16]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]);
}

//! race <<<1, 32>>>
__global__ void stmatrix_before_its_barrier(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  const uint32_t two[2] = {__float_as_uint(x[lane]), __float_as_uint(x[lane + 32])};
  stmatrix_x2(shared_address(rows[lane % 16]), two);
  __syncwarp();
  //! buggy:
  out[lane] = rows[lane / 2][lane % 4];
}

// Two matrices in one place: their rows are 8 apart.
//! race <<<1, 32>>>
__global__ void stmatrix_of_two_to_one_place(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  const uint32_t two[2] = {__float_as_uint(x[lane]), __float_as_uint(x[lane + 32])};
  stmatrix_x2(shared_address(rows[lane % 16]), two);
  //! buggy: stmatrix_x2(shared_address(rows[lane % 8]), two);
  __syncwarp();
  out[lane] = rows[lane / 4][lane % 4];
}

//! out of bounds <<<1, 32>>>
__global__ void stmatrix_past_the_end(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  const uint32_t two[2] = {__float_as_uint(x[lane]), __float_as_uint(x[lane + 32])};
  stmatrix_x2(shared_address(rows[lane % 16]), two);
  //! buggy: stmatrix_x2(shared_address(rows[lane % 16 + 1]), two);
  __syncwarp();
  out[lane] = rows[8 + lane / 8][lane % 4];
}
