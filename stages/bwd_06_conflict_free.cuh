// Backward stage 6: conflict_free
// idea:    the lanes of a warp and the rows of tiles are arranged so that no bank conflict is left
// types:   fp32
// needs:   any GPU
// after:   vectorized
// deterministic: no
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=64; d > 128: Br=32 Bc=32
// limits:  Br in (32, 64); Bc in (32, 64)
// shared:  4 * (2 * Bc * (d + Br) + (Bc + 2 * Br) * max(32, next_power_of_2(d)))
// workspace: D
// hbm:     4 * B * (5 * H_kv * N_k * d + H * N_q * (Tc * (4 * d + 2) + 3 * d + 2))
// predicted: 1.4x at d=64 and d=128: half the wavefronts of reads from shared memory
// measured: 1.14x at d=64 causal, 1.14x full, 1.24x at d=128 causal, 1.23x full at N=4096; 1.15x at d=64
//          causal, 1.15x full at N=1024 (H200, fp32; make readme)
//
// An H200 serves 16 bytes a lane in four wavefronts, but in two if neighbouring lanes read the same numbers
// (results/h200/banks.json). Two arrangements make that happen for every operand:
//
//   lanes    4 x 8 as common/conflict_free.cuh draws it, no longer lane / 8 and lane % 8: both operands of an
//            outer product are then read in two wavefronts, not four.
//   columns  Some change places within their row, by XOR with a number that the row decides (swizzle):
//
//     Q, dO    of odd rows neighbouring float4s: k ^ 4         a warp reads 4 rows, 4 columns of each, along
//     P, dS    of odd rows halves of 32 columns: col ^ 16      the sum: even and odd rows no longer meet
//     K^T, V^T of k with odd k / 4 halves of 32 keys: ^ 16     a warp stores 16 rows x 2 float4s at a time
//
// A row that is read across has the same swizzle in all lanes, so there it costs nothing. K as it is needs
// none: dQ reads it across, and its float4s are stored in the order of the lanes.
//
// Requests, and HBM traffic without caches (hbm, above), are those of vectorized. No line of the stage takes
// more wavefronts than it must (flash.inspect()).
//
// Changed from vectorized: where a lane's numbers and a tile's columns are. Nothing else.
//
// Bound by no single unit: by its counts (flash.inspect(), d=64) a tile of S takes 8,300 wavefronts, and
// 10,240 cycles for multiplications. The multipliers are busy 51 % of the time, shared memory 39 %, issue
// slots are used 68 % (H200, B4 H12 N1024 d64 causal). The next stage asks what these wait for: tiles of Q
// and dO, the mask and expf of each score, the longest blocks.
#pragma once
#include "common/conflict_free.cuh"
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

// As load_tile4, but of odd rows neighbouring float4s change places.
template <int columns>
__device__ __forceinline__ void load_swizzled_rows(float* tile, const float* matrix, int64_t stride_n,
                                                   int first, int N) {
  for (int n = threadIdx.x; n < Br * width / 4; n += threads) {
    const int row = n / (width / 4), k = n % (width / 4) * 4;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (first + row < N && k < columns) x = load4(matrix + (first + row) * stride_n + k);
    store4(tile + row * width + (k ^ row % 2 * 4), x.x, x.y, x.z, x.w);
  }
}

// C += A B, the sum over n steps. A: rows of n numbers, a_pitch apart, of which a float4 gives four steps.
// Element k is at k ^ a_swizzle. B: n rows, b_pitch apart, columns from first_col on, in fours. In a row k
// with odd k / 4, element x is at x ^ b_swizzle.
template <int R, int C>
__device__ __forceinline__ void add_product(float (&c)[R][C], const float* a, int a_pitch, int a_swizzle,
                                            const float* b, int b_pitch, int b_swizzle, int first_col,
                                            int n) {
  for (int k = 0; k < n; k += 4) {
    float four[R][4];
    for (int r = 0; r < R; r++) load(four[r], a + r * a_pitch, k, 0, a_swizzle);
    #pragma unroll                        // four[r][e] is a register only if e is a constant
    for (int e = 0; e < 4; e++) {
      float a_col[R], b_row[C];
      for (int r = 0; r < R; r++) a_col[r] = four[r][e];
      load(b_row, b + (k + e) * b_pitch, first_col, 32, k / 4 % 2 * b_swizzle);
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

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L and D
    float* dQ = p.dQ.head(b, h);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      load_swizzled_rows<d>(Q_smem, p.Q.head(b, h), p.Q.stride_n, i * Br, p.N_q);             // line 9
      load_swizzled_rows<d_v>(dO_smem, p.dO.head(b, h), p.dO.stride_n, i * Br, p.N_q);
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[rows][cols] = {}, dP_reg[rows][cols] = {};
      const float* Q_rows = Q_smem + S_row * width;
      add_product(S_reg, Q_rows, 4 * width, 4 * odd, KT_smem, Bc, 16, S_col, d);               // line 10
      const float* dO_rows = dO_smem + S_row * width;
      add_product(dP_reg, dO_rows, 4 * width, 4 * odd, VT_smem, Bc, 16, S_col, d_v);           // line 13

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
          const int to = (S_row + 4 * r) * Bc + ((S_col + 8 * c) ^ 16 * odd);
          store4(P_smem + to, S_reg[r][c], S_reg[r][c + 1], S_reg[r][c + 2], S_reg[r][c + 3]);
          store4(dS_smem + to, dP_reg[r][c], dP_reg[r][c + 1], dP_reg[r][c + 2], dP_reg[r][c + 3]);
        }
      }
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

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
      add_product(dQ_reg, dS_smem + dQ_row * Bc, 4 * Bc, 16 * odd, K_smem, width, 0, dim, Bc);
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
