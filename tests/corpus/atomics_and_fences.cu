// Atomics beside plain accesses, and results that blocks hand to each other.
#include <cuda_runtime.h>

//! race <<<1, 64>>>
__global__ void plain_read_beside_an_atomic(const float* x, float* out, unsigned* count) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);
  __syncthreads();
  //! buggy:
  out[threadIdx.x] = sum;
}

//! race <<<1, 64>>>
__global__ void plain_write_beside_an_atomic(const float* x, float* out, unsigned* count) {
  __shared__ unsigned most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  if (threadIdx.x == 40) atomicMax(&most, 1000u);
  //! buggy: if (threadIdx.x == 40) most = 1000;
  atomicMax(&most, unsigned(x[threadIdx.x]));
  __syncthreads();
  out[threadIdx.x] = most;
}

//! race <<<1, 64>>>
__global__ void start_value_of_an_atomic(const float* x, float* out, unsigned* count) {
  __shared__ unsigned most;
  if (threadIdx.x == 0) most = 0;
  __syncthreads();
  //! buggy:
  atomicMax(&most, unsigned(x[threadIdx.x]));
  __syncthreads();
  out[threadIdx.x] = most;
}

// A counter is set back to 0 while another warp may still count.
//! race <<<1, 64>>>
__global__ void counter_set_back(const float* x, float* out, unsigned* count) {
  __shared__ unsigned counter;
  if (threadIdx.x == 0) counter = 0;
  __syncthreads();
  const unsigned mine = atomicAdd(&counter, 1u);
  __syncthreads();
  //! buggy:
  if (threadIdx.x == 0) counter = 0;
  out[threadIdx.x] = mine;
}

// The value is read by an atomic, but another block's may come between.
//! race <<<2, 32>>>
__global__ void plain_read_of_a_global_counter(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  const unsigned ticket = atomicAdd(&count[0], 1u);
  out[blockIdx.x] = ticket;
  //! buggy: out[blockIdx.x] = count[0];
}

// The last block adds up all blocks' results: each must be out before its block is counted.
//! race <<<3, 32>>>
__global__ void fence_before_the_count(const float* x, float* out, unsigned* count) {
  __shared__ bool last;
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  __threadfence();
  //! buggy:
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&count[0], 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  float sum = 0.f;
  for (int b = 0; b < gridDim.x; b++) sum += out[b * 32 + threadIdx.x];
  out[100 + threadIdx.x] = sum;
}

//! race <<<3, 32>>>
__global__ void fence_after_the_count(const float* x, float* out, unsigned* count) {
  __shared__ bool last;
  out[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&count[0], 1u) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  //! buggy:
  float sum = 0.f;
  for (int b = 0; b < gridDim.x; b++) sum += out[b * 32 + threadIdx.x];
  out[100 + threadIdx.x] = sum;
}

// One thread's fence covers the others' writes only if a barrier comes before it.
//! race <<<3, 64>>>
__global__ void barrier_before_the_count(const float* x, float* out, unsigned* count) {
  __shared__ bool last;
  out[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy:
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&count[0], 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  float sum = 0.f;
  for (int b = 0; b < gridDim.x; b++) sum += out[b * 64 + threadIdx.x];
  out[300 + threadIdx.x] = sum;
}

// A block's result behind a flag: the reader sees the flag, and must not see what was there before.
//! race <<<2, 32>>>
__global__ void flag_without_a_fence(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    __threadfence();
    //! buggy:
    atomicExch(&count[0], 1u);
  } else if (atomicAdd(&count[0], 0u)) {
    __threadfence();
    out[1] = out[0];
  }
}

//! race <<<2, 32>>>
__global__ void flag_read_without_a_fence(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    __threadfence();
    atomicExch(&count[0], 1u);
  } else if (atomicAdd(&count[0], 0u)) {
    __threadfence();
    //! buggy:
    out[1] = out[0];
  }
}

// The flag is set by an atomic, and read as if it were not.
//! race <<<2, 32>>>
__global__ void flag_read_plainly(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    atomicExch(&count[0], 1u);
  } else {
    out[0] = atomicAdd(&count[0], 0u) ? 1.f : 0.f;
    //! buggy: out[0] = count[0] ? 1.f : 0.f;
  }
}

// A fence of the block is not one of the device.
//! race <<<2, 32>>>
__global__ void fence_of_the_block_alone(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    __threadfence();
    //! buggy: __threadfence_block();
    atomicExch(&count[0], 1u);
  } else if (atomicAdd(&count[0], 0u)) {
    __threadfence();
    out[1] = out[0];
  }
}

//! race <<<2, 32>>>
__global__ void write_after_the_fence(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    //! buggy: __threadfence();
    __threadfence();
    //! buggy: out[0] = x[0];
    atomicExch(&count[0], 1u);
  } else if (atomicAdd(&count[0], 0u)) {
    __threadfence();
    out[1] = out[0];
  }
}

//! race <<<2, 32>>>
__global__ void read_before_the_flag(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    __threadfence();
    atomicExch(&count[0], 1u);
    return;
  }
  const unsigned ready = atomicAdd(&count[0], 0u);
  __threadfence();
  out[1] = ready ? out[0] : 0.f;
  //! buggy: out[1] = blockIdx.x ? out[0] : float(ready);
}

// Three warps read; the fourth writes when it knows of all of them.
//! race <<<1, 128>>>
__global__ void a_reader_not_waited_for(const float* x, float* out, unsigned* count) {
  __shared__ float value;
  const int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) value = x[0];
  __syncthreads();
  if (threadIdx.x % 32) return;
  if (warp < 3) {
    out[warp] = value;
    __threadfence();
    atomicAdd(&count[0], 1u);
    //! buggy: if (warp) atomicAdd(&count[0], 1u);
  } else {
    while (atomicAdd(&count[0], 0u) < 3) __nanosleep(20);
    //! buggy: while (atomicAdd(&count[0], 0u) < 2) __nanosleep(20);
    __threadfence();
    value = 0.f;
  }
}

// Blocks take turns, in the order of their numbers, to add to the same rows.
//! race <<<3, 32>>>
__global__ void turn_handed_on_without_a_fence(const float* x, float* out, unsigned* count) {
  if (threadIdx.x == 0)
    while (atomicAdd(&count[0], 0u) != blockIdx.x) {}
  __syncthreads();
  __threadfence();
  out[threadIdx.x] = (blockIdx.x ? out[threadIdx.x] : 0.f) + x[threadIdx.x];
  __threadfence();
  //! buggy:
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&count[0], 1u);
}

//! race <<<3, 64>>>
__global__ void turn_handed_on_too_early(const float* x, float* out, unsigned* count) {
  if (threadIdx.x == 0)
    while (atomicAdd(&count[0], 0u) != blockIdx.x) {}
  __syncthreads();
  __threadfence();
  out[threadIdx.x] = (blockIdx.x ? out[threadIdx.x] : 0.f) + x[threadIdx.x];
  __threadfence();
  __syncthreads();
  //! buggy:
  if (threadIdx.x == 0) atomicAdd(&count[0], 1u);
}

// A lock: what it guards must be out before it is free.
//! race <<<3, 32>>>
__global__ void lock_without_a_fence(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  while (atomicCAS(&count[0], 0u, 1u)) {}
  __threadfence();
  count[1] += unsigned(x[0]);
  __threadfence();
  //! buggy:
  atomicExch(&count[0], 0u);
}

// Within a block its own fence is enough, on both sides.
//! race <<<1, 64>>>
__global__ void fence_of_the_block_within_it(const float* x, float* out, unsigned* count) {
  __shared__ float value;
  if (threadIdx.x == 0) {
    value = x[0];
    __threadfence_block();
    //! buggy:
    atomicExch(&count[0], 1u);
  } else if (threadIdx.x == 32) {
    while (!atomicAdd(&count[0], 0u)) __nanosleep(20);
    __threadfence_block();
    out[0] = value;
  }
}

//! race <<<2, 32>>>
__global__ void reader_fences_its_block_alone(const float* x, float* out, unsigned* count) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    out[0] = x[0];
    __threadfence();
    atomicExch(&count[0], 1u);
  } else if (atomicAdd(&count[0], 0u)) {
    __threadfence();
    //! buggy: __threadfence_block();
    out[1] = out[0];
  }
}
