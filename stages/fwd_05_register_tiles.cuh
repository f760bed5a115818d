// Forward stage 5: register_tiles
// idea:    a thread computes an 8 x 8 piece of S and of O: an outer product a step, operands transposed
// types:   fp32
// needs:   any GPU
// after:   flash2
// takes:   dropout, sink, d_v
// tiles:   Br=128 Bc=64; d > 64: Br=128 Bc=32; d > 128: Br=64 Bc=32
// limits:  Br in (32, 64, 128); Bc in (32, 64)
// shared:  4 * (Br * d + 2 * Bc * d + Br * Bc)
// hbm:     4 * B * H * (2 * Tr * N_k * d + N_q * (2 * d + 1))
// predicted: 1.3x at d=64, 1.5x at d=128: a quarter of the loads; but the stores of Q, K and P conflict
// measured: 0.85x at d=64 causal, 0.88x full, 0.81x at d=128 causal, 0.98x full at N=4096; 0.69x at d=64
//          causal, 0.66x full at N=1024 (H200, fp32; make readme)
//
// In flash2 a thread has 8 x 2 numbers of S and loads 10 numbers from shared memory for 16 multiplications.
// Here it has 8 x 8 (8 x 4 for d > 64, because O takes more registers, and 4 x 4 for d > 128) and loads 16
// for 64. One step of S = Q K^T is an outer product: a column of Q times a row of K^T, 8 numbers each
// (common/outer_product.cuh). One step of O += P V is that of a column of P and a row of V.
//
// A warp is 4 x 8 lanes, and owns 4 * rows whole rows of the tile:
//
//             columns of S_ij               The lanes of a row take every 8th column; rows are dealt out the
//             0   1   2  ...  7   8         same way, every 4th. So 8 lanes share a row: a maximum takes
//   row 0    t0  t1  t2  ... t7  t0         three shuffles instead of five. 8 lanes read 8 neighbouring
//   row 1    t8  t9 t10  ... t15 t8         numbers of K, and 4 lanes 4 neighbouring numbers of Q: from
//   row 2   t16 t17 t18  ... t23 t16        different banks, and what several lanes read is read once.
//   row 3   t24 t25 t26  ... t31 t24
//   row 4    t0  t1  t2  ... t7  t0         For neighbours at one k, Q, K and P must lie transposed.
//
// HBM traffic without caches (hbm, above): as in flash2, but K and V half as often where Br is twice
// flash2's.
//
// Changed from flash2: which numbers a thread has, how they are indexed, and the loads that transpose. The
// scores of a tile stay in S_reg, as P, because P goes to shared memory from there. One division per row
// instead of one per number of O. The line numbers are still those of FlashAttention-2's Algorithm 1.
//
// Bound by waiting: a warp waits 53 % of its time for global memory, since a thread waits for each number of
// K and V before it asks for the next one, and with 254 registers a thread there are only 7 warps of 64.
// Meanwhile shared memory is busy 34 % of the time, the multipliers 20 % (H200, B4 H12 N1024 d64 causal). By
// its counts shared memory comes next (flash.inspect(), d=64). For a tile of S and the step of O that
// follows, a multiprocessor needs 8192 cycles of multiplications. The loads take as many wavefronts, a cycle
// each (in flash2 36864). But transposing K takes another 4096, because a warp stores 32 numbers into one
// bank, and storing P takes 2048, 8 numbers to a bank.
//
// Stays because the outer product is what the next two rungs feed: alone it waits for its loads and meets
// bank conflicts, 32-way where it stores K and Q, and loses to flash2; with float4 it is twice as fast as
// that.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/outer_product.cuh"
#include "common/tile.cuh"
#include "common/transposed.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int rows = Br >= 128 && d <= 128 ? 8 : 4;  // rows of S and O per thread
constexpr int cols = Bc / 8;                         // columns of S per thread
constexpr int dims = d / 8;                          // columns of O per thread
constexpr int warps = Br / (4 * rows), threads = 32 * warps;

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  // A warp has 4 * rows rows of the tile; its lanes are 4 x 8.
  const int first_row = warp * 4 * rows + lane / 8, first_col = lane % 8;
  auto row_of = [&](int r) { return first_row + 4 * r; };                // this thread's r-th row of a tile
  auto col_of = [&](int c) { return first_col + 8 * c; };
  float* O = p.O.head(b, h);

  extern __shared__ float smem[];
  float* Q_smem = smem;                   // d x Br: transposed
  float* K_smem = Q_smem + Br * d;        // d x Bc: transposed
  float* V_smem = K_smem + Bc * d;        // Bc x d
  float* P_smem = V_smem + Bc * d;        // Bc x Br: transposed
  load_transposed(Q_smem, Br, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);            // line 4

  float O_reg[rows][dims] = {}, m[rows], l[rows];                        // line 5
  for (int r = 0; r < rows; r++) {
    m[r] = SINK ? p.sink[h] : -INFINITY;
    l[r] = SINK ? 1.f : 0.f;
  }

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_transposed(K_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);       // line 7
    load_tile<d_v>(V_smem, d, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[rows][cols] = {};                                        // line 8: S_ij = Q_i K_j^T
    #pragma unroll 8
    for (int k = 0; k < d; k++) {
      float query[rows], key[cols];
      for (int r = 0; r < rows; r++) query[r] = Q_smem[k * Br + row_of(r)];
      for (int c = 0; c < cols; c++) key[c] = K_smem[k * Bc + col_of(c)];
      add_outer_product(S_reg, query, key);
    }

    #pragma unroll
    for (int r = 0; r < rows; r++) {                                     // line 9
      const int row = i * Br + row_of(r);
      float m_new = m[r];
      for (int c = 0; c < cols; c++) {
        const int col = j * Bc + col_of(c);
        S_reg[r][c] = mask.sees(row, col) ? mask.score(p.scale * S_reg[r][c], row, col) : -INFINITY;
        m_new = fmaxf(m_new, S_reg[r][c]);
      }
      m_new = warp_max(m_new, 8);
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      float l_tile = 0.f;
      for (int c = 0; c < cols; c++) {
        S_reg[r][c] = expf(S_reg[r][c] - shift);                         // P
        l_tile += S_reg[r][c];
        S_reg[r][c] *= mask.keep(row, j * Bc + col_of(c));
        P_smem[col_of(c) * Br + row_of(r)] = S_reg[r][c];
      }
      const float alpha = expf(m[r] - shift);
      l[r] = alpha * l[r] + warp_sum(l_tile, 8);
      m[r] = m_new;
      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // line 10: e^(m - m_new) O
    }
    __syncwarp();                         // a warp reads only the rows of P that it wrote itself

    #pragma unroll 8
    for (int col = 0; col < Bc; col++) {                                 // line 10: + P~_ij V_j
      float P[rows], value[dims];
      for (int r = 0; r < rows; r++) P[r] = P_smem[col * Br + row_of(r)];
      for (int c = 0; c < dims; c++) value[c] = V_smem[col * d + col_of(c)];
      add_outer_product(O_reg, P, value);
    }
  }                                                                      // line 11

  #pragma unroll
  for (int r = 0; r < rows; r++) {
    const int row = i * Br + row_of(r);
    if (row >= p.N_q) continue;
    const float inv_l = l[r] == 0.f ? 0.f : 1.f / l[r];
    for (int c = 0; c < dims; c++) {                                     // lines 12, 14
      const int k = col_of(c);
      if (k < d_v) O[row * p.O.stride_n + k] = inv_l * O_reg[r][c];
    }
    if (first_col == 0)                                                  // lines 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : m[r] + logf(l[r]);
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * (Br * d + Bc * d + Bc * d + Br * Bc);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
