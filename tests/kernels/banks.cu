// One warp, one store to shared memory and one load, each lane at an index that it is given: for what a
// pattern of indices costs. results/counts.py measures it on a GPU, test_checker.py in the simulator.
#include <cuda_runtime.h>

template <class T> __global__ void banks_kernel(const int* index, T* out) {
  __shared__ T vectors[2048];
  const int lane = threadIdx.x, i = index[lane];   // below 0: this lane does nothing
  T v = out[lane];
  if (i >= 0) vectors[i] = v;  // HERE: store
  __syncwarp();
  if (i >= 0) v = vectors[i];  // HERE: load
  out[lane] = v;
}

extern "C" const char* run_banks(int bytes, const int* index, void* out) {
  if (bytes == 4) banks_kernel<float><<<1, 32>>>(index, static_cast<float*>(out));
  if (bytes == 8) banks_kernel<float2><<<1, 32>>>(index, static_cast<float2*>(out));
  if (bytes == 16) banks_kernel<float4><<<1, 32>>>(index, static_cast<float4*>(out));
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
