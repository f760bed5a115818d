// Backward stage 4: register_tiles
// idea:    a thread computes 4 x 8 pieces of all five products by outer products; K and V transposed
// types:   fp32
// needs:   any GPU
// after:   recompute
// deterministic: no
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 128: Br=32 Bc=32
// limits:  Br in (32, 64); Bc in (32, 64)
// shared:  4 * (2 * Bc * (d + Br) + (Bc + 2 * Br) * max(32, next_power_of_2(d)))
// workspace: D
// hbm:     4 * B * (5 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
// predicted: 1.1x at d=64, 1.4x at d=128: a third of the loads, but many take four wavefronts
// measured: 0.78x at d=64 causal, 0.76x full, 0.96x at d=128 causal, 0.90x full at N=4096; 0.75x at d=64
//          causal, 0.74x full at N=1024 (H200, fp32; make readme)
//
// In recompute a lane loads 10 numbers from shared memory for 16 multiplications, and most of these loads
// bring one number for the whole warp. Here a thread holds a piece of every product in registers: 4 x 8
// numbers (of S and dP 4 x 4 for d > 64, 1 x 4 for d > 128; of dK, dV and dQ 4 x 4 for d <= 32). One step of
// a sum is then the outer product of 4 numbers of one operand and 8 of the other: 12 loads for 32
// multiplications (common/outer_product.cuh).
//
// A warp is 4 x 8 lanes: 8 neighbours share rows of a product, and every eighth lane shares columns. What a
// product sums over decides how its operands should lie:
//
//   S = Q K^T, dP = dO V^T    over d       K and V are transposed, once, because the block keeps them: 8
//                                          neighbouring lanes then read neighbouring keys of one k. Q and dO
//                                          come anew for each tile, and stay as they are.
//   dV = P^T dO, dK = dS^T Q  over rows    All four stay as they are. A row of P and one of dO make an outer
//                                          product, and so do a row of dS and one of Q.
//   dQ = dS K                 over keys    dS stays as it is; and K is here once more, not transposed.
//
// add_product makes three of them. It reads its first operand along the sum and its second one across. The
// other two read both across.
//
// HBM traffic without caches (hbm, above): as in recompute, but K is read twice, the second time to be
// transposed.
//
// Changed from recompute: which numbers a thread holds, and with them every product. The order of the steps
// and the masks stay. Lines 10 and 13 of Algorithm 2 are no longer one loop. Columns from d to the next
// multiple of 32 are zeros in shared memory, so that no product asks for them.
//
// Bound by waiting: a warp waits 39 % of its time for global memory, and registers leave room for 8 warps
// only. Meanwhile shared memory is busy 39 % of the time, the multipliers 25 % (H200, B4 H12 N1024 d64
// causal). By its counts shared memory comes next (flash.inspect(), d=64). For a tile of S a multiprocessor
// needs 10,240 cycles for multiplications. nvcc merges loads of four neighbours into one of 16 bytes by
// itself (sm_90a: all 42 of the products), and these take 14,300 wavefronts, a cycle each; stores of P and dS
// take 4,900. The four rows that a warp reads of Q, dO and dS lie in the same banks.
//
// For d > 128 a block takes up to 168 KB of shared memory: d = 256 needs an H100. Left the choice,
// attention() takes the best stage that fits.
//
// Stays because the outer product is what the next two rungs feed, as in the forward: alone it waits for its
// loads, meets bank conflicts, and loses to recompute.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/outer_product.cuh"
#include "common/rowsum.cuh"
#include "common/tile.cuh"
#include "common/transposed.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps_d = d <= 64 ? 1 : d <= 128 ? 2 : 4;        // warps that share columns of dK, dV and dQ
constexpr int width = (d + 32 * warps_d - 1) / (32 * warps_d) * 32 * warps_d;     // d, rounded up
constexpr int warps = Bc / 16 * warps_d, threads = 32 * warps;

// Numbers of a thread: rows x cols of S and dP, keys x dims of dK and dV, dQ_rows x dims of dQ
constexpr int cols = Bc / (8 * warps_d) < 4 ? 4 : Bc / (8 * warps_d);
constexpr int warps_c = Bc / (8 * cols);                       // warps that share the columns of S and dP
constexpr int rows = Br / (4 * (warps / warps_c));
constexpr int keys = 4, dims = width / (8 * warps_d);
constexpr int dQ_rows = Br / (Bc / 4);

// n numbers of a row of a tile, in fours: from columns `first`, first + step, first + 2 * step, ...
template <int n>
__device__ __forceinline__ void load(float (&to)[n], const float* row, int first, int step) {
  for (int x = 0; x < n; x++) to[x] = row[first + x / 4 * step + x % 4];
}

// C += A B, the sum over n steps. A: rows of n numbers, a_pitch apart. B: n rows, b_pitch apart, columns from
// first_col on, in fours.
template <int R, int C>
__device__ __forceinline__ void add_product(float (&c)[R][C], const float* a, int a_pitch,
                                            const float* b, int b_pitch, int first_col, int n) {
  for (int k = 0; k < n; k++) {
    float a_col[R], b_row[C];
    for (int r = 0; r < R; r++) a_col[r] = a[r * a_pitch + k];
    load(b_row, b + k * b_pitch, first_col, 32);
    add_outer_product(c, a_col, b_row);
  }
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of this thread: rows S_row + 4 * r, columns from S_col on, of S and dP; rows from dK_row on of dK and dV,
  // dQ_row + 4 * r of dQ, columns from dim on. (Columns: four, then four more 32 further on.)
  const int S_row = warp / warps_c * 4 * rows + lane / 8, S_col = warp % warps_c * 8 * cols + lane % 8 * 4;
  const int dK_row = warp / warps_d * 16 + lane / 8 * 4, dim = warp % warps_d * 8 * dims + lane % 8 * 4;
  const int dQ_row = warp / warps_d * 4 * dQ_rows + lane / 8;

  extern __shared__ float smem[];
  float* K_smem = smem;                   // Bc x width
  float* KT_smem = K_smem + Bc * width;   // d x Bc: transposed
  float* VT_smem = KT_smem + d * Bc;      // d_v x Bc: transposed
  float* Q_smem = VT_smem + d * Bc;       // Br x width
  float* dO_smem = Q_smem + Br * width;   // Br x width
  float* P_smem = dO_smem + Br * width;   // Br x Bc
  float* dS_smem = P_smem + Br * Bc;      // Br x Bc
  for (float* x = smem + threadIdx.x; x < P_smem; x += threads) *x = 0.f;     // columns from d on stay 0
  __syncthreads();
  load_tile(K_smem, width, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);            // line 6
  load_transposed(KT_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);
  load_transposed<d_v>(VT_smem, Bc, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[keys][dims] = {}, dV_reg[keys][dims] = {};                // line 7

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L and D
    float* dQ = p.dQ.head(b, h);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      load_tile(Q_smem, width, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);           // line 9
      load_tile<d_v>(dO_smem, width, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};
      add_product(S_reg, Q_smem + S_row * width, 4 * width, KT_smem, Bc, S_col, d);        // line 10
      add_product(dP_reg, dO_smem + S_row * width, 4 * width, VT_smem, Bc, S_col, d_v);    // line 13

      for (int r = 0; r < rows; r++) {
        const int row = i * Br + S_row + 4 * r;
        const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;    // line 9
        const float D_row = row < p.N_q ? D[first_row + row] : 0.f;
        for (int c = 0; c < cols; c++) {
          const int col = j * Bc + S_col + c / 4 * 32 + c % 4;
          const float x = p.scale * S_reg[r][c];
          const float P = mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f;     // line 11
          const float dS = P * (mask.keep(row, col) * dP_reg[r][c] - D_row);                // line 14
          P_smem[(S_row + 4 * r) * Bc + S_col + c / 4 * 32 + c % 4] = P * mask.keep(row, col);
          dS_smem[(S_row + 4 * r) * Bc + S_col + c / 4 * 32 + c % 4] = mask.through_score(dS, x, row, col);
        }
      }
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

      for (int row = 0; row < Br; row++) {
        float P[keys], gradient[dims], dS[keys], query[dims];
        load(P, P_smem + row * Bc, dK_row, 0);
        load(gradient, dO_smem + row * width, dim, 32);
        add_outer_product(dV_reg, P, gradient);                          // line 12: + P_ij^T dO_i
        load(dS, dS_smem + row * Bc, dK_row, 0);
        load(query, Q_smem + row * width, dim, 32);
        add_outer_product(dK_reg, dS, query);                            // line 16: + dS_ij^T Q_i
      }

      float dQ_reg[dQ_rows][dims] = {};                                  // line 15: dS_ij K_j
      add_product(dQ_reg, dS_smem + dQ_row * Bc, 4 * Bc, K_smem, width, dim, Bc);
      for (int r = 0; r < dQ_rows; r++) {
        const int row = i * Br + dQ_row + 4 * r;
        if (row >= p.N_q) continue;
        for (int c = 0; c < dims; c++) {                                 // line 15: to HBM, with other blocks
          const int k = dim + c / 4 * 32 + c % 4;
          if (k < d) atomicAdd(dQ + row * p.dQ.stride_n + k, p.scale * dQ_reg[r][c]);
        }
      }
    }                                                                    // line 17
  }

  float* dK = p.dK.head(b, h_kv);
  float* dV = p.dV.head(b, h_kv);
  for (int r = 0; r < keys; r++) {                                       // line 18
    const int col = j * Bc + dK_row + r;
    if (col >= p.N_k) continue;
    for (int c = 0; c < dims; c++) {
      const int k = dim + c / 4 * 32 + c % 4;
      if (k >= d) continue;
      dK[col * p.dK.stride_n + k] = p.scale * dK_reg[r][c];
      if (k < d_v) dV[col * p.dV.stride_n + k] = dV_reg[r][c];
    }
  }
}

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q; }   // D

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  float* D = static_cast<float*>(p.workspace);
  launch_D_kernel(p, D, /*clear_dQ=*/true, stream);
  const size_t bytes = sizeof(float) * (Bc * (width + 2 * d) + 2 * Br * (width + Bc));
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D);
  return cudaGetLastError();
}
