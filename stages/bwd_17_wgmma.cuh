// Backward stage 17: wgmma
// idea:    the five products by warpgroups, from shared memory; P^T and dS^T from registers
// types:   fp16, bf16
// needs:   sm_90a
// after:   tma
// deterministic: no
// tiles:   Br=128 Bc=128; d > 64: Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (64, 128); Bc in (64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 2 * Bc * Br + 16 * Br + 16
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (12 * Tc * d + 10 * d + 4) + Tr * Br * (8 * Tc + 4 * d + 8)))
// predicted: 1.5x at d=64, 2x at d=128, 4x at d=256: mma.sync does not reach the tensor cores' rate, and
//          loads each fragment of Q and dO once for 16 keys, not 64; no spills
// measured: 1.43x at d=64 causal, 1.46x full, 1.51x at d=128 causal, 1.52x full, 1.84x at d=256 causal, 1.74x
//          full (H200, bf16, N=4096; make readme)
//
// As in the forward stage wgmma (common/wgmma.cuh), four warps multiply together, 64 rows at a time. In
// transposed the rows of four of the five products are keys. So a warpgroup has 64 keys, and all that its
// rows of dV and dK need:
//
//                         A                          B
//   S^T  = K_j Q_i^T      K_j, K-major               Q_i, K-major          64 x Br
//   dP^T = V_j dO_i^T     V_j, K-major               dO_i, K-major         64 x Br
//   dV  += P^T dO_i       P^T, in registers          dO_i, MN-major        64 x d
//   dK  += dS^T Q_i       dS^T, in registers         Q_i, MN-major         64 x d
//   dQ   = dS K_j         dS^T, MN-major             K_j, MN-major         64 x d, or some panels of it
//
// No operand is transposed by an instruction of its own. wgmma reads a tile either way, by its descriptor: Q
// and dO both ways, and dS^T as dS. For that dS^T lies in panels, as if TMA had brought it: stmatrix stores
// it (common/warpgroup_products.cuh). wgmma sees these stores after fence_proxy_async().
//
// dQ has rows of Q, and so other owners: a warpgroup takes 64 of them, and if there are fewer than that, a
// part of the columns, whole panels.
//
// d > 128: 64 rows of dV and dK would be 2 * 128 registers a thread. So two warpgroups share 64 keys. Each
// makes all of S^T and dP^T, and its panels of dV and dK: 7 products' work in the place of 5.
//
// HBM traffic without caches (hbm, above): as in cp_async.
//
// Changed from tma: the products, and who has which rows; the default tiles. 2^x is worked out for every
// score, and the mask chooses afterwards: where a branch goes around it, ptxas lacks registers, and waits for
// each product (C7511; so it was in warp_specialized).
#pragma once
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/prepare.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"
#include "common/warpgroup_products.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int sharing = d <= 128 ? 1 : 2;          // warpgroups that share 64 keys,
constexpr int columns = sharing == 1 ? width : 128;          // each with so many columns of dV and dK
constexpr int warps = Bc / 16 * sharing, threads = 32 * warps;
constexpr int dQ_sharing = 16 * warps / Br;        // warpgroups that share 64 rows of dQ, and so on
constexpr int dQ_columns = dQ_sharing == 1 ? width : (panels + dQ_sharing - 1) / dQ_sharing * panel;
constexpr int Q_bytes = sizeof(ELEMENT) * Br * pitch, K_bytes = sizeof(ELEMENT) * Bc * pitch;    // of a tile

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, const __grid_constant__ CUtensorMap Q_map,
    const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap V_map,
    const __grid_constant__ CUtensorMap dO_map) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  // This warp's rows of dK and dV, and of dQ; its columns, from a panel on. The last part may begin in the
  // one before, which keeps these columns.
  const int warp = warp_index(), part = warp / (Bc / 16), dQ_part = warp / (Br / 16);
  const int first_key = warp % (Bc / 16) * 16, warp_row = warp % (Br / 16) * 16;
  const int first_col = min(part * columns, pitch - columns);
  const int first_dim = min(dQ_part * dQ_columns, pitch - dQ_columns);

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, in panels
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: the n-th Q_i is in buffer n % 2
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* dST_smem = dO_smem + 2 * Br * pitch;      // Bc x Br, the same
  float* L_smem = reinterpret_cast<float*>(dST_smem + Bc * Br);          // Br, to the base 2, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice
  uint64_t* arrived_smem = reinterpret_cast<uint64_t*>(D_smem + 2 * Br);     // for each buffer
  if (threadIdx.x == 0) {
    mbarrier_init(arrived_smem, 1);
    mbarrier_init(arrived_smem + 1, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  auto load_tiles = [&](int n, int h, int i) {       // of the n-th tile, by thread 0
    uint64_t* arrived = arrived_smem + n % 2;
    const int64_t row = (((int64_t)b * p.H + h) * Tr + i) * Br;          // in L and D
    const int stats_bytes = sizeof(float) * Br;
    mbarrier_arrive_expect(arrived, 2 * (Q_bytes + stats_bytes) + (n == 0 ? 2 * K_bytes : 0));
    if (n == 0) load_panels(K_smem, K_map, arrived, Bc, j * Bc, h_kv, b);                // line 6
    if (n == 0) load_panels(V_smem, V_map, arrived, Bc, j * Bc, h_kv, b);
    load_panels(Q_smem + n % 2 * Br * pitch, Q_map, arrived, Br, i * Br, h, b);          // line 9
    load_panels(dO_smem + n % 2 * Br * pitch, dO_map, arrived, Br, i * Br, h, b);
    bulk_load(L_smem + n % 2 * Br, w.L + row, stats_bytes, arrived);
    bulk_load(D_smem + n % 2 * Br, w.D + row, stats_bytes, arrived);
  };

  // What wgmma reads: 64 rows of K_j and V_j, and of dS; Q_i and dO_i in buffer 0, both ways; columns of K_j
  const uint32_t K_tile = matrix_at(K_smem + first_key / 64 * 64 * panel);
  const uint32_t V_tile = K_tile + Bc * pitch / 8;      // it lies behind K_j; no register of its own
  const uint32_t Q_tile = matrix_at(Q_smem), dO_tile = matrix_at(dO_smem);
  const uint32_t Q_columns = matrix_at(Q_smem + first_col * Br, 128 * Br);
  const uint32_t dO_columns = matrix_at(dO_smem + first_col * Br, 128 * Br);
  const uint32_t dS_rows = matrix_at(dST_smem + warp_row / 64 * Bc * panel);
  const uint32_t K_columns = matrix_at(K_smem + first_dim * Bc, 128 * Bc);

  float dK_reg[columns / 8][4] = {}, dV_reg[columns / 8][4] = {};        // line 7
  const float scale2 = p.scale * LOG2_E;

  int n = 0;                                // tiles so far
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    Mask mask(p, b, h);
    if (part > 0) mask.gradient = nullptr;             // the first one has written it
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in dQ_accum
    if (threadIdx.x == 0 && tiles.first < tiles.end) load_tiles(n, h, tiles[tiles.first]);
    for (int t = tiles.first; t < tiles.end; t++, n++) {                 // line 8
      const int i = tiles[t];
      mbarrier_wait(arrived_smem + n % 2, n / 2 % 2);
      __syncthreads();                    // the tiles are here, and all are done with the last ones
      if (threadIdx.x == 0 && t + 1 < tiles.end) load_tiles(n + 1, h, tiles[t + 1]);
      const int buffer = n % 2 * (Q_bytes / 16);         // as descriptors count
      const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;

      // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
      float S_reg[Br / 8][4], dP_reg[Br / 8][4];
      wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer);
      wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer);
      wgmma_wait<0>();

      for_both(S_reg, dP_reg, [&](float& S, float& dP, int r, int c) {
        const int row = i * Br + c, col = j * Bc + first_key + r;
        const float x = scale2 * S;
        const float P = fast_exp2(score2(mask, x, row, col) - L_i[c]);
        S = mask.sees(row, col) ? P : 0.f;                               // line 11: P_ij; without a branch
        dP = mask.through_score(S * (dP - D_i[c]), LN_2 * x, row, col);  // line 14: dS_ij
      });
      uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4];
      to_A(P_frag, S_reg);
      to_A(dS_frag, dP_reg);
      if (part == 0) store_fragments(dST_smem, dS_frag, Bc, first_key);
      fence_proxy_async();
      wgmma_PV(dV_reg, P_frag, dO_columns + buffer);                     // line 12: + P_ij^T dO_i
      wgmma_PV(dK_reg, dS_frag, Q_columns + buffer);                     // line 16: + dS_ij^T Q_i
      wgmma_wait<0>();
      __syncthreads();                    // a warpgroup now reads all of dS, which many warps wrote

      float dQ_reg[dQ_columns / 8][4];                                   // line 15: dS_ij K_j
      wgmma_dQ<Bc / 16>(dQ_reg, dS_rows, K_columns);
      wgmma_wait<0>();
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + warp_row + r, k = first_dim + c;
        if (row < p.N_q && k < d && k >= dQ_part * dQ_columns)
          atomicAdd(w.dQ_accum + (first_row + row) * d + k, x);
      });
    }                                                                    // line 17
  }

  auto store = [&](const Tensor& out, float (&acc)[columns / 8][4]) {    // line 18
    for_each_pair(acc, [&](uint32_t packed, int r, int c) {
      const int col = j * Bc + first_key + r, k = first_col + c;
      if (col < p.N_k && k < d && k >= part * columns)
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + k) = packed;
    });
  };
  for_each(dK_reg, [&](float& x, int, int) { x *= p.scale; });
  store(p.dK, dK_reg);
  store(p.dV, dV_reg);
}

__global__ void __launch_bounds__(256) convert_kernel(BwdParams p, const float* dQ_accum) {
  const int64_t t = (int64_t)blockIdx.x * 256 + threadIdx.x, row = t / d;
  if (row >= (int64_t)p.B * p.H * p.N_q) return;
  ELEMENT* dQ = p.dQ.head(row / p.N_q / p.H, row / p.N_q % p.H) + row % p.N_q * p.dQ.stride_n;
  dQ[t % d] = ELEMENT(p.scale * dQ_accum[t]);
}

int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }     // and of L and D

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * rows_of_Q(p) * (d + 2); }

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, dO_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(dO_map, p.dO, p.B, p.H, p.N_q, d, Br);
  if (error != cudaSuccess) return error;
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, 1);
  const size_t bytes = 2 * (K_bytes + 2 * Q_bytes) + sizeof(ELEMENT) * Bc * Br +
                       sizeof(float) * 4 * Br + 2 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = p.B * p.H_kv * ceil_div(p.N_k, Bc);
  backward_kernel<<<blocks, threads, bytes, stream>>>(p, w, Q_map, K_map, V_map, dO_map);
  convert_kernel<<<ceil_div((int64_t)p.B * p.H * p.N_q * d, 256), 256, 0, stream>>>(p, w.dQ_accum);
  return cudaGetLastError();
}
