// Forward stage 7: conflict_free
// idea:    a layout of lanes and an XOR layout of the transposed tiles that leave no bank conflict
// types:   fp32
// needs:   any GPU
// after:   vectorized
// takes:   dropout, sink, d_v
// tiles:   Br=128 Bc=64; d > 64: Br=128 Bc=32; d > 128: Br=64 Bc=32
// limits:  Br in (32, 64, 128); Bc in (32, 64)
// shared:  4 * (Br * d + Bc * (d + (d + 31) // 32 * 32) + Br * Bc)
// hbm:     4 * B * H * (2 * Tr * N_k * d + N_q * (2 * d + 1))
// predicted: 1.3x at d=64, 1.2x at d=128: half the wavefronts of shared memory
// measured: 1.15x at d=64 causal, 1.17x full, 1.07x at d=128 causal, 1.09x full at N=4096; 1.16x at d=64
//          causal, 1.17x full at N=1024 (H200, fp32; make readme)
//
// Two layouts change, and nothing else.
//
// The lanes. They are still 4 x 8, but numbered otherwise (common/conflict_free.cuh draws it): lanes of a row
// and lanes of a column are both neighbours. Then the loads of both operands take two wavefronts, the least
// for what they read, instead of two and four.
//
// The transposed tiles. What a warp stores at a time must fall into different banks. All rows of such a tile
// start in the same bank, so some of its columns change places by an XOR with a few bits of the row:
//
//   Q, K     A warp takes 16 rows x 2 float4s of HBM instead of 4 x 8. The 16 numbers for each of the two k
//            are neighbours, and for every other float4 the halves of 32 columns change places (swizzle_of).
//   P        A quarter of a warp stores two float4s in each of four rows: they change places by multiples of
//            8 columns (P_swizzle).
//
// The reads undo it. An XOR with a constant costs nothing, so that the loops are unrolled just far enough for
// the compiler to know it. That is why P's rows are in another order than the keys.
//
// HBM traffic without caches (hbm, above): as in register_tiles.
//
// Changed from vectorized: lane_row4 and lane_col8, load_swizzled4, the XOR in loads and stores, and the
// order of P's rows. A row's lanes differ in other bits, hence max_of_8 and sum_of_8. And in this layout
// lanes share the numbers that dropout needs (common/drop_shared.cuh).
//
// Shared memory is no longer the bound: its counts (flash.inspect(), d=64) are 4600 wavefronts for 8192
// cycles of multiplications, and it is busy 33 % of the time, the multipliers 61 %. Of its time a warp waits
// 6 % for global memory (H200, B4 H12 N1024 d64 causal): a block multiplies nothing while its next K and V
// come, but the other one on the multiprocessor fills most of that gap.
#pragma once
#include "common/conflict_free.cuh"
#include "common/drop_shared.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/outer_product.cuh"
#include "common/vector.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int rows = Br >= 128 && d <= 128 ? 8 : 4;  // rows of S and O per thread
constexpr int cols = Bc / 8;                         // columns of S per thread
constexpr int dims = (d + 31) / 32 * 4;              // columns of O per thread
constexpr int width = 8 * dims;                      // d, rounded up
constexpr int warps = Br / (4 * rows), threads = 32 * warps;

// Column c of row x of P_smem is at c ^ P_swizzle(x), so that the 8 float4s which a quarter of a warp stores
// at a time, two in each of four rows, fall into different banks.
// --- the swizzle
__device__ __forceinline__ int P_swizzle(int x) { return x % 4 * 8; }
// ---

// Over the 8 lanes that share a row, which differ in the bits 0, 2 and 3 (lane_col8)
__device__ __forceinline__ float max_of_8(float x) {
  for (int distance : {1, 4, 8}) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float sum_of_8(float x) {
  for (int distance : {1, 4, 8}) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  // Rows and columns come in fours; first_row and first_col are where this thread's first four start.
  const int first_row = threadIdx.x / 32 * 4 * rows + 4 * lane_row4(), first_col = 4 * lane_col8();
  auto row_of = [&](int r) { return first_row + r / 4 * 16 + r % 4; };   // this thread's r-th row of a tile
  auto col_of = [&](int c) { return first_col + c / 4 * 32 + c % 4; };
  float* O = p.O.head(b, h);

  extern __shared__ __align__(16) float smem[];
  float* Q_smem = smem;                   // d x Br: transposed
  float* K_smem = Q_smem + Br * d;        // d x Bc: transposed
  float* V_smem = K_smem + Bc * d;        // Bc x width
  float* P_smem = V_smem + Bc * width;    // Bc x Br: transposed
  load_swizzled4<threads>(Q_smem, Br, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);  // line 4

  float O_reg[rows][dims] = {}, m[rows], l[rows];                        // line 5
  for (int r = 0; r < rows; r++) {
    m[r] = SINK ? p.sink[h] : -INFINITY;
    l[r] = SINK ? 1.f : 0.f;
  }

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_swizzled4<threads>(K_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 7
    load_tile4<threads, d_v>(V_smem, width, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[rows][cols] = {};                                        // line 8: S_ij = Q_i K_j^T
    // --- S_ij, from Q_smem and K_smem
    #pragma unroll 8
    for (int k = 0; k < d; k++) {
      float query[rows], key[cols];
      load(query, Q_smem + k * Br, first_row, 16, swizzle_of(k));
      load(key, K_smem + k * Bc, first_col, 32, swizzle_of(k));
      add_outer_product(S_reg, query, key);
    }
    // ---

    #pragma unroll
    for (int r = 0; r < rows; r++) {                                     // line 9
      const int row = i * Br + row_of(r);
      float m_new = m[r];
      for (int c = 0; c < cols; c++) {
        const int col = j * Bc + col_of(c);
        S_reg[r][c] = mask.sees(row, col) ? mask.score(p.scale * S_reg[r][c], row, col) : -INFINITY;
        m_new = fmaxf(m_new, S_reg[r][c]);
      }
      m_new = max_of_8(m_new);
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      float l_tile = 0.f;
      for (int c = 0; c < cols; c++) {
        S_reg[r][c] = expf(S_reg[r][c] - shift);                         // P
        l_tile += S_reg[r][c];
      }
      const float alpha = expf(m[r] - shift);
      l[r] = alpha * l[r] + sum_of_8(l_tile);
      m[r] = m_new;
      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // line 10: e^(m - m_new) O
    }
    if (DROPOUT) drop(S_reg, mask, i * Br + first_row, j * Bc + first_col);
    for (int c = 0; c < cols; c++) {
      // The row of P_smem for key col_of(c). It is not col_of(c) itself: like this, x % 4 is known when the
      // loop over x below is unrolled, and with it P_swizzle(x).
      const int x = lane_col8() + c % 4 * 8 + c / 4 * 32;
      // --- P, four numbers at a time
      for (int r = 0; r < rows; r += 4)
        store4(P_smem + x * Br + (row_of(r) ^ P_swizzle(lane_col8())),
               S_reg[r][c], S_reg[r + 1][c], S_reg[r + 2][c], S_reg[r + 3][c]);
      // ---
    }
    __syncwarp();                         // a warp reads only the rows of P that it wrote itself

    for (int y = 0; y < Bc / 8; y++) {                                   // line 10: + P~_ij V_j
      #pragma unroll
      for (int x = 0; x < 8; x++) {       // row 8 * y + x of P_smem is that of this key:
        const int col = 4 * x + y % 4 + y / 4 * 32;
        float P[rows], value[dims];
        load(P, P_smem + (8 * y + x) * Br, first_row, 16, P_swizzle(x));
        load(value, V_smem + col * width, first_col, 32);
        add_outer_product(O_reg, P, value);
      }
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
