// Forward stage 4: flash2
// idea:    FlashAttention-2: Q tile a block, K/V inner loop; O, m, l in registers; L written once
// types:   fp32
// needs:   any GPU
// after:   online_softmax
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 64: Br=64 Bc=32; d > 128: Br=32 Bc=32
// limits:  Br % 8 == 0; Bc % 32 == 0; (Br // 8) * (Bc // 32) <= 64
// shared:  4 * (Br * d + Bc * (2 * d + 1) + Br * Bc)
// hbm:     4 * B * H * (2 * Tr * N_k * d + N_q * (2 * d + 1))
// measured: 6.36x at d=64 causal, 7.29x full, 11.80x at d=128 causal, 10.95x full at N=4096; 3.20x at d=64
//          causal, 4.13x full at N=1024 (H200, fp32; make readme)
//
// FlashAttention-2, Algorithm 1: the loops change places. The outer loop is over tiles of Q. No tile of O
// depends on another one, so each is a block of its own: B * H * Tr blocks instead of B * H. The inner loop
// is over tiles of K and V. So O, m and l of a tile stay in the registers of one warp from the first key to
// the last one, and are written once:
//
//   m_new = max(m, rowmax(S))                                  (Algorithm 1, line 9)
//   l     = e^(m - m_new) l + rowsum(P~)                       (line 9)
//   O     = e^(m - m_new) O + P~ V_j                           (line 10)
//   O / l at the end                                           (line 12)
//   L     = m + log(l)                                         (line 13)
//
// There are two more savings. O is kept unnormalised, which takes one division at the end instead of one per
// tile. And P~ is relative to m_new from the start, not to the tile's own maximum, so that one factor is
// applied instead of two.
//
// HBM traffic without caches (hbm, above): Q, O and L cross once, K and V Tr times. With a causal mask K and
// V cross about half as often.
//
// Erratum: line 10 of the paper's Algorithm 1 has diag(e^(m - m_new))^-1 O. The inverse is a mistake: when
// the maximum grows, the old terms get smaller. tests/test_mutants.py runs it as printed and sees it fail.
//
// Changed from online_softmax: the order of the loops, and where O, m and l live. And three blocks are to fit
// on a multiprocessor, so a thread gets at most 80 registers. (At d=128 with a causal mask, 12 bytes are
// spilled.)
//
// Which scores count is now asked of an object, as in all later stages: Mask (common/mask.cuh), made once a
// block. It says which tiles of K and V there are, tiles[0] to tiles[tiles.end - 1]; and of an element,
// whether it counts (sees), and what becomes of it (score). Its rule is a file of stages/masks, a few lines.
//
// Three things that few calls ask for: V of d_v < d columns; a sink, a logit a head in the denominator of
// each row, which is where m and l start; and dropout, which multiplies P by keep, 0 or 1 / (1 - p), once l
// has it (common/dropout.cuh).
//
// Bound by shared memory: it is busy 62 % of the time, and the multipliers are busy 28 % (H200, B4 H12 N1024
// d64 causal). In Q K^T a warp reads `rows` numbers of Q and 32 * cols of K for rows * 32 * cols
// multiplications. In P V it reads `rows` numbers of P and 32 * dims of V for rows * 32 * dims. A larger
// piece of S and O per thread would need fewer loads. And a causal tile on the diagonal is computed in full,
// though half of it is masked.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/tile.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = 8, threads = 32 * warps;
constexpr int rows = Br / warps;          // rows of S and O per thread: those of its warp
constexpr int cols = Bc / 32;             // columns of S per thread
constexpr int dims = (d + 31) / 32;       // columns of O per thread

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 3) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Mask mask(p, b, h);
  float* O = p.O.head(b, h);

  extern __shared__ float smem[];
  float* Q_smem = smem;                   // Br x d
  float* K_smem = Q_smem + Br * d;        // Bc x d, rows d + 1 apart
  float* V_smem = K_smem + Bc * (d + 1);  // Bc x d
  float* P_smem = V_smem + Bc * d;        // Br x Bc
  load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4

  float O_reg[rows][dims] = {}, m[rows], l[rows];                        // line 5
  for (int r = 0; r < rows; r++) {
    m[r] = SINK ? p.sink[h] : -INFINITY;
    l[r] = SINK ? 1.f : 0.f;
  }

  const auto tiles = mask.key_tiles(i);
  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);          // line 7
    load_tile<d_v>(V_smem, d, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[rows][cols] = {};                                        // line 8: S_ij = Q_i K_j^T
    for (int k = 0; k < d; k++) {
      for (int c = 0; c < cols; c++) {
        const float key = K_smem[(lane + 32 * c) * (d + 1) + k];   // one key per lane, one Q for all
        for (int r = 0; r < rows; r++) S_reg[r][c] += Q_smem[(warp * rows + r) * d + k] * key;
      }
    }

    for (int r = 0; r < rows; r++) {                                     // line 9
      const int row = i * Br + warp * rows + r;
      float m_new = m[r];
      for (int c = 0; c < cols; c++) {
        const int col = j * Bc + lane + 32 * c;
        S_reg[r][c] = mask.sees(row, col) ? mask.score(p.scale * S_reg[r][c], row, col) : -INFINITY;
        m_new = fmaxf(m_new, S_reg[r][c]);
      }
      m_new = warp_max(m_new);
      // --- m, l and O follow the new maximum
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      float l_tile = 0.f;
      for (int c = 0; c < cols; c++) {
        const float P = expf(S_reg[r][c] - shift);
        const int col = lane + 32 * c;
        P_smem[(warp * rows + r) * Bc + col] = P * mask.keep(row, j * Bc + col);
        l_tile += P;
      }
      const float alpha = expf(m[r] - shift);
      l[r] = alpha * l[r] + warp_sum(l_tile);
      m[r] = m_new;
      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // line 10: e^(m - m_new) O
      // ---
    }
    __syncwarp();                         // a warp reads only the rows of P that it wrote itself

    for (int col = 0; col < Bc; col++) {                                 // line 10: + P~_ij V_j
      for (int c = 0; c < dims; c++) {
        const float value = lane + 32 * c < d ? V_smem[col * d + lane + 32 * c] : 0.f;
        for (int r = 0; r < rows; r++) O_reg[r][c] += P_smem[(warp * rows + r) * Bc + col] * value;
      }
    }
  }                                                                      // line 11

  for (int r = 0; r < rows; r++) {
    const int row = i * Br + warp * rows + r;
    if (row >= p.N_q) continue;
    // --- O and L leave the registers
    for (int c = 0; c < dims; c++) {                                     // lines 12, 14
      const int k = lane + 32 * c;
      if (k < d_v) O[row * p.O.stride_n + k] = l[r] == 0.f ? 0.f : O_reg[r][c] / l[r];
    }
    if (lane == 0)                                                       // lines 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : m[r] + logf(l[r]);
    // ---
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * (Br * d + Bc * (d + 1) + Bc * d + Br * Bc);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
