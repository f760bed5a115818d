// What the 16-bit backward stages do before their main kernel. Introduced by: backward stage 11, cp_async.
#pragma once
#include "exp2.cuh"
#include "mask.cuh"
#include "mma.cuh"
#include "sequences.cuh"
#include "warp.cuh"

// A thread has 8 columns of a row: 16 bytes. So many threads have a row together, and a block so many rows:
constexpr int row_threads = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32, block_rows = 256 / row_threads;

// What the main kernel reads and adds to, in HBM, in float. There is room for whole tiles of Q: so cp.async
// may copy four numbers at a time, and no tile is a case of its own.
struct Workspace {
  float* dQ_accum;         // (B, H, N_q, d), dQ_copies times
  float* L;                // (B, H, N_q), to the base 2; of rows past the end +infinity: their P is 0
  float* D;                // (B, H, N_q)
  float times_L = 1.f, times_D = 1.f;      // factors of what is written there
  int *ticket = nullptr, first_ticket = 0, zeros = 0;      // of blocks that draw tickets; so many 0 behind it
};

__host__ __device__ inline int padded(int N_q) { return ceil_div(N_q, BLOCK_R) * BLOCK_R; }

// Zeros in dQ_accum; L and D. Line numbers are those of FlashAttention-2's Algorithm 2.
__global__ void __launch_bounds__(256) prepare_kernel(BwdParams p, Workspace to, int dQ_copies) {
  const int N = padded(p.N_q), blocks = N / block_rows;                  // `blocks` of a head
  const int bh = blockIdx.x / blocks, b = bh / p.H, h = bh % p.H;
  int row = blockIdx.x % blocks * block_rows + threadIdx.x / row_threads;
  const int col = threadIdx.x % row_threads * 8;
  const int64_t padded_row = (int64_t)bh * N + row, all_rows = (int64_t)p.B * p.H * N;
  enter_sequence_of_row(p, row);
  start_next_kernel();

  float sum = 0.f;
  if (row < p.N_q && col < d_v) {
    __align__(16) ELEMENT O[8], dO[8];
    *reinterpret_cast<uint4*>(O) = *reinterpret_cast<const uint4*>(p.O.head(b, h) + row * p.O.stride_n + col);
    *reinterpret_cast<uint4*>(dO) =
        *reinterpret_cast<const uint4*>(p.dO.head(b, h) + row * p.dO.stride_n + col);
    for (int e = 0; e < 8; e++) sum += float(dO[e]) * float(O[e]);       // line 4
  }
  sum = warp_sum(sum, row_threads);
  for (int copy = 0; copy < dQ_copies && col < HEAD_DIM; copy++)         // line 3
    for (int e = 0; e < 2; e++)
      reinterpret_cast<float4*>(to.dQ_accum + (copy * all_rows + padded_row) * HEAD_DIM + col)[e] = float4{};
  if (col > 0) return;
  if (to.ticket && padded_row <= to.zeros) to.ticket[padded_row] = padded_row ? 0 : to.first_ticket;
  const bool inside = row < p.N_q;
  const float L_row = inside ? p.L[(int64_t)bh * all_rows_of_L(p) + row] : INFINITY;
  if (p.dL && inside) sum -= p.dL[(int64_t)bh * all_rows_of_L(p) + row];   // P_ij is also that of L_i by S_ij
  if (SINK && inside) p.dsink[(int64_t)bh * all_rows_of_L(p) + row] = -expf(p.sink[h] - L_row) * sum;
  to.L[padded_row] = to.times_L * (LOG2_E * L_row);
  to.D[padded_row] = L_row == -INFINITY ? 0.f : to.times_D * sum;      // no key seen: dL may be infinite
  if (!Mask::is_range) wait_for_previous_kernel();                     // lists of tiles: early_prepare.cuh
}
