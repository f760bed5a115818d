// Races in shared memory: between lanes, between warps, by the order of reads and writes.
#include <cuda_runtime.h>

//! race <<<1, 32>>>
__global__ void read_at_distance_1(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  //! buggy:
  out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

//! race <<<1, 32>>>
__global__ void read_at_distance_31(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  //! buggy:
  out[threadIdx.x] = threadIdx.x == 0 ? tile[31] : 0.f;
}

// A barrier of each warp does not order two of them.
//! race <<<1, 64>>>
__global__ void read_at_distance_32(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 32];
}

//! race <<<1, 32>>>
__global__ void write_after_read_at_distance_1(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  const float other = tile[threadIdx.x ^ 1];
  __syncwarp();
  //! buggy:
  tile[threadIdx.x] = other;
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void write_after_read_at_distance_32(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float other = tile[threadIdx.x ^ 32];
  __syncthreads();
  //! buggy: __syncwarp();
  tile[threadIdx.x] = other;
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race <<<1, 32>>>
__global__ void two_lanes_write(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: tile[threadIdx.x & ~1] = tile[threadIdx.x | 1] = x[threadIdx.x];
  __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void two_warps_write(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: tile[threadIdx.x % 32] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x % 32];
}

// Each half of the warp waits for itself alone.
//! race <<<1, 32>>>
__global__ void halves_of_a_warp(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  //! buggy: if (threadIdx.x < 16) __syncwarp(0x0000ffff); else __syncwarp(0xffff0000);
  out[threadIdx.x] = tile[threadIdx.x ^ 16];
}

//! race <<<1, 64>>>
__global__ void sum_without_atomics(const float* x, float* out, unsigned* count) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);
  //! buggy: sum += x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = sum;
}

//! race <<<1, 64>>>
__global__ void histogram(const float* x, float* out, unsigned* count) {
  __shared__ unsigned bins[8];
  if (threadIdx.x < 8) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[int(x[threadIdx.x]) % 8], 1u);
  //! buggy: bins[int(x[threadIdx.x]) % 8]++;
  __syncthreads();
  if (threadIdx.x < 8) out[threadIdx.x] = bins[threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void transpose_in_place(const float* x, float* out, unsigned* count) {
  __shared__ float tile[8][8];
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  tile[row][col] = x[threadIdx.x];
  __syncthreads();
  const float value = tile[col][row];
  __syncthreads();
  //! buggy:
  tile[row][col] = value;
  out[threadIdx.x] = tile[row][col];
}

// Inclusive sums: a round reads what the round before has written, and all read before any writes.
//! race <<<1, 64>>>
__global__ void scan_reads_before_writes(const float* x, float* out, unsigned* count) {
  __shared__ float sums[64];
  const int t = threadIdx.x;
  sums[t] = x[t];
  for (int distance = 1; distance < 64; distance *= 2) {
    __syncthreads();
    const float other = t >= distance ? sums[t - distance] : 0.f;
    __syncthreads();
    //! buggy:
    sums[t] += other;
  }
  out[t] = sums[t];
}

//! race <<<1, 64>>>
__global__ void scan_writes_before_reads(const float* x, float* out, unsigned* count) {
  __shared__ float sums[64];
  const int t = threadIdx.x;
  sums[t] = x[t];
  for (int distance = 1; distance < 64; distance *= 2) {
    __syncthreads();
    //! buggy:
    const float other = t >= distance ? sums[t - distance] : 0.f;
    __syncthreads();
    sums[t] += other;
  }
  out[t] = sums[t];
}

// Lanes have not been in step since Volta: volatile orders nothing.
//! race <<<1, 32>>>
__global__ void warp_synchronous_sum(const float* x, float* out, unsigned* count) {
  __shared__ volatile float sums[32];
  const int lane = threadIdx.x;
  sums[lane] = x[lane];
  for (int distance = 16; distance > 0; distance /= 2) {
    __syncwarp();
    //! buggy:
    if (lane < distance) sums[lane] = sums[lane] + sums[lane + distance];
  }
  if (lane == 0) out[0] = sums[0];
}

// A shuffle exchanges registers; it orders no accesses to memory.
//! race <<<1, 32>>>
__global__ void shuffle_as_a_barrier(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  const int lane = threadIdx.x;
  tile[lane] = x[lane];
  const float other = __shfl_xor_sync(0xffffffff, x[lane], 1);
  __syncwarp();
  //! buggy:
  out[lane] = tile[31 - lane] + other;
}

//! race <<<1, 64>>>
__global__ void producer_and_consumer_warp(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  if (threadIdx.x < 32) tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy:
  if (threadIdx.x >= 32) out[threadIdx.x] = tile[threadIdx.x - 32];
}

//! race <<<1, 64>>>
__global__ void one_thread_publishes(const float* x, float* out, unsigned* count) {
  __shared__ float scale;
  if (threadIdx.x == 63) scale = x[0];
  __syncthreads();
  //! buggy:
  out[threadIdx.x] = scale * x[threadIdx.x];
}

// Two elements in one word: reading, changing and writing back the word loses the neighbour's.
//! race <<<1, 32>>>
__global__ void halves_of_a_word(const float* x, float* out, unsigned* count) {
  __shared__ unsigned short halves[32];
  halves[threadIdx.x] = 1;
  __syncwarp();
  halves[threadIdx.x] += 2;
  //! buggy: reinterpret_cast<unsigned*>(halves)[threadIdx.x / 2] += 2 << threadIdx.x % 2 * 16;
  __syncwarp();
  out[threadIdx.x] = halves[threadIdx.x ^ 1];
}

//! race <<<1, 64>>>
__global__ void vectors_over_scalars(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy: __syncwarp();
  const float4 four = reinterpret_cast<const float4*>(tile)[15 - threadIdx.x / 4];
  out[threadIdx.x] = four.x + four.y + four.z + four.w;
}
