// Backward stage 22: dq_by_turns
// idea:    one warpgroup makes all of dQ_i; the other ones go on, and make the next
// types:   fp16, bf16
// needs:   sm_90a
// after:   seeded
// deterministic: no
// tiles:   Br=128 Bc=128; d > 64: Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (64, 128); Bc in (64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * (Br + (Bc if d <= 64 else 64)) + 16 * Br + 96
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.1x at d=64, where exponentials take as long as products; 1.05x at d=128 (a study had 1.05x
//          there: H200, N=4096)
// measured: 1.15x at d=64 causal, 1.14x full, 1.15x at d=128 causal, 1.15x full, 1.02x at d=256 causal, 1.01x
//          full (H200, bf16, N=4096; make readme)
//
// So far each warpgroup had its share of dQ_i, and waited for all of dS_ij before it. So all of them went on
// together: their exponentials came at the same time, and their products, too. Now one warpgroup makes all of
// dQ_i. The others only arrive at the barrier and go on to the next tile, so their exponentials come under
// this one's products:
//
//   warpgroup 0   S dP | exp | dV dS dK | dQ_1 ............ | S dP | exp | dV dS dK . |
//   warpgroup 1   S dP | exp | dV dS dK | S dP | exp | dV dS dK | dQ_2 ............ |
//
// d <= 64: they take turns. Nobody can be two tiles ahead, as then it would be its own turn, and dS of the
// others were not there. So two buffers of dS are enough. A barrier for each turn: at one of them those that
// arrive early might be counted for the turn before. Each has room for its own sums in shared memory, as the
// copy engine may still read the ones of the turn before.
//
// 64 < d <= 128: it is always warpgroup 0, with room for one in shared memory; the other one waits at the
// barrier, too. d > 128: as before.
//
// In one run (H100, bf16, d=64, N = 2048 / 4096 / 16384, in hopper_tuned): full 395 -> 438, 432 -> 488, 463
// -> 501 TFLOP/s, causal 315 -> 329, 382 -> 413, 454 -> 473. By turns at d=128 499 -> 491, 550 -> 542, 560 ->
// 561. With room for half of the sums, so that the copy engine is waited for within a turn, d=64 had 407.
//
// Two small things besides: dS is made of P in float, which stays beside the rounded one, as to unpack that
// took two instructions a pair. And dK's products, which take dS from registers, begin before it is stored.
// These two gave (H100, bf16, one run, N = 2048 / 4096 / 16384, in hopper_tuned) at d=64 full 462 -> 473, 500
// -> 516, 513 -> 535 TFLOP/s, causal 366 -> 379, 441 -> 468, 504 -> 529; at d=128 full 536 -> 555, 558 ->
// 601, 584 -> 614, causal 430 -> 446, 523 -> 546, 587 -> 616.
//
// HBM traffic without caches (hbm, above): as in late_dq.
//
// Changed from seeded: these.
#pragma once
#include "common/bulk_sums.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/pairs.cuh"
#include "common/ring_rows.cuh"
#include "common/seed.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int sharing = d <= 128 ? 1 : 2;          // warpgroups that share 64 keys,
constexpr int columns = sharing == 1 ? width : 128;          // each with so many columns of dV and dK
constexpr int warps = Bc / 16 * sharing, threads = 32 * warps + 128;     // consumers; and the producer's
constexpr int producer_registers = 24, consumer_registers = warps <= 8 ? 240 : 112;
constexpr bool by_turns = d <= 64;                 // a warpgroup makes all of dQ_i, then another one the next
constexpr int turns = by_turns ? warps / 4 : 1;
constexpr int dQ_sharing = d <= 128 ? 1 : 16 * warps / Br;   // else: warpgroups that share 64 rows of dQ_i
constexpr int dQ_columns = dQ_sharing == 1 ? width : (panels + dQ_sharing - 1) / dQ_sharing * panel;
constexpr int dQ_strips = by_turns ? Br / 64 : 1;  // of 64 rows, that a warpgroup makes
constexpr int dQ_warps = by_turns ? warps : Br / 16 * dQ_sharing;        // the first ones make dQ,
constexpr int staged = 4 * Bc * turns / dQ_warps;  // each with so many columns of it in shared memory

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
  const int warp = warp_index(), part = sharing == 1 ? 0 : warp / (Bc / 16);    // 0: no register
  const int dQ_part = by_turns ? 0 : warp / (Br / 16);
  const int first_key = warp % (Bc / 16) * 16, warp_row = warp % (Br / 16 / dQ_strips) * 16;
  const int first_col = min(part * columns, pitch - columns);
  const int first_dim = min(dQ_part * dQ_columns, pitch - dQ_columns);

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* dST_smem = smem + (2 * Bc + 4 * Br) * pitch;        // Bc x Br, in panels, twice
  float* dQ_smem = reinterpret_cast<float*>(dST_smem + 2 * Bc * Br);     // a warp: 16 x staged
  float* L_smem = dQ_smem + 64 * Bc * turns;         // Br, -L / c, twice
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
  const uint32_t behind_Q = 2 * Br * pitch / 8;         // dO_i lies behind Q_i
  const uint32_t Q_tile = matrix_at(Q_smem.tiles), dO_tile = Q_tile + behind_Q;
  const uint32_t Q_columns = matrix_at(Q_smem.tiles + first_col * Br, 128 * Br);
  const uint32_t dO_columns = Q_columns + behind_Q;
  const uint32_t dS_rows = matrix_at(dST_smem + warp_row / 64 * Bc * panel);
  const uint32_t K_columns = matrix_at(K_smem.tiles + first_dim * Bc, 128 * Bc);

  float dK_reg[columns / 8][4] = {}, dV_reg[columns / 8][4] = {};        // line 7
  const float c = factor_of_S(p.scale);

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
      dO_smem.wait_until_full(n);
      if (!Mask::scores) seed(S_reg, L_i);
      seed(dP_reg, D_i);
      wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);
      wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, true);
      wgmma_wait<1>();                    // dP^T goes on

      float slope_reg[Br / 8][4];         // of a mask that changes scores
      if (Mask::scores) change_scores(S_reg, slope_reg, mask, p.scale, i * Br, j * Bc + first_key, L_i);
      for_each(S_reg, [&](float& x, int r, int col) {                      // line 11: P_ij; without a branch
        const float P = fast_exp2(c * x);
        x = mask.sees(i * Br + col, j * Bc + first_key + r) ? P : 0.f;
      });
      uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4];
      to_A(P_frag, S_reg);
      wgmma_PV(dV_reg, P_frag, dO_columns + buffer);                     // line 12: + P_ij^T dO_i
      wgmma_wait<1>();                    // dP^T is there, dV goes on

      for_both(S_reg, dP_reg, [&](float P, float& dP, int r, int col) {  // line 14: dS_ij
        dP = P * dP;
        mask.keep_gradient(dP, i * Br + col, j * Bc + first_key + r);
      });
      if (Mask::scores) for_both(dP_reg, slope_reg, [](float& dS, float& slope, int, int) { dS *= slope; });
      to_A(dS_frag, dP_reg);
      wgmma_PV(dK_reg, dS_frag, Q_columns + buffer);                     // line 16: + dS_ij^T Q_i
      if (part == 0) store_fragments(dST_smem + n % 2 * Bc * Br, dS_frag, Bc, first_key);
      fence_proxy_async();
      wgmma_wait<1>();                    // dV is there, dK goes on
      const bool makes_dQ = by_turns ? n % turns == warp / 4 : warp < dQ_warps;
      if (by_turns && !makes_dQ)
        named_barrier_arrive(1 + n % turns, 32 * warps);
      else
        named_barrier_sync(1 + n % turns, 32 * warps);       // all of dS is there
      dO_smem.release(n);                 // wgmma_wait() met all lanes after they had read L_i and D_i

      if (!makes_dQ) {
        wgmma_wait<0>();
        Q_smem.release(n);
        continue;
      }
      float dQ_reg[dQ_strips][dQ_columns / 8][4];                        // line 15: dS_ij K_j
      #pragma unroll
      for (int s = 0; s < dQ_strips; s++)
        wgmma_dQ<Bc / 16>(dQ_reg[s], dS_rows + dS_buffer + s * (Bc * panel / 8), K_columns);
      wgmma_wait<dQ_strips>();            // dK is there, dQ goes on
      Q_smem.release(n);
      wgmma_wait<0>();
      float* dQ = w.dQ_accum + (int64_t)((b * p.H + h) * Tr + i) * (Br * d);       // 32 bits do for tiles
      bulk_add_fragments<staged / dQ_strips / 8>(dQ, dQ_smem + 16 * warp * staged, dQ_reg, warp_row,
                                                 first_dim, dQ_part * dQ_columns);
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
  prepare_seeds(w, p.scale);
  prepare(p, w, rows_of_Q(p), 1, stream);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + 2 * Bc * Br) +
                       sizeof(float) * (64 * Bc * turns + 4 * Br) + 12 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = p.B * p.H_kv * ceil_div(p.N_k, Bc);
  backward_kernel<<<blocks, threads, bytes, stream>>>(p, w, Q_map, K_map, V_map, dO_map);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  return cudaGetLastError();
}
