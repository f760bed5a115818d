// Backward stage 20: overlap
// idea:    exponentials and dS under products, dK under dQ: nobody waits for a product before it must
// types:   fp16, bf16
// needs:   sm_90a
// after:   tma_reduce
// deterministic: no
// tiles:   Br=128 Bc=128; d > 64: Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (64, 128); Bc in (64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * (Br + 64) + 16 * Br + 96
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.15x at d=64, 1.1x at d=128: the tensor cores have work under the exponentials (a study had
//          1.05x by dV ahead of dS and 1.03x by dK under dQ: H200, d=128, N=4096)
// measured: 1.03x at d=64 causal, 1.03x full, 1.01x at d=128 causal, 1.02x full, 1.07x at d=256 causal, 1.08x
//          full (H200, bf16, N=4096; make readme)
//
// So far a warpgroup has waited for both products before the exponentials, and for dV and dK before dQ. But
// each step needs one product of those that are under way:
//
//   issue               wait for         meanwhile
//   S^T, dP^T           S^T              P^T = exp(scale * S^T - L), as dP^T is multiplied
//   dV += P^T dO        dP^T             dS^T = P^T * (dP^T - D), as dV is
//   dK += dS^T Q        dV               meet the other warpgroups: all of dS is there; give dO back
//   dQ = dS K           dK               give Q back, as dQ is multiplied
//                       dQ               dQ leaves
//
// Products end in the order in which they were issued, so wgmma_wait<1>() waits for all but the last one.
//
// Registers are short. So dV is done before dQ starts, as dQ goes where S, dP and P were. And dS is made of P
// as it was rounded for dV, which may be read while dV is multiplied. (With P in float beside it 48 bytes a
// thread are spilled at d = 64, and ptxas waits for each product, C7512.)
//
// S^T of the next tile is not issued under dK: in the study that was slower (0.93x), as the two warpgroups
// are at different products anyhow.
//
// A mask that changes scores needs its slope with dS, when S is gone. So it is worked out with P.
//
// HBM traffic without caches (hbm, above): as in late_dq.
//
// Changed from tma_reduce: the order of products and waits.
#pragma once
#include "common/bulk_sums.cuh"
#include "common/early_prepare.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/ring_rows.cuh"
#include "common/tile16.cuh"
#include "common/warpgroup_products.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int sharing = d <= 128 ? 1 : 2;          // warpgroups that share 64 keys,
constexpr int columns = sharing == 1 ? width : 128;          // each with so many columns of dV and dK
constexpr int warps = Bc / 16 * sharing, threads = 32 * warps + 128;     // consumers; and the producer's
constexpr int producer_registers = 24, consumer_registers = warps <= 8 ? 240 : 112;
constexpr int dQ_sharing = 16 * warps / Br;        // warpgroups that share 64 rows of dQ, and so on
constexpr int dQ_columns = dQ_sharing == 1 ? width : (panels + dQ_sharing - 1) / dQ_sharing * panel;
constexpr int staged = 64 / sharing;               // columns of dQ that a warp has in shared memory

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
  ELEMENT* dST_smem = smem + (2 * Bc + 4 * Br) * pitch;        // Bc x Br, in panels, twice
  float* dQ_smem = reinterpret_cast<float*>(dST_smem + 2 * Bc * Br);     // a warp: 16 x staged
  float* L_smem = dQ_smem + 16 * warps * staged;     // Br, to the base 2, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice
  uint64_t* barriers = reinterpret_cast<uint64_t*>(D_smem + 2 * Br);
  const Ring<1, Bc> K_smem(smem, barriers), V_smem(K_smem.tiles + Bc * pitch, barriers + 2);
  const Ring<2, Br> Q_smem(V_smem.tiles + Bc * pitch, barriers + 4);
  const Ring<2, Br> dO_smem(Q_smem.tiles + 2 * Br * pitch, barriers + 8);
  K_smem.init(warps);
  V_smem.init(warps);
  Q_smem.init(warps);
  dO_smem.init(warps);
  __syncthreads();

  int n = 0;                                // tiles so far
  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    K_smem.fill(K_map, 0, j * Bc, h_kv, b);                              // line 6
    V_smem.fill(V_map, 0, j * Bc, h_kv, b);
    for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
      const auto tiles = Mask(p, b, h).query_tiles(j);
      for (int t = tiles.first; t < tiles.end; t++, n++) {               // line 9
        const int i = tiles[t];
        const int64_t row = (((int64_t)b * p.H + h) * Tr + i) * Br;      // in L and D
        fill(Q_smem, Q_map, n, i * Br, h, b, L_smem, w.L + row);
        fill(dO_smem, dO_map, n, i * Br, h, b, D_smem, w.D + row);
      }
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: 64 rows of K_j and V_j, and of dS; Q_i and dO_i in buffer 0, both ways; columns of K_j
  const uint32_t K_tile = matrix_at(K_smem.tiles + first_key / 64 * 64 * panel);
  const uint32_t V_tile = K_tile + Bc * pitch / 8;      // it lies behind K_j; no register of its own
  const uint32_t Q_tile = matrix_at(Q_smem.tiles), dO_tile = matrix_at(dO_smem.tiles);
  const uint32_t Q_columns = matrix_at(Q_smem.tiles + first_col * Br, 128 * Br);
  const uint32_t dO_columns = matrix_at(dO_smem.tiles + first_col * Br, 128 * Br);
  const uint32_t dS_rows = matrix_at(dST_smem + warp_row / 64 * Bc * panel);
  const uint32_t K_columns = matrix_at(K_smem.tiles + first_dim * Bc, 128 * Bc);

  float dK_reg[columns / 8][4] = {}, dV_reg[columns / 8][4] = {};        // line 7
  const float scale2 = p.scale * LOG2_E;

  K_smem.wait_until_full(0);
  V_smem.wait_until_full(0);
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    Mask mask(p, b, h);
    if (part > 0) mask.gradient = nullptr;             // the first one has written it
    const auto tiles = mask.query_tiles(j);
    for (int t = tiles.first; t < tiles.end; t++, n++) {                 // line 8
      const int i = tiles[t];
      const uint32_t buffer = Q_smem.offset(n), dS_buffer = n % 2 * (Bc * Br / 8);    // as descriptors count
      const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;

      // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
      float S_reg[Br / 8][4], dP_reg[Br / 8][4];
      Q_smem.wait_until_full(n);
      wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer);
      dO_smem.wait_until_full(n);
      wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer);
      wgmma_wait<1>();                    // dP^T goes on

      float slope_reg[Br / 8][4];         // of a mask that changes scores
      for_both(S_reg, slope_reg, [&](float& S, float& slope, int r, int c) {
        const int row = i * Br + c, col = j * Bc + first_key + r;
        const float x = scale2 * S, P = fast_exp2(score2(mask, x, row, col) - L_i[c]);
        if (Mask::scores) slope = mask.slope(LN_2 * x, row, col);
        S = mask.sees(row, col) ? P : 0.f;                               // line 11: P_ij; without a branch
      });
      uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4];
      to_A(P_frag, S_reg);
      // --- dV under dS
      wgmma_PV(dV_reg, P_frag, dO_columns + buffer);                     // line 12: + P_ij^T dO_i
      wgmma_wait<1>();                    // dP^T is there, dV goes on
      // ---

      for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int c) {   // line 14: dS_ij
        dP = P * (dP - D_i[c]);
        mask.keep_gradient(dP, i * Br + c, j * Bc + first_key + r);
      });
      if (Mask::scores) for_both(dP_reg, slope_reg, [](float& dS, float& slope, int, int) { dS *= slope; });
      to_A(dS_frag, dP_reg);
      if (part == 0) store_fragments(dST_smem + n % 2 * Bc * Br, dS_frag, Bc, first_key);
      fence_proxy_async();
      // --- dK under dQ, and who is done with what
      wgmma_PV(dK_reg, dS_frag, Q_columns + buffer);                     // line 16: + dS_ij^T Q_i
      wgmma_wait<1>();                    // dV is there, dK goes on
      named_barrier_sync(1, 32 * warps);  // all of dS is there, and nobody reads L_i and D_i any more
      dO_smem.release(n);

      float dQ_reg[dQ_columns / 8][4];                                   // line 15: dS_ij K_j
      wgmma_dQ<Bc / 16>(dQ_reg, dS_rows + dS_buffer, K_columns);
      wgmma_wait<1>();                    // dK is there, dQ goes on
      Q_smem.release(n);
      wgmma_wait<0>();
      // ---
      float* dQ = w.dQ_accum + (((int64_t)b * p.H + h) * Tr + i) * Br * d;
      bulk_add_fragments<staged / 8>(dQ, dQ_smem + 16 * warp * staged, one_strip(dQ_reg), warp_row, first_dim,
                                     dQ_part * dQ_columns);
    }                                                                    // line 17
  }

  if (threadIdx.x % 32 == 0) bulk_wait<0>();

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
  prepare(p, w, rows_of_Q(p), 1, stream);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + 2 * Bc * Br) +
                       sizeof(float) * (16 * warps * staged + 4 * Br) + 12 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = p.B * p.H_kv * ceil_div(p.N_k, Bc);
  backward_kernel<<<blocks, threads, bytes, stream>>>(p, w, Q_map, K_map, V_map, dO_map);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  return cudaGetLastError();
}
