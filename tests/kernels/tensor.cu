// 16-bit numbers, ldmatrix, stmatrix, tensor cores and asynchronous copies: what PTX and CUDA promise, one
// small kernel each. test_tensor.py runs this file in the simulator and on a GPU.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <mma.h>
#include <stdint.h>

#include "../../stages/common/ptx.cuh"

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// ------------------------------------------------------------------------------------------ 16-bit numbers
template <class T> __global__ void widen(const T* x, float* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = float(x[i]);
}
template <class T> __global__ void narrow(const float* x, T* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = T(x[i]);
}
template <class T> __global__ void arithmetic(const T* x, const T* y, const T* z, T* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const T a = x[i], b = y[i], c = z[i];
    const T all[] = {a + b, a - b, a * b, a / b, __hfma(a, b, c), __hmax(a, b), __hmin(a, b), -a, __habs(a),
                     hsqrt(__habs(a)), T(a < b), T(a == b)};
    for (int k = 0; k < 12; k++) out[12 * i + k] = all[k];
  }
}
extern "C" const char* run_widen_float16(const __half* x, float* out, int n) {
  widen<__half><<<1, 128>>>(x, out, n);
  return result();
}
extern "C" const char* run_narrow_float16(const float* x, __half* out, int n) {
  narrow<__half><<<1, 128>>>(x, out, n);
  return result();
}
extern "C" const char* run_arithmetic_float16(const __half* x, const __half* y, const __half* z,
                                            __half* out, int n) {
  arithmetic<__half><<<1, 128>>>(x, y, z, out, n);
  return result();
}
extern "C" const char* run_widen_bfloat16(const __nv_bfloat16* x, float* out, int n) {
  widen<__nv_bfloat16><<<1, 128>>>(x, out, n);
  return result();
}
extern "C" const char* run_narrow_bfloat16(const float* x, __nv_bfloat16* out, int n) {
  narrow<__nv_bfloat16><<<1, 128>>>(x, out, n);
  return result();
}
extern "C" const char* run_arithmetic_bfloat16(const __nv_bfloat16* x, const __nv_bfloat16* y,
                                               const __nv_bfloat16* z, __nv_bfloat16* out, int n) {
  arithmetic<__nv_bfloat16><<<1, 128>>>(x, y, z, out, n);
  return result();
}

__global__ void pairs(const float2* x, float2* out, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const __half2 h = __float22half2_rn(x[i]), h2 = __hfma2(h, h, __floats2half2_rn(1.f, 2.f));
    const __nv_bfloat162 b = __float22bfloat162_rn(x[i]), b2 = __hmul2(b, __float2bfloat162_rn(3.f));
    out[4 * i] = __half22float2(h2);
    out[4 * i + 1] = make_float2(__high2float(h), __low2float(h));
    out[4 * i + 2] = __bfloat1622float2(b2);
    out[4 * i + 3] = make_float2(__high2float(b), __low2float(b));
  }
}
extern "C" const char* run_pairs(const float2* x, float2* out, int n) {
  pairs<<<1, 64>>>(x, out, n);
  return result();
}

__global__ void masks_where_less(const uint32_t* a, uint32_t b, int flip, uint32_t* out, int n) {
  for (int i = threadIdx.x; i < n; i += 64) out[i] = where_less(a[i], b, flip);
}
extern "C" const char* run_masks_where_less(const uint32_t* a, uint32_t b, int flip, uint32_t* out, int n) {
  masks_where_less<<<1, 64>>>(a, b, flip, out, n);
  return result();
}

// ---------------------------------------------------------------------------------------- ldmatrix, stmatrix
// Matrix i of `matrices` (8 x 8 each) has its row r at row order[8 * i + r] of shared memory; out: the
// registers, by lane.
template <int count, bool transposed>
__global__ void load_matrices(const uint16_t* matrices, const int* order, uint32_t* out) {
  __shared__ __align__(16) uint16_t rows[32][8];
  const int lane = threadIdx.x;
  if (lane < 8 * count)
    for (int k = 0; k < 8; k++) rows[order[lane]][k] = matrices[8 * lane + k];
  __syncwarp();
  uint32_t registers[count];
  const uint32_t row = shared_address(rows[lane < 8 * count ? order[lane] : 0]);
  if constexpr (count == 2 && transposed) ldmatrix_x2_trans(registers, row);
  else if constexpr (count == 2) ldmatrix_x2(registers, row);
  else if constexpr (transposed) ldmatrix_x4_trans(registers, row);
  else ldmatrix_x4(registers, row);
  for (int i = 0; i < count; i++) out[lane * count + i] = registers[i];
}
extern "C" const char* run_load_matrices(int count, int transposed, const uint16_t* matrices,
                                         const int* order, uint32_t* out) {
  if (count == 2 && transposed) load_matrices<2, true><<<1, 32>>>(matrices, order, out);
  else if (count == 2) load_matrices<2, false><<<1, 32>>>(matrices, order, out);
  else if (transposed) load_matrices<4, true><<<1, 32>>>(matrices, order, out);
  else load_matrices<4, false><<<1, 32>>>(matrices, order, out);
  return result();
}

// The way back; without a GPU of that kind it does nothing.
template <int count, bool transposed>
__global__ void store_matrices(const uint32_t* registers, uint16_t* matrices) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ __align__(16) uint16_t rows[32][8];
  const int lane = threadIdx.x;
  uint32_t mine[count];
  for (int i = 0; i < count; i++) mine[i] = registers[lane * count + i];
  const uint32_t row = shared_address(rows[lane]);
  if constexpr (count == 2 && transposed) stmatrix_x2_trans(row, mine);
  else if constexpr (count == 2) stmatrix_x2(row, mine);
  else if constexpr (transposed) stmatrix_x4_trans(row, mine);
  else stmatrix_x4(row, mine);
  __syncwarp();
  if (lane < 8 * count)
    for (int k = 0; k < 8; k++) matrices[8 * lane + k] = rows[lane][k];
#endif
}
extern "C" const char* run_store_matrices(int count, int transposed, const uint32_t* registers,
                                          uint16_t* matrices) {
  if (count == 2 && transposed) store_matrices<2, true><<<1, 32>>>(registers, matrices);
  else if (count == 2) store_matrices<2, false><<<1, 32>>>(registers, matrices);
  else if (transposed) store_matrices<4, true><<<1, 32>>>(registers, matrices);
  else store_matrices<4, false><<<1, 32>>>(registers, matrices);
  return result();
}

// ------------------------------------------------------------------------------------------ tensor cores
// The registers of each lane as they are: a 4, b 2, d 4.
template <class T> __global__ void multiply(const uint32_t* a, const uint32_t* b, float* d) {
  const int lane = threadIdx.x;
  uint32_t a_reg[4], b_reg[2];
  float d_reg[4];
  for (int i = 0; i < 4; i++) a_reg[i] = a[4 * lane + i];
  for (int i = 0; i < 2; i++) b_reg[i] = b[2 * lane + i];
  for (int i = 0; i < 4; i++) d_reg[i] = d[4 * lane + i];
  mma_m16n8k16<T>(d_reg, a_reg, b_reg);
  for (int i = 0; i < 4; i++) d[4 * lane + i] = d_reg[i];
}
extern "C" const char* run_multiply_float16(const uint32_t* a, const uint32_t* b, float* d) {
  multiply<__half><<<1, 32>>>(a, b, d);
  return result();
}
extern "C" const char* run_multiply_bfloat16(const uint32_t* a, const uint32_t* b, float* d) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  multiply<__nv_bfloat16><<<1, 32>>>(a, b, d);
#endif
  return result();
}

// out = 2 * (A B + C), all tiles 16 x 16 with ld elements from one row (or column) to the next
using namespace nvcuda;
template <class T, class LayoutA, class LayoutB>
__global__ void fragments(const T* A, const T* B, const float* C, float* out, int ld, wmma::layout_t layout) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> a;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> b;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> c, d;
  wmma::load_matrix_sync(a, A, ld);
  wmma::load_matrix_sync(b, B, ld);
  wmma::load_matrix_sync(c, C, ld, layout);
  wmma::fill_fragment(d, 1.f);
  wmma::mma_sync(d, a, b, c);
  for (int i = 0; i < d.num_elements; i++) d.x[i] *= 2.f;
  wmma::store_matrix_sync(out, d, ld, layout);
}
template <class T>
static const char* run_fragments(const T* A, const T* B, const float* C, float* out, int ld, int a_by_columns,
                                 int b_by_columns, int c_by_columns) {
  using row = wmma::row_major;
  using col = wmma::col_major;
  const auto layout = c_by_columns ? wmma::mem_col_major : wmma::mem_row_major;
  if (a_by_columns && b_by_columns) fragments<T, col, col><<<1, 32>>>(A, B, C, out, ld, layout);
  else if (a_by_columns) fragments<T, col, row><<<1, 32>>>(A, B, C, out, ld, layout);
  else if (b_by_columns) fragments<T, row, col><<<1, 32>>>(A, B, C, out, ld, layout);
  else fragments<T, row, row><<<1, 32>>>(A, B, C, out, ld, layout);
  return result();
}
extern "C" const char* run_fragments_float16(const __half* A, const __half* B, const float* C, float* out,
                                             int ld, int a_by_columns, int b_by_columns, int c_by_columns) {
  return run_fragments(A, B, C, out, ld, a_by_columns, b_by_columns, c_by_columns);
}
extern "C" const char* run_fragments_bfloat16(const __nv_bfloat16* A, const __nv_bfloat16* B, const float* C,
                                              float* out, int ld, int a_by_columns, int b_by_columns,
                                              int c_by_columns) {
  return run_fragments(A, B, C, out, ld, a_by_columns, b_by_columns, c_by_columns);
}

// --------------------------------------------------------------------------------------- asynchronous copies
// out[i] = x[i] for i < n, and 0 for the other ones of 128 numbers: the last 16 bytes are cut off at n.
__global__ void copy_zero_filled(const float* x, float* out, int n) {
  __shared__ __align__(16) float tile[128];
  const int first = 4 * threadIdx.x, left = min(max(n - first, 0), 4);
  cp_async_16(shared_address(tile + first), x + (left ? first : 0), 4 * left);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = threadIdx.x; i < 128; i += blockDim.x) out[i] = tile[127 - i];
}
extern "C" const char* run_copy_zero_filled(const float* x, float* out, int n) {
  copy_zero_filled<<<1, 32>>>(x, out, n);
  return result();
}

// The sum of `tiles` tiles of 256 floats, the next one under way while one is added up. right = 0: waits for
// too few of the copies; 1: all that is needed; 2: without the barrier after use.
__global__ void pipeline(const float* x, float* out, int tiles, int right) {
  __shared__ __align__(16) float tile[2][256];
  const int t = threadIdx.x;                    // of 64
  cp_async_16(shared_address(tile[0] + 4 * t), x + 4 * t);
  cp_async_commit();
  float sum = 0.f;
  for (int j = 0; j < tiles; j++) {
    if (j + 1 < tiles) cp_async_16(shared_address(tile[(j + 1) % 2] + 4 * t), x + 256 * (j + 1) + 4 * t);
    cp_async_commit();                          // a group each round, if an empty one
    if (right == 0) cp_async_wait<2>();
    else cp_async_wait<1>();
    __syncthreads();
    for (int i = 0; i < 4; i++) sum += tile[j % 2][(4 * (t ^ 32) + 37 * i) % 256] * float(i + 1);
    if (right != 2) __syncthreads();
  }
  out[t] = sum;
}
extern "C" const char* run_pipeline(const float* x, float* out, int tiles, int right) {
  pipeline<<<1, 64>>>(x, out, tiles, right);
  return result();
}

// One ldmatrix.x4 of 32 rows, `pitch` numbers of 16 bits apart, at column 0; or a stmatrix.x4. swizzle: each
// row's 16-byte pieces change places, piece x is at x ^ (row % 8).
template <bool writes> __global__ void conflicts(int pitch, int swizzle, uint32_t* out) {
  __shared__ __align__(128) uint16_t tile[32 * 128];
  const int lane = threadIdx.x;
  for (int i = 2 * lane; i < 32 * 128; i += 64) *reinterpret_cast<uint32_t*>(tile + i) = i;
  __syncwarp();
  const uint32_t row = shared_address(tile + lane * pitch + (swizzle ? lane % 8 * 8 : 0));
  uint32_t four[4] = {1, 2, 3, 4};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  if constexpr (writes) stmatrix_x4(row, four);
#endif
  if constexpr (!writes) ldmatrix_x4(four, row);
  for (int i = 0; i < 4; i++) out[4 * lane + i] = four[i];
}
extern "C" const char* run_conflicts(int writes, int pitch, int swizzle, uint32_t* out) {
  if (writes) conflicts<true><<<1, 32>>>(pitch, swizzle, out);
  else conflicts<false><<<1, 32>>>(pitch, swizzle, out);
  return result();
}
