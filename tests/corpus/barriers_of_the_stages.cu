// The barriers of the attention kernels, in miniature: each is left out once.
#include <cuda_runtime.h>

#include "common/ptx.cuh"

//! race <<<1, 64>>>
__global__ void between_load_and_use(const float* x, float* out, unsigned* count) {
  __shared__ float K_smem[64];
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    K_smem[threadIdx.x] = x[64 * j + threadIdx.x];
    __syncthreads();
    //! buggy:
    for (int k = 0; k < 64; k++) sum += K_smem[k];
  }
  out[threadIdx.x] = sum;
}

//! race <<<1, 64>>>
__global__ void between_use_and_next_load(const float* x, float* out, unsigned* count) {
  __shared__ float K_smem[64];
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    //! buggy:
    K_smem[threadIdx.x] = x[64 * j + threadIdx.x];
    __syncthreads();
    for (int k = 0; k < 64; k++) sum += K_smem[k];
  }
  out[threadIdx.x] = sum;
}

// Q stays for the whole loop; the first barrier in it is for Q, too.
//! race <<<1, 64>>>
__global__ void after_the_load_of_Q(const float* x, float* out, unsigned* count) {
  __shared__ float Q_smem[64];
  Q_smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  //! buggy:
  float sum = 0.f;
  for (int j = 0; j < 2; j++) sum += Q_smem[(threadIdx.x + 32) % 64] * x[j];
  out[threadIdx.x] = sum;
}

// K's buffer takes V: between them all must have used K.
//! race <<<1, 64>>>
__global__ void between_K_and_V_in_one_buffer(const float* x, float* out, unsigned* count) {
  __shared__ float KV_smem[64];
  KV_smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float s = KV_smem[63 - threadIdx.x];
  __syncthreads();
  //! buggy:
  KV_smem[threadIdx.x] = x[64 + threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = s * KV_smem[63 - threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void in_a_reduction(const float* x, float* out, unsigned* count) {
  __shared__ float maxima[64];
  const int t = threadIdx.x;
  maxima[t] = x[t];
  __syncthreads();
  for (int distance = 32; distance > 0; distance /= 2) {
    if (t < distance) maxima[t] = fmaxf(maxima[t], maxima[t + distance]);
    __syncthreads();
    //! buggy:
  }
  out[t] = maxima[0];
}

// The result of a reduction is read by all, and then its memory is used for the next one.
//! race <<<1, 64>>>
__global__ void after_a_reduction(const float* x, float* out, unsigned* count) {
  __shared__ float parts[2];
  const int t = threadIdx.x;
  float total = 0.f;
  for (int round = 0; round < 2; round++) {
    float sum = x[64 * round + t];
    for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (t % 32 == 0) parts[t / 32] = sum;
    __syncthreads();
    total += parts[0] + parts[1];
    __syncthreads();
    //! buggy:
  }
  out[t] = total;
}

// A warp's rows of P go through shared memory, from the lanes that computed them to those that read them.
//! race <<<1, 64>>>
__global__ void between_P_and_its_product(const float* x, float* out, unsigned* count) {
  __shared__ float P_smem[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  P_smem[warp][lane] = expf(-x[lane]);
  __syncwarp();
  //! buggy:
  float sum = 0.f;
  for (int c = 0; c < 32; c++) sum += P_smem[warp][c] * x[c];
  out[threadIdx.x] = sum;
}

//! race <<<1, 64>>>
__global__ void before_the_next_P(const float* x, float* out, unsigned* count) {
  __shared__ float P_smem[2][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = 0.f;
  for (int j = 0; j < 2; j++) {
    __syncwarp();
    //! buggy:
    P_smem[warp][lane] = expf(-x[32 * j + lane]);
    __syncwarp();
    for (int c = 0; c < 32; c++) sum += P_smem[warp][c] * x[c];
  }
  out[threadIdx.x] = sum;
}

// Double buffering: one barrier a round is enough if the next tile goes into the other buffer.
//! race <<<1, 64>>>
__global__ void the_other_buffer(const float* x, float* out, unsigned* count) {
  __shared__ float K_smem[2][64];
  const int t = threadIdx.x;
  K_smem[0][t] = x[t];
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    if (j < 2) K_smem[(j + 1) % 2][t] = x[64 * (j + 1) + t];
    //! buggy: if (j < 2) K_smem[j % 2][t] = x[64 * (j + 1) + t];
    sum += K_smem[j % 2][63 - t];
  }
  out[t] = sum;
}

//! race <<<1, 64>>>
__global__ void of_two_buffers(const float* x, float* out, unsigned* count) {
  __shared__ float K_smem[2][64];
  const int t = threadIdx.x;
  K_smem[0][t] = x[t];
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    //! buggy: if (j != 1) __syncthreads();
    if (j < 2) K_smem[(j + 1) % 2][t] = x[64 * (j + 1) + t];
    sum += K_smem[j % 2][63 - t];
  }
  out[t] = sum;
}

// L and D of a tile's rows, which some threads load for all.
//! race <<<1, 64>>>
__global__ void after_the_load_of_L(const float* x, float* out, unsigned* count) {
  __shared__ float L_smem[16];
  __shared__ float D_smem[16];
  const int t = threadIdx.x;
  if (t < 16) L_smem[t] = x[t];
  else if (t < 32) D_smem[t - 16] = x[t];
  __syncthreads();
  //! buggy: __syncwarp();
  out[t] = x[t] * (L_smem[t / 4] - D_smem[t / 4]);
}

// dS is stored by rows and read by columns.
//! race <<<1, 64>>>
__global__ void between_dS_and_its_transpose(const float* x, float* out, unsigned* count) {
  __shared__ float dS_smem[8][9];
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  dS_smem[row][col] = x[threadIdx.x];
  __syncthreads();
  //! buggy:
  out[threadIdx.x] = dS_smem[col][row];
}

// The epilogue stages O through Q's memory: all must be done with Q.
//! race <<<1, 64>>>
__global__ void before_the_epilogue(const float* x, float* out, unsigned* count) {
  __shared__ float Q_smem[64];
  const int t = threadIdx.x;
  Q_smem[t] = x[t];
  __syncthreads();
  float sum = 0.f;
  for (int k = 0; k < 64; k++) sum += Q_smem[k];
  __syncthreads();
  //! buggy:
  Q_smem[t] = sum;
  out[t] = Q_smem[t];
}

//! race <<<1, 64>>>
__global__ void in_the_epilogue(const float* x, float* out, unsigned* count) {
  __shared__ float O_smem[64];
  const int t = threadIdx.x;
  O_smem[t] = x[t];
  __syncthreads();
  //! buggy:
  const int other = t % 8 * 8 + t / 8;
  out[other] = O_smem[other];
}

// Two warps share the keys of a row; one adds up what both have.
//! race <<<1, 64>>>
__global__ void before_adding_up_the_warps(const float* x, float* out, unsigned* count) {
  __shared__ float O_smem[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float o = x[threadIdx.x];
  if (warp == 1) O_smem[lane] = o;
  __syncthreads();
  //! buggy:
  if (warp == 0) out[lane] = o + O_smem[lane];
}

//! race <<<1, 32>>>
__global__ void before_ldmatrix(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) __half K_smem[16][8];
  const int lane = threadIdx.x;
  for (int e = 0; e < 4; e++) K_smem[lane / 2][lane % 2 * 4 + e] = __float2half(x[4 * lane + e]);
  __syncwarp();
  //! buggy:
  uint32_t fragment[2];
  ldmatrix_x2(fragment, shared_address(K_smem[lane % 16]));
  out[lane] = __uint_as_float(fragment[0] ^ fragment[1]);
}

//! race <<<1, 64>>>
__global__ void after_ldmatrix(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float K_smem[32][4];
  const int t = threadIdx.x;
  for (int e = 0; e < 2; e++) K_smem[t / 2][t % 2 * 2 + e] = x[2 * t + e];
  __syncthreads();
  uint32_t fragment[4];
  ldmatrix_x4(fragment, shared_address(K_smem[t % 32]));
  __syncthreads();
  //! buggy: __syncwarp();
  for (int e = 0; e < 2; e++) K_smem[t / 2][t % 2 * 2 + e] = 0.f;
  out[t] = __uint_as_float(fragment[0] ^ fragment[3]);
}

// Copies of all threads: each waits for its own, then all meet.
//! race <<<1, 64>>>
__global__ void after_the_wait_for_copies(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float K_smem[256];
  const int t = threadIdx.x;
  cp_async_16(shared_address(K_smem + 4 * t), x + 4 * t);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  //! buggy:
  out[t] = K_smem[4 * (63 - t)];
}

//! race <<<1, 64>>>
__global__ void before_the_next_copies(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float K_smem[256];
  const int t = threadIdx.x;
  float sum = 0.f;
  for (int j = 0; j < 3; j++) {
    __syncthreads();
    //! buggy:
    cp_async_16(shared_address(K_smem + 4 * t), x + 4 * (64 * j + t));
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    sum += K_smem[4 * (63 - t)];
  }
  out[t] = sum;
}

// The accumulators of a tile are set to zero by other threads than add to them.
//! race <<<1, 64>>>
__global__ void after_the_zeros_of_dQ(const float* x, float* out, unsigned* count) {
  __shared__ float dQ_smem[32];
  const int t = threadIdx.x;
  if (t < 32) dQ_smem[t] = 0.f;
  __syncthreads();
  //! buggy:
  atomicAdd(&dQ_smem[t / 2], x[t]);
  __syncthreads();
  if (t < 32) out[t] = dQ_smem[t];
}

//! race <<<1, 64>>>
__global__ void after_the_sums_of_dQ(const float* x, float* out, unsigned* count) {
  __shared__ float dQ_smem[32];
  const int t = threadIdx.x;
  if (t < 32) dQ_smem[t] = 0.f;
  __syncthreads();
  atomicAdd(&dQ_smem[t / 2], x[t]);
  __syncthreads();
  //! buggy:
  if (t < 32) out[t] = dQ_smem[t];
}
