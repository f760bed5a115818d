// Introduced by: forward stage 2, tiled.
#pragma once

// By default a block gets at most 48 KB of dynamic shared memory. Each kernel must ask for more.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}
