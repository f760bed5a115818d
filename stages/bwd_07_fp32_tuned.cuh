// Backward stage 7: fp32_tuned
// idea:    what is left: 2^x, cut tiles apart, P out of registers, prefetch of Q and dO, order of blocks
// types:   fp32
// needs:   any GPU
// after:   conflict_free
// default: any GPU
// deterministic: no
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 128: Br=32 Bc=32
// limits:  Br in (32, 64); Bc in (32, 64)
// shared:  4 * (2 * Bc * (d + Br) + (Bc + 2 * Br) * max(32, next_power_of_2(d)))
// workspace: D
// hbm:     4 * B * (5 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
// predicted: 1.3x at d=64, 1.2x at d=128, less without a mask: no wait for Q and dO; heavy tiles first
// measured: 1.37x at d=64 causal, 1.30x full, 1.37x at d=128 causal, 1.35x full at N=4096; 1.53x at d=64
//          causal, 1.29x full at N=1024 (H200, fp32; make readme)
//
// No product changes any more. What does:
//
//   - The next tiles of Q and dO are loaded into registers while the last three products run, and stored when
//     these are done (stage_tile, store_tile). So no multiplication waits for HBM.
//   - P waits in shared memory, where dV needs it anyway, while dP is being made. The registers that it gives
//     back, up to 32, hold the next Q and dO.
//   - An exponential is one instruction (common/exp2.cuh). Only tiles that the mask cuts, or that reach past
//     the last row or key, look at it.
//   - With a causal mask, the tiles of K and V that most rows see start first, those of all heads. Short ones
//     fill the gaps at the end (common/order.cuh).
//   - Loops are unrolled, and multiplications ordered (by_rows), as was fastest. The compiler may use as many
//     registers as 256 threads on a multiprocessor leave.
//
// dQ still leaves by atomics: each block adds its part to HBM, in any order, so that the last bits of dQ
// differ from run to run. A kernel of its own for dQ, as in deterministic, would be seven products instead of
// five.
//
// HBM traffic without caches (hbm, above): as in conflict_free.
//
// Changed from conflict_free: the list above.
//
// Bound by the multipliers and what feeds them: multipliers are busy 63 % of the time, issue slots 72 %,
// shared memory 50 %, HBM 4 % (H200, B4 H12 N1024 d64 causal). That is 67 % of the speed of PyTorch's product
// of large fp32 matrices (docs/measurements.md), which keeps the multipliers busy 77 % of the time.
#pragma once
#include "common/conflict_free.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/order.cuh"
#include "common/outer_product.cuh"
#include "common/rowsum.cuh"
#include "common/vector.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps_d = d <= 64 ? 1 : d <= 128 ? 2 : 4;        // warps that share columns of dK, dV and dQ
constexpr int width = (d + 32 * warps_d - 1) / (32 * warps_d) * 32 * warps_d;     // d, rounded up
constexpr int warps = Bc / 16 * warps_d, threads = 32 * warps;
constexpr int blocks_per_sm = threads < 256 ? 256 / threads : 1;
constexpr int unroll_k = d <= 64 ? 2 : 4;                      // as measured

// Numbers of a thread: rows x cols of S and dP, keys x dims of dK and dV, dQ_rows x dims of dQ
constexpr int cols = Bc / (8 * warps_d) < 4 ? 4 : Bc / (8 * warps_d);
constexpr int warps_c = Bc / (8 * cols);                       // warps that share the columns of S and dP
constexpr int rows = Br / (4 * (warps / warps_c));
constexpr int keys = 4, dims = width / (8 * warps_d);
constexpr int dQ_rows = Br / (Bc / 4);

// Registers for a tile of Q or dO on its way from HBM to shared memory: a thread has every tile_step-th row.
constexpr int tile_step = threads / (width / 4), staged_rows = Br / tile_step;

// Rows of `matrix` from `first` on. Rows from N on, and columns that it does not have, are zeros.
template <int columns>
__device__ __forceinline__ void stage_tile(float4 (&staged)[staged_rows], const float* matrix,
                                           int64_t stride_n, int first, int N) {
  const int row = first + threadIdx.x / (width / 4), k = threadIdx.x % (width / 4) * 4;
  const float* from = matrix + row * stride_n + k;
  for (int n = 0; n < staged_rows; n++) {
    const bool inside = row + n * tile_step < N && (width == columns || k < columns);
    staged[n] = inside ? load4(from) : make_float4(0.f, 0.f, 0.f, 0.f);
    from += tile_step * stride_n;
  }
}

// Of odd rows neighbouring float4s change places.
__device__ __forceinline__ void store_tile(float* tile, const float4 (&staged)[staged_rows]) {
  for (int n = 0; n < staged_rows; n++) {
    const int row = threadIdx.x / (width / 4) + n * tile_step, k = threadIdx.x % (width / 4) * 4;
    const float4 x = staged[n];
    store4(tile + row * width + (k ^ row % 2 * 4), x.x, x.y, x.z, x.w);
  }
}

// C += A B, the sum over n steps. A: rows of n numbers, a_pitch apart, of which a float4 gives four steps.
// Element k is at k ^ a_swizzle. B: n rows, b_pitch apart, columns from first_col on, in fours. In a row k
// with odd k / 4, element x is at x ^ b_swizzle. The layouts repeat after `period` steps. These are unrolled,
// so that swizzles are constants; and that `unroll` times.
template <int period, int unroll, int R, int C>
__device__ __forceinline__ void add_product(float (&c)[R][C], const float* a, int a_pitch, int a_swizzle,
                                            const float* b, int b_pitch, int b_swizzle, int first_col,
                                            int n) {
  #pragma unroll (unroll)
  for (int done = 0; done < n; done += period) {
    #pragma unroll
    for (int k = 0; k < period; k += 4) {
      float four[R][4];
      for (int r = 0; r < R; r++) load(four[r], a + (k ^ a_swizzle) + r * a_pitch, 0, 0);
      #pragma unroll                      // four[r][e] is a register only if e is a constant
      for (int e = 0; e < 4; e++) {
        float a_col[R], b_row[C];
        for (int r = 0; r < R; r++) a_col[r] = four[r][e];
        load(b_row, b + (k + e) * b_pitch, first_col, 32, k / 4 % 2 * b_swizzle);
        add_outer_product<true>(c, a_col, b_row);
      }
    }
    a += period;
    b += period * b_pitch;
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
__global__ void __launch_bounds__(threads, blocks_per_sm) backward_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc), heads = p.B * p.H_kv;      // lines 1, 2
  const Work work = dispatch_order(Tc, heads, CAUSAL ? heads : 1);       // line 5; most rows see tile 0
  const int j = work.tile, bh = work.bh;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, row4 = lane_row4(), col8 = lane_col8();
  // Of this thread: rows S_row + 4 * r, columns from S_col on, of S and dP; rows from dK_row on of dK and dV,
  // dQ_row + 4 * r of dQ, columns from dim on. (Columns: four, then four more 32 further on.)
  const int S_row = warp / warps_c * 4 * rows + row4, S_col = warp % warps_c * 8 * cols + col8 * 4;
  const int dK_row = warp / warps_d * 16 + row4 * 4, dim = warp % warps_d * 8 * dims + col8 * 4;
  const int dQ_row = warp / warps_d * 4 * dQ_rows + row4;
  const int odd = row4 % 2;               // are S_row + 4 * r and dQ_row + 4 * r?

  extern __shared__ __align__(16) float smem[];
  float* K_smem = smem;                   // Bc x width
  float* KT_smem = K_smem + Bc * width;   // d x Bc: transposed
  float* VT_smem = KT_smem + d * Bc;      // d_v x Bc: transposed
  float* Q_smem = VT_smem + d * Bc;       // Br x width
  float* dO_smem = Q_smem + Br * width;   // Br x width
  float* P_smem = dO_smem + Br * width;   // Br x Bc
  float* dS_smem = P_smem + Br * Bc;      // Br x Bc
  load_tile4<threads>(K_smem, width, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
  load_swizzled4<threads>(KT_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);
  load_swizzled4<threads, d_v>(VT_smem, Bc, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[keys][dims] = {}, dV_reg[keys][dims] = {};                // line 7

  float4 Q_staged[staged_rows], dO_staged[staged_rows];
  auto stage_tiles = [&](int h, int i) {
    stage_tile<d>(Q_staged, p.Q.head(b, h), p.Q.stride_n, i * Br, p.N_q);
    stage_tile<d_v>(dO_staged, p.dO.head(b, h), p.dO.stride_n, i * Br, p.N_q);
  };
  bool staged = false;                    // are the next head's first ones on their way?

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L and D
    float* dQ = p.dQ.head(b, h);
    if (!staged && tiles.first < tiles.end) stage_tiles(h, tiles[tiles.first]);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      store_tile(Q_smem, Q_staged);                                      // line 9
      store_tile(dO_smem, dO_staged);
      __syncthreads();                    // nobody reads before everybody has written

      float L_row[rows], D_row[rows];
      for (int r = 0; r < rows; r++) {
        const int row = i * Br + S_row + 4 * r;
        L_row[r] = row < p.N_q ? p.L[first_row + row] : 0.f;             // line 9
        D_row[r] = row < p.N_q ? D[first_row + row] : 0.f;
      }

      float S_reg[rows][cols] = {}, slope_reg[rows][cols];               // line 10: S_ij = Q_i K_j^T
      const float* Q_rows = Q_smem + S_row * width;
      add_product<8, unroll_k>(S_reg, Q_rows, 4 * width, 4 * odd, KT_smem, Bc, 16, S_col, d);
      const bool cut = mask.cuts(tiles, t, j);
      for (int r = 0; r < rows; r++) {                                   // line 11: P_ij
        const int row = i * Br + S_row + 4 * r;
        for (int c = 0; c < cols; c++) {
          const int col = j * Bc + S_col + c / 4 * 32 + c % 4;
          const float x = p.scale * S_reg[r][c];
          slope_reg[r][c] = mask.slope(x, row, col);
          S_reg[r][c] = fast_exp2(LOG2_E * (mask.score(x, row, col) - L_row[r]));
        }
        for (int c = 0; cut && c < cols; c++) {
          if (!mask.sees(row, j * Bc + S_col + c / 4 * 32 + c % 4)) S_reg[r][c] = 0.f;
        }
        for (int c = 0; c < cols; c += 4) {
          const int to = (S_row + 4 * r) * Bc + ((S_col + 8 * c) ^ 16 * odd);
          store4(P_smem + to, S_reg[r][c], S_reg[r][c + 1], S_reg[r][c + 2], S_reg[r][c + 3]);
        }
      }

      float dP_reg[rows][cols] = {};                                     // line 13: dP_ij = dO_i V_j^T
      const float* dO_rows = dO_smem + S_row * width;
      add_product<8, unroll_k>(dP_reg, dO_rows, 4 * width, 4 * odd, VT_smem, Bc, 16, S_col, d_v);
      for (int r = 0; r < rows; r++) {                                   // line 14: dS_ij
        for (int c = 0; c < cols; c += 4) {
          const int to = (S_row + 4 * r) * Bc + ((S_col + 8 * c) ^ 16 * odd);
          float P[4];
          load(P, P_smem + to, 0, 0);               // from where it waited, out of the way of dP
          float2 two;
          for (int e = 0; e < 4; e++) {
            const int row = i * Br + S_row + 4 * r, col = j * Bc + S_col + 8 * c + e;
            if (e % 2 == 0) two = mask.keep_two(row, col);
            const float keep = e % 2 ? two.y : two.x, dS = P[e] * (keep * dP_reg[r][c + e] - D_row[r]);
            mask.keep_gradient(dS, row, col);
            dP_reg[r][c + e] = dS * slope_reg[r][c + e];
            P[e] *= keep;
          }
          if (DROPOUT) store4(P_smem + to, P[0], P[1], P[2], P[3]);      // for dV
          store4(dS_smem + to, dP_reg[r][c], dP_reg[r][c + 1], dP_reg[r][c + 2], dP_reg[r][c + 3]);
        }
      }
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

      const int next_h = t + 1 < tiles.end ? h : h + 1;
      if (next_h < (h_kv + 1) * group) {
        const auto next = Mask(p, b, next_h).query_tiles(j);
        const int next_t = next_h == h ? t + 1 : next.first;
        staged = next_t < next.end;
        if (staged) stage_tiles(next_h, next[next_t]);                   // they come while the products run
      }

      #pragma unroll 32
      for (int row = 0; row < Br; row++) {
        float P[keys], gradient[dims], dS[keys], query[dims];
        load(P, P_smem + row * Bc, dK_row, 0, row % 2 * 16);
        load(gradient, dO_smem + row * width, dim, 32, row % 2 * 4);
        add_outer_product(dV_reg, P, gradient);                          // line 12: + P_ij^T dO_i
        load(dS, dS_smem + row * Bc, dK_row, 0, row % 2 * 16);
        load(query, Q_smem + row * width, dim, 32, row % 2 * 4);
        add_outer_product(dK_reg, dS, query);                            // line 16: + dS_ij^T Q_i
      }

      float dQ_reg[dQ_rows][dims] = {};                                  // line 15: dS_ij K_j
      add_product<32, 1>(dQ_reg, dS_smem + dQ_row * Bc, 4 * Bc, 16 * odd, K_smem, width, 0, dim, Bc);
      for (int r = 0; r < dQ_rows; r++) {
        const int row = i * Br + dQ_row + 4 * r;
        if (row >= p.N_q) continue;
        for (int c = 0; c < dims; c += 4) {                              // line 15: to HBM, with other blocks
          const int k = dim + 8 * c;
          if (k >= d) continue;
          atomic_add4(dQ + row * p.dQ.stride_n + k, p.scale * dQ_reg[r][c], p.scale * dQ_reg[r][c + 1],
                      p.scale * dQ_reg[r][c + 2], p.scale * dQ_reg[r][c + 3]);
        }
      }
    }                                                                    // line 17
  }

  float* dK = p.dK.head(b, h_kv);
  float* dV = p.dV.head(b, h_kv);
  for (int r = 0; r < keys; r++) {                                       // line 18
    const int col = j * Bc + dK_row + r;
    if (col >= p.N_k) continue;
    for (int c = 0; c < dims; c += 4) {
      const int k = dim + 8 * c;
      if (k >= d) continue;
      store4(dK + col * p.dK.stride_n + k, p.scale * dK_reg[r][c], p.scale * dK_reg[r][c + 1],
             p.scale * dK_reg[r][c + 2], p.scale * dK_reg[r][c + 3]);
      if (k >= d_v) continue;
      store4(dV + col * p.dV.stride_n + k, dV_reg[r][c], dV_reg[r][c + 1], dV_reg[r][c + 2],
             dV_reg[r][c + 3]);
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
