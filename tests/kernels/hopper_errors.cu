// Mistakes with the instructions of hopper.cu, one a kernel, each reported at the line with its number.
#include <cuda_runtime.h>

#define ELEMENT __half
#include "../../stages/common/hopper.cuh"
#include "../../stages/common/wgmma.cuh"

template <int number> __global__ void mistake(const float* x, float* out, CUtensorMap map) {
  __shared__ __align__(1024) float tile[256];
  __shared__ uint64_t barrier;
  const int t = threadIdx.x;
  float D[2][4] = {};
  tile[t] = x[t];
  if (t == 0 && number != 3) mbarrier_init(&barrier, 2);
  __syncthreads();
  if (number == 0) mbarrier_init(reinterpret_cast<uint64_t*>(tile + 1), 1);  // HERE: 0
  if (number == 1) mbarrier_init(reinterpret_cast<uint64_t*>(out), 1);  // HERE: 1
  if (number == 2) mbarrier_init(&barrier, 0);  // HERE: 2
  if (number == 3) mbarrier_arrive(&barrier);  // HERE: 3
  if (number == 4) mbarrier_wait(&barrier, 2);  // HERE: 4
  if (number == 5 && t == 0) {
    mbarrier_arrive_expect(&barrier, 64);
    mbarrier_arrive(&barrier);
    mbarrier_arrive(&barrier);  // HERE: 5
  }
  if (number == 6) mbarrier_arrive_expect(&barrier, 1 << 20);  // HERE: 6
  if (number == 7) tma_load(tile, map, &barrier, 0, 0, 0, 0);  // HERE: 7
  if (number == 8) bulk_add(out, tile, 20);  // HERE: 8
  if (number == 9) bulk_add(out + 1, tile, 32);  // HERE: 9
  if (number == 10) bulk_add(out, x, 32);  // HERE: 10
  if (number == 11) wgmma(D, K_major(0x3fff, 0, 64), K_major(0, 0, 64));  // HERE: 11
  if (number == 12) wgmma(D, K_major(0, 0, 64), K_major(0, 0, 64) | uint64_t(1) << 49);  // HERE: 12
  if (number == 13 && t % 128 < 64) wgmma_fence();  // HERE: 13
  if (number == 13 && t % 128 >= 64) wgmma_commit();  // HERE: 13
  if (number == 14) named_barrier_sync(16, 32);  // HERE: 14
  if (number == 15) named_barrier_sync(1, 48);  // HERE: 15
  if (number == 16) {
    setmaxnreg_dec<40>();
    setmaxnreg_inc<24>();  // HERE: 16
  }
  if (number == 17 && t >= 32) mbarrier_wait(&barrier, 0);  // HERE: 17
  if (number == 17 && t == 0) mbarrier_arrive_expect(&barrier, 48);
  if (number == 18 && t < 64) named_barrier_sync(3, 96);  // HERE: 18
  if (number == 19 && t < 32) wgmma_commit();  // HERE: 19
  if (number == 20 && t < 64)
    while (!mbarrier_test(&barrier, 0)) {}  // HERE: 20
  if (number == 21) wgmma_fence();  // HERE: 21
  if (number == 22) bulk_load(tile, x + 1, 32, &barrier);  // HERE: 22
  out[t] = D[0][0];
}

extern "C" const char* run_mistake(int number, const float* x, float* out) {
  const CUtensorMap nothing{};
  switch (number) {
#define CASE(n) case n: mistake<n><<<1, n == 21 ? 64 : 128>>>(x, out, nothing); break;
    CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20) CASE(21) CASE(22)
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
