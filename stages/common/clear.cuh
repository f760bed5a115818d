// Counters that begin at 0. Introduced by: backward stage 33, semaphores.
#pragma once

__global__ void clear_kernel(int* counters, int count) {
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n < count) counters[n] = 0;
}
