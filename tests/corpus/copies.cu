// cp.async: waits that are too weak, groups miscounted, buffers used too early.
#include <cuda_runtime.h>

#include "common/ptx.cuh"

//! race <<<1, 32>>>
__global__ void no_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  out[t] = tile[4 * t];
}

//! race <<<1, 32>>>
__global__ void wait_that_leaves_a_group(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy: cp_async_wait<1>();
  out[t] = tile[4 * t];
}

// What is not committed belongs to no group, and no wait is for it.
//! race <<<1, 32>>>
__global__ void no_commit(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  //! buggy:
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! race <<<1, 32>>>
__global__ void commit_before_the_copy(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_commit();
  cp_async_commit();
  //! buggy: cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! race <<<1, 32>>>
__global__ void wait_before_the_copy(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_wait<0>();
  cp_async_commit();
  //! buggy: cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_wait<0>();
  //! buggy: cp_async_commit();
  out[t] = tile[4 * t];
}

// K and V in groups of their own: of two, the first is K.
//! race <<<1, 32>>>
__global__ void second_of_two_groups(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float K_smem[128];
  __shared__ __align__(16) float V_smem[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(K_smem + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_16(shared_address(V_smem + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<1>();
  float sum = K_smem[4 * t];
  //! buggy: float sum = V_smem[4 * t];
  cp_async_wait<0>();
  sum += V_smem[4 * t];
  out[t] = sum;
}

//! race <<<1, 32>>>
__global__ void two_tiles_in_one_group(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float K_smem[128];
  __shared__ __align__(16) float V_smem[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(K_smem + 4 * t), x + 4 * t);
  cp_async_commit();
  //! buggy:
  cp_async_16(shared_address(V_smem + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<1>();
  out[t] = K_smem[4 * t];
  cp_async_wait<0>();
  out[100 + t] = V_smem[4 * t];
}

// Three buffers. In the last rounds nothing is copied any more; without an empty group the wait for all but
// one leaves the tile that is used.
//! race <<<1, 64>>>
__global__ void no_empty_groups_at_the_end(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[3][256];
  const int t = threadIdx.x, tiles = 3;
  for (int j = 0; j < 2; j++) {
    cp_async_16(shared_address(tile[j] + 4 * t), x + 4 * (64 * j + t));
    cp_async_commit();
  }
  float sum = 0.f;
  for (int j = 0; j < tiles; j++) {
    cp_async_wait<1>();
    __syncthreads();
    if (j + 2 < tiles) cp_async_16(shared_address(tile[(j + 2) % 3] + 4 * t), x + 4 * (64 * (j + 2) + t));
    cp_async_commit();
    //! buggy: if (j + 2 < tiles) cp_async_commit();
    sum += tile[j % 3][4 * (63 - t)];
  }
  out[t] = sum;
}

//! race <<<1, 64>>>
__global__ void wait_for_one_group_less(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[3][256];
  const int t = threadIdx.x, tiles = 3;
  for (int j = 0; j < 2; j++) {
    cp_async_16(shared_address(tile[j] + 4 * t), x + 4 * (64 * j + t));
    cp_async_commit();
  }
  float sum = 0.f;
  for (int j = 0; j < tiles; j++) {
    cp_async_wait<1>();
    //! buggy: cp_async_wait<2>();
    __syncthreads();
    if (j + 2 < tiles) cp_async_16(shared_address(tile[(j + 2) % 3] + 4 * t), x + 4 * (64 * (j + 2) + t));
    cp_async_commit();
    sum += tile[j % 3][4 * (63 - t)];
  }
  out[t] = sum;
}

// The buffer of the tile before, which other warps may still read.
//! race <<<1, 64>>>
__global__ void buffer_used_too_early(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[2][256];
  const int t = threadIdx.x, tiles = 3;
  cp_async_16(shared_address(tile[0] + 4 * t), x + 4 * t);
  cp_async_commit();
  float sum = 0.f;
  for (int j = 0; j < tiles; j++) {
    cp_async_wait<0>();
    __syncthreads();
    const int next = (j + 1) % 2;
    //! buggy: const int next = j % 2;
    if (j + 1 < tiles) cp_async_16(shared_address(tile[next] + 4 * t), x + 4 * (64 * (j + 1) + t));
    cp_async_commit();
    sum += tile[j % 2][4 * (63 - t)];
  }
  out[t] = sum;
}

// One buffer too few: the copy goes where the tile in use is.
//! race <<<1, 64>>>
__global__ void two_buffers_for_three(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[3][256];
  const int t = threadIdx.x, tiles = 3, buffers = 3;
  //! buggy: const int t = threadIdx.x, tiles = 3, buffers = 2;
  for (int j = 0; j < 2; j++) {
    cp_async_16(shared_address(tile[j] + 4 * t), x + 4 * (64 * j + t));
    cp_async_commit();
  }
  float sum = 0.f;
  for (int j = 0; j < tiles; j++) {
    cp_async_wait<1>();
    __syncthreads();
    const int next = (j + 2) % buffers;
    if (j + 2 < tiles) cp_async_16(shared_address(tile[next] + 4 * t), x + 4 * (64 * (j + 2) + t));
    cp_async_commit();
    sum += tile[j % buffers][4 * (63 - t)];
  }
  out[t] = sum;
}

//! race <<<1, 64>>>
__global__ void barrier_before_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy: __syncthreads();
  __syncthreads();
  //! buggy: cp_async_wait<0>();
  out[t] = tile[4 * (63 - t)];
}

//! race <<<1, 64>>>
__global__ void copy_over_what_is_read(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) tile[4 * t + k] = x[k];
  __syncthreads();
  out[t] = tile[4 * (63 - t)];
  __syncthreads();
  //! buggy:
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  out[100 + t] = tile[4 * t];
}

//! race <<<1, 32>>>
__global__ void write_over_a_copy(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  tile[4 * t] = 1.f;
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! race <<<1, 32>>>
__global__ void two_copies_to_one_place(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t + 128);
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! race <<<1, 64>>>
__global__ void copies_of_two_threads_to_one_place(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_16(shared_address(tile + 4 * (t | 32)), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (t >= 32) out[t] = tile[4 * t];
}

// The source must stay as it is until the copy has been made.
//! race <<<1, 32>>>
__global__ void source_overwritten(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) out[4 * t + k] = x[k];
  cp_async_16(shared_address(tile + 4 * t), out + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  out[4 * t] = 0.f;
  cp_async_wait<0>();
  out[200 + t] = tile[4 * t];
}

//! race <<<1, 64>>>
__global__ void source_overwritten_by_another_thread(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) out[4 * t + k] = x[k];
  cp_async_16(shared_address(tile + 4 * t), out + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  __syncthreads();
  out[4 * (63 - t)] = 0.f;
  cp_async_wait<0>();
  out[300 + t] = tile[4 * t];
}

//! race <<<1, 64>>>
__global__ void source_not_yet_written(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) out[4 * t + k] = x[k];
  __syncthreads();
  //! buggy:
  cp_async_16(shared_address(tile + 4 * t), out + 4 * (63 - t));
  cp_async_commit();
  cp_async_wait<0>();
  out[300 + t] = tile[4 * t];
}

// A block must not end before its copies: its shared memory may be another's by then.
//! race or copy <<<1, 32>>>
__global__ void copy_that_outlives_its_block(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  cp_async_commit();
  out[t] = x[t];
  cp_async_wait<0>();
  //! buggy:
}

//! race <<<1, 32>>>
__global__ void ldmatrix_before_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float rows[32][4];
  const int lane = threadIdx.x;
  cp_async_16(shared_address(rows[lane]), x + 4 * lane);
  cp_async_commit();
  cp_async_wait<0>();
  //! buggy:
  __syncwarp();
  uint32_t fragment[4];
  ldmatrix_x4(fragment, shared_address(rows[lane]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[3]);
  cp_async_wait<0>();
}

//! out of bounds <<<1, 64>>>
__global__ void copy_from_past_the_end(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x, i = 800 + 4 * t;
  cp_async_16(shared_address(tile + 4 * t), i < 1000 ? x + i : x, i < 1000 ? 16 : 0);
  //! buggy: cp_async_16(shared_address(tile + 4 * t), x + i);
  cp_async_commit();
  cp_async_wait<0>();
  out[t] = tile[4 * t];
}

//! out of bounds <<<1, 32>>>
__global__ void copy_past_the_end_of_shared(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_16(shared_address(tile + 4 * t + 4), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  out[t] = tile[4 * t | 4];
}

//! uninitialised <<<1, 32>>>
__global__ void copy_of_nothing(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[128];
  const int t = threadIdx.x;
  cp_async_16(shared_address(tile + 4 * t), x + 4 * t);
  //! buggy: cp_async_16(shared_address(tile + 4 * t), out + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  out[200 + t] = tile[4 * t];
}

// The other warp writes when this one has waited, and nothing tells it so.
//! race <<<1, 64>>>
__global__ void source_overwritten_after_the_wait(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[256];
  const int t = threadIdx.x;
  for (int k = 0; k < 4; k++) out[4 * t + k] = x[k];
  cp_async_16(shared_address(tile + 4 * t), out + 4 * t);
  cp_async_commit();
  __syncthreads();
  cp_async_wait<0>();
  __syncthreads();
  //! buggy:
  out[4 * (63 - t)] = 0.f;
  out[300 + t] = tile[4 * t];
}
