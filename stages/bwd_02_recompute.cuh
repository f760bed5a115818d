// Backward stage 2: recompute
// idea:    FlashAttention-2: P from L, D = rowsum(dO * O); a K/V tile a block; dQ by atomicAdd
// types:   fp32
// needs:   any GPU
// after:   naive
// deterministic: no
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 64: Br=32 Bc=32; d > 128: Br=16 Bc=32
// limits:  Br % 8 == 0; Bc % 32 == 0; (Br // 8) * (Bc // 32) <= 64
// shared:  8 * (Br * d + Bc * (d + 1) + Br * Bc)
// workspace: D
// hbm:     4 * B * (4 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
// measured: 54.30x at d=64 causal, 28.39x full at N=4096; 34.44x at d=64 causal, 22.58x full at N=1024 (H200,
//          fp32; make readme)
//
// FlashAttention-2, Algorithm 2. S, P, dP and dS, N x N, are gone from HBM: one tile of each exists at a
// time, on the chip. Softmax and its derivative need two numbers for each whole row, and both are known
// before the first tile:
//
//   P_ij = e^(S_ij - L_i)   The forward pass has left L = m + log(l). So a tile of P is made from a tile of
//                           Q K^T, without a maximum or a sum: one number is kept for each row instead of
//                           N_k. FlashAttention-1 keeps two, m and l. But e^(S - m) / l = e^(S - m - log(l)),
//                           so their combination L is enough (section 3.1.1).
//
//   D_i = sum_k dO_ik O_ik  In naive, D_i = sum_j P_ij dP_ij, which needs the whole row. But
//                           dP_ij = sum_k dO_ik V_jk, and the two sums can change places:
//                             sum_j P_ij sum_k dO_ik V_jk = sum_k dO_ik sum_j P_ij V_jk = sum_k dO_ik O_ik.
//                           These are d products of what the forward pass has left (common/rowsum.cuh).
//
// A block has a tile of K and V, and walks along the tiles of Q and dO. So dK and dV of its keys are sums in
// registers, as O is in flash2. They also run over the query heads that read its key head (GQA), one after
// the other, in a fixed order. But dQ of a row is a sum over keys, that is over blocks: each adds its part to
// HBM by atomicAdd. Which block comes first differs from run to run. A floating-point sum depends on the
// order of its terms, so the last bits of dQ differ, too.
//
// The layout is flash2's: a warp has Br / 8 rows of S, dP and dQ, and its lanes share the columns. It also
// has Bc / 8 rows of dK and dV. In dV += P^T dO these are columns of P, which all warps have written: hence a
// third barrier. All lanes read the same number of P, and each lane its own column of dO, so there are no
// bank conflicts. (If d is no multiple of 32, there are some when K and V are stored.)
//
// Which tiles of Q see something of K_j, and which scores count, is asked of the mask (common/mask.cuh), one
// for each query head.
//
// A sink is in L, so it changes nothing here. Its own gradient is that of a score whose dP is 0, as its value
// is: dS = P (dP - D) = -e^(sink - L_i) D_i, summed over the rows i (common/rowsum.cuh). With dropout,
// O = (keep P) V. So dV takes keep P, and dP is keep dO V^T. D is still rowsum(dO * O).
//
// HBM traffic without caches (hbm, above): K, V, dK and dV cross once. Q, dO, L and D are read Tc times, and
// dQ is read and written Tc times. Before that O, dO and L are read, D is written and dQ set to 0. With a
// causal mask about half of the Tc times remain.
//
// Errata: Algorithm 2 leaves out the scale, which dQ and dK need, too. In its line 4, D has N elements, not
// d. And the O_i that line 9 loads is never used, because D has what is needed of it.
//
// Changed from naive: everything but the five products.
//
// Bound by shared memory, like flash2: it is busy 61 % of the time, and the multipliers 35 % (H200, B4 H12
// N1024 d64 causal). The tiles of K, V, Q, dO, P and dS take 97 KB, so two blocks fit on a multiprocessor, 16
// warps of 64. The atomics hardly count: no thread waits for them, and L2, which carries them out, is busy
// 5 % of the time. (At d = 64 with a causal mask 8 bytes are spilled.)
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/rowsum.cuh"
#include "common/tile.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = 8, threads = 32 * warps;
constexpr int rows = Br / warps;          // rows of S, dP and dQ per thread: those of its warp
constexpr int keys = Bc / warps;          // rows of dK and dV per thread: those of its warp
constexpr int cols = Bc / 32;             // columns of S and dP per thread
constexpr int dims = (d + 31) / 32;       // columns of dQ, dK and dV per thread

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 2) backward_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  extern __shared__ float smem[];
  float* K_smem = smem;                   // Bc x d, rows d + 1 apart
  float* V_smem = K_smem + Bc * (d + 1);  // Bc x d, rows d + 1 apart
  float* Q_smem = V_smem + Bc * (d + 1);  // Br x d
  float* dO_smem = Q_smem + Br * d;       // Br x d
  float* P_smem = dO_smem + Br * d;       // Br x Bc
  float* dS_smem = P_smem + Br * Bc;      // Br x Bc
  load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);            // line 6
  load_tile<d_v>(V_smem, d + 1, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[keys][dims] = {}, dV_reg[keys][dims] = {};                // line 7

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L and D
    float* dQ = p.dQ.head(b, h);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);               // line 9
      load_tile<d_v>(dO_smem, d, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};
      for (int k = 0; k < d; k++) {
        for (int c = 0; c < cols; c++) {
          const float key = K_smem[(lane + 32 * c) * (d + 1) + k];       // one key per lane, one Q for all
          const float value = V_smem[(lane + 32 * c) * (d + 1) + k];
          for (int r = 0; r < rows; r++) {
            S_reg[r][c] += Q_smem[(warp * rows + r) * d + k] * key;      // line 10: S_ij = Q_i K_j^T
            dP_reg[r][c] += dO_smem[(warp * rows + r) * d + k] * value;  // line 13: dP_ij = dO_i V_j^T
          }
        }
      }

      // --- P and dS of the tile
      for (int r = 0; r < rows; r++) {
        const int row = i * Br + warp * rows + r;
        const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;    // line 9
        const float D_row = row < p.N_q ? D[first_row + row] : 0.f;
        for (int c = 0; c < cols; c++) {
          const int col = j * Bc + lane + 32 * c;
          const float x = p.scale * S_reg[r][c];
          const float P = mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f;     // line 11
          const float dS = P * (mask.keep(row, col) * dP_reg[r][c] - D_row);                // line 14
          P_smem[(warp * rows + r) * Bc + lane + 32 * c] = P * mask.keep(row, col);
          dS_smem[(warp * rows + r) * Bc + lane + 32 * c] = mask.through_score(dS, x, row, col);
        }
      }
      // ---
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

      for (int row = 0; row < Br; row++) {
        for (int c = 0; c < dims; c++) {
          const float gradient = lane + 32 * c < d ? dO_smem[row * d + lane + 32 * c] : 0.f;
          const float query = lane + 32 * c < d ? Q_smem[row * d + lane + 32 * c] : 0.f;
          for (int r = 0; r < keys; r++) {
            dV_reg[r][c] += P_smem[row * Bc + warp * keys + r] * gradient;  // line 12: + P_ij^T dO_i
            dK_reg[r][c] += dS_smem[row * Bc + warp * keys + r] * query;    // line 16: + dS_ij^T Q_i
          }
        }
      }

      // --- the tile's part of dQ
      float dQ_reg[rows][dims] = {};                                     // line 15: dS_ij K_j
      for (int col = 0; col < Bc; col++) {
        for (int c = 0; c < dims; c++) {
          const float key = lane + 32 * c < d ? K_smem[col * (d + 1) + lane + 32 * c] : 0.f;
          for (int r = 0; r < rows; r++) dQ_reg[r][c] += dS_smem[(warp * rows + r) * Bc + col] * key;
        }
      }
      for (int r = 0; r < rows; r++) {
        const int row = i * Br + warp * rows + r;
        if (row >= p.N_q) continue;
        for (int c = 0; c < dims; c++) {                                 // line 15: to HBM, with other blocks
          const int k = lane + 32 * c;
          if (k < d) atomicAdd(dQ + row * p.dQ.stride_n + k, p.scale * dQ_reg[r][c]);
        }
      }
      // ---
    }                                                                    // line 17
  }

  float* dK = p.dK.head(b, h_kv);
  float* dV = p.dV.head(b, h_kv);
  for (int r = 0; r < keys; r++) {                                       // line 18
    const int col = j * Bc + warp * keys + r;
    if (col >= p.N_k) continue;
    for (int c = 0; c < dims; c++) {
      const int k = lane + 32 * c;
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
  const size_t bytes = 2 * sizeof(float) * (Br * d + Bc * (d + 1) + Br * Bc);
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D);
  return cudaGetLastError();
}
