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
//
// The three steps stay; what changes is who works on what. A block copies a tile of each operand to shared
// memory, once, and all of its threads read it from there: each number of K comes from HBM Tr times instead
// of N_q times, each number of Q Tc times instead of N_k times.
//
// The layout, which all fp32 stages up to 4 keep: a block has 8 warps; a warp owns Br / 8 whole rows of the
// tile, and its lanes share the columns. Lane t has columns t, t + 32, ... of S, and of O.
//
//             columns of S_ij            A row never leaves its warp. So its maximum and its sum are
//             0  1  2 ...  31            shuffles inside the warp (common/warp.cuh), and warps wait for
//   warp 0    t0 t1 t2 ... t31  row 0    each other only when a tile is loaded. In registers, a thread
//             t0 t1 t2 ... t31  row 1    has rows x cols numbers of S: one number of K, read from shared
//   warp 1    t0 t1 t2 ... t31  row 2    memory, is used for all of its rows.
//
// In shared memory, K's rows lie d + 1 floats apart: 32 lanes read the same k of 32 rows, and d + 1 is odd,
// so that these fall into 32 different banks. With d, a multiple of 8, they would fall into 4 at best, one
// after the other.
//
// HBM traffic without caches (hbm, above): Q Tc times, K and V Tr times; N x N numbers six times, as S is
// written, read three times and overwritten by P, which is read; O and L.
//
// Changed from naive: all three kernels, and more lines than in any later fp32 stage, as the layout is new.
//
// Bound by waiting: a block loads its tiles, and only then multiplies; the registers leave room for few
// warps, so that no others are there to multiply meanwhile. softmax_kernel, which has nothing to multiply,
// reaches more than half of HBM's bandwidth. And N x N numbers still cross HBM four times: S is written and
// read, P is written and read. (softmax_kernel reads S three times, and finds it in the caches twice.)
#pragma once
#include "common/launch.cuh"
#include "common/tile.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = 8, threads = 32 * warps;
constexpr int rows = Br / warps;          // rows of a tile per warp
constexpr int cols = Bc / 32;             // columns of S per lane
constexpr int dims = (d + 31) / 32;       // columns of O per lane

// S (B, H, N_q, N_k) = scale * Q K^T, one tile S_ij per block. The 2: two blocks are to fit on a
// multiprocessor, so a thread may have 128 registers.
__global__ void __launch_bounds__(threads, 2) scores_kernel(FwdParams p, float* S) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, bh = blockIdx.x / Tc / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  extern __shared__ float smem[];         // as large as the launch says; cut up by hand
  float* Q_smem = smem;                   // Br x d
  float* K_smem = Q_smem + Br * d;        // Bc x d, rows d + 1 apart
  load_tile(Q_smem, d, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);
  load_tile(K_smem, d + 1, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);
  __syncthreads();                        // nobody reads before everybody has written

  float S_reg[rows][cols] = {};
  for (int k = 0; k < d; k++) {
    for (int c = 0; c < cols; c++) {
      const float key = K_smem[(lane + 32 * c) * (d + 1) + k];   // a key per lane; Q: all the same
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

// P = exp(S - m) / l, one row per warp. Its lanes read neighbouring columns, and combine by shuffles.
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

// O = P V, one tile O_i per block, which walks along the tiles of P's rows and of V
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
