// Sums in float, and how they become gradients of 16 bits. Introduced by: backward stage 12, late_dq.
#pragma once
#include "prepare.cuh"

// Four sums at a time, where the GPU can (sm_90)
__device__ __forceinline__ void atomic_add4(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
#else
  for (int e = 0; e < 4; e++) atomicAdd(to + e, x[e]);
#endif
}

// Add an accumulator to a tile of dQ_accum, from (row, col) on. Of the columns of dQ it has every `step`-th
// 16. dQ_accum lies as registers do: of each fragment of 16 x 8, 4 numbers of lane 0 are first, then 4 of
// lane 1, and so on. So a lane adds 4 numbers by one instruction, a warp 512 bytes in a row.
template <int strips, int n_tiles>
__device__ __forceinline__ void add_fragments(float* dQ, const float (&acc)[strips][n_tiles][4], int row,
                                              int col, int step) {
  const bool all_inside = HEAD_DIM % (8 * step * n_tiles) == 0;          // then no lane compares
  float* to = dQ + row * HEAD_DIM + 16 * col + threadIdx.x % 32 * 4;
  #pragma unroll
  for (int n = 0; n < n_tiles; n += 2) {
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const int more_cols = 8 * step * n + 8 * half;
        if (all_inside || col + more_cols < HEAD_DIM)
          atomic_add4(to + 16 * (s * HEAD_DIM + more_cols), acc[s][n + half]);
      }
    }
  }
}

// Eight numbers, times scale and rounded, to element `index` of `matrix`, a multiple of 8. (The address is
// counted in 16 bytes. Counted in elements, nvcc takes it for unaligned and stores 4 times 4 bytes.)
__device__ __forceinline__ void store8(ELEMENT* matrix, int64_t index, const float (&x)[8], float scale) {
  uint32_t rounded[4];
  for (int e = 0; e < 4; e++) rounded[e] = pack<ELEMENT>(scale * x[2 * e], scale * x[2 * e + 1]);
  reinterpret_cast<uint4*>(matrix)[index / 8] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
}

// sum += what four lanes have of a fragment: rows `row` and row + 8 of dQ_accum
__device__ __forceinline__ void add_two_rows(float (&sum)[2][8], const float* from) {
  for (int e = 0; e < 8; e += 2) {
    const float4 x = *reinterpret_cast<const float4*>(from + 2 * e);
    sum[0][e] += x.x;
    sum[0][e + 1] += x.y;
    sum[1][e] += x.z;
    sum[1][e + 1] += x.w;
  }
}

// dQ = scale * dQ_accum, the sum of its copies. Of each fragment a thread has rows `row` and row + 8: the 16
// numbers of four lanes, which lie in a row. So a warp reads 2048 bytes in a row.
constexpr int convert_rows = 2 * block_rows;

__global__ void __launch_bounds__(256) convert_dQ_kernel(BwdParams p, const float* dQ_accum, int dQ_copies) {
  const int blocks = ceil_div(p.N_q, convert_rows), bh = blockIdx.x / blocks, N = padded(p.N_q);
  const int fragment = threadIdx.x / 8, col = fragment % row_threads * 8, in_fragment = threadIdx.x % 8;
  const int strip = blockIdx.x % blocks * convert_rows + fragment / row_threads * 16;    // of 16 rows
  int first_row = strip;
  enter_sequence_of_row(p, first_row);
  if (first_row >= p.N_q || col >= HEAD_DIM) return;
  wait_for_previous_kernel();               // it may have started early
  start_next_kernel();                      // now: reduce_heads_kernel needs no more than that one's sums
  float sum[2][8] = {};
  for (int copy = 0; copy < dQ_copies; copy++) {
    const float* from = dQ_accum + ((copy * (int64_t)p.B * p.H + bh) * N + strip) * HEAD_DIM + 16 * col;
    add_two_rows(sum, from + 16 * in_fragment);
  }
  for (int half = 0; half < 2; half++) {
    const int row = first_row + in_fragment + 8 * half;
    if (row < p.N_q)
      store8(p.dQ.head(bh / p.H, bh % p.H), row * p.dQ.stride_n + col, sum[half], p.scale);
  }
}

// For dispatch_order() (order.cuh): as many heads as have Q, dO and sums of dQ that fit in 40 MB of L2, if
// not more than `most`; and a divisor of `heads`: a few that were left for the end would begin with the
// longest blocks when no short ones are left.
__host__ __device__ inline int heads_with_sums_in_L2(int heads, int N_q, int most = 16) {
  int together = max(1, min(most, int(40000000 / (int64_t(N_q) * 8 * HEAD_DIM))));
  while (heads % together) together--;
  return together;
}
