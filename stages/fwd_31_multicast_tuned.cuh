// Forward stage 31: multicast_tuned
// idea:    a ticket for the next tile of Q, from one block of the cluster to the other
// types:   fp16, bf16
// needs:   sm_90a
// after:   multicast
// default: sm_90a if d > 128 and B * H * N_q >= 65536 and N_k >= 2048 and (H == H_kv or N_k > 8192)
//          and window >= N_k
// takes:   dropout, sink, d_v
// tiles:   Br=256 Bc=128; d > 64 and rows < 8192: Br=128 Bc=128; d > 128: Br=256 Bc=80;
//          d > 128 and rows < 16384: Br=128 Bc=80
// limits:  Br % 128 == 0; Br <= 384; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((3 if d <= 128 and Br * ((d + 63) // 64) <= 512 else 1) * (Br // 2) + 4 * Bc)
//          * ((d + 63) // 64 * 64) + 168
// workspace: the number of tiles that clusters have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.3x with a causal mask at N=2048, 1.1x at N=4096; 1.0x without
// measured: 0.75x at d=64 causal, 0.98x full, 1.21x at d=128 causal, 0.96x full, 1.19x at d=256 causal, 1.00x
//          full (H200, bf16, N=4096; make readme)
//
// A cluster's turns were settled: the longest tiles first, there and back. With unequal tiles that was no
// match for a ticket (H100, bf16, causal, d=256, N = 2048 / 4096 / 16384: 442 / 631 / 816 TFLOP/s,
// hopper_tuned with its ticket 605 / 708 / 805). But a ticket has to go to both blocks. So when block 0's
// producer has asked for all of a tile, it draws the ticket for the next one, and writes it into block 1's
// shared memory, whose producer waits for it at an mbarrier (common/tickets.cuh). That takes more than 24
// registers: producers have 40, and consumers 8 less.
//
// In one run (H100, bf16, d=256, N = 2048 / 4096 / 16384; TFLOP/s, with FlashAttention-3's): full 755 / 799 /
// 822 (756 / 791 / 793), causal 625 / 725 / 831 (625 / 720 / 813). Small shapes, grouped heads with few keys
// and d=128 are hopper_tuned's: there it is the faster one.
//
// And with a causal mask the short tiles, the last quarter of each head's, come last of all: then four heads
// together are enough (common/tile_order.cuh). (H200, bf16, d=256, N = 2048 / 4096 / 16384: 1.079 / 1.009 /
// 1.001 of the speed with eight heads and without, of which `measured` is. There, at N=2048, the last group
// was four heads, for 66 clusters.)
//
// With 80 keys half a tile is 48 columns, for warpgroups whose rows see no more of the diagonal's
// (cut_diagonal). ptxas serialises that, unless V is given back after the exponentials. (H200, bf16, d=256,
// causal, of the speed without, two runs: N = 1024 and B = 8 1.02; N = 2048 / 4096 / 16384 1.015 / 1.007 /
// 1.002.)
//
// And at d=256 L is worked out while P V of a tile's last step is under way: 1.00 to 1.01 (H200, bf16).
//
// Changed from multicast: this, and the order.
#pragma once
#include "common/both_rows.cuh"
#include "common/cluster.cuh"
#include "common/drop.cuh"
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/ring_multicast.cuh"
#include "common/store_panels.cuh"
#include "common/tickets.cuh"
#include "common/tile16.cuh"
#include "common/tile_order.cuh"
#include "common/turns.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R / 2, Bc = BLOCK_C;      // Br: of a block, as a cluster of two has BLOCK_R
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br == 128 ? 40 : 32;
constexpr int consumer_registers = Br < 128 ? 240 : Br == 128 ? 232 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr bool early_wait = d > 64 || CAUSAL;                            // for K, before the exponentials
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr bool seamless = d <= 128 && Br * pitch <= 128 * 128;    // two buffers of Q and one of O fit; else O
constexpr int Q_buffers = seamless ? 2 : 1;                              // leaves through Q's
constexpr int tile_rows = (seamless ? 3 : 1) * Br + 4 * Bc;              // in shared memory
constexpr int half_cols = (Bc / 2 + 15) / 16 * 16;                       // of a tile of S
using TileOrder = Order<short_tiles_last && (d > 128)>;                  // else marks serialise it: C7511

// The first row of a warp of this block, of the cluster's BLOCK_R
__device__ __forceinline__ int row_of(int warp) {
  return (warp / 4 * 2 + (warp / 4 % 2 ^ cluster_rank())) * 64 + warp % 4 * 16;
}

// Line 4: the rows of this block's warpgroups, of the cluster's from `row` on
__device__ __forceinline__ void fill_Q(const Ring<Q_buffers, Br>& Q_smem, const CUtensorMap& Q_map,
                                       unsigned n, int row, int h, int b) {
  uint64_t* full = Q_smem.full + n % Q_buffers;
  mbarrier_arrive_expect(full, Q_smem.bytes);
  for (int w = 0; w < Br / 64; w++)
    load_panels(Q_smem.tiles + n % Q_buffers * Q_smem.elements + 64 * w * panel, Q_map, full, Br,
                row + row_of(4 * w), h, b);
}

// How many tiles of Q blocks have asked for, after their first ones
__global__ void clear_kernel(int* asked_for) { *asked_for = 0; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
  FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
  const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap O_map, TileOrder order) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), heads = p.B * p.H, all = Tr * heads;    // lines 1, 2
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const float c = exponent_scale(p.scale);

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch);
  const Ring<Q_buffers, Br> Q_smem(smem, barriers);
  const MulticastRing<2, Bc> K_smem(smem + Q_buffers * Br * pitch, barriers + 4);
  const MulticastRing<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  ELEMENT* O_smem = seamless ? V_smem.tiles + 2 * Bc * pitch : smem;      // Br x d, in panels
  Handed* handed = reinterpret_cast<Handed*>(barriers + 12);              // for each buffer of Q_i
  const Tickets tickets(reinterpret_cast<uint64_t*>(handed + 2));
  Q_smem.init(warps);
  K_smem.init(warps), V_smem.init(warps);
  cluster_sync();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    int V_row = 0, V_head = 0, V_batch = 0;      // of the V before, which has not been asked for
    for (int n = 0, step = 0, next = blockIdx.x / 2;; n++) {             // line 3
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
      fill_Q(Q_smem, Q_map, n, i * BLOCK_R, h, b);
      for (int t = 0; t < max(tiles.end, 1); t++, step++) {              // line 7: K_j, then the V before
        K_smem.fill(K_map, step, tiles[t] * Bc, h_kv, b);
        if (seamless ? step > 0 : t > 0) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        V_row = tiles[t] * Bc, V_head = h_kv, V_batch = b;
      }
      if (!seamless) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
      next = 2 * all > gridDim.x ? gridDim.x / 2 + tickets.next(n, static_cast<int*>(p.workspace)) : all;
    }
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at<2>(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at<2>(K_smem.tiles), V_tile = matrix_at<2>(V_smem.tiles, 128 * Bc);
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
  auto first_row = [&](const Work& work) { return (Tr - 1 - work.tile) * BLOCK_R + row_of(warp); };
  auto wait_for_Q = [&](unsigned n) {       // returns what came with it
    Q_smem.wait_until_full(n);
    const Handed work = lane == 0 ? handed[n % Q_buffers] : Handed{};
    return Handed{{of_lane_0(work.tile), of_lane_0(work.bh)}, of_lane_0(work.b), of_lane_0(work.h)};
  };
  auto store = [&](const Handed& work) {
    rescale(O_reg, inv_l);                                               // line 12
    store_panels(O_map, O_smem, O_reg, Br, 16 * warp, first_row(work), work.h, work.b);
    if (!seamless && lane == 0) bulk_wait_read<0>();
  };
  bool is_left = false;                     // P V of the last step of the tile before
  Handed before = {}, work = wait_for_Q(0), next;
  for (unsigned n = 0, step = 0, last = 0; work.tile >= 0; n++, before = work, work = next) {    // line 3
    const int warp_row = first_row(work);
    const Mask mask(p, work.b, work.h);
    const auto tiles = mask.key_tiles(Tr - 1 - work.tile);
    const int end = max(tiles.end, 1);
    const auto needed = mask.needed<half_cols, !seamless>(tiles, end, first_row(work) / 64 * 64 + 63);
    for (int r = 0; r < 2; r++) m[r] = SINK ? LOG2_E * p.sink[work.h] : -INFINITY, l[r] = SINK && !(lane % 4);
    auto maximum = [&](auto& S, int t) {                                 // line 9
      K_smem.release(step + t);
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      maximum_step(S, m, alpha, shift, c, cut, slack);
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
      store(before);
      exponential(S_reg, 0);
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
      exponential(S, t);
      V_smem.release(step + t - 1);
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
        rescale(O_reg, alpha);                                           // line 10
    };
    for (int t = 1; t < needed.tiles - needed.some_are_enough; t++) step_of(S_reg, t);         // line 6
    if (needed.some_are_enough) step_of(first<half_cols / 8>(S_reg), needed.tiles - 1);        // line 11
    last = step + needed.tiles - 1;
    step += end;
    if (seamless) store_L(p, m, l, inv_l, work.bh, warp_row);            // lines 13, 15
    if (seamless) next = wait_for_Q(n + 1);
    is_left = seamless && next.tile >= 0;
    if (!is_left) {
      multiply_O(last);
      if (!seamless) store_L(p, m, l, inv_l, work.bh, warp_row);
      wgmma_wait<0>();
      V_smem.release(last);
    }
    for (unsigned passed = last + 1; passed < step; passed++) {   // this warpgroup's rows see nothing of it
      turns.skip();
      K_smem.pass(passed);
      V_smem.pass(passed);
    }
    if (!is_left) store(work);
    Q_smem.release(n);
    if (!seamless) next = wait_for_Q(n + 1);
  }
  if (lane == 0) bulk_wait<0>();
  turns.end_all();
  cluster_sync();
}

size_t workspace_bytes(const FwdParams&) { return sizeof(int); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, O_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, 64);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc / 2);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc / 2);
  if (error == cudaSuccess) error = make_tensor_map(O_map, p.O, p.B, p.H, p.N_q, d_v, 16);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 21 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  const int tiles = p.B * p.H * ceil_div(p.N_q, BLOCK_R), clusters = min(tiles, multiprocessors() / 2);
  if (clusters < tiles) clear_kernel<<<1, 1, 0, stream>>>(static_cast<int*>(p.workspace));
  const TileOrder order(Mask::all_keys, p.B * p.H, ceil_div(p.N_q, BLOCK_R), p.N_k, 2 * d, p.H / p.H_kv);
  const ClusterLaunch launch(2, 2 * clusters, threads, bytes, stream, clusters < tiles);
  cudaLaunchKernelEx(launch, forward_kernel, p, Q_map, K_map, V_map, O_map, order);
  return cudaGetLastError();
}
