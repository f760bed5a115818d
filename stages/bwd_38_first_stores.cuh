// Backward stage 38: first_stores
// idea:    a fixed order needs no zeros: the first part of dQ_i is stored, and the last one has it converted
// types:   fp16, bf16
// needs:   sm_90a
// after:   augmented
// default: sm_90a if d <= 128 and (deterministic or causal and H_kv % 2 == 0 and
//          (256 * d <= B * H * N_q if d > 64 else 1024 * d <= B * H * N_q <= 4096 * d))
// deterministic: yes
// takes:   dropout, sink, d_v
// tiles:   Br=128 Bc=128; d > 64: Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (64, 128); Bc in (64, 128); Br <= Bc
// shared:  4 * (Bc + (4 if d <= 64 else 3) * Br) * ((d + 63) // 64 * 64) + 4 * Bc * Br +
//          (20 * Br + 1343) // 1024 * 1024
// workspace: dQ_accum, L, D, dK_parts, dV_parts, the next tickets, semaphores
// hbm:     B * (4 * d * N_k * (H_kv + H // divisor(H // H_kv, B * H * Tc // (6 * multiprocessors)) *
//          (1 if divisor(H // H_kv, B * H * Tc // (6 * multiprocessors)) * H_kv == H else 5)) +
//          H * (N_q * (4 * Tc * d + 10 * d + 4) + Tr *
//          (Br * (Tc * (8 * d + 10) - 4 * d + 26) + 48 * (Tc + 1))))
// predicted: in semaphores' place 1.06x: no zeros are written or read, dQ is converted under the products,
//          S and dP start as in augmented; of augmented's speed 0.9x, if causal
// measured: 0.99x at d=64 causal, 0.98x full, 1.01x at d=128 causal, 1.00x full (H200, bf16, N=4096; make
//          readme)
//
// semaphores adds sums of dQ in the order of keys. So the first one is known. But it was added, too, to zeros
// that a kernel had written before; and another kernel after the last one made dQ of the sums.
//
// Here the first one is stored, by the same copy engine: what has been there does not count, and nothing has
// to be cleared. And semaphores are counters, as in idle_warps: when all sums of a tile are counted, the
// third warp beside the producer converts it (common/first_stores.cuh).
//
// Time over augmented's (H200, bf16, B N = 16384, H d = 2048; in parentheses causal with all tiles fro, of 32
// heads together at d=64 and 16 at d=128):
//
//       N =            2048           4096           16384
//      64   full       1.00           1.01           1.01
//      64   causal     1.02 (1.08)    1.02 (1.09)    1.03 (1.10)
//     128   full       1.00           1.01           1.01
//     128   causal     0.99 (1.08)    0.99 (1.09)    0.99 (1.07)
//
// Small calls, B N = 512 to 8192: causal 0.82 to 1.01 (fro 0.86 to 1.14), full 0.91 to 1.15. (With as many
// heads side by side as are at work to 1.20; and with two copies of dQ to 1.21.) To alone, causal: 1.02 to
// 1.06, B=1, N=2048 1.18. Window of 1024, N=16384, heads together: d=64 2 1.16, 8 1.02; d=128 2 1.04, 8 1.08.
//
// Causal calls take it, too, if they need not be deterministic, where it is faster: at d=128 with grouped
// heads (4 or 8 of 16 or 32) 0.91 to 1.00 of augmented's time, with 16 heads and N=777 0.85; at d=64 with 12
// heads, N=1024 and B=8 0.94; small ones 0.95 to 1.03 of hopper_tuned's. Not with one key head (0.98 to
// 1.13) or an odd number (1.04, 1.08): these have no pair. And calls take it that must be deterministic.
//
// HBM traffic without caches (hbm, above): as in augmented, but there are no zeros, and of the first sum of a
// tile nothing is read.
//
// Changed from augmented: the order, from semaphores, and the first sums. A thread spills up to 84 bytes.
#pragma once
#include "common/augmented.cuh"
#include "common/clear_unseen.cuh"
#include "common/drop_signed.cuh"
#include "common/exp2.cuh"
#include "common/first_stores.cuh"
#include "common/gradients.cuh"
#include "common/items.cuh"
#include "common/launch.cuh"
#include "common/lean_scores.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/pairs.cuh"
#include "common/store_parts.cuh"
#include "common/store_staged.cuh"
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
constexpr int room = (by_turns ? Br : Bc) * turns / (8 * warps);     // of a warp, in panels of 16 rows
constexpr int behind_dK = 2 * panels <= room ? 16 * pitch : 0;  // dV's room; if there is little, dK's

// As many blocks as items, or as multiprocessors. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, WorkspaceOfParts w, float* dKV_parts, Items items,
    const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap dO_map,
    const __grid_constant__ CUtensorMap dK_map, const __grid_constant__ CUtensorMap dV_map) {
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
  const Statistics statistics(dST_smem + 2 * Bc * Br);                   // -L / c, -D
  uint64_t* barriers = statistics.barriers();
  float* dQ_smem = statistics.end();        // Br x d, for each turn
  const Ring<1, Bc> K_smem(smem, barriers), V_smem(K_smem.tiles + Bc * pitch, barriers + 2);
  const Ring<2, Br> Q_smem(V_smem.tiles + Bc * pitch, barriers + 4);
  const Ring<2, Br> dO_smem(Q_smem.tiles + 2 * Br * pitch, barriers + 8);
  Handed* handed = reinterpret_cast<Handed*>(barriers + 12);             // with K_j
  const StagedSums<turns> sums{dQ_smem, w.dQ_accum, barriers + 14};
  sums.init(dQ_warps / turns);
  sums.turn().init(1, 1);
  K_smem.init(warps + 2);
  V_smem.init(warps);
  Q_smem.init(warps);
  dO_smem.init(warps);
  __syncthreads();
  start_next_kernel();
  wait_for_previous_kernel();               // it has set tickets and counters

  int n = 0;                                // tiles so far
  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (warp > warps) return add_and_convert(sums, p, w, items, K_smem, handed);
    if (threadIdx.x > 32 * warps) return;
    for (int m = 0, next = next_item(w.ticket);; m++) {                  // line 5
      K_smem.wait_until_empty(m);
      const Handed work = nth_in_order(p, items, next);
      *handed = work;
      if (work.tile < 0) return mbarrier_arrive(K_smem.full);            // the consumers end, too
      K_smem.fill(K_map, m, work.tile * Bc, work.h, work.b);             // line 6
      V_smem.fill(V_map, m, work.tile * Bc, work.h, work.b);
      int h = work.bh - work.b * p.H;       // the first one of its query heads; then the next ones
      do {
        const auto tiles = Mask(p, work.b, h).query_tiles(handed->tile);
        for (int k = 0; k < tiles.end - tiles.first; k++, n++) {         // line 9
          const int i = tiles[nth_of(tiles, k, from_last(work.h, p.H_kv))];
          const int64_t row = (int64_t)((work.b * p.H + h) * Tr + i) * Br;       // in L and D
          fill(Q_smem, Q_map, n, i * Br, h, work.b, statistics.with_Q(w, row));
          fill(dO_smem, dO_map, n, i * Br, h, work.b, statistics.with_dO(w, row));
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
  const uint32_t dS_rows = matrix_at(dST_smem + warp_row / 64 * Bc * panel);
  const uint32_t K_columns = matrix_at(K_smem.tiles + first_dim * Bc, 128 * Bc);

  ELEMENT* staging = reinterpret_cast<ELEMENT*>(dQ_smem) + warp * room * 16 * panel;     // for dK and dV
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
        const float *L_i = statistics.L(n), *D_i = statistics.D(n);

        // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
        float S_reg[Br / 8][4], dP_reg[Br / 8][4];
        const auto seen = seen_of<Br / 8>(mask, tiles, t, i * Br, j * Bc + first_key);
        Q_smem.wait_until_full(n);
        if (!Mask::scores) statistics.start<0, L_parts>(S_reg, n);
        wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);
        dO_smem.wait_until_full(n);
        if (!Mask::scores && !DROPOUT) statistics.start<L_parts, all_parts>(dP_reg, n);
        if (!Mask::scores) wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, !DROPOUT);
        wgmma_wait<!Mask::scores>();        // dP^T goes on, if it has begun

        // slope: of a mask that changes scores. kept: P for dV
        uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4], slope_frag[Br / 16][4], kept_frag[Br / 16][4];
        if (Mask::scores) change_scores(S_reg, slope_frag, mask, p.scale, i * Br, j * Bc + first_key, L_i);
        for_each(S_reg, [&](float& x, int, int) { x = fast_exp2(c * x); });  // line 11: P_ij
        if (cut) clear_unseen(S_reg, mask, tiles, t, j, i * Br, j * Bc + first_key, seen);
        if (DROPOUT) drop_P(kept_frag, P_frag, S_reg, mask, i * Br, j * Bc + first_key);
        else to_A(P_frag, S_reg);
        if (Mask::scores && !DROPOUT) seed(dP_reg, D_i);         // only now: registers
        if (Mask::scores) wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, !DROPOUT);
        wgmma_PV(dV_reg, DROPOUT ? kept_frag : P_frag, Q_columns + behind_Q + buffer);    // line 12: + P^T dO
        wgmma_wait<1>();                    // dP^T is there, dV goes on

        if (Mask::scores) for_both(P_frag, S_reg, [](float P, float& x, int, int) { x = P; });
        if (DROPOUT) drop_dS(dP_reg, P_frag, D_i);
        else for_both(S_reg, dP_reg, [](float P, float& dP, int, int) { dP = P * dP; });     // line 14: dS_ij
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
        dO_smem.release(n);

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
        sums.stage(n, dQ_reg, warp_row, first_dim, dQ_part * dQ_columns);
      };
      for_each_tile_in_order(mask, tiles, j, from_last(work.h, p.H_kv), n, step);         // line 17
    } while (++bh % items.block_heads);
    const Handed done = of_lane_0(handed);  // again: no registers for it in the loop
    K_smem.release(m);
    V_smem.release(m);
    bh = of_lane_0(bh) - 1;                 // the last one; without the shuffle it is kept in the loop, too

    const int first_row = j * Bc + first_key, from_col = part * columns;
    if (p.H > items.block_heads * p.H_kv) {          // parts of dK and dV
      store_parts(p, dKV_parts, bh, items.block_heads, dK_reg, dV_reg, first_row, first_col, from_col);
    } else {                                // line 18; where other warps may have had dQ, too
      if (warp < dQ_warps) sums.wait_until_left(n, by_turns ? warp / 4 : 0);
      if (dQ_warps < warps) named_barrier_sync(3, 32 * warps);
      store_staged<room>(dK_map, staging, dK_reg, scale_of_dS(p), first_row, done, first_col, from_col);
      store_staged<room>(dV_map, staging + behind_dK, dV_reg, dropout_scale(p), first_row, done, first_col,
                         from_col);
    }
    if (threadIdx.x % 32 == 0) bulk_wait_read<0>();            // before sums need that again
  }
  if (threadIdx.x % 32 == 0) bulk_wait<0>();
  convert_complete(p, w, items);            // no items are left: consumers help
}

// Rows of dQ, L and D; numbers in dK and in dV
int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }

int64_t numbers_of_K(const BwdParams& p) {
  const int heads = p.H / heads_of_a_block(p);
  return heads > p.H_kv ? (int64_t)p.B * heads * p.N_k * d : 0;
}

int counters(const BwdParams& p) { return 2 + p.B * p.H * ceil_div(p.N_q, Br); }         // and tickets

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (d + 5) + 2 * numbers_of_K(p)) + sizeof(int) * counters(p);
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, dO_map, dK_map, dV_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc);
  if (error == cudaSuccess) error = make_tensor_map(dO_map, p.dO, p.B, p.H, p.N_q, d_v, Br);
  if (error == cudaSuccess) error = make_tensor_map(dK_map, p.dK, p.B, p.H_kv, p.N_k, d, 16);
  if (error == cudaSuccess) error = make_tensor_map(dV_map, p.dV, p.B, p.H_kv, p.N_k, d_v, 16);
  if (error != cudaSuccess) return error;
  WorkspaceOfParts w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  w.parts = reinterpret_cast<Part*>(w.D + rows_of_Q(p));
  prepare_seeds(w, p.scale, dropout_scale(p));
  float* dKV_parts = w.D + 4 * rows_of_Q(p);
  w.ticket = reinterpret_cast<int*>(dKV_parts + 2 * numbers_of_K(p));
  w.zeros = counters(p) - 1;
  prepare(p, w, rows_of_Q(p), 0, stream);
  const EarlyLaunch split(ceil_div(rows_of_Q(p), 256), 256, 0, stream);
  if (!Mask::scores) cudaLaunchKernelEx(split, split_kernel, w, rows_of_Q(p));
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + 2 * Bc * Br) +
                       sizeof(float) * Br * pitch * turns + Statistics::room;
  allow_shared_memory(backward_kernel, bytes);
  Items items(p, heads_of_a_block(p));                                   // line 2
  items.heads_together = heads_in_order(p, items.tiles, items.blocks(), items.block_heads);
  cudaLaunchKernelEx(EarlyLaunch(items.blocks(), threads, bytes, stream), backward_kernel, p, w, dKV_parts,
                     items, Q_map, K_map, V_map, dO_map, dK_map, dV_map);
  reduce_heads(with_scale_of_dS(p), dKV_parts, p.H / heads_of_a_block(p), stream, false);
  return cudaGetLastError();
}
