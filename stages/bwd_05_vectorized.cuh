// Backward stage 5: vectorized
// idea:    four numbers at a time: from HBM, in shared memory, and the atomics of dQ
// types:   fp32
// needs:   any GPU
// after:   register_tiles
// deterministic: no
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 128: Br=32 Bc=32
// limits:  Br in (32, 64); Bc in (32, 64)
// shared:  4 * (2 * Bc * (d + Br) + (Bc + 2 * Br) * max(32, next_power_of_2(d)))
// workspace: D
// hbm:     4 * B * (5 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
// predicted: 1.2x at d=64 and d=128: a quarter of the requests to HBM and of the stores to shared memory
// measured: 1.58x at d=64 causal, 1.61x full, 1.47x at d=128 causal, 1.55x full at N=4096; 1.68x at d=64
//          causal, 1.74x full at N=1024 (H200, fp32; make readme)
//
// A request for 16 bytes a lane costs as many instructions as one for 4. So
//
//   - tiles come from HBM by float4s (common/vector.cuh), a quarter of the loads and of the stores to shared
//     memory;
//   - P and dS are stored four keys at a time, and dK and dV leave four columns at a time;
//   - a float4 of Q, dO or dS along the sum gives add_product four steps of it;
//   - dQ is added to four numbers at a time where the GPU can (atomic_add4: sm_90).
//
// The loads of the inner loops stay what they were, as nvcc had merged them. What it cannot do: it does not
// know that the rows of a tensor start at multiples of 16 bytes. checks.py checks that they do.
//
// HBM traffic without caches (hbm, above): as in register_tiles, in a quarter of the requests.
//
// Changed from register_tiles: loads, stores and atomics. A thread's numbers and all steps stay. load_tile4
// fills columns from d on with zeros itself.
//
// Bound by shared memory: it is busy 61 % of the time, the multipliers 43 % (H200, B4 H12 N1024 d64 causal).
// By its counts (flash.inspect(), d=64) a tile of S takes 16,500 wavefronts, a cycle each, and 10,240 cycles
// for multiplications. The rows of Q, dO and dS still lie in the same banks.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/outer_product.cuh"
#include "common/rowsum.cuh"
#include "common/vector.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps_d = d <= 64 ? 1 : d <= 128 ? 2 : 4;        // warps that share columns of dK, dV and dQ
constexpr int width = (d + 32 * warps_d - 1) / (32 * warps_d) * 32 * warps_d;     // d, rounded up
constexpr int warps = Bc / 16 * warps_d, threads = 32 * warps;

// Numbers of a thread: rows x cols of S and dP, keys x dims of dK and dV, dQ_rows x dims of dQ
constexpr int cols = Bc / (8 * warps_d) < 4 ? 4 : Bc / (8 * warps_d);
constexpr int warps_c = Bc / (8 * cols);                       // warps that share the columns of S and dP
constexpr int rows = Br / (4 * (warps / warps_c));
constexpr int keys = 4, dims = width / (8 * warps_d);
constexpr int dQ_rows = Br / (Bc / 4);

// C += A B, the sum over n steps. A: rows of n numbers, a_pitch apart, of which a float4 gives four steps.
// B: n rows, b_pitch apart, columns from first_col on, in fours.
template <int R, int C>
__device__ __forceinline__ void add_product(float (&c)[R][C], const float* a, int a_pitch,
                                            const float* b, int b_pitch, int first_col, int n) {
  for (int k = 0; k < n; k += 4) {
    float four[R][4];
    for (int r = 0; r < R; r++) load(four[r], a + r * a_pitch, k, 0);
    #pragma unroll                        // four[r][e] is a register only if e is a constant
    for (int e = 0; e < 4; e++) {
      float a_col[R], b_row[C];
      for (int r = 0; r < R; r++) a_col[r] = four[r][e];
      load(b_row, b + (k + e) * b_pitch, first_col, 32);
      add_outer_product(c, a_col, b_row);
    }
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
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, const float* D) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Of this thread: rows S_row + 4 * r, columns from S_col on, of S and dP; rows from dK_row on of dK and dV,
  // dQ_row + 4 * r of dQ, columns from dim on. (Columns: four, then four more 32 further on.)
  const int S_row = warp / warps_c * 4 * rows + lane / 8, S_col = warp % warps_c * 8 * cols + lane % 8 * 4;
  const int dK_row = warp / warps_d * 16 + lane / 8 * 4, dim = warp % warps_d * 8 * dims + lane % 8 * 4;
  const int dQ_row = warp / warps_d * 4 * dQ_rows + lane / 8;

  extern __shared__ __align__(16) float smem[];
  float* K_smem = smem;                   // Bc x width
  float* KT_smem = K_smem + Bc * width;   // d x Bc: transposed
  float* VT_smem = KT_smem + d * Bc;      // d_v x Bc: transposed
  float* Q_smem = VT_smem + d * Bc;       // Br x width
  float* dO_smem = Q_smem + Br * width;   // Br x width
  float* P_smem = dO_smem + Br * width;   // Br x Bc
  float* dS_smem = P_smem + Br * Bc;      // Br x Bc
  load_tile4<threads>(K_smem, width, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
  load_transposed4<threads>(KT_smem, Bc, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);
  load_transposed4<threads, d_v>(VT_smem, Bc, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[keys][dims] = {}, dV_reg[keys][dims] = {};                // line 7

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L and D
    float* dQ = p.dQ.head(b, h);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      load_tile4<threads>(Q_smem, width, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 9
      load_tile4<threads, d_v>(dO_smem, width, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};
      add_product(S_reg, Q_smem + S_row * width, 4 * width, KT_smem, Bc, S_col, d);        // line 10
      add_product(dP_reg, dO_smem + S_row * width, 4 * width, VT_smem, Bc, S_col, d_v);    // line 13

      for (int r = 0; r < rows; r++) {
        const int row = i * Br + S_row + 4 * r;
        const float L_row = row < p.N_q ? p.L[first_row + row] : 0.f;    // line 9
        const float D_row = row < p.N_q ? D[first_row + row] : 0.f;
        for (int c = 0; c < cols; c++) {
          const int col = j * Bc + S_col + c / 4 * 32 + c % 4;
          const float x = p.scale * S_reg[r][c];
          S_reg[r][c] = mask.sees(row, col) ? expf(mask.score(x, row, col) - L_row) : 0.f; // line 11: P_ij
          const float dS = S_reg[r][c] * (mask.keep(row, col) * dP_reg[r][c] - D_row);           // line 14
          dP_reg[r][c] = mask.through_score(dS, x, row, col);
          S_reg[r][c] *= mask.keep(row, col);
        }
        for (int c = 0; c < cols; c += 4) {
          const int to = (S_row + 4 * r) * Bc + S_col + 8 * c;
          store4(P_smem + to, S_reg[r][c], S_reg[r][c + 1], S_reg[r][c + 2], S_reg[r][c + 3]);
          store4(dS_smem + to, dP_reg[r][c], dP_reg[r][c + 1], dP_reg[r][c + 2], dP_reg[r][c + 3]);
        }
      }
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

      for (int row = 0; row < Br; row++) {
        float P[keys], gradient[dims], dS[keys], query[dims];
        load(P, P_smem + row * Bc, dK_row, 0);
        load(gradient, dO_smem + row * width, dim, 32);
        add_outer_product(dV_reg, P, gradient);                          // line 12: + P_ij^T dO_i
        load(dS, dS_smem + row * Bc, dK_row, 0);
        load(query, Q_smem + row * width, dim, 32);
        add_outer_product(dK_reg, dS, query);                            // line 16: + dS_ij^T Q_i
      }

      float dQ_reg[dQ_rows][dims] = {};                                  // line 15: dS_ij K_j
      add_product(dQ_reg, dS_smem + dQ_row * Bc, 4 * Bc, K_smem, width, dim, Bc);
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
