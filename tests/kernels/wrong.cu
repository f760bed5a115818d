// Kernels with one mistake each, for the checker: test_checker.py finds the lines of a finding by the
// comments "// HERE: name" at their ends. With fixed = 1 each is right, and nothing is to be found.
#include <cuda_runtime.h>

#include "../../stages/common/launch.cuh"
#include "../../stages/common/ptx.cuh"

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// ------------------------------------------------------------------------------------------- shared memory
__global__ void barrier_before_use(const float* x, float* out, int fixed) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];  // HERE: barrier_before_use 1
  if (fixed) __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x];  // HERE: barrier_before_use 2
}
__global__ void barrier_after_use(const float* x, float* out, int fixed) {
  __shared__ float tile[64];
  float sum = 0.f;
  for (int j = 0; j < 2; j++) {
    tile[threadIdx.x] = x[64 * j + threadIdx.x];  // HERE: barrier_after_use 2
    __syncthreads();
    for (int k = 0; k < 64; k++) sum += tile[k];  // HERE: barrier_after_use 1
    if (fixed) __syncthreads();
  }
  out[threadIdx.x] = sum;
}
__global__ void barrier_too_early(const float* x, float* out, int fixed) {
  __shared__ float tile[2][64];
  if (!fixed) __syncthreads();
  tile[1][threadIdx.x] = x[threadIdx.x];  // HERE: barrier_too_early 1
  if (fixed) __syncthreads();
  out[threadIdx.x] = tile[1][(threadIdx.x + 32) % 64];  // HERE: barrier_too_early 2
}
// Each warp has a row of its own, so __syncwarp() is enough, but it is needed: a shuffle orders no memory.
__global__ void syncwarp_missing(const float* x, float* out, int fixed) {
  __shared__ float rows[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  rows[warp][lane] = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 1);  // HERE: syncwarp_missing 1
  const float other = __shfl_xor_sync(0xffffffff, x[threadIdx.x], 2);
  if (fixed) __syncwarp();
  out[threadIdx.x] = rows[warp][31 - lane] + other;  // HERE: syncwarp_missing 2
}
__global__ void syncwarp_of_half(const float* x, float* out, int fixed) {
  __shared__ float row[32];
  row[threadIdx.x] = x[threadIdx.x];  // HERE: syncwarp_of_half 1
  if (fixed) __syncwarp();
  else if (threadIdx.x < 16) __syncwarp(0x0000ffff);
  else __syncwarp(0xffff0000);
  out[threadIdx.x] = row[threadIdx.x ^ 16];  // HERE: syncwarp_of_half 2
}
__global__ void syncwarp_across_warps(const float* x, float* out, int fixed) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];  // HERE: syncwarp_across_warps 1
  __syncwarp();
  if (fixed) __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x ^ 32];  // HERE: syncwarp_across_warps 2
}
// Warp 1 synchronises with itself a few times, reads, and then writes: nothing says that warp 0 has read.
__global__ void write_after_two_reads(const float* x, float* out, int fixed) {
  __shared__ float tile[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) tile[lane] = x[lane];
  __syncthreads();
  if (warp == 1)
    for (int i = 0; i < 3; i++) __syncwarp();
  out[threadIdx.x] = tile[lane];  // HERE: write_after_two_reads 1
  if (fixed) __syncthreads();
  if (warp == 1) tile[lane] = 0.f;  // HERE: write_after_two_reads 2
}
__global__ void copied_by_memcpy(const float* x, float* out, int fixed) {
  __shared__ float tile[64][16];
  memcpy(tile[threadIdx.x], x, 16 * sizeof(float));  // HERE: copied_by_memcpy 1
  if (fixed) __syncthreads();
  out[threadIdx.x] = tile[63 - threadIdx.x][threadIdx.x % 16];  // HERE: copied_by_memcpy 2
}
// Double buffering: the next tile is loaded while this one is read, so it must go into the other buffer.
__global__ void same_buffer(const float* x, float* out, int fixed) {
  __shared__ float tile[2][64];
  tile[0][threadIdx.x] = x[threadIdx.x];
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    const int next = fixed ? (j + 1) % 2 : j % 2;
    if (j < 2) tile[next][threadIdx.x] = x[64 * (j + 1) + threadIdx.x];  // HERE: same_buffer 1
    sum += tile[j % 2][63 - threadIdx.x];  // HERE: same_buffer 2
    if (!fixed) __syncthreads();
  }
  out[threadIdx.x] = sum;
}
__global__ void sum_without_atomic(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncthreads();
  if (fixed) atomicAdd(&sum, x[threadIdx.x]);
  else sum += x[threadIdx.x];  // HERE: sum_without_atomic 1
  __syncthreads();
  out[threadIdx.x] = sum;
}
__global__ void read_beside_atomic(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);  // HERE: read_beside_atomic 1
  if (fixed) __syncthreads();
  out[threadIdx.x] = sum;  // HERE: read_beside_atomic 2
}
__global__ void shared_off_by_one(const float* x, float* out, int fixed) {
  __shared__ float a[64];
  __shared__ float b[64];
  b[threadIdx.x] = 0.f;
  a[threadIdx.x] = 0.f;
  __syncthreads();
  a[threadIdx.x + !fixed] = x[threadIdx.x];  // HERE: shared_off_by_one 1
  __syncthreads();
  out[threadIdx.x] = a[threadIdx.x] + b[threadIdx.x];
}
__global__ void shared_before_the_start(const float* x, float* out, int fixed) {
  __shared__ float before[16];
  __shared__ float a[64];
  const int t = threadIdx.x;
  if (t < 16) before[t] = 0.f;
  a[t] = x[t];
  __syncthreads();
  out[t] = fixed && t == 0 ? before[0] : a[t - 1];  // HERE: shared_before_the_start 1
}
__global__ void row_before_the_start(const float* x, float* out, int fixed) {
  __shared__ float a[2][32];
  const int t = threadIdx.x;
  for (int row = fixed ? 0 : -1; row < 2; row++) a[row][t] = x[t];  // HERE: row_before_the_start 1
  out[t] = a[0][t] + a[1][t];
}
__global__ void dynamic_before_the_start(const float* x, float* out, int fixed) {
  extern __shared__ float smem[];
  float* A_smem = smem;
  const int t = threadIdx.x;
  A_smem[t] = x[t];
  __syncthreads();
  out[t] = fixed && t == 0 ? 0.f : A_smem[t - 1];  // HERE: dynamic_before_the_start 1
}
__global__ void vector_past_the_end_of_shared(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float a[62];
  for (int k = threadIdx.x; k < 62; k += 16) a[k] = x[k];
  __syncthreads();
  const int i = fixed && threadIdx.x == 15 ? 0 : threadIdx.x;
  const float4 v = reinterpret_cast<float4*>(a)[i];  // HERE: vector_past_the_end_of_shared 1
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
__global__ void dynamic_too_small(const float* x, float* out) {
  extern __shared__ float smem[];
  float* A_smem = smem;
  float* B_smem = A_smem + 64;
  A_smem[threadIdx.x] = x[threadIdx.x];
  B_smem[threadIdx.x] = x[threadIdx.x];  // HERE: dynamic_too_small 1
  __syncthreads();
  out[threadIdx.x] = A_smem[63 - threadIdx.x] + B_smem[63 - threadIdx.x];  // HERE: dynamic_too_small 2
}
// The ragged last tile is not filled with zeros.
__global__ void tile_not_filled(const float* x, float* out, int fixed) {
  __shared__ float tile[8][8];
  const int row = threadIdx.x / 8, k = threadIdx.x % 8;
  if (row < 5) tile[row][k] = x[threadIdx.x];
  else if (fixed) tile[row][k] = 0.f;
  __syncthreads();
  float sum = 0.f;
  for (int r = 0; r < 8; r++) sum += tile[r][k];  // HERE: tile_not_filled 1
  out[threadIdx.x] = sum;
}

// ------------------------------------------------------------------------------------------- global memory
__global__ void off_by_one(const float* x, float* out, int n, int fixed) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (fixed ? i < n : i <= n) out[i] = x[i % n];  // HERE: off_by_one 1
}
__global__ void before_the_start(const float* x, float* out, int fixed) {
  const int i = threadIdx.x;
  out[i] = (fixed && i == 0 ? 0.f : x[i - 1]) + x[i];  // HERE: before_the_start 1
}
__global__ void wild_pointer(float* out, int fixed) {
  float* p = fixed ? out : nullptr;
  p[threadIdx.x] = 1.f;  // HERE: wild_pointer 1
}
__global__ void same_address(const float* x, float* out, int fixed) {
  out[fixed ? blockIdx.x * 32 + threadIdx.x : threadIdx.x] = x[threadIdx.x];  // HERE: same_address 1
}
// A block reads what another block writes: there is no order of blocks.
__global__ void reads_neighbour(float* out, int fixed) {
  out[blockIdx.x * 32 + threadIdx.x] = 1.f;  // HERE: reads_neighbour 1
  if (!fixed && blockIdx.x) out[64 + threadIdx.x] = out[threadIdx.x];  // HERE: reads_neighbour 2
}
// The block that comes last adds up what all blocks have written (the "threadfence reduction").
__global__ void fence_missing(float* out, unsigned* count, int fixed) {
  __shared__ bool last;
  if (threadIdx.x < 32) out[1 + blockIdx.x * 32 + threadIdx.x] = 1.f;  // HERE: fence_missing 1
  __syncthreads();
  if (threadIdx.x == 0) {
    if (fixed) __threadfence();
    last = atomicAdd(count, 1) == gridDim.x - 1;
    if (fixed) __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  float sum = 0.f;
  for (int i = 0; i < 32 * gridDim.x; i++) sum += out[1 + i];  // HERE: fence_missing 2
  out[0] = sum;
}
__global__ void misaligned(const float* x, float* out, int fixed) {
  const float4 v = *reinterpret_cast<const float4*>(x + 4 * threadIdx.x + !fixed);  // HERE: misaligned 1
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}

// ------------------------------------------------------------------------------------------- barriers
__global__ void barrier_for_some(const float* x, float* out, int n, int fixed) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (fixed || threadIdx.x < n) __syncthreads();  // HERE: barrier_for_some 1
  __syncwarp();  // HERE: barrier_for_some 2
  if (threadIdx.x < n) out[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
__global__ void barrier_in_loop(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  const int rounds = fixed ? 2 : 1 + threadIdx.x % 32 / 16;
  for (int i = 0; i < rounds; i++) {
    __syncthreads();  // HERE: barrier_in_loop 1
    if (threadIdx.x == i) sum += x[i];
  }
  __syncwarp();  // HERE: barrier_in_loop 2
  if (fixed) __syncthreads();
  out[threadIdx.x] = fixed ? sum : 0.f;
}
__global__ void two_barriers(const float* x, float* out, int fixed) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  if (fixed) {
    __syncthreads();
  } else if (threadIdx.x < 32) {
    __syncthreads();  // HERE: two_barriers 1
  } else {
    __syncthreads();  // HERE: two_barriers 2
  }
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// The last round of a reduction reads what another thread has just written.
__global__ void barrier_in_reduction(const float* x, float* out, int fixed) {
  __shared__ float sums[64];
  sums[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  for (int distance = 32; distance > 0; distance /= 2) {
    const int other = threadIdx.x + distance;
    if (threadIdx.x < distance) sums[threadIdx.x] += sums[other];  // HERE: barrier_in_reduction 1
    if (fixed) __syncthreads();
  }
  if (threadIdx.x == 0) out[0] = sums[0];
}
// All fence, then one thread counts the block for all; and all of the last block fence before they read.
__global__ void fence_by_all(const float* x, float* out, unsigned* count, int fixed) {
  __shared__ bool last;
  out[32 + blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];  // HERE: fence_by_all 1
  if (fixed) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(count, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int b = 1; b <= gridDim.x; b++)
    out[threadIdx.x] += out[b * 32 + threadIdx.x];  // HERE: fence_by_all 2
}
__global__ void read_after_own_atomic(const float* x, float* out, int fixed) {
  atomicAdd(&out[fixed ? blockIdx.x : 0], x[threadIdx.x]);  // HERE: read_after_own_atomic 1
  __syncthreads();
  if (threadIdx.x) return;
  out[100 + blockIdx.x] = out[fixed ? blockIdx.x : 0];  // HERE: read_after_own_atomic 2
}
__global__ void barrier_before_atomic(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;  // HERE: barrier_before_atomic 1
  if (fixed) __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);  // HERE: barrier_before_atomic 2
  __syncthreads();
  out[threadIdx.x] = sum;
}
__global__ void read_before_atomic(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 1.f;
  __syncthreads();
  if (threadIdx.x == 0) out[64] = sum;  // HERE: read_before_atomic 1
  if (fixed) __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);  // HERE: read_before_atomic 2
}
// Lane 2 knows of lane 1's atomic, not of lane 0's.
__global__ void atomic_of_a_third(const float* x, float* out, int fixed) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncwarp();
  if (threadIdx.x < 3) atomicAdd(&sum, x[threadIdx.x]);  // HERE: atomic_of_a_third 1
  if (fixed) __syncwarp();
  if (threadIdx.x == 1 || threadIdx.x == 2) __syncwarp(6);
  if (threadIdx.x == 2) out[0] = sum;  // HERE: atomic_of_a_third 2
}
// Shared memory lies at the same address in every block, and is not the same.
__global__ void shared_atomic_between_blocks(float* out, unsigned* count, int fixed) {
  __shared__ unsigned mine;
  if (threadIdx.x) return;
  mine = 0;
  unsigned* counter = fixed ? count : &mine;
  if (blockIdx.x == 0) out[0] = 1.f;  // HERE: shared_atomic_between_blocks 1
  __threadfence();
  const bool first = atomicAdd(counter, 1) == 0;
  __threadfence();
  if (blockIdx.x && first != fixed) out[1] = out[0];  // HERE: shared_atomic_between_blocks 2
}
__global__ void row_past_the_end(const float* x, float* out, int fixed) {
  __shared__ float a[8][33];
  __shared__ float b[8][33];
  b[threadIdx.x / 32][threadIdx.x % 32] = 0.f;
  for (int row = 0; row < 8 + !fixed; row++)
    if (threadIdx.x < 32) a[row][threadIdx.x] = x[threadIdx.x];  // HERE: row_past_the_end 1
  __syncthreads();
  out[threadIdx.x] = a[threadIdx.x / 32][threadIdx.x % 32] + b[threadIdx.x / 32][threadIdx.x % 32];
}
__global__ void vector_past_the_end(unsigned* count, int fixed) {
  if (fixed) *count = 1;
  else *reinterpret_cast<uint2*>(count) = make_uint2(1, 2);  // HERE: vector_past_the_end 1
}

// ------------------------------------------------------------------------------------------ matrices, copies
// Lane l gets of row l / 4 what that lane's neighbours wrote.
__global__ void ldmatrix_before_syncwarp(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  if (lane < 16)
    for (int k = 0; k < 4; k++) rows[lane][k] = x[4 * lane + k];  // HERE: ldmatrix_before_syncwarp 1
  if (fixed) __syncwarp();
  uint32_t two[2];
  ldmatrix_x2(two, shared_address(rows[lane % 16]));  // HERE: ldmatrix_before_syncwarp 2
  out[lane] = __uint_as_float(two[0] ^ two[1]);
}
__global__ void ldmatrix_of_nothing(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  if (lane < 15 + fixed)
    for (int k = 0; k < 4; k++) rows[lane][k] = x[4 * lane + k];
  __syncwarp();
  uint32_t two[2];
  ldmatrix_x2_trans(two, shared_address(rows[lane % 16]));  // HERE: ldmatrix_of_nothing 1
  out[lane] = __uint_as_float(two[0] ^ two[1]);
}
__global__ void ldmatrix_past_the_end(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  if (lane < 16)
    for (int k = 0; k < 4; k++) rows[lane][k] = x[4 * lane + k];
  __syncwarp();
  uint32_t two[2];
  ldmatrix_x2(two, shared_address(rows[fixed ? lane % 16 : lane % 16 + 1]));  // HERE: ldmatrix_past_the_end 1
  out[lane] = __uint_as_float(two[0] ^ two[1]);
}
__global__ void stmatrix_before_syncwarp(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float rows[16][4];
  const int lane = threadIdx.x;
  const uint32_t two[2] = {__float_as_uint(x[lane]), __float_as_uint(x[lane + 32])};
  stmatrix_x2(shared_address(rows[lane % 16]), two);  // HERE: stmatrix_before_syncwarp 1
  if (fixed) __syncwarp();
  out[lane] = rows[lane / 2][lane % 4];  // HERE: stmatrix_before_syncwarp 2
}
__global__ void copy_not_waited_for(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * (t % 32));  // HERE: copy_not_waited_for 1
  cp_async_commit();
  if (fixed) cp_async_wait<0>();
  out[t] = tile[4 * t];  // HERE: copy_not_waited_for 2
  cp_async_wait<0>();
}
// A thread waits for its own copies only: the others need the barrier after that.
__global__ void copy_waited_for_too_late(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * (t % 32));  // HERE: copy_waited_for_too_late 1
  cp_async_commit();
  if (!fixed) __syncthreads();
  cp_async_wait<0>();
  if (fixed) __syncthreads();
  out[t] = tile[4 * (63 - t)];  // HERE: copy_waited_for_too_late 2
}
// Of three groups the last may still be under way, and it is read.
__global__ void copy_of_a_later_group(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[3][256];
  const int t = threadIdx.x;
  for (int j = 0; j < 3; j++) {
    cp_async_16(shared_address(tile[j] + 4 * t), x + 4 * (t % 32));  // HERE: copy_of_a_later_group 1
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  out[t] = tile[fixed ? 1 : 2][4 * (63 - t)];  // HERE: copy_of_a_later_group 2
  cp_async_wait<0>();
}
__global__ void copy_over_what_is_read(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) tile[4 * t + k] = x[t];
  __syncthreads();
  out[t] = tile[4 * (63 - t)];  // HERE: copy_over_what_is_read 1
  if (fixed) __syncthreads();
  cp_async_16(shared_address(tile + 4 * t), x);  // HERE: copy_over_what_is_read 2
  cp_async_commit();
  cp_async_wait<0>();
}
__global__ void write_over_a_copy(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x);  // HERE: write_over_a_copy 1
  cp_async_commit();
  if (fixed) cp_async_wait<0>();
  tile[4 * t] = 1.f;  // HERE: write_over_a_copy 2
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}
__global__ void two_copies_to_one_place(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x);  // HERE: two_copies_to_one_place 1
  cp_async_commit();
  if (fixed) cp_async_wait<0>();
  cp_async_16(shared_address(tile + 4 * t), x + 4);  // HERE: two_copies_to_one_place 2
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}
__global__ void copy_from_past_the_end(const float* x, float* out, int fixed) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x, bytes = fixed && 4 * t >= 200 ? 0 : 16;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t, bytes);  // HERE: copy_from_past_the_end 1
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

extern "C" const char* run_wrong(int which, const float* x, float* out, unsigned* count, int fixed) {
  switch (which) {
    case 0: barrier_before_use<<<1, 64>>>(x, out, fixed); break;
    case 1: barrier_after_use<<<1, 64>>>(x, out, fixed); break;
    case 2: barrier_too_early<<<1, 64>>>(x, out, fixed); break;
    case 3: syncwarp_missing<<<1, 64>>>(x, out, fixed); break;
    case 4: syncwarp_of_half<<<1, 32>>>(x, out, fixed); break;
    case 5: syncwarp_across_warps<<<1, 64>>>(x, out, fixed); break;
    case 6: same_buffer<<<1, 64>>>(x, out, fixed); break;
    case 7: sum_without_atomic<<<1, 64>>>(x, out, fixed); break;
    case 8: read_beside_atomic<<<1, 64>>>(x, out, fixed); break;
    case 9: shared_off_by_one<<<1, 64>>>(x, out, fixed); break;
    case 10: dynamic_too_small<<<1, 64, fixed ? 512 : 508>>>(x, out); break;
    case 11: tile_not_filled<<<1, 64>>>(x, out, fixed); break;
    case 12: off_by_one<<<7, 32>>>(x, out, 200, fixed); break;
    case 13: before_the_start<<<1, 64>>>(x, out, fixed); break;
    case 14: wild_pointer<<<1, 64>>>(out, fixed); break;
    case 15: same_address<<<2, 32>>>(x, out, fixed); break;
    case 16: reads_neighbour<<<2, 32>>>(out, fixed); break;
    case 17: fence_missing<<<3, 64>>>(out, count, fixed); break;
    case 18: misaligned<<<1, 32>>>(x, out, fixed); break;
    case 19: barrier_for_some<<<1, 64>>>(x, out, 50, fixed); break;
    case 20: barrier_in_loop<<<1, 64>>>(x, out, fixed); break;
    case 21: two_barriers<<<1, 64>>>(x, out, fixed); break;
    case 22: write_after_two_reads<<<1, 64>>>(x, out, fixed); break;
    case 23: copied_by_memcpy<<<1, 64>>>(x, out, fixed); break;
    case 24: barrier_in_reduction<<<1, 64>>>(x, out, fixed); break;
    case 25: fence_by_all<<<3, 32>>>(x, out, count, fixed); break;
    case 26: read_after_own_atomic<<<4, 32>>>(x, out, fixed); break;
    case 27: shared_atomic_between_blocks<<<2, 32>>>(out, count, fixed); break;
    case 28: row_past_the_end<<<1, 64>>>(x, out, fixed); break;
    case 29: vector_past_the_end<<<1, 1>>>(count, fixed); break;
    case 30: barrier_before_atomic<<<1, 64>>>(x, out, fixed); break;
    case 31: read_before_atomic<<<1, 64>>>(x, out, fixed); break;
    case 32: atomic_of_a_third<<<1, 32>>>(x, out, fixed); break;
    case 33: ldmatrix_before_syncwarp<<<1, 32>>>(x, out, fixed); break;
    case 34: ldmatrix_of_nothing<<<1, 32>>>(x, out, fixed); break;
    case 35: ldmatrix_past_the_end<<<1, 32>>>(x, out, fixed); break;
    case 36: stmatrix_before_syncwarp<<<1, 32>>>(x, out, fixed); break;
    case 37: copy_not_waited_for<<<1, 64>>>(x, out, fixed); break;
    case 38: copy_waited_for_too_late<<<1, 64>>>(x, out, fixed); break;
    case 39: copy_of_a_later_group<<<1, 64>>>(x, out, fixed); break;
    case 40: copy_over_what_is_read<<<1, 64>>>(x, out, fixed); break;
    case 41: write_over_a_copy<<<1, 64>>>(x, out, fixed); break;
    case 42: two_copies_to_one_place<<<1, 64>>>(x, out, fixed); break;
    case 43: copy_from_past_the_end<<<1, 64>>>(x, out, fixed); break;
    case 44: shared_before_the_start<<<1, 64>>>(x, out, fixed); break;
    case 45: row_before_the_start<<<1, 32>>>(x, out, fixed); break;
    case 46: dynamic_before_the_start<<<1, 64, 256>>>(x, out, fixed); break;
    case 47: vector_past_the_end_of_shared<<<1, 16>>>(x, out, fixed); break;
  }
  return result();
}

// Reads by `lines` different lines, ten instructions each, of what nothing has written
#define TEN_READS sum += *p; sum += *p; sum += *p; sum += *p; sum += *p; \
                  sum += *p; sum += *p; sum += *p; sum += *p; sum += *p;
__global__ void many_mistakes(float* out, int lines) {
  __shared__ float a;
  volatile float* p = &a;
  if (lines == 0) a = 0.f;
  float sum = 0.f;
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  TEN_READS
  if (lines > 10) sum += *p;
  out[0] = sum;
}
extern "C" const char* run_many_mistakes(float* out, int lines) {
  many_mistakes<<<1, 1>>>(out, lines);
  return result();
}

// ------------------------------------------------------------------------------------------- what it costs
__global__ void transpose_unpadded(const float* x, float* out, int n) {
  __shared__ float tile[32][32];
  const int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  tile[threadIdx.y][threadIdx.x] = x[row * n + column];
  __syncthreads();
  out[(blockIdx.x * 32 + threadIdx.y) * n + blockIdx.y * 32 + threadIdx.x] =
      tile[threadIdx.x][threadIdx.y];  // HERE: unpadded
}
__global__ void transpose_padded(const float* x, float* out, int n) {
  __shared__ float tile[32][33];
  const int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  tile[threadIdx.y][threadIdx.x] = x[row * n + column];
  __syncthreads();
  out[(blockIdx.x * 32 + threadIdx.y) * n + blockIdx.y * 32 + threadIdx.x] =
      tile[threadIdx.x][threadIdx.y];  // HERE: padded
}
__global__ void transpose_strided(const float* x, float* out, int n) {
  const int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
  out[column * n + row] = x[row * n + column];  // HERE: strided
}
__global__ void copy_by_float4(const float4* x, float4* out) {
  out[threadIdx.x] = x[threadIdx.x];  // HERE: float4
}
__global__ void copy_every_second(const float* x, float* out) {
  if (threadIdx.x % 2 == 0) out[threadIdx.x] = x[threadIdx.x];  // HERE: every second
}
__global__ void copy_shifted(const float* x, float* out) {
  out[threadIdx.x] = x[threadIdx.x + 4];  // HERE: shifted
}
__global__ void vectors_in_shared(const float4* x, float4* out, int pitch) {
  extern __shared__ float4 V_smem[];
  const int row = threadIdx.x / 4, k = threadIdx.x % 4;
  V_smem[threadIdx.x] = x[threadIdx.x];  // HERE: vectors in a row
  __syncthreads();
  out[threadIdx.x] = V_smem[threadIdx.x % 8 * pitch];  // HERE: vectors in a column
  if (k == 0) out[32 + row] = V_smem[5];  // HERE: one vector for all
}
extern "C" const char* run_cost(int which, const float* x, float* out, int n) {
  auto* x4 = reinterpret_cast<const float4*>(x);
  auto* out4 = reinterpret_cast<float4*>(out);
  const dim3 grid(n / 32, n / 32), block(32, 32);
  switch (which) {
    case 0: transpose_unpadded<<<grid, block>>>(x, out, n); break;
    case 1: transpose_padded<<<grid, block>>>(x, out, n); break;
    case 2: transpose_strided<<<grid, block>>>(x, out, n); break;
    case 3: copy_by_float4<<<1, 64>>>(x4, out4); break;
    case 4: copy_every_second<<<1, 64>>>(x, out); break;
    case 5: copy_shifted<<<1, 64>>>(x, out); break;
    case 6: vectors_in_shared<<<1, 32, 1024>>>(x4, out4, n); break;
  }
  return result();
}

// ------------------------------------------------------------------------------------------- right, but odd
// Neighbouring bytes and halves of a word belong to different threads; __device__ variables; structs.
struct Three { float x, y, z; };
struct Padded { float value; bool flag; };
__device__ int counter;
__device__ const int table[4] = {3, 1, 2, 0};
__global__ void odd_but_right(const unsigned char* bytes, unsigned char* out, Three* threes, short* halves) {
  __shared__ unsigned char byte_smem[65];
  __shared__ short half_smem[64];
  __shared__ Three three_smem[64];
  const int t = threadIdx.x;
  byte_smem[t] = bytes[t];
  half_smem[t] = halves[t];
  three_smem[t] = threes[t];
  if (t == 0) byte_smem[64] = 1;
  atomicAdd(&counter, table[t % 4]);
  __shared__ Padded padded_smem[64];
  padded_smem[t].value = 1.f;
  padded_smem[t].flag = true;
  __syncthreads();
  const Padded other = padded_smem[63 - t];   // three bytes of it were never written
  if (!other.flag) out[0] = 1;
  byte_smem[t] ^= byte_smem[t];
  __syncthreads();
  out[t] = byte_smem[63 - t] + byte_smem[64];
  halves[t] = half_smem[63 - t];
  threes[t] = three_smem[63 - t];
}
extern "C" const char* run_odd_but_right(const unsigned char* bytes, unsigned char* out, Three* threes,
                                         short* halves) {
  odd_but_right<<<1, 64>>>(bytes, out, threes, halves);
  return result();
}

// Many threads of many blocks, each ordered with others by atomics between fences
__global__ void fences(unsigned* count) {
  for (int i = 0; i < 4; i++) {
    __threadfence();
    atomicAdd(count, 1);
    __threadfence();
  }
}
extern "C" const char* run_fences(unsigned* count) {
  fences<<<20, 64>>>(count);
  return result();
}

// All the shared memory that a block can have; its dynamic part by two names; pointers X_smem of all kinds.
__device__ float from_the_end(int i) {
  extern __shared__ float also_smem[];
  return also_smem[63 - i];
}
struct __align__(16) Parts {
  float* K_smem = nullptr;
  static size_t distance(float* Q_smem) {
    float* V_smem = Q_smem + 4;
    return V_smem - Q_smem;
  }
};
__global__ void all_of_shared_memory(const float* x, float* out) {
  extern __shared__ float smem[];
  __shared__ float a[64];
  __shared__ float b[60];
  __shared__ unsigned flag;
  const int t = threadIdx.x;
  if (t == 0) atomicExch(&flag, 2u);
  void* raw_smem = smem;
  volatile float* volatile_smem = static_cast<float*>(raw_smem);
  for (const float* p_smem = x + t; p_smem < x + t + 1; p_smem++) volatile_smem[t] = *p_smem;
  a[t] = x[t];
  if (t < 60) b[t] = a[t];
  Parts parts;
  if (t == 70) *parts.K_smem = 1.f;
  else *(parts.K_smem = smem + 64 + t) = 2.f;
  __syncthreads();
  out[t] = from_the_end(t) + a[t] + b[t % 60] + *parts.K_smem + flag;
}
extern "C" const char* run_all_of_shared_memory(const float* x, float* out, int bytes) {
  static const cudaError_t once = cudaFuncSetAttribute(
      all_of_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (once != cudaSuccess || Parts::distance(out) != 4) return "not set up";
  all_of_shared_memory<<<1, 64, bytes>>>(x, out);
  return result();
}
// Reads what the kernel before writes, and writes what that one reads, which may still run.
__global__ void copied(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x]; }
__global__ void too_early(float* x, float* out, int fixed) {
  const int t = threadIdx.x;
  if (fixed || t >= 40) wait_for_previous_kernel();
  out[64 + t] = 1.f;                        // nobody else uses it
  x[t] = out[63 - t];  // HERE: too_early
}
extern "C" const char* run_too_early(float* x, float* out, int fixed) {
  copied<<<1, 64>>>(x, out);
  cudaLaunchKernelEx(EarlyLaunch(1, 64, 0, nullptr), too_early, x, out, fixed);
  return result();
}
// Between two kernels one that touches nothing of theirs. It waits: 0: not; 1: before it lets the next one
// start; 2: after; 3: and that starts when this one ends.
__global__ void between(int waits) {
  if (waits == 2) start_next_kernel();
  if (waits && threadIdx.x == 5) wait_for_previous_kernel();
  if (waits == 1) __syncthreads();
  if (waits == 1 && threadIdx.x == 5) start_next_kernel();
}
__global__ void reads_two_back(float* out, int waiting_blocks) {
  if (blockIdx.x < waiting_blocks) wait_for_previous_kernel();
  out[64 + 64 * blockIdx.x + threadIdx.x] = out[threadIdx.x];  // HERE: two_back
}
extern "C" const char* run_two_back(float* x, float* out, int between_waits, int waiting_blocks) {
  copied<<<1, 64>>>(x, out);
  cudaLaunchKernelEx(EarlyLaunch(2, 64, 0, nullptr), between, between_waits);
  cudaLaunchKernelEx(EarlyLaunch(2, 64, 0, nullptr), reads_two_back, out, waiting_blocks);
  return result();
}
