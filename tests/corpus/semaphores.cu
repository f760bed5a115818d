// Blocks that wait for one another at counters in HBM: to add up in a fixed order, or to what is cleared.
#include <cuda_runtime.h>

#include "common/hopper.cuh"

// By one thread, which has waited for its sums
__device__ __forceinline__ void count_up(int* semaphore) {
  __threadfence();
  atomicAdd(semaphore, 1);
}

// Some blocks have more to do, and come to their sums last.
__device__ __forceinline__ void work(bool much) {
  for (int i = 0; i < 100 && much; i++) __nanosleep(1000);
}

//! race <<<3, 32>>> (x, reinterpret_cast<float*>(count + 2), reinterpret_cast<int*>(count))
__global__ void asked_without_acquiring(const float* x, float* sums, int* semaphore) {
  if (threadIdx.x) return;
  while (load_acquire(semaphore) < blockIdx.x) {}
  //! buggy: while (atomicAdd(semaphore, 0) < blockIdx.x) {}
  sums[0] += x[blockIdx.x];
  count_up(semaphore);
}

//! race <<<3, 32>>> (x, reinterpret_cast<float*>(count + 2), reinterpret_cast<int*>(count))
__global__ void counted_without_a_fence(const float* x, float* sums, int* semaphore) {
  if (threadIdx.x) return;
  while (load_acquire(semaphore) < blockIdx.x) {}
  sums[0] += x[blockIdx.x];
  count_up(semaphore);
  //! buggy: atomicAdd(semaphore, 1);
}

// The tile before this one is that of the block before it.
//! race <<<3, 32>>> (x, reinterpret_cast<float*>(count + 2), reinterpret_cast<int*>(count))
__global__ void a_turn_too_early(const float* x, float* sums, int* semaphore) {
  if (threadIdx.x) return;
  work(blockIdx.x == 0);
  while (blockIdx.x > 0 && load_acquire(semaphore) < blockIdx.x) {}
  //! buggy: while (blockIdx.x > 0 && load_acquire(semaphore) < int(blockIdx.x) - 1) {}
  sums[0] += x[blockIdx.x];
  count_up(semaphore);
}

// A lane knows whose turn it is; the others have to wait for it.
//! race <<<3, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void asked_by_a_lane_alone(const float* x, float* out, int* semaphore) {
  while (threadIdx.x == 0 && load_acquire(semaphore) < blockIdx.x) {}
  __syncwarp();
  //! buggy:
  out[threadIdx.x] = (blockIdx.x ? out[threadIdx.x] : 0.f) + x[threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) count_up(semaphore);
}

//! race <<<3, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void counted_by_a_lane_alone(const float* x, float* out, int* semaphore) {
  while (threadIdx.x == 0 && load_acquire(semaphore) < blockIdx.x) {}
  __syncwarp();
  out[threadIdx.x] = (blockIdx.x ? out[threadIdx.x] : 0.f) + x[threadIdx.x];
  __syncwarp();
  //! buggy:
  if (threadIdx.x == 0) count_up(semaphore);
}

// Each warp adds, one counts: when all have added.
//! race <<<3, 64>>> (x, reinterpret_cast<float*>(count + 2), reinterpret_cast<int*>(count))
__global__ void counted_by_each_warp(const float* x, float* sums, int* semaphore) {
  if (threadIdx.x % 32) return;
  const int warp = threadIdx.x / 32;
  work(blockIdx.x == 0 && warp == 1);
  while (blockIdx.x > 0 && load_acquire(semaphore) < 2 * blockIdx.x) {}
  //! buggy: while (blockIdx.x > 0 && load_acquire(semaphore) < blockIdx.x) {}
  sums[warp] += x[warp];
  count_up(semaphore);
}

// A tile has a semaphore of its own.
//! race <<<4, 32>>> (x, reinterpret_cast<float*>(count + 2), reinterpret_cast<int*>(count))
__global__ void semaphore_of_another_tile(const float* x, float* sums, int* semaphores) {
  if (threadIdx.x) return;
  const int tile = blockIdx.x % 2, before = blockIdx.x / 2;
  while (before > 0 && load_acquire(semaphores + tile) < before) {}
  sums[tile] += x[blockIdx.x];
  count_up(semaphores + tile);
  //! buggy: count_up(semaphores + 1 - tile);
}

// A sum that the copy engine makes is there when bulk_wait says so; bulk_wait_read says that its numbers have
// been read.
//! race <<<2, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void counted_when_it_is_read(const float* x, float* out, int* semaphore) {
  __shared__ __align__(16) float row[8];
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    for (int i = 0; i < 8; i++) out[i] = 0.f;
    for (int i = 0; i < 8; i++) row[i] = x[i];
    fence_proxy_async();
    bulk_add(out, row, sizeof row);
    bulk_commit();
    bulk_wait<0>();
    //! buggy: bulk_wait_read<0>();
    count_up(semaphore);
  } else {
    while (load_acquire(semaphore) < 1) {}
    out[8] = out[0];
  }
}

// Another warp counts what a copy adds, when the one that started it has said that it is there.
//! race <<<2, 64>>> (x, out, reinterpret_cast<int*>(count))
__global__ void counted_by_a_warp_that_has_not_waited(const float* x, float* out, int* semaphore) {
  __shared__ __align__(16) float row[8];
  if (threadIdx.x % 32) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    for (int i = 0; i < 8; i++) out[i] = 0.f;
    for (int i = 0; i < 8; i++) row[i] = x[i];
    fence_proxy_async();
    bulk_add(out, row, sizeof row);
    bulk_commit();
    bulk_wait<0>();
    count_up(semaphore);
    //! buggy:
  } else if (blockIdx.x == 0) {
    while (load_acquire(semaphore) < 1) {}
    //! buggy:
    count_up(semaphore);
    //! buggy: count_up(semaphore); count_up(semaphore);
  } else if (threadIdx.x == 0) {
    while (load_acquire(semaphore) < 2) {}
    out[8] = out[0];
  }
}

// Sums begin at 0, which another block has written.
//! race <<<2, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void added_before_they_are_cleared(const float* x, float* out, int* counter) {
  __shared__ __align__(16) float row[8];
  if (blockIdx.x == 0) {
    work(true);
    if (threadIdx.x < 8) out[threadIdx.x] = 0.f;
    __syncwarp();
    if (threadIdx.x == 0) count_release(counter);
  } else if (threadIdx.x == 0) {
    for (int i = 0; i < 8; i++) row[i] = x[i];
    fence_proxy_async();
    while (load_acquire(counter) < 1) {}
    //! buggy:
    fence_proxy_async_global();
    bulk_add(out, row, sizeof row);
    bulk_commit();
    bulk_wait<0>();
  }
}

// In a fixed order the first one stores, and the next one adds to that.
//! race <<<2, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void added_before_the_first_is_stored(const float* x, float* out, int* semaphore) {
  __shared__ __align__(16) float row[8];
  if (threadIdx.x) return;
  for (int i = 0; i < 8; i++) row[i] = x[8 * blockIdx.x + i];
  fence_proxy_async();
  work(blockIdx.x == 0);
  while (load_acquire(semaphore) < blockIdx.x) {}
  //! buggy:
  blockIdx.x ? bulk_add(out, row, sizeof row) : bulk_store(out, row, sizeof row);
  bulk_commit();
  bulk_wait<0>();
  count_release(semaphore);
}

// Two lanes have cleared a part each; lane 0 counts for both.
//! race <<<2, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void counted_before_the_warp_has_met(const float* x, float* out, int* counter) {
  if (blockIdx.x == 0) {
    if (threadIdx.x < 2) out[threadIdx.x] = 0.f;
    __syncwarp();
    //! buggy:
    if (threadIdx.x == 0) count_release(counter);
  } else if (threadIdx.x == 0) {
    while (load_acquire(counter) < 1) {}
    out[1] += x[1];
  }
}

// Three blocks add their parts, the last one waits for all, and converts.
//! race <<<4, 32>>> (x, out, reinterpret_cast<int*>(count))
__global__ void converted_before_the_last_part(const float* x, float* out, int* counter) {
  if (threadIdx.x) return;
  if (blockIdx.x < 3) {
    work(blockIdx.x == 2);
    out[blockIdx.x] = x[blockIdx.x];
    count_release(counter);
  } else {
    while (load_acquire(counter) < 3) {}
    //! buggy: while (load_acquire(counter) < 2) {}
    out[3] = out[0] + out[1] + out[2];
  }
}
