// Forward stage 39: late_ticket
// idea:    from tile to tile: tickets drawn late, and with 192 rows, too, Q in two buffers
// types:   fp16, bf16
// needs:   sm_90a
// after:   lazy_maximum
// takes:   dropout, sink, d_v
// tiles:   Br=192 Bc=128; d > 64 or rows < 65536: Br=128 Bc=128; rows < 8192: Br=64 Bc=128;
//          d > 64 and rows >= 65536 and keys >= 8192 and window >= 8192: Br=192 Bc=80;
//          d > 128: Br=128 Bc=80; d > 128 and rows < 16384: Br=64 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((3 if d <= 128 and Br * ((d + 63) // 64) <= 256 else 2 if d <= 128 else 1) * Br + 4 * Bc)
//          * ((d + 63) // 64 * 64) + 128
// workspace: the number of tiles that blocks have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.01x at d=128 causal, 1.05x at d=256 causal; 1.03x at d=128, N=16384 (a draft of it was
//          measured before)
// measured: 1.00x at d=64 causal, 1.00x full, 1.01x at d=128 causal, 0.99x full, 1.07x at d=256 causal, 1.00x
//          full (H200, bf16, N=4096; make readme)
//
// Late tickets. A ticket was drawn when a block began to ask for a tile: with that tile before it, and the
// end of the one before that. So who had a long tile in hand held a ticket for another one, while others
// had nothing left to take. Now it is drawn when all of a tile is asked for, two steps before its end:
// soon enough for the next Q and K to be there in time. (multicast_tuned has it so.) By a simulation of
// who draws what when (132 blocks, H d = 2048, causal; a tile costs a step more than it has), how much
// longer the last block works than all do on average:
//
//   tiles of                128 x 128                      192 x 80                 128 x 80, d=256
//   N, B             2048, 8  4096, 4  16384, 1   4096, 4  8192, 2  16384, 1   2048, 8  4096, 4
//   drawn before      1.004    1.009    1.004      1.083    1.039    1.018      1.091    1.126
//   drawn late        1.004    1.005    1.002      1.025    1.005    1.005      1.014    1.006
//
// Short tiles in halves. The last quarter of a head's tiles, the short ones, came for all heads in turn,
// so that the next tile of a head had to read its keys from HBM again: all heads' are too much for L2. Now
// half of the heads have theirs, then the others. And with tiles of 192 rows it is a third, as a quarter
// are too few of them to fill the gaps.
//
// Two buffers of Q. Tiles of 192 rows of d=128 had one, as no buffer for O was left: so the next tile's
// first product had to wait until this one's O had been copied. But O needs no buffer of its own: Q's has
// the same rows, each warp's rows of Q are read by its warpgroup alone, and when O is ready, that has no
// more products with them. So O leaves through its tile's buffer of Q, the next Q is in the other one, and
// tiles follow each other as with 128 rows (seamless). The buffer is given back when the copy has read it,
// one softmax later.
//
// L under P V. With d > 128 no product of the next tile is under way when L is worked out, but P V of this
// one's last step can be.
//
// TFLOP/s, lazy_maximum's -> this one's (of a draft; H200, bf16, causal, by turns; H = 16, 8 at d = 128,
// 256): d=128, N = 2048 / 4096 / 8192 / 16384: 617 / 682 / 725 / 762 -> 616 / 688 / 750 / 773; d=256,
// N=1024 and 2048, B=8: 464 / 603 -> 470 / 650. At d=64 1.00.
//
// HBM traffic without caches (hbm, above): as in hopper_tuned.
//
// Changed from lazy_maximum: these. And 192 x 80 begins with 8192 keys.
#pragma once
#include "common/both_rows.cuh"
#include "common/drop.cuh"
#include "common/epilogue.cuh"
#include "common/late_ticket.cuh"
#include "common/launch.cuh"
#include "common/lazy_maximum.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/own_rows.cuh"
#include "common/ring.cuh"
#include "common/store_panels.cuh"
#include "common/tile16.cuh"
#include "common/tile_order.cuh"
#include "common/turns.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br == 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr bool early_wait = d > 64 || CAUSAL && Br < 192;                // for K, before the exponentials
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr bool seamless = d <= 128;        // two buffers of Q fit
constexpr bool O_apart = seamless && Br * pitch <= 128 * 128;            // and one of O; else it leaves
constexpr int Q_buffers = seamless ? 2 : 1;                              // through its tile's Q
constexpr int tile_rows = (Q_buffers + O_apart) * Br + 4 * Bc;           // in shared memory
constexpr int half_cols = Bc % 32 == 0 ? Bc / 2 : Bc;                    // of a tile of S
using TileOrder = LateOrder<short_tiles_last, Br>;

// How many tiles of Q blocks have asked for, after their first ones
__global__ void clear_kernel(int* asked_for) { *asked_for = 0; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
  FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
  const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap O_map, TileOrder order) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H, all = Tr * heads;         // lines 1, 2
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const float c = exponent_scale(p.scale);

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch);
  const Ring<Q_buffers, Br> Q_smem(smem, barriers);
  const Ring<2, Bc> K_smem(smem + Q_buffers * Br * pitch, barriers + 4);
  const Ring<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  Handed* handed = reinterpret_cast<Handed*>(barriers + 12);              // for each buffer of Q_i
  Q_smem.init(warps);
  K_smem.init(warps), V_smem.init(warps);
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    int V_row = 0, V_head = 0, V_batch = 0;      // of the V before, which has not been asked for
    for (int n = 0, step = 0, next = blockIdx.x;; n++) {                 // line 3
      Q_smem.wait_until_empty(n);
      if (next >= all) {                    // the consumers end, too
        handed[n % Q_buffers] = {{-1}};
        mbarrier_arrive(Q_smem.full + n % Q_buffers);
        if (seamless) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        return;
      }
      const Work work = order.nth(Tr, heads, next);
      const int i = Tr - 1 - work.tile, b = work.bh / p.H, h = work.bh % p.H, h_kv = h / (p.H / p.H_kv);
      const auto tiles = Mask(p, b, h).key_tiles(i);
      handed[n % Q_buffers] = {work, b, h};
      Q_smem.fill(Q_map, n, i * Br, h, b);                               // line 4
      for (int t = 0; t < max(tiles.end, 1); t++, step++) {              // line 7: K_j, then the V before
        K_smem.fill(K_map, step, tiles[t] * Bc, h_kv, b);
        if (seamless ? step > 0 : t > 0) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        V_row = tiles[t] * Bc, V_head = h_kv, V_batch = b;
      }
      if (!seamless) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
      next = Mask::all_keys ? next + gridDim.x : draw_ticket(n, all, p.workspace);
    }
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);
  const Turns<Br / 64> turns(warp / 4);

  float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                      // line 5
  uint32_t P_frag[Bc / 16][4];
  auto multiply_S = [&](auto& S, unsigned step, unsigned n) {            // line 8: S_ij = Q_i K_j^T
    wgmma_QK<width / 16>(S, Q_tile + Q_smem.offset(n), Br, K_tile + K_smem.offset(step), false, Bc);
  };
  auto multiply_O = [&](unsigned step) {                                 // line 10: + P~_ij V_j
    V_smem.wait_until_full(step);
    wgmma_PV(O_reg, P_frag, V_tile + V_smem.offset(step));
  };

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float m[2], l[2], inv_l[2], alpha[2], shift[2];
  auto first_row = [&](const Work& work) { return (Tr - 1 - work.tile) * Br + 16 * warp; };   // of this warp
  auto wait_for_Q = [&](unsigned n) { return Q_smem.wait_until_full(n), of_lane_0(handed[n % Q_buffers]); };
  unsigned n = 0, step = 0, last = 0;
  const bool no_row = rows_may_end && (Tr - 1) * Br + warp / 4 * 64 >= p.N_q;      // in the last tile
  auto with_rows = [&](const Handed& work) {                             // the next that has some, or this
    return no_row ? pass_last_tiles(work, n, step, p, wait_for_Q, turns, Q_smem, K_smem, V_smem) : work;
  };
  auto store = [&](const Handed& work, unsigned n) {
    rescale(O_reg, inv_l);                                               // line 12
    ELEMENT* O_smem = O_apart ? V_smem.tiles + 2 * Bc * pitch : Q_smem.tiles + n % Q_buffers * Br * pitch;
    store_panels(O_map, O_smem, O_reg, Br, 16 * warp, first_row(work), work.h, work.b);
  };
  bool is_left = false;                     // P V of the last step of the tile before
  bool grows;                               // m of a row of this warp, in this step
  Handed before = {}, work = with_rows(wait_for_Q(0)), next;
  for (; work.tile >= 0; n++, before = work, work = with_rows(next)) {   // line 3
    const int warp_row = first_row(work);
    const Mask mask(p, work.b, work.h);
    const auto tiles = mask.key_tiles(Tr - 1 - work.tile);
    const int end = max(tiles.end, 1);
    const auto needed = mask.needed<half_cols>(tiles, end, first_row(work) / 64 * 64 + 63);  // by 64 rows
    for (int r = 0; r < 2; r++) m[r] = SINK ? LOG2_E * p.sink[work.h] : -INFINITY, l[r] = SINK && !(lane % 4);
    auto maximum = [&](auto& S, int t) {                                 // line 9
      K_smem.release(step + t);
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      grows = lazy_maximum(S, m, alpha, shift, c, cut);
      if (early_wait && t + 1 < needed.tiles) K_smem.wait_until_full(step + t + 1);
    };
    auto exponential = [&](auto& S, int t) {
      exponentials(S, l, alpha, c, shift);
      to_A(P_frag, S);
      if (DROPOUT) drop(P_frag, mask, warp_row, tiles[t] * Bc);
    };

    K_smem.wait_until_full(step);
    turns.wait();
    multiply_S(S_reg, step, n);
    if (is_left) {
      multiply_O(last);
      turns.end();
      wgmma_wait<1>();
      maximum(S_reg, 0);
      wgmma_wait<0>();
      V_smem.release(last);
      store(before, n - 1);
      exponential(S_reg, 0);
      if (!O_apart) release_stored<O_apart>(Q_smem, n - 1);
    } else {
      turns.end();
      wgmma_wait<0>();
      maximum(S_reg, 0);
      exponential(S_reg, 0);
    }
    for_each(O_reg, [](float& x, int, int) { x = 0.f; });                // line 5
    auto step_of = [&](auto& S, int t) {
      if (!early_wait) K_smem.wait_until_full(step + t);
      turns.wait();
      multiply_S(S, step + t, n);
      multiply_O(step + t - 1);
      turns.end();
      wgmma_wait<1>();
      maximum(S, t);
      wgmma_wait<0>();
      V_smem.release(step + t - 1);
      exponential(S, t);
      if (grows) rescale(O_reg, alpha);                                  // line 10
    };
    for (int t = 1; t < needed.tiles - needed.some_are_enough; t++) step_of(S_reg, t);         // line 6
    if (needed.some_are_enough) step_of(first<half_cols / 8>(S_reg), needed.tiles - 1);        // line 11
    last = step + needed.tiles - 1;
    if (needed.tiles < end) {                     // this warpgroup's rows see nothing of the last tile
      turns.skip();
      K_smem.pass(last + 1);
      V_smem.pass(last + 1);
    }
    step += end;
    if (seamless) store_L(p, m, l, inv_l, work.bh, warp_row);            // lines 13, 15
    if (seamless) next = wait_for_Q(n + 1);
    is_left = seamless && next.tile >= 0 && !(no_row && next.tile == 0);
    if (!is_left) {
      multiply_O(last);
      if (!seamless) store_L(p, m, l, inv_l, work.bh, warp_row);
      wgmma_wait<0>();
      V_smem.release(last);
      store(work, n);
    }
    if (O_apart || !is_left) release_stored<O_apart>(Q_smem, n);
    if (!seamless) next = wait_for_Q(n + 1);
  }
  if (lane == 0) bulk_wait<0>();
  turns.end_all();
}

size_t workspace_bytes(const FwdParams&) { return sizeof(int); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, O_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc);
  if (error == cudaSuccess) error = make_tensor_map(O_map, p.O, p.B, p.H, p.N_q, d_v, 16);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 16 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  const int tiles = p.B * p.H * ceil_div(p.N_q, Br), blocks = min(tiles, multiprocessors());
  const bool tickets = blocks < tiles && !Mask::all_keys;
  if (tickets) clear_kernel<<<1, 1, 0, stream>>>(static_cast<int*>(p.workspace));
  const TileOrder order(Mask::all_keys, p.B * p.H, ceil_div(p.N_q, Br), p.N_k, 2 * d, p.H / p.H_kv);
  cudaLaunchKernelEx(EarlyLaunch(blocks, threads, bytes, stream, tickets), forward_kernel, p, Q_map,
                     K_map, V_map, O_map, order);
  return cudaGetLastError();
}
