// Backward stage 4: vectorized
// idea:    float4, register tiles, operands transposed where that helps: near what fp32 multipliers give
// types:   fp32
// needs:   any GPU
// after:   recompute
// default: any GPU
// deterministic: no
// tiles:   Br=64 Bc=64; d > 128: Br=32 Bc=32
// limits:  Br in (32, 64); Bc in (32, 64)
// shared:  4 * (2 * Bc * (d + Br) + (Bc + 2 * Br) * max(32, 1 << (d - 1).bit_length()))
// workspace: D
// hbm:     4 * B * (4 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
//
// The algorithm is recompute's: FlashAttention-2's Algorithm 2. What changes is what it was in the forward
// stage of this name: a thread has 4 x 8 numbers of every product in registers (of S and dP 4 x 4 for d > 64,
// 1 x 4 for d > 128; of dK, dV and dQ 4 x 4 for d <= 32), loads four numbers at a time, and no load or store
// has a bank conflict.
//
// Five products, and what each of them sums over decides how its operands should lie:
//
//   S = Q K^T, dP = dO V^T    over k       K and V transposed: once, as the block keeps them. Q and dO come
//                                          anew each time, and stay as they are: a float4 along k gives four
//                                          steps of the sum, one after the other (add_product).
//   dV = P^T dO, dK = dS^T Q  over rows    all four as they are: a row of P and a row of dO make one outer
//                                          product (common/outer_product.cuh), and so do those of dS and Q
//   dQ = dS K                 over keys    dS as it is, four steps to a float4; and K once more, as it is
//
// So the block has K twice. P waits in shared memory, where dV needs it anyway, while dP is being made: the
// registers that it gives back, up to 32, are worth more than the loads.
//
// dQ still leaves by atomics, four numbers at a time where the GPU can: each block adds its part to HBM, in
// any order, so that the last bits of dQ differ from run to run. A kernel of its own for dQ, as in
// deterministic, would be seven products instead of five.
//
// HBM traffic without caches (hbm, above): as in recompute; L and D twice where two warps share the rows of
// S, which the formula leaves out.
//
// For d > 128 a block takes up to 168 KB of shared memory: d = 256 needs an H100. Left the choice,
// attention() takes the best stage that fits.
//
// Changed from recompute: as from flash2 to the forward stage: how tiles are loaded, held and multiplied. The
// steps and their names stay. The blocks that most rows see start first.
//
// Bound by how fast registers reach the multipliers, it seems, like the forward stage: these are busy 63 % of
// the time, issue slots 73 %, shared memory 50 %, HBM 4 % (H200, B4 H12 N1024 d64 causal).
#pragma once
#include "common/conflict_free.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/outer_product.cuh"
#include "common/rowsum.cuh"
#include "common/vector.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps_d = d <= 64 ? 1 : d <= 128 ? 2 : 4;        // warps that share columns of dK, dV and dQ
constexpr int width = (d + 32 * warps_d - 1) / (32 * warps_d) * 32 * warps_d;     // d, rounded up
constexpr int warps = Bc / 16 * warps_d, threads = 32 * warps;
constexpr int blocks = threads < 256 ? 256 / threads : 1;      // per multiprocessor

// Numbers of a thread: rows x cols of S and dP, 4 x dims of dK and dV, dQ_rows x dims of dQ
constexpr int cols = Bc / (8 * warps_d) < 4 ? 4 : Bc / (8 * warps_d);
constexpr int warps_c = Bc / (8 * cols);                       // warps that share the columns of S and dP
constexpr int rows = Br / (4 * (warps / warps_c));
constexpr int dims = width / (8 * warps_d);
constexpr int dQ_rows = Br / (Bc / 4);

constexpr int times = d <= 64 ? 2 : 4;                         // how often to unroll: as measured

// What a thread carries of a tile of Q or dO, from HBM to shared memory
constexpr int at_once = threads / (width / 4), pieces = Br / at_once;   // rows of the tile; times
struct Pieces { float4 x[pieces]; };

// `left`: rows from the tile's first to N_q. Rows from there on, and columns from d on, are zeros.
__device__ __forceinline__ void fetch(Pieces& next, const float* tile, int64_t stride_n, int left) {
  const int row = threadIdx.x / (width / 4), k = threadIdx.x % (width / 4) * 4;
  const float* from = tile + row * stride_n + k;
  #pragma unroll
  for (int n = 0; n < pieces; n++) {
    const bool inside = row + n * at_once < left && (width == d || k < d);
    next.x[n] = inside ? load4(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    from += at_once * stride_n;
  }
}

// Of odd rows, neighbouring float4s change places, so that two rows can be read at a time (load: swap = 4).
__device__ __forceinline__ void put(float* tile, const Pieces& next) {
  const int row = threadIdx.x / (width / 4), k = threadIdx.x % (width / 4) * 4;
  #pragma unroll
  for (int n = 0; n < pieces; n++) {
    const int at = row + n * at_once;
    const float4 x = next.x[n];
    store4(tile + at * width + (k ^ at % 2 * 4), x.x, x.y, x.z, x.w);
  }
}

// C += A B for four k. A: float4s along k, `a_pitch` apart. B: rows of k, read as by load(); from one to the
// next `swap` grows by `swap_step`.
template <int R, int C>
__device__ __forceinline__ void add_product(float (&c)[R][C], const float* a, int a_pitch, const float* b,
                                            int b_pitch, int first, int swap, int swap_step) {
  float four[R][4];
  #pragma unroll
  for (int r = 0; r < R; r++) load(four[r], a + r * a_pitch, 0, 0);
  #pragma unroll
  for (int e = 0; e < 4; e++) {
    float column[R], row[C];
    #pragma unroll
    for (int r = 0; r < R; r++) column[r] = four[r][e];
    load(row, b + e * b_pitch, first, 32, swap + e * swap_step);
    add_outer_product<true>(c, column, row);
  }
}

// Four sums at a time, where the GPU can (sm_90)
__device__ __forceinline__ void atomic_add4(float* to, float x, float y, float z, float w) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(to), make_float4(x, y, z, w));
#else
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
  atomicAdd(to + 2, z);
  atomicAdd(to + 3, w);
#endif
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, blocks) vectorized_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc), heads = p.B * p.H_kv;     // 1, 2
  const int j = CAUSAL ? blockIdx.x / heads : blockIdx.x % Tc;           // 5; causal: most rows see j = 0
  const int bh = CAUSAL ? blockIdx.x % heads : blockIdx.x / Tc;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of this thread: rows S_row + 4 * r, columns from S_col on, of S and dP; rows keys to keys + 3 of dK and
  // dV, dQ_row + 4 * r of dQ, columns from dim on. (Columns: four, then four more 32 further on.)
  const int S_row = warp / warps_c * 4 * rows + lane_row4();
  const int S_col = warp % warps_c * 8 * cols + 4 * lane_col8();
  const int keys = warp / warps_d * 16 + 4 * lane_row4(), dim = warp % warps_d * 8 * dims + 4 * lane_col8();
  const int dQ_row = warp / warps_d * 4 * dQ_rows + lane_row4();
  const int odd = lane_row4() % 2;            // are S_row and dQ_row?

  extern __shared__ __align__(16) float smem[];
  float* K_smem = smem;                   // Bc x width
  float* KT_smem = K_smem + Bc * width;   // d x Bc: transposed
  float* VT_smem = KT_smem + d * Bc;      // d x Bc: transposed
  float* Q_smem = VT_smem + d * Bc;       // Br x width
  float* dO_smem = Q_smem + Br * width;   // Br x width
  float* P_smem = dO_smem + Br * width;   // Br x Bc
  float* dS_smem = P_smem + Br * Bc;      // Br x Bc

  const float* K = p.K.head(b, h_kv) + (int64_t)j * Bc * p.K.stride_n;
  const float* V = p.V.head(b, h_kv) + (int64_t)j * Bc * p.V.stride_n;
  for (int n = warp; n < Bc / 16 * (width / 8); n += warps) {            // 6: 16 rows x 2 float4s a warp
    const int row = n % (Bc / 16) * 16 + lane / 2, k = n / (Bc / 16) * 2 + lane % 2;
    const bool inside = j * Bc + row < p.N_k && 4 * k < d;
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
    const float4 key = inside ? load4(K + row * p.K.stride_n + 4 * k) : zero;
    const float4 value = inside ? load4(V + row * p.V.stride_n + 4 * k) : zero;
    store4(K_smem + row * width + (4 * k ^ row % 4 * 8), key.x, key.y, key.z, key.w);
    if (4 * k >= d) continue;
    store_transposed(KT_smem, Bc, row, k, key);
    store_transposed(VT_smem, Bc, row, k, value);
  }

  float dK_reg[4][dims] = {}, dV_reg[4][dims] = {};                      // 7

  // causal: the first row that sees key j * Bc is j * Bc - diagonal; the tiles of Q before it see none
  const int first_i = CAUSAL ? max(j * Bc - p.diagonal, 0) / Br : 0;
  const int tiles = max(Tr - first_i, 0) * group;
  Pieces Q_next, dO_next;
  auto fetch_tiles = [&](int h, int i) {
    const int64_t first = (int64_t)i * Br;
    fetch(Q_next, p.Q.head(b, h) + first * p.Q.stride_n, p.Q.stride_n, p.N_q - i * Br);
    fetch(dO_next, p.dO.head(b, h) + first * p.dO.stride_n, p.dO.stride_n, p.N_q - i * Br);
  };
  int h = h_kv * group, i = first_i, next_h = h, next_i = i;
  if (tiles > 0) fetch_tiles(h, i);
  for (int n = 0; n < tiles; n++) {                                      // 8: over the heads and their tiles
    put(Q_smem, Q_next);                                                 // 9
    put(dO_smem, dO_next);
    __syncthreads();                      // nobody reads before everybody has written

    float L[rows], D_row[rows];
    #pragma unroll
    for (int r = 0; r < rows; r++) {
      const int row = i * Br + S_row + 4 * r;
      const int64_t at = ((int64_t)b * p.H + h) * p.N_q + row;
      L[r] = row < p.N_q ? p.L[at] : 0.f;                                // 9
      D_row[r] = row < p.N_q ? D[at] : 0.f;
    }

    float S_reg[rows][cols] = {};                                        // 10: S_ij = Q_i K_j^T
    const float* Q_at = Q_smem + S_row * width;
    const float* K_at = KT_smem;
    #pragma unroll (times)
    for (int k8 = 0; k8 < d; k8 += 8) {
      #pragma unroll
      for (int k = 0; k < 8; k += 4)
        add_product(S_reg, Q_at + (k ^ 4 * odd), 4 * width, K_at + k * Bc, Bc, S_col, swizzle_of(k), 0);
      Q_at += 8;
      K_at += 8 * Bc;
    }
    const bool masked = (i + 1) * Br > p.N_q || (j + 1) * Bc > p.N_k ||
                        (CAUSAL && (j + 1) * Bc - 1 > i * Br + p.diagonal);
    #pragma unroll
    for (int r = 0; r < rows; r++) {                                     // 11: P_ij
      #pragma unroll
      for (int c = 0; c < cols; c++) S_reg[r][c] = fast_exp2(LOG2_E * (p.scale * S_reg[r][c] - L[r]));
      if (masked) {
        #pragma unroll
        for (int c = 0; c < cols; c++) {
          const int row = i * Br + S_row + 4 * r, col = j * Bc + S_col + c / 4 * 32 + c % 4;
          const bool visible = row < p.N_q && col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
          if (!visible) S_reg[r][c] = 0.f;
        }
      }
      #pragma unroll
      for (int c = 0; c < cols; c += 4)
        store4(P_smem + (S_row + 4 * r) * Bc + ((S_col + 8 * c) ^ 16 * odd),
               S_reg[r][c], S_reg[r][c + 1], S_reg[r][c + 2], S_reg[r][c + 3]);
    }

    float dP_reg[rows][cols] = {};                                       // 13: dP_ij = dO_i V_j^T
    const float* dO_at = dO_smem + S_row * width;
    const float* V_at = VT_smem;
    #pragma unroll (times)
    for (int k8 = 0; k8 < d; k8 += 8) {
      #pragma unroll
      for (int k = 0; k < 8; k += 4)
        add_product(dP_reg, dO_at + (k ^ 4 * odd), 4 * width, V_at + k * Bc, Bc, S_col, swizzle_of(k), 0);
      dO_at += 8;
      V_at += 8 * Bc;
    }
    #pragma unroll
    for (int r = 0; r < rows; r++) {                                     // 14: dS_ij
      #pragma unroll
      for (int c = 0; c < cols; c += 4) {
        const int at = (S_row + 4 * r) * Bc + ((S_col + 8 * c) ^ 16 * odd);
        const float4 P = load4(P_smem + at);      // from where it waited, out of the way of dP
        store4(dS_smem + at, P.x * (dP_reg[r][c] - D_row[r]), P.y * (dP_reg[r][c + 1] - D_row[r]),
               P.z * (dP_reg[r][c + 2] - D_row[r]), P.w * (dP_reg[r][c + 3] - D_row[r]));
      }
    }
    __syncthreads();                      // a warp now reads columns of P and dS, which all warps wrote

    if (++next_i == Tr) {
      next_i = first_i;
      next_h++;
    }
    if (n + 1 < tiles) fetch_tiles(next_h, next_i);       // on their way while the multiplications run

    #pragma unroll 32
    for (int row = 0; row < Br; row++) {
      float P[4], gradient[dims], dS[4], query[dims];
      load(P, P_smem + row * Bc, keys, 0, row % 2 * 16);
      load(gradient, dO_smem + row * width, dim, 32, row % 2 * 4);
      add_outer_product(dV_reg, P, gradient);                            // 12: + P_ij^T dO_i
      load(dS, dS_smem + row * Bc, keys, 0, row % 2 * 16);
      load(query, Q_smem + row * width, dim, 32, row % 2 * 4);
      add_outer_product(dK_reg, dS, query);                              // 16: + dS_ij^T Q_i
    }

    float dQ_reg[dQ_rows][dims] = {};                                    // 15: dS_ij K_j
    const float* dS_at = dS_smem + dQ_row * Bc;
    K_at = K_smem;                        // now K as it is, not transposed
    for (int col32 = 0; col32 < Bc; col32 += 32) {
      #pragma unroll
      for (int col = 0; col < 32; col += 4)
        add_product(dQ_reg, dS_at + (col ^ 16 * odd), 4 * Bc, K_at + col * width, width, dim, 0, 8);
      dS_at += 32;
      K_at += 32 * width;
    }
    float* dQ = p.dQ.head(b, h) + dim;
    #pragma unroll
    for (int r = 0; r < dQ_rows; r++) {                                  // 15: to HBM, beside other blocks
      const int row = i * Br + dQ_row + 4 * r;
      if (row >= p.N_q) continue;
      #pragma unroll
      for (int c = 0; c < dims; c += 4) {
        if (width != d && dim + 8 * c >= d) continue;
        atomic_add4(dQ + row * p.dQ.stride_n + 8 * c, p.scale * dQ_reg[r][c], p.scale * dQ_reg[r][c + 1],
                    p.scale * dQ_reg[r][c + 2], p.scale * dQ_reg[r][c + 3]);
      }
    }
    h = next_h;
    i = next_i;
    __syncthreads();                      // all are done with these tiles, which are now overwritten
  }                                                                      // 17

  float* dK = p.dK.head(b, h_kv) + dim;
  float* dV = p.dV.head(b, h_kv) + dim;
  #pragma unroll
  for (int r = 0; r < 4; r++) {                                          // 18
    const int col = j * Bc + keys + r;
    if (col >= p.N_k) continue;
    #pragma unroll
    for (int c = 0; c < dims; c += 4) {
      if (width != d && dim + 8 * c >= d) continue;
      store4(dK + col * p.dK.stride_n + 8 * c, p.scale * dK_reg[r][c], p.scale * dK_reg[r][c + 1],
             p.scale * dK_reg[r][c + 2], p.scale * dK_reg[r][c + 3]);
      store4(dV + col * p.dV.stride_n + 8 * c, dV_reg[r][c], dV_reg[r][c + 1], dV_reg[r][c + 2],
             dV_reg[r][c + 3]);
    }
  }
}

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q; }   // D

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  float* D = static_cast<float*>(p.workspace);
  launch_D_kernel(p, D, /*clear_dQ=*/true, stream);
  const size_t bytes = sizeof(float) * (Bc * (width + 2 * d) + 2 * Br * (width + Bc));
  allow_shared_memory(vectorized_kernel, bytes);
  vectorized_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D);
  return cudaGetLastError();
}
