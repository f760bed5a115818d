// Backward stage 34: exchanged_semaphores
// idea:    exchanged_tuned with the same bits in each run: sums of dQ in the order of keys, by semaphores
// types:   fp16, bf16
// needs:   sm_90a
// after:   exchanged_tuned
// deterministic: yes
// takes:   dropout, sink, d_v
// tiles:   Br=64 Bc=128
// limits:  Br in (64,); Bc in (128,)
// shared:  (2 * Bc + 4 * Br) * ((d + 63) // 64 * 64) + 64 * (Bc + 6 * Br) * ((d + 127) // 128) +
//          4 * Bc * Br + 16 * Br + 224
// workspace: dQ_accum, L, D, dK_parts, dV_parts, semaphores
// hbm:     B * (4 * d * N_k * (H_kv + 4 * H * (H > H_kv)) + H * (N_k * (5 * d + min(d, 64) * (ceil_div(d, 64)
//          % 2)) + N_q * (10 * d + 4 + 4 * Tc * (2 * d + min(d, 64) * (ceil_div(d, 64) % 2))) + 8 * Tr * Br *
//          (Tc * (d + 2) + d / 2 + 1 + d * (1 < Tc and N_q <= 2 * N_k and B * H * Tc <= multiprocessors //
//          2))))
// predicted: none was made
// measured: 0.97x at d=64 causal, 0.94x full, 0.96x at d=128 causal, 0.87x full, 0.97x at d=256 causal, 0.91x
//          full (H200, bf16, N=4096; make readme)
//
// As in semaphores (common/in_order.cuh), one for either half of dQ's columns. The third warpgroup adds from
// registers, a warp beside counts: causal 0.99 to 1.03 times as long, full to 1.11, small calls 1.21 (H200).
// Stays because calls with deterministic=True and d > 128 take it. HBM, dropout: as in exchanged_tuned.
#pragma once
#include "common/clear_unseen.cuh"
#include "common/cluster.cuh"
#include "common/drop_signed.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/hand_over.cuh"
#include "common/keep_order.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/pairs.cuh"
#include "common/reduce_heads.cuh"
#include "common/ring_parts.cuh"
#include "common/ring_rows.cuh"
#include "common/seed.cuh"
#include "common/store_halves.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C / 2;      // Bc: of a block, as a cluster of two has BLOCK_C
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int columns = (panels + 1) / 2 * panel;  // of dV and dK in an accumulator: one has the first half,
constexpr int second = pitch - columns;            // one those from here on: maybe some of the first's, too
constexpr int first_steps = (width < columns ? width : columns) / 16;    // of 16 columns, in the first half
constexpr int threads = 512;                       // three warpgroups of consumers; and the producer's
constexpr int producer_registers = 24, dQ_registers = 104, consumer_registers = 192;

// The second warpgroup's dP^T = V_j dO_i^T, by the halves of dO_i as they come
__device__ __forceinline__ void multiply_dP(float (&dP_reg)[Br / 8][4], uint32_t V_tile,
                                            const PartRing<3, Br, columns>& dO_smem, unsigned n) {
  const uint32_t dO_tile = matrix_at<2>(dO_smem.tiles), more = (columns - second) * Br / 8;
  wgmma_QK<first_steps>(dP_reg, V_tile, Bc, dO_tile + dO_smem.offset(2 * n), true);
  dO_smem.wait_until_full(2 * n + 1);
  if constexpr (width > columns)            // of the second half, what is not in the first
    wgmma_QK<width / 16 - first_steps>(dP_reg, V_tile + columns * Bc / 8, Bc,
                                       dO_tile + dO_smem.offset(2 * n + 1) + more, true);
}

// The third warpgroup's part, line 15: dQ_i += dS_ij K_j, 64 columns at a time
__device__ __forceinline__ void add_dQ(const BwdParams& p, const Workspace& w, int j, int b, int h,
                                       bool last, int first_tile, const Place& turn, uint64_t* sums,
                                       const Ring<1, Bc>& K_smem, const ELEMENT* dST_smem,
                                       const Place& dS_place, const PartRing<1, Bc, columns>& peer_K_smem,
                                       const ELEMENT* peer_dST_smem, uint64_t* peer_dS_full) {
  const int warp_row = warp_index() % 4 * 16;
  const int rank = cluster_rank(), first_col = rank * second;
  const uint32_t K_columns = matrix_at<2>(K_smem.tiles + first_col * Bc, 128 * Bc);
  const uint32_t peer_K_columns = matrix_at<2>(peer_K_smem.tiles, 128 * Bc);
  K_smem.wait_until_full(0);
  peer_K_smem.wait_until_full(0);
  int n = 0;                                // tiles so far
  const auto tiles = Mask(p, b, h).query_tiles(j);
  for (; n < tiles.end - tiles.first; n++) {
    float* dQ = w.dQ_accum + (int64_t)(first_tile + tiles[nth_of(tiles, n, last)]) * Br * d;
    const Place added(sums + n % 2 * 2);
    uint32_t dS_frag[Bc / 16][4], peer_dS_frag[Bc / 16][4];
    if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(peer_dS_full, sizeof(ELEMENT) * Bc * Br);
    dS_place.wait_until_full(n);
    load_transposed(dS_frag, dST_smem, warp_row);
    mbarrier_wait(peer_dS_full, n % 2);
    load_transposed(peer_dS_frag, peer_dST_smem, warp_row);
    #pragma unroll
    for (int col = 0; col < columns; col += panel) {
      float dQ_reg[panel / 8][4];
      wgmma_dQ_registers(dQ_reg, dS_frag, K_columns + col * Bc / 8);
      wgmma_dQ_registers(dQ_reg, peer_dS_frag, peer_K_columns + col * Bc / 8, true);
      if (col == 0) dS_place.emptied();     // now all of it is in registers, certainly
      if (col == 0 && threadIdx.x % 32 == 0) mbarrier_arrive_in_block(dS_place.empty, 1 - rank);
      wgmma_wait<0>();
      if (col == 0) {
        turn.wait_until_full(n);
        turn.emptied();
        added.wait_until_empty(n / 2);
      }
      if (first_col + col >= rank * columns)
        add_fragments(dQ, one_strip(dQ_reg), warp_row, first_col + col, 1);
    }
    added.filled();
  }
}

// A cluster of two blocks per tile of K and V and query head. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, float* dKV_parts, int* semaphores, int heads_together, int dQ_copies,
    const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap dO_map,
    const __grid_constant__ CUtensorMap dK_map, const __grid_constant__ CUtensorMap dV_map) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, 2 * Bc), heads = p.B * p.H;   // lines 1, 2
  const Work work = dispatch_to_and_fro(Tc, heads, p.H % 2 == 0, heads_together, blockIdx.x / 2);  // line 5
  const int j = work.tile, bh = work.bh, b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const bool last = from_last(h, p.H);
  const int rank = cluster_rank(), peer = 1 - rank;
  const int block_key = (2 * j + rank) * Bc, first_tile = (j % dQ_copies * heads + bh) * Tr;     // of sums
  const int warpgroup = warp_index() / 4, warp_row = warp_index() % 4 * 16;    // of dQ, or of dV and dK

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* dST_smem = smem + 2 * (Bc + Br) * pitch + (Bc + 3 * Br) * columns;   // Bc x Br, a panel
  ELEMENT* peer_dST_smem = dST_smem + Bc * Br;
  uint4* P_smem = reinterpret_cast<uint4*>(peer_dST_smem + Bc * Br);     // as registers lie; and then slopes
  float *L_smem = reinterpret_cast<float*>(P_smem + Bc * Br / 4), *D_smem = L_smem + 2 * Br;   // -L / c; D
  uint64_t* barriers = reinterpret_cast<uint64_t*>(D_smem + 2 * Br);
  const Ring<1, Bc> K_smem(smem, barriers), V_smem(K_smem.tiles + Bc * pitch, barriers + 2);
  const Ring<2, Br> Q_smem(V_smem.tiles + Bc * pitch, barriers + 4);
  const PartRing<3, Br, columns> dO_smem(Q_smem.tiles + 2 * Br * pitch, barriers + 8);       // halves
  const PartRing<1, Bc, columns> peer_K_smem(dO_smem.tiles + 3 * Br * columns, barriers + 14);
  const Place P_place(barriers + 16), dS_place(barriers + 18), turn(barriers + 22);      // turn: to add
  uint64_t *peer_dS_full = barriers + 20, *sums = barriers + 24;     // sums to be counted: two, by turns
  K_smem.init(4);
  V_smem.init(4);
  Q_smem.init(8);
  dO_smem.init(8);
  P_place.init(4, 4);
  turn.init(1, 4);
  for (int n = 0; n < 2; n++) Place(sums + 2 * n).init(4, 1);
  dS_place.init(4, 8);                      // 4 warps of the peer empty what they have of it
  if (threadIdx.x == 0) mbarrier_init(peer_dS_full, 1);
  peer_K_smem.init(4);
  cluster_sync();
  start_next_kernel();
  if (!Mask::is_range) wait_for_previous_kernel();           // lists
  const Mask mask(p, b, h);
  const auto tiles = mask.query_tiles(j);
  int n = 0;                                // tiles so far
  if (warpgroup == 3) {                     // the producer
    setmaxnreg_dec<producer_registers>();
    if (warp_index() % 4 > 0)
      return keep_order(turn, sums, mask, tiles, j, last, semaphores + 2 * first_tile + rank, 2, dQ_copies);
    if (threadIdx.x > 384) return;
    K_smem.fill(K_map, 0, block_key, h_kv, b);                           // line 6
    V_smem.fill(V_map, 0, block_key, h_kv, b);
    peer_K_smem.fill(K_map, 0, (2 * j + peer) * Bc, h_kv, b, rank * second);
    wait_for_previous_kernel();
    for (; n < tiles.end - tiles.first; n++) {                           // line 9
      const int i = tiles[nth_of(tiles, n, last)];
      const int64_t row = ((int64_t)bh * Tr + i) * Br;                   // in L and D
      fill(Q_smem, Q_map, n, i * Br, h, b, L_smem, w.L + row);
      dO_smem.fill(dO_map, 2 * n, i * Br, h, b, 0, D_smem + n % 2 * Br, w.D + row);
      dO_smem.fill(dO_map, 2 * n + 1, i * Br, h, b, second);
    }
    return;
  }

  if (warpgroup == 2) {
    setmaxnreg_dec<dQ_registers>();
    wait_for_previous_kernel();
    add_dQ(p, w, j, b, h, last, first_tile, turn, sums, K_smem, dST_smem, dS_place, peer_K_smem,
           peer_dST_smem, peer_dS_full);
    return cluster_sync();
  }
  setmaxnreg_inc<consumer_registers>();
  // What wgmma reads: K_j and V_j; Q_i in buffer 0, both ways, and dO_i
  const uint32_t K_tile = matrix_at<2>(K_smem.tiles), V_tile = matrix_at<2>(V_smem.tiles);
  const uint32_t Q_tile = matrix_at<2>(Q_smem.tiles), dO_columns = matrix_at<2>(dO_smem.tiles, 128 * Br);
  const uint32_t Q_columns = matrix_at<2>(Q_smem.tiles, 128 * Br), Q_second = Q_columns + second * Br / 8;
  float first_reg[columns / 8][4] = {}, second_reg[columns / 8][4] = {};         // line 7: of dV, or of dK
  K_smem.wait_until_full(0);
  V_smem.wait_until_full(0);
  for (; n < tiles.end - tiles.first; n++) {                             // line 8
    const int t = nth_of(tiles, n, last), i = tiles[t];
    const uint32_t buffer = Q_smem.offset(n);                            // as descriptors count
    const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;
    float S_reg[Br / 8][4], dP_reg[Br / 8][4], slope_reg[Br / 8][4];
    uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4], slope_frag[Br / 16][4];
    uint32_t signed_frag[Br / 16][4];       // with dropout: P, what is dropped with a minus
    if (warpgroup == 0) {                 // dV
      const float c = factor_of_S(p.scale);
      const auto seen = seen_of<Br / 8>(mask, tiles, t, i * Br, block_key + warp_row);
      Q_smem.wait_until_full(n);
      if (!Mask::scores) seed(S_reg, L_i);
      wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);           // line 10
      wgmma_wait<0>();
      if (Mask::scores) change_scores(S_reg, slope_reg, mask, p.scale, i * Br, block_key + warp_row, L_i);
      for_each(S_reg, [&](float& x, int, int) { x = fast_exp2(c * x); });          // line 11: P_ij
      clear_unseen(S_reg, mask, tiles, t, j, i * Br, block_key + warp_row, seen);
      Q_smem.release(n);
      if (DROPOUT) drop_P(P_frag, signed_frag, S_reg, mask, i * Br, of_lane_0(block_key + warp_row));
      else to_A(P_frag, S_reg);
      if (Mask::scores) to_A(slope_frag, slope_reg);
      dO_smem.wait_until_full(2 * n);
      wgmma_PV(first_reg, P_frag, dO_columns + dO_smem.offset(2 * n));   // line 12: + P_ij^T dO_i
      dO_smem.wait_until_full(2 * n + 1);
      wgmma_PV(second_reg, P_frag, dO_columns + dO_smem.offset(2 * n + 1));
      P_place.wait_until_empty(n);
      hand_over(P_smem, DROPOUT ? signed_frag : P_frag);
      if (Mask::scores) hand_over(P_smem + Bc * Br / 8, slope_frag);
      P_place.filled();
      wgmma_wait<1>();
      dO_smem.release(2 * n);
      wgmma_wait<0>();
      dO_smem.release(2 * n + 1);
    } else {                              // dK
      dO_smem.wait_until_full(2 * n);
      seed(dP_reg, D_i);
      multiply_dP(dP_reg, V_tile, dO_smem, n);                           // line 13
      wgmma_wait<0>();
      __syncwarp();                       // all lanes have read D_i
      dO_smem.release(2 * n);
      if (!DROPOUT) dO_smem.release(2 * n + 1);
      P_place.wait_until_full(n);
      take(P_frag, P_smem);
      if (Mask::scores) take(slope_frag, P_smem + Bc * Br / 8);
      for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int col) {   // line 14: dS_ij
        dP = DROPOUT && P < 0.f ? -P * D_i[col] : P * dP;
        mask.keep_gradient(DROPOUT ? mask.dropout.scale * dP : dP, i * Br + col, block_key + warp_row + r);
      });
      if (Mask::scores) for_both(slope_frag, dP_reg, [](float slope, float& dS, int, int) { dS *= slope; });
      P_place.emptied();
      if (DROPOUT) dO_smem.release(2 * n + 1);       // with its buffer D_i is given back
      to_A(dS_frag, dP_reg);
      Q_smem.wait_until_full(n);
      wgmma_PV(first_reg, dS_frag, Q_columns + buffer);                  // line 16: + dS_ij^T Q_i
      wgmma_PV(second_reg, dS_frag, Q_second + buffer);
      mbarrier_wait_for_blocks(dS_place.empty, n % 2 ^ 1);
      store_fragments(dST_smem, dS_frag, Bc, warp_row);
      fence_proxy_async();
      dS_place.filled();
      if (threadIdx.x % 32 == 0)
        bulk_send(peer_dST_smem + warp_row * Br, dST_smem + warp_row * Br, sizeof(ELEMENT) * 16 * Br,
                  peer_dS_full, peer);
      wgmma_wait<0>();
      Q_smem.release(n);
    }
  }                                                                      // line 17
  if (p.H > p.H_kv) {                       // parts of dV and dK
    float* part = dKV_parts + ((warpgroup == 0 ? heads : 0) + bh) * (int64_t)p.N_k * d;
    store_part(part, first_reg, block_key + warp_row, p.N_k, 0, 0, warpgroup == 0 ? d_v : d);
    store_part(part, second_reg, block_key + warp_row, p.N_k, second, columns, warpgroup == 0 ? d_v : d);
  } else {                                  // line 18, through the buffers of Q
    Q_smem.wait_until_empty(n + warpgroup);
    store_halves(warpgroup == 0 ? dV_map : dK_map, Q_smem.tiles + (n + warpgroup) % 2 * Q_smem.elements,
                 first_reg, second_reg, second, warpgroup ? scale_of_dS(p) : dropout_scale(p), Bc,
                 warp_row, block_key, h, b);
  }
  cluster_sync();
}

int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }     // and of L and D
int64_t numbers_of_K(const BwdParams& p) { return p.H > p.H_kv ? (int64_t)p.B * p.H * p.N_k * d : 0; }
int dQ_copies(const BwdParams& p) { return copies_of_dQ(p, multiprocessors() / 2); }

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (dQ_copies(p) * d + 2) + 2 * numbers_of_K(p)) +
         sizeof(int) * 2 * dQ_copies(p) * p.B * p.H * ceil_div(p.N_q, Br);
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
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * dQ_copies(p) * d;
  w.D = w.L + rows_of_Q(p);
  prepare_seeds(w, p.scale, dropout_scale(p));
  float* dKV_parts = w.D + rows_of_Q(p);
  w.ticket = reinterpret_cast<int*>(dKV_parts + 2 * numbers_of_K(p));    // semaphores, to be set to 0
  w.zeros = 2 * dQ_copies(p) * p.B * p.H * ceil_div(p.N_q, Br) - 1;
  prepare(p, w, rows_of_Q(p), dQ_copies(p), stream);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + Br) * pitch + (Bc + 3 * Br) * columns + 4 * Bc * Br) +
                       sizeof(float) * 4 * Br + 28 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int Tc = ceil_div(p.N_k, 2 * Bc), blocks = 2 * p.B * p.H * Tc, at_once = multiprocessors() / 2;
  const int heads_together = heads_of_clusters(p, Tc, at_once);
  cudaLaunchKernelEx(ClusterLaunch(2, blocks, threads, bytes, stream, true), backward_kernel, p, w, dKV_parts,
                     w.ticket, heads_together, dQ_copies(p), Q_map, K_map, V_map, dO_map, dK_map, dV_map);
  cudaLaunchKernelEx(EarlyLaunch(p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream),
                     convert_dQ_kernel, with_scale_of_dS(p), w.dQ_accum, dQ_copies(p));
  reduce_heads(with_scale_of_dS(p), dKV_parts, p.H, stream);
  return cudaGetLastError();
}
