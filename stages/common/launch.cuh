// Introduced by: forward stage 2, tiled.
#pragma once

// A block gets up to 48 KB of dynamic shared memory by default; more must be asked for, kernel by kernel.
template <class Kernel>
cudaError_t allow_shared_memory(Kernel kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}
