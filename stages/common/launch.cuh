// Introduced by: forward stage 2, tiled.
#pragma once

// By default a block gets at most 48 KB of dynamic shared memory. Each kernel must ask for more.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

// Of the current device. Introduced by: forward stage 18, split_kv.
inline int of_device(cudaDeviceAttr attribute) {
  int device, value;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}
inline int multiprocessors() { return of_device(cudaDevAttrMultiProcessorCount); }

// How much a block asks for, at least `bytes`, so that a multiprocessor has no room for more than its share
inline size_t shared_memory_of(int blocks, size_t bytes) {
  const int share = (blocks - 1) / multiprocessors() + 1;
  return max(bytes, size_t(of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / (share + 1)));
}

// cudaLaunchKernelEx(EarlyLaunch(blocks, threads, bytes, stream), kernel, arguments) is
// kernel<<<blocks, threads, bytes, stream>>>(arguments), but the kernel may start before the one in front of
// it in the stream has ended (programmatic dependent launch, CUDA C++ Programming Guide): when all blocks of
// that one have ended, or have called start_next_kernel(). So it must call wait_for_previous_kernel() before
// it touches what another kernel uses (ptx.cuh). Before sm_90, and if not `early`, it is a launch as
// any other.
// Introduced by: forward stage 18, split_kv.
struct EarlyLaunch {
  cudaLaunchAttribute attribute = {};
  cudaLaunchConfig_t config = {};

  EarlyLaunch(int blocks, dim3 threads, size_t bytes, cudaStream_t stream, bool early = true) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &attribute;
    constexpr int compiled_for[] = {__CUDA_ARCH_LIST__};       // 900 for sm_90; of several, the oldest first
    config.numAttrs = early && compiled_for[0] >= 900;
  }
  EarlyLaunch(const EarlyLaunch&) = delete;      // config points to the attribute
  operator const cudaLaunchConfig_t*() const { return &config; }
};
