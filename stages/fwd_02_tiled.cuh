// Forward stage 2: tiled
// idea:    the same three kernels, through tiles in shared memory
// types:   fp32
// needs:   any GPU
// after:   naive
// tiles:   Br=64 Bc=64; d > 64: Br=64 Bc=32; d > 128: Br=32 Bc=32
// limits:  Br % 8 == 0; Bc % 32 == 0; (Br // 8) * (Bc // 32) <= 64
// shared:  4 * (Bc * d + max(Br * d + Bc, Br * Bc))
// workspace: S, P
// hbm:     4 * B * H * (Tc * N_q * d + 2 * Tr * N_k * d + 6 * N_q * N_k + N_q * (d + 1))
// measured: 14.77x at d=64 causal, 14.90x full, 11.62x at d=128 causal, 11.63x full at N=4096; 14.53x at d=64
//          causal, 14.80x full at N=1024 (H200, fp32; make readme)
//
// The three steps stay. What changes is who loads what: the threads of a block together copy a tile of each
// operand to shared memory, and all of them read it there. So each number of K is loaded Tr times instead of
// N_q times. Each number of Q is loaded Tc times, as in naive, where the lanes of a warp share it.
//
// These are loads, not HBM traffic: in naive the caches served nearly all of them. HBM moves 200 MB during
// scores_kernel in both stages, and that is S itself. What the tiles relieve is L1, which is busy 38 % of the
// time instead of 99 % (H200, B4 H12 N1024 d64 causal).
//
// The layout, which all stages up to flash2 keep: a block has 8 warps. A warp owns Br / 8 rows of the tile,
// and its lanes share the columns. Lane t has columns t, t + 32, ... of S, and of O.
//
//             columns of S_ij            A row never leaves its warp. So its maximum and its sum take
//             0  1  2 ...  31            shuffles within the warp (common/warp.cuh), and warps wait for
//   warp 0    t0 t1 t2 ... t31  row 0    each other only when a tile is loaded. A thread holds rows x cols
//             t0 t1 t2 ... t31  row 1    numbers of S in registers: a number of K, once read from shared
//   warp 1    t0 t1 t2 ... t31  row 2    memory, serves all of its rows.
//
// In shared memory, K's rows lie d + 1 floats apart. 32 lanes read the same k of 32 rows. d + 1 is odd, so
// these numbers are in 32 different banks and come all at once. With rows d apart, a multiple of 8, they
// would be in 4 banks at most, and come one after the other.
//
// HBM traffic without caches (hbm, above): Q is read Tc times, K and V Tr times. N x N numbers are written or
// read six times: S is written, read three times and overwritten by P, and P is read. O and L are written.
//
// Changed from naive: all three kernels. The layout is new, so this step has more lines than later ones. Its
// tools are in stages/common: load_tile (tile.cuh), warp_max and warp_sum (warp.cuh), allow_shared_memory
// (launch.cuh).
//
// Bound by waiting: a block loads its tiles and only then multiplies, and few other warps are there to
// multiply meanwhile. Registers limit them. scores_kernel needs 79 registers a thread, rounded up to 80, so
// of a multiprocessor's 65,536 there are enough for 3 blocks: 24 warps of the 64 that it could hold.
// output_kernel needs 108, rounded up to 112: 2 blocks, 16 warps. (By formula, from ptxas's report for sm_90
// at d=64; the profiler counts 37 % and 24 % of the 64. Shared memory, 33 KB a block, would allow 6 blocks.)
// softmax_kernel has nothing to multiply, and uses 56 % of HBM's bandwidth. N x N numbers still cross HBM
// four times: S is written and read, P is written and read. softmax_kernel reads S three times, but twice
// finds it in the caches.
#pragma once
#include "common/launch.cuh"
#include "common/tile.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = 8, threads = 32 * warps;
constexpr int rows = Br / warps;          // rows of S and O per thread: those of its warp
constexpr int cols = Bc / 32;             // columns of S per thread
constexpr int dims = (d + 31) / 32;       // columns of O per thread

// S (B, H, N_q, N_k) = scale * Q K^T, one tile S_ij per block. The 2 asks for room for two blocks on a
// multiprocessor: a thread then gets at most 128 registers.
__global__ void __launch_bounds__(threads, 2) scores_kernel(FwdParams p, float* S) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, bh = blockIdx.x / Tc / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  extern __shared__ float smem[];         // as large as the launch says; divided by hand
  float* Q_smem = smem;                   // Br x d
  float* K_smem = Q_smem + Br * d;        // Bc x d, rows d + 1 apart
  load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);
  load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);
  __syncthreads();                        // nobody reads before everybody has written

  float S_reg[rows][cols] = {};
  for (int k = 0; k < d; k++) {
    for (int c = 0; c < cols; c++) {
      const float key = K_smem[(lane + 32 * c) * (d + 1) + k];   // one key per lane, one Q for all
      for (int r = 0; r < rows; r++) S_reg[r][c] += Q_smem[(warp * rows + r) * d + k] * key;
    }
  }

  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < cols; c++) {
      const int row = i * Br + warp * rows + r, col = j * Bc + lane + 32 * c;
      const bool visible = !CAUSAL || col <= row + p.diagonal;
      if (row >= p.N_q || col >= p.N_k) continue;
      S[((int64_t)bh * p.N_q + row) * p.N_k + col] = visible ? p.scale * S_reg[r][c] : -INFINITY;
    }
  }
}

// P = exp(S - m) / l, one row per warp. Its lanes read neighbouring columns, then combine by shuffles.
__global__ void __launch_bounds__(threads, 2) softmax_kernel(FwdParams p, float* S) {
  const int64_t row = (int64_t)blockIdx.x * warps + threadIdx.x / 32;   // of B * H * N_q
  const int lane = threadIdx.x % 32;
  if (row >= (int64_t)p.B * p.H * p.N_q) return;   // whole warps: the shuffles of the others stay complete
  float* S_row = S + row * p.N_k;

  float m = -INFINITY, l = 0.f;
  for (int col = lane; col < p.N_k; col += 32) m = fmaxf(m, S_row[col]);
  m = warp_max(m);
  const float shift = m == -INFINITY ? 0.f : m;   // a row that sees no key: -inf - -inf would be NaN
  for (int col = lane; col < p.N_k; col += 32) l += expf(S_row[col] - shift);
  l = warp_sum(l);

  for (int col = lane; col < p.N_k; col += 32) S_row[col] = l == 0.f ? 0.f : expf(S_row[col] - shift) / l;
  if (lane == 0) p.L[row] = l == 0.f ? -INFINITY : m + logf(l);
}

// O = P V. One tile O_i per block, which walks along the tiles of V and of its rows of P.
__global__ void __launch_bounds__(threads, 2) output_kernel(FwdParams p, const float* P) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* O = p.O.head(b, h);

  extern __shared__ float smem[];
  float* V_smem = smem;                   // Bc x d
  float* P_smem = V_smem + Bc * d;        // Br x Bc

  float O_reg[rows][dims] = {};
  // --- O_i along the tiles of P and V
  for (int j = 0; j < Tc; j++) {
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile(V_smem, d, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    for (int r = 0; r < rows; r++) {
      for (int c = 0; c < cols; c++) {
        const int row = i * Br + warp * rows + r, col = j * Bc + lane + 32 * c;
        P_smem[(warp * rows + r) * Bc + lane + 32 * c] =
            row < p.N_q && col < p.N_k ? P[((int64_t)bh * p.N_q + row) * p.N_k + col] : 0.f;
      }
    }
    __syncthreads();

    for (int col = 0; col < Bc; col++) {
      for (int c = 0; c < dims; c++) {
        const float value = lane + 32 * c < d ? V_smem[col * d + lane + 32 * c] : 0.f;   // d: 8, 16, 24, ...
        for (int r = 0; r < rows; r++) O_reg[r][c] += P_smem[(warp * rows + r) * Bc + col] * value;
      }
    }
  }
  // ---

  for (int r = 0; r < rows; r++) {
    for (int c = 0; c < dims; c++) {
      const int row = i * Br + warp * rows + r, k = lane + 32 * c;
      if (row < p.N_q && k < d) O[row * p.O.stride_n + k] = O_reg[r][c];
    }
  }
}

size_t workspace_bytes(const FwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q * p.N_k; }   // S, P

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  float* S = static_cast<float*>(p.workspace);
  const int heads = p.B * p.H, Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const size_t scores_bytes = sizeof(float) * (Br * d + Bc * (d + 1));
  const size_t output_bytes = sizeof(float) * (Bc * d + Br * Bc);
  allow_shared_memory(scores_kernel, scores_bytes);
  allow_shared_memory(output_kernel, output_bytes);
  scores_kernel<<<heads * Tr * Tc, threads, scores_bytes, stream>>>(p, S);
  softmax_kernel<<<ceil_div((int64_t)heads * p.N_q, warps), threads, 0, stream>>>(p, S);
  output_kernel<<<heads * Tr, threads, output_bytes, stream>>>(p, S);
  return cudaGetLastError();
}
