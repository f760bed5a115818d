// Backward stage 28: whole_tiles
// idea:    whole tiles have a loop of their own, which never asks the mask
// types:   fp16, bf16
// needs:   sm_90a
// after:   persistent
// deterministic: no
// tiles:   Br=128 Bc=128; d > 64: Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (64, 128); Bc in (64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * (Br + (Bc if d <= 64 else 64)) +
//          16 * Br + 112
// workspace: dQ_accum, L, D, dK_parts, dV_parts, the next ticket
// hbm:     B * (4 * d * N_k * (H_kv + H // divisor(H // H_kv, B * H * Tc // (6 * multiprocessors)) *
//          (1 if divisor(H // H_kv, B * H * Tc // (6 * multiprocessors)) * H_kv == H else 5)) +
//          H * (N_q * (4 * Tc * d + 10 * d + 4) + Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.02x if causal, 1.01x full: the steps of whole tiles ask nothing
// measured: 1.04x at d=64 causal, 1.01x full, 1.02x at d=128 causal, 1.01x full, 1.00x at d=256 causal, 1.02x
//          full (H200, bf16, N=4096; make readme)
//
// Each step asked the mask about each of its elements: a comparison and a choice for each of a lane's 32 or
// 64, between two products. But few tiles are cut: causal, those on the diagonal, with which a tile of keys
// begins; those of the last rows; with a window, both ends. (At d > 128 a thread spills 8 bytes.)
//
// So a step is a lambda, step(t, cut), and there are three loops of it (for_each_tile, common/
// clear_unseen.cuh): over tiles that the mask cuts, over whole ones, and over cut ones again. The compiler
// makes three copies of a step, and the one for whole tiles knows nothing of the mask. The others write zeros
// where nobody sees. A mask that reads tensors is asked before the tile of Q is there (seen_of).
//
// In hopper_tuned, with a branch in each step (a step that asks first whether the mask cuts its tile, which
// no rung has) -> with three loops (H200, bf16, one run, TFLOP/s, N = 2048 / 4096 / 16384): causal d=64 416
// / 491 / 537 -> 420 / 489 / 538, d=128 494 / 581 / 621 -> 503 / 590 / 632; full d=64 493 / 517 / 539 -> 499
// / 527 / 541, d=128 587 / 622 / 615 -> 593 / 618 / 624. (Two copies, in a loop over both loops, spill 112
// to 180 bytes.)
//
// A mask that changes scores is asked in all steps, and takes registers: with S^T and dP^T beside each other
// ptxas serialised the products, and at d = 64 a thread spilled from 280 bytes (ALiBi) to 1444 (softcap). So
// here dP^T starts when P^T is there, a slope has 16 bits (common/lean_scores.cuh), and P^T comes back from
// the operand of dV: nothing is serialised, and 8 bytes (ALiBi), none (softcap) or 404 (a bias with its
// gradient) are spilled.
//
// HBM traffic without caches (hbm, above): as in whole_group.
//
// Changed from persistent: these.
#pragma once
#include "common/bulk_sums.cuh"
#include "common/clear_unseen.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/items.cuh"
#include "common/launch.cuh"
#include "common/lean_scores.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/pairs.cuh"
#include "common/ring_rows.cuh"
#include "common/seed.cuh"
#include "common/store_parts.cuh"
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

// As many blocks as items, or as multiprocessors. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, float* dKV_parts, Items items,
    const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap dO_map) {
  const int Tr = ceil_div(p.N_q, Br);                                    // line 1
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
  Handed* handed = reinterpret_cast<Handed*>(barriers + 12);             // with K_j
  K_smem.init(warps);
  V_smem.init(warps);
  Q_smem.init(warps);
  dO_smem.init(warps);
  __syncthreads();

  int n = 0;                                // tiles so far
  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    for (int m = 0, next = blockIdx.x;; m++) {                           // line 5
      K_smem.wait_until_empty(m);
      const Handed work = items.nth(p, next);
      *handed = work;
      if (work.tile < 0) return mbarrier_arrive(K_smem.full);            // the consumers end, too
      K_smem.fill(K_map, m, work.tile * Bc, work.h, work.b);             // line 6
      V_smem.fill(V_map, m, work.tile * Bc, work.h, work.b);
      int h = work.bh - work.b * p.H;       // the first one of its query heads; then the next ones
      do {
        const auto tiles = Mask(p, work.b, h).query_tiles(handed->tile);
        for (int t = tiles.first; t < tiles.end; t++, n++) {             // line 9
          const int i = tiles[t];
          const int64_t row = (int64_t)((work.b * p.H + h) * Tr + i) * Br;       // in L and D
          fill(Q_smem, Q_map, n, i * Br, h, work.b, L_smem, w.L + row);
          fill(dO_smem, dO_map, n, i * Br, h, work.b, D_smem, w.D + row);
        }
      } while (++h % items.block_heads);
      next = next_item(w.ticket);
    }
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

  const float c = factor_of_S(p.scale);

  for (int m = 0;; m++) {                                                // line 5
    K_smem.wait_until_full(m);
    const Handed work = of_lane_0(handed);
    if (work.tile < 0) break;
    const int j = work.tile;
    int bh = work.bh;                       // the first one of its query heads; then the next ones
    V_smem.wait_until_full(m);
    float dK_reg[columns / 8][4] = {}, dV_reg[columns / 8][4] = {};      // line 7
    do {
      Mask mask(p, bh / p.H, bh % p.H);
      if (part > 0) mask.gradient = nullptr;             // the first one has written it
      const auto tiles = mask.query_tiles(j);
      auto step = [&](int t, bool cut) {                                 // line 8
        const int i = tiles[t];
        const uint32_t buffer = Q_smem.offset(n), dS_buffer = n % 2 * (Bc * Br / 8);  // as descriptors count
        const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;

        // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
        float S_reg[Br / 8][4], dP_reg[Br / 8][4];
        const auto seen = seen_of<Br / 8>(mask, tiles, t, i * Br, j * Bc + first_key);
        Q_smem.wait_until_full(n);
        dO_smem.wait_until_full(n);
        if (!Mask::scores) seed(S_reg, L_i);
        if (!Mask::scores) seed(dP_reg, D_i);
        wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);
        if (!Mask::scores) wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, true);
        wgmma_wait<!Mask::scores>();        // dP^T goes on, if it has begun

        // slope: of a mask that changes scores
        uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4], slope_frag[Br / 16][4];
        if (Mask::scores) change_scores(S_reg, slope_frag, mask, p.scale, i * Br, j * Bc + first_key, L_i);
        for_each(S_reg, [&](float& x, int, int) { x = fast_exp2(c * x); });  // line 11: P_ij
        if (cut) clear_unseen(S_reg, mask, tiles, t, j, i * Br, j * Bc + first_key, seen);
        to_A(P_frag, S_reg);
        if (Mask::scores) seed(dP_reg, D_i);         // only now: registers
        if (Mask::scores) wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, true);
        wgmma_PV(dV_reg, P_frag, dO_columns + buffer);                   // line 12: + P_ij^T dO_i
        wgmma_wait<1>();                    // dP^T is there, dV goes on

        if (Mask::scores) for_both(P_frag, S_reg, [](float P, float& x, int, int) { x = P; });
        for_both(S_reg, dP_reg, [](float P, float& dP, int, int) { dP = P * dP; });  // line 14: dS_ij
        keep_gradients(mask, dP_reg, i * Br, j * Bc + first_key);
        if (Mask::scores) for_both(slope_frag, dP_reg, [](float slope, float& dS, int, int) { dS *= slope; });
        to_A(dS_frag, dP_reg);
        wgmma_PV(dK_reg, dS_frag, Q_columns + buffer);                   // line 16: + dS_ij^T Q_i
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
          return Q_smem.release(n);
        }
        float dQ_reg[dQ_strips][dQ_columns / 8][4];                      // line 15: dS_ij K_j
        #pragma unroll
        for (int s = 0; s < dQ_strips; s++)
          wgmma_dQ<Bc / 16>(dQ_reg[s], dS_rows + dS_buffer + s * (Bc * panel / 8), K_columns);
        wgmma_wait<dQ_strips>();            // dK is there, dQ goes on
        Q_smem.release(n);
        wgmma_wait<0>();
        float* dQ = w.dQ_accum + (int64_t)(bh * Tr + i) * (Br * d);     // 32 bits do for tiles
        bulk_add_fragments<staged / dQ_strips / 8>(dQ, dQ_smem + 16 * warp * staged, dQ_reg, warp_row,
                                                   first_dim, dQ_part * dQ_columns);
      };
      for_each_tile(mask, tiles, j, n, step);                            // line 17
    } while (++bh % items.block_heads);
    const Handed done = of_lane_0(handed);  // again: no registers for it in the loop
    K_smem.release(m);
    V_smem.release(m);
    bh = of_lane_0(bh) - 1;                 // the last one; without the shuffle it is kept in the loop, too

    const int first_row = j * Bc + first_key, from_col = part * columns;
    if (p.H > items.block_heads * p.H_kv) {          // parts of dK and dV
      store_parts(p, dKV_parts, bh, items.block_heads, dK_reg, dV_reg, first_row, first_col, from_col);
    } else {
      auto store = [&](const Tensor& out, float (&acc)[columns / 8][4]) {  // line 18
        for_each_pair(acc, [&](uint32_t packed, int r, int c) {
          const int col = first_row + r, k = first_col + c;
          if (col < p.N_k && k < d && k >= from_col)
            *reinterpret_cast<uint32_t*>(out.head(done.b, done.h) + col * out.stride_n + k) = packed;
        });
      };
      for_each(dK_reg, [&](float& x, int, int) { x *= p.scale; });
      store(p.dK, dK_reg);
      store(p.dV, dV_reg);
    }
  }
  if (threadIdx.x % 32 == 0) bulk_wait<0>();
}

// Rows of dQ, L and D; numbers in dK and in dV
int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }

int64_t numbers_of_K(const BwdParams& p) {
  const int heads = p.H / heads_of_a_block(p);
  return heads > p.H_kv ? (int64_t)p.B * heads * p.N_k * d : 0;
}

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (d + 2) + 2 * numbers_of_K(p)) + sizeof(int);
}

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
  float* dKV_parts = w.D + rows_of_Q(p);
  const Items items(p, heads_of_a_block(p));                             // line 2
  w.ticket = reinterpret_cast<int*>(dKV_parts + 2 * numbers_of_K(p));
  w.first_ticket = multiprocessors();
  prepare(p, w, rows_of_Q(p), 1, stream);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + 2 * Bc * Br) +
                       sizeof(float) * (64 * Bc * turns + 4 * Br) + 14 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<items.blocks(), threads, bytes, stream>>>(p, w, dKV_parts, items, Q_map, K_map, V_map,
                                                              dO_map);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  reduce_heads(p, dKV_parts, p.H / heads_of_a_block(p), stream);
  return cudaGetLastError();
}
