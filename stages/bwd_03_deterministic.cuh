// Backward stage 3: deterministic
// idea:    dK and dV in one kernel, dQ in another: no atomics, the same bits every run; 7 products, not 5
// types:   fp32
// needs:   any GPU
// after:   recompute
// deterministic: yes
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 64: Br=32 Bc=32; d > 128: Br=16 Bc=32
// limits:  Br % 8 == 0; Bc % 32 == 0; (Br // 8) * (Bc // 32) <= 64
// shared:  8 * (Br * d + Bc * (d + 1) + Br * Bc)
// workspace: D
// hbm:     4 * B * (4 * H_kv * N_k * d + H * (N_q * (Tc * (2 * d + 4) + 5 * d + 2) + 2 * Tr * N_k * d))
// measured: 0.62x at d=64 causal, 0.62x full, 0.60x at d=128 causal, 0.61x full at N=4096; 0.60x at d=64
//          causal, 0.60x full at N=1024 (H200, fp32; make readme)
//
// A floating-point sum has the same bits in every run if its terms always come in the same order. In
// recompute those of dK and dV do: one block adds them up, tile by tile. Those of dQ do not, because many
// blocks add to a row. So dQ gets a kernel of its own, with the loops of flash2: a block has a tile of Q,
// walks along the tiles of K and V, and keeps its dQ in registers to the end. No two blocks write the same
// element any more, and nothing has to be set to 0 beforehand.
//
// The price: each kernel makes S and dP for itself, so there are seven products instead of five:
//
//   dKV_kernel   S = Q K^T   dP = dO V^T   dV = P^T dO   dK = scale * dS^T Q     a tile of K and V per block
//   dQ_kernel    S = Q K^T   dP = dO V^T   dQ = scale * dS K                     a tile of Q per block
//
// HBM traffic without caches (hbm, above): in dKV_kernel K, V, dK and dV cross once, and Q and dO are read Tc
// times. In dQ_kernel Q, dO and dQ cross once, and K and V are read Tr times. Each of them reads L and D Tc
// times. Before them O, dO and L are read and D is written. With a causal mask about half of the Tc and Tr
// times remain.
//
// Changed from recompute: its kernel loses dQ (line 15 of Algorithm 2, and line 3 before it), and is called
// dKV_kernel. dQ_kernel is new, but its lines are known from there and from flash2.
//
// Bound by shared memory, as recompute is: it is busy 63 % of the time in dKV_kernel and 54 % in dQ_kernel
// (H200, B4 H12 N1024 d64 causal). Without the fifth product and its atomics, dKV_kernel takes 21 % less time
// than recompute's kernel. dQ_kernel, with three products, takes nearly as long as dKV_kernel with four.
//
// Stays because the same bits every run are worth its price to some: the ladder's fp32 branch goes on from
// recompute, and this stage is what deterministic=True takes in fp32.
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

// dK and dV. One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 2) dKV_kernel(BwdParams p, const float* D) {
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

// dQ. One block per tile of Q: lines 9 to 15 with the loops the other way round.
__global__ void __launch_bounds__(threads, 2) dQ_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br);
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const int64_t first_row = (int64_t)bh * p.N_q;
  float* dQ = p.dQ.head(b, h);

  extern __shared__ float smem[];
  float* K_smem = smem;                   // Bc x d, rows d + 1 apart
  float* V_smem = K_smem + Bc * (d + 1);  // Bc x d, rows d + 1 apart
  float* Q_smem = V_smem + Bc * (d + 1);  // Br x d
  float* dO_smem = Q_smem + Br * d;       // Br x d
  float* dS_smem = dO_smem + Br * d;      // Br x Bc
  load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 9
  load_tile<d_v>(dO_smem, d, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);

  float dQ_reg[rows][dims] = {};

  // --- dQ_i along the tiles of K and V
  for (int t = 0; t < tiles.end; t++) {
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);          // line 6
    load_tile<d_v>(V_smem, d + 1, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};
    for (int k = 0; k < d; k++) {
      for (int c = 0; c < cols; c++) {
        const float key = K_smem[(lane + 32 * c) * (d + 1) + k];         // one key per lane, one Q for all
        const float value = V_smem[(lane + 32 * c) * (d + 1) + k];
        for (int r = 0; r < rows; r++) {
          S_reg[r][c] += Q_smem[(warp * rows + r) * d + k] * key;        // line 10: S_ij = Q_i K_j^T
          dP_reg[r][c] += dO_smem[(warp * rows + r) * d + k] * value;    // line 13: dP_ij = dO_i V_j^T
        }
      }
    }

    for (int r = 0; r < rows; r++) {
      const int row = i * Br + warp * rows + r;
      const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;      // line 9
      const float D_row = row < p.N_q ? D[first_row + row] : 0.f;
      for (int c = 0; c < cols; c++) {
        const int col = j * Bc + lane + 32 * c;
        const float x = p.scale * S_reg[r][c];
        const float P = mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f; // line 11
        const float dS = P * (mask.keep(row, col) * dP_reg[r][c] - D_row);                  // line 14
        dS_smem[(warp * rows + r) * Bc + lane + 32 * c] = dS * mask.slope(x, row, col);
      }
    }
    __syncwarp();                         // a warp reads only the rows of dS that it wrote itself

    for (int col = 0; col < Bc; col++) {                                 // line 15: + dS_ij K_j
      for (int c = 0; c < dims; c++) {
        const float key = lane + 32 * c < d ? K_smem[col * (d + 1) + lane + 32 * c] : 0.f;
        for (int r = 0; r < rows; r++) dQ_reg[r][c] += dS_smem[(warp * rows + r) * Bc + col] * key;
      }
    }
  }
  // ---

  for (int r = 0; r < rows; r++) {
    const int row = i * Br + warp * rows + r;
    if (row >= p.N_q) continue;
    for (int c = 0; c < dims; c++) {
      const int k = lane + 32 * c;
      if (k < d) dQ[row * p.dQ.stride_n + k] = p.scale * dQ_reg[r][c];
    }
  }
}

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q; }   // D

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  float* D = static_cast<float*>(p.workspace);
  launch_D_kernel(p, D, /*clear_dQ=*/false, stream);
  const size_t bytes = 2 * sizeof(float) * (Br * d + Bc * (d + 1) + Br * Bc);
  allow_shared_memory(dKV_kernel, bytes);
  dKV_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D);
  allow_shared_memory(dQ_kernel, bytes);  // of which it leaves the last Br x Bc floats: it keeps no P
  dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p, D);
  return cudaGetLastError();
}
