// Forward stage 6: vectorized
// idea:    float4: four numbers an instruction, from HBM, from and to shared memory, and to O
// types:   fp32
// needs:   any GPU
// after:   register_tiles
// takes:   dropout, sink, d_v
// tiles:   Br=128 Bc=64; d > 64: Br=128 Bc=32; d > 128: Br=64 Bc=32
// limits:  Br in (32, 64, 128); Bc in (32, 64)
// shared:  4 * (Br * d + Bc * (d + (d + 31) // 32 * 32) + Br * Bc)
// hbm:     4 * B * H * (2 * Tr * N_k * d + N_q * (2 * d + 1))
// predicted: 1.6x at d=64 and d=128: a quarter of the load instructions; several loads under way at a time
// measured: 2.19x at d=64 causal, 2.20x full, 2.31x at d=128 causal, 2.42x full at N=4096; 2.57x at d=64
//          causal, 2.45x full at N=1024 (H200, fp32; make readme)
//
// One instruction moves 16 bytes: 4 loads from shared memory for 64 multiplications instead of 16, a quarter
// of the loads from HBM, and a quarter of the stores of O (common/vector.cuh).
//
// So a thread's rows and columns come in fours now: rows 0 to 3 and 16 to 19, say, and columns 0 to 3 and 32
// to 35. A float4 of transposed Q or K is four rows, or four keys, at the same k: all four numbers count in
// the same step. (With float4s along d the loads would be as many, but each step would need one number of
// each. A kernel like that took 2 to 6 % longer on an H200.)
//
// A float4 must start at a multiple of 16 bytes. So rows of shared memory cannot be padded by one number, as
// K's are in flash2, and V's are rounded up to a multiple of 32 numbers: `width`. What is beyond d is 0.
//
// The number of loads in a loop is now known when it is compiled (`threads` is a template argument), so the
// compiler starts several before it waits for the first.
//
// HBM traffic without caches (hbm, above): as in register_tiles.
//
// Changed from register_tiles: row_of and col_of, loads and stores, and the store of P. That is a loop of its
// own now, because four rows of a column go together.
//
// Bound by shared memory: it is busy 59 % of the time, the multipliers 54 % (H200, B4 H12 N1024 d64 causal).
// By its counts (flash.inspect(), d=64) there are 9300 wavefronts for the 8192 cycles of multiplications.
// Transposing K has 8-way conflicts, 1024 wavefronts, and the store of P too, 2048. And of the loads, those
// of K and V take four wavefronts where two would do.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/outer_product.cuh"
#include "common/vector.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int rows = Br >= 128 && d <= 128 ? 8 : 4;  // rows of S and O per thread
constexpr int cols = Bc / 8;                         // columns of S per thread
constexpr int dims = (d + 31) / 32 * 4;              // columns of O per thread
constexpr int width = 8 * dims;                      // d, rounded up
constexpr int warps = Br / (4 * rows), threads = 32 * warps;

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  // Rows and columns come in fours; first_row and first_col are where this thread's first four start.
  const int first_row = warp * 4 * rows + 4 * (lane / 8), first_col = 4 * (lane % 8);
  auto row_of = [&](int r) { return first_row + r / 4 * 16 + r % 4; };   // this thread's r-th row of a tile
  auto col_of = [&](int c) { return first_col + c / 4 * 32 + c % 4; };
  float* O = p.O.head(b, h);

  extern __shared__ __align__(16) float smem[];
  float* Q_smem = smem;                   // d x Br: transposed
  float* K_smem = Q_smem + Br * d;        // d x Bc: transposed
  float* V_smem = K_smem + Bc * d;        // Bc x width
  float* P_smem = V_smem + Bc * width;    // Bc x Br: transposed
  load_transposed4<threads>(Q_smem, Br, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);  // line 4

  float O_reg[rows][dims] = {}, m[rows], l[rows];                        // line 5
  for (int r = 0; r < rows; r++) {
    m[r] = SINK ? p.sink[h] : -INFINITY;
    l[r] = SINK ? 1.f : 0.f;
  }

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_transposed4<threads>(K_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 7
    load_tile4<threads, d_v>(V_smem, width, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[rows][cols] = {};                                        // line 8: S_ij = Q_i K_j^T
    #pragma unroll 8
    for (int k = 0; k < d; k++) {
      float query[rows], key[cols];
      load(query, Q_smem + k * Br, first_row, 16);
      load(key, K_smem + k * Bc, first_col, 32);
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
      }
      const float alpha = expf(m[r] - shift);
      l[r] = alpha * l[r] + warp_sum(l_tile, 8);
      m[r] = m_new;
      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // line 10: e^(m - m_new) O
    }
    for (int c = 0; c < cols; c++) {
      for (int r = 0; r < rows; r += 4)
        store4(P_smem + col_of(c) * Br + row_of(r),
               S_reg[r][c], S_reg[r + 1][c], S_reg[r + 2][c], S_reg[r + 3][c]);
    }
    __syncwarp();                         // a warp reads only the rows of P that it wrote itself

    #pragma unroll 8
    for (int col = 0; col < Bc; col++) {                                 // line 10: + P~_ij V_j
      float P[rows], value[dims];
      load(P, P_smem + col * Br, first_row, 16);
      load(value, V_smem + col * width, first_col, 32);
      add_outer_product(O_reg, P, value);
    }
  }                                                                      // line 11

  #pragma unroll
  for (int r = 0; r < rows; r++) {
    const int row = i * Br + row_of(r);
    if (row >= p.N_q) continue;
    const float inv_l = l[r] == 0.f ? 0.f : 1.f / l[r];
    for (int c = 0; c < dims; c += 4) {                                  // lines 12, 14
      const int k = col_of(c);
      if (k >= d_v) continue;
      store4(O + row * p.O.stride_n + k, inv_l * O_reg[r][c], inv_l * O_reg[r][c + 1],
             inv_l * O_reg[r][c + 2], inv_l * O_reg[r][c + 3]);
    }
    if (first_col == 0)                                                  // lines 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : m[r] + logf(l[r]);
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * (Br * d + Bc * d + Bc * width + Br * Bc);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
