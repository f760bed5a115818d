// Forward stage 3: online_softmax
// idea:    FlashAttention-1, Algorithm 1: one kernel, K/V outer loop; m, l, O updated in HBM
// types:   fp32
// needs:   any GPU
// after:   tiled
// tiles:   Br=64 Bc=64; d > 64: Br=64 Bc=32; d > 128: Br=32 Bc=32
// limits:  Br % 8 == 0; Bc % 32 == 0; (Br // 8) * (Bc // 32) <= 64
// shared:  4 * (Br * d + Bc * (2 * d + 1) + Br * Bc)
// workspace: m, l
// hbm:     4 * B * H * (2 * N_k * d + Tc * N_q * (3 * d + 4) + N_q * (d + 5))
// measured: 0.42x at d=64 causal, 0.20x full, 0.28x at d=128 causal, 0.14x full at N=4096; 0.56x at d=64
//          causal, 0.31x full at N=1024 (H200, fp32; make readme)
//
// Softmax needs the maximum and the sum of a whole row. But both can be corrected later. Take the keys of a
// row tile by tile. Let m and l be the maximum and the sum over the tiles so far, and O the output for these
// keys alone. A new tile has the maximum m~ and the sum l~. Then:
//
//   m_new = max(m, m~)                                                           (Algorithm 1, line 11)
//   l_new = e^(m - m_new) l + e^(m~ - m_new) l~                                  (line 11)
//   O_new = ( l e^(m - m_new) O + e^(m~ - m_new) P~ V_j ) / l_new                (line 12)
//
// So S_ij and P_ij exist for one tile at a time, on the chip. The N x N matrices are gone from HBM, and the
// workspace is m and l, 8 bytes per row. That is the online softmax. The kernel below is FlashAttention-1's
// Algorithm 1, line by line.
//
// HBM traffic without caches (hbm, above): K and V are read once. Q is read Tc times; O, m and l are read and
// written Tc times. Before that they are set, and in the end L is made of m and l.
//
// Changed from tiled: its three kernels become one, so this step is larger than others. Tiles are loaded and
// S_reg and P V are computed as before. The two loops and lines 10 to 13 are new.
//
// Bound by two things. One is parallelism: a block has a whole head. At B4 H12 that makes 48 blocks of 8
// warps, and an H200 has 132 multiprocessors with room for 64 warps each. The loop over i could be split
// among blocks, since no tile of O depends on another one. The other is O, m and l, which go to memory and
// back for every tile of keys, Tc times. At N1024 L2 holds them, and 0.4 % of HBM's bandwidth is used; but a
// warp waits two fifths of its time for loads from global memory. flash2 changes both: it swaps the loops,
// and makes every tile of Q a block.
//
// Stays because it is FlashAttention-1, the algorithm that needs no N x N matrix: 384 KiB of scratch memory
// where tiled has 192 MiB (B4 H12 N1024), and the lines that flash2 puts in another order.
#pragma once
#include "common/launch.cuh"
#include "common/tile.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;  // line 1: the paper derives them from M, the size of shared memory
constexpr int warps = 8, threads = 32 * warps;
constexpr int rows = Br / warps;          // rows of S and O per thread: those of its warp
constexpr int cols = Bc / 32;             // columns of S per thread
constexpr int dims = (d + 31) / 32;       // columns of O per thread

// One block per head. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 2) online_softmax_kernel(FwdParams p, float* m, float* l) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 3, 4
  const int bh = blockIdx.x;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* O = p.O.head(b, h);
  m += (int64_t)bh * p.N_q;
  l += (int64_t)bh * p.N_q;

  extern __shared__ float smem[];
  float* Q_smem = smem;                   // Br x d
  float* K_smem = Q_smem + Br * d;        // Bc x d, rows d + 1 apart
  float* V_smem = K_smem + Bc * (d + 1);  // Bc x d
  float* P_smem = V_smem + Bc * d;        // Br x Bc

  for (int row = warp; row < p.N_q; row += warps) {                      // line 2
    for (int k = lane; k < d; k += 32) O[row * p.O.stride_n + k] = 0.f;
    if (lane == 0) {
      m[row] = -INFINITY;
      l[row] = 0.f;
    }
  }

  for (int j = 0; j < Tc; j++) {                                         // line 5
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);          // line 6
    load_tile(V_smem, d, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

    // causal: the first row that sees key j * Bc is j * Bc - diagonal; the tiles of Q before it see none
    const int first_i = CAUSAL ? max(j * Bc - p.diagonal, 0) / Br : 0;
    for (int i = first_i; i < Tr; i++) {                                 // line 7
      __syncthreads();                    // as above, for Q
      load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);               // line 8
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[rows][cols] = {};                                      // line 9: S_ij = Q_i K_j^T
      for (int k = 0; k < d; k++) {
        for (int c = 0; c < cols; c++) {
          const float key = K_smem[(lane + 32 * c) * (d + 1) + k];   // one key per lane, one Q for all
          for (int r = 0; r < rows; r++) S_reg[r][c] += Q_smem[(warp * rows + r) * d + k] * key;
        }
      }

      float m_new[rows], l_old[rows], l_new[rows], alpha[rows], beta[rows];
      for (int r = 0; r < rows; r++) {
        const int row = i * Br + warp * rows + r;
        const float m_old = row < p.N_q ? m[row] : -INFINITY;            // line 8
        l_old[r] = row < p.N_q ? l[row] : 0.f;

        float m_tile = -INFINITY;                                        // line 10: m~, P~, l~ of this tile
        for (int c = 0; c < cols; c++) {
          const int col = j * Bc + lane + 32 * c;
          const bool visible = col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
          S_reg[r][c] = visible ? p.scale * S_reg[r][c] : -INFINITY;
          m_tile = fmaxf(m_tile, S_reg[r][c]);
        }
        m_tile = warp_max(m_tile);
        const float shift = m_tile == -INFINITY ? 0.f : m_tile;          // no key: -inf - -inf is NaN
        float l_tile = 0.f;
        for (int c = 0; c < cols; c++) {
          const float P = expf(S_reg[r][c] - shift);
          P_smem[(warp * rows + r) * Bc + lane + 32 * c] = P;
          l_tile += P;
        }
        l_tile = warp_sum(l_tile);

        // --- the tile joins the row so far
        m_new[r] = fmaxf(m_old, m_tile);                                 // line 11
        const float shift_new = m_new[r] == -INFINITY ? 0.f : m_new[r];  // has seen no key at all yet
        alpha[r] = expf(m_old - shift_new);
        beta[r] = expf(m_tile - shift_new);
        l_new[r] = alpha[r] * l_old[r] + beta[r] * l_tile;
        // ---
      }
      __syncwarp();                       // P_smem is complete; all have read m and l, which lane 0 writes

      float O_reg[rows][dims] = {};                                      // line 12: P~_ij V_j
      for (int col = 0; col < Bc; col++) {
        for (int c = 0; c < dims; c++) {
          const float value = lane + 32 * c < d ? V_smem[col * d + lane + 32 * c] : 0.f;
          for (int r = 0; r < rows; r++) O_reg[r][c] += P_smem[(warp * rows + r) * Bc + col] * value;
        }
      }
      for (int r = 0; r < rows; r++) {
        const int row = i * Br + warp * rows + r;
        if (row >= p.N_q) continue;
        // --- O_i of all keys so far
        for (int c = 0; c < dims; c++) {                                 // lines 8, 12: O_i from HBM and back
          const int k = lane + 32 * c;
          if (k >= d || l_new[r] == 0.f) continue;                       // O stays 0 until the row sees a key
          float* o = O + row * p.O.stride_n + k;
          *o = (l_old[r] * alpha[r] * *o + beta[r] * O_reg[r][c]) / l_new[r];
        }
        // ---
        if (lane == 0) {                                                 // line 13
          m[row] = m_new[r];
          l[row] = l_new[r];
        }
      }
    }                                                                    // line 14
  }                                                                      // lines 15, 16

  __syncthreads();
  for (int row = threadIdx.x; row < p.N_q; row += threads)               // beyond Algorithm 1: our L
    p.L[(int64_t)bh * p.N_q + row] = l[row] == 0.f ? -INFINITY : m[row] + logf(l[row]);
}

size_t workspace_bytes(const FwdParams& p) { return 2 * sizeof(float) * p.B * p.H * p.N_q; }   // m and l

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  float* m = static_cast<float*>(p.workspace);
  float* l = m + (int64_t)p.B * p.H * p.N_q;
  const size_t bytes = sizeof(float) * (Br * d + Bc * (d + 1) + Bc * d + Br * Bc);
  allow_shared_memory(online_softmax_kernel, bytes);
  online_softmax_kernel<<<p.B * p.H, threads, bytes, stream>>>(p, m, l);
  return cudaGetLastError();
}
