// Mistakes with the instructions of tensor.cu, one a kernel, each reported at the line with its number.
#include <cuda_runtime.h>
#include <mma.h>

#include "../../stages/common/ptx.cuh"

template <int number> __global__ void mistake(const float* x, float* out) {
  __shared__ __align__(32) float tile[256];
  const int t = threadIdx.x;
  uint32_t two[2] = {}, four[4] = {};
  float sum[4] = {};
  tile[t] = x[t];
  __syncthreads();
  if (number == 0) ldmatrix_x2(two, shared_address(tile + 4 * (t % 16) + 1));  // HERE: 0
  if (number == 1) ldmatrix_x2(two, 0u - 16);  // HERE: 1
  if (number == 2) ldmatrix_x2(two, shared_address(x));  // HERE: 2
  if (number == 3) mma_m16n8k16<__half>(sum, four, two);  // HERE: 3
  if (number == 4 && t % 32 < 16) ldmatrix_x2(two, shared_address(tile));  // HERE: 4
  if (number == 4 && t % 32 >= 16) mma_m16n8k16<__half>(sum, four, two);  // HERE: 4
  if (number == 5) cp_async_16(shared_address(tile), x + 1);  // HERE: 5
  if (number == 6) cp_async_16(shared_address(tile + 2), x);  // HERE: 6
  if (number == 7) cp_async_16(shared_address(tile), x, 20);  // HERE: 7
  if (number == 8) {
    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, __half, nvcuda::wmma::row_major> a;
    nvcuda::wmma::load_matrix_sync(a, reinterpret_cast<const __half*>(tile + 4), 16);  // HERE: 8
  }
  if (number == 9 && t == 5) return;
  if (number == 9) ldmatrix_x2(two, shared_address(tile));  // HERE: 9
  out[t] = sum[0] + float(two[0]);
}

extern "C" const char* run_mistake(int number, const float* x, float* out) {
  switch (number) {
    case 0: mistake<0><<<1, 64>>>(x, out); break;
    case 1: mistake<1><<<1, 64>>>(x, out); break;
    case 2: mistake<2><<<1, 64>>>(x, out); break;
    case 3: mistake<3><<<1, 50>>>(x, out); break;
    case 4: mistake<4><<<1, 64>>>(x, out); break;
    case 5: mistake<5><<<1, 64>>>(x, out); break;
    case 6: mistake<6><<<1, 64>>>(x, out); break;
    case 7: mistake<7><<<1, 64>>>(x, out); break;
    case 8: mistake<8><<<1, 64>>>(x, out); break;
    case 9: mistake<9><<<1, 64>>>(x, out); break;
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
