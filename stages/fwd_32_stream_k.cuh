// Forward stage 32: stream_k
// idea:    stream-K: the last round and a bit is divided by steps of keys: all blocks end together
// types:   fp16, bf16
// needs:   sm_90a
// after:   hopper_tuned
// takes:   dropout, sink, d_v
// tiles:   Br=192 Bc=128; d > 64 or rows < 65536: Br=128 Bc=128; rows < 8192: Br=64 Bc=128;
//          d > 64 and rows >= 65536 and keys >= 8192 and window >= 8192: Br=192 Bc=80;
//          d > 128: Br=128 Bc=80; d > 128 and rows < 16384: Br=64 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((3 if d <= 128 and Br * ((d + 63) // 64) <= 256 else 1) * Br + 4 * Bc)
//          * ((d + 63) // 64 * 64) + 160
// workspace: O of a part of a tile for each block, in float, and flags; with a mask as hopper_tuned
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1)) + (Br * (2 * d + 128 * ceil_div(d, 16) + 52)
//          * (multiprocessors - ceil_div(multiprocessors, Tc))
//          if B * H * Tr > multiprocessors and B * H * Tr % multiprocessors > 0 else 0)
// predicted: 1.03x full, where at d=128 16 rounds become 15.5, at d=64 22 become 21.3; 1.05x at d=128 full,
//          N=16384; 1.0x causal
// measured: 1.00x at d=64 causal, 1.04x full, 1.00x at d=128 causal, 1.02x full, 1.00x at d=256 causal, 0.98x
//          full (H200, bf16, N=4096; make readme)
//
// Equal tiles go in rounds: each block takes one, then each takes the next. The last round may have work for
// few of them. With B=4, H=16, N=4096, d=128, full, there are 2048 tiles: on 132 multiprocessors 16 rounds,
// for the work of 15.5.
//
//   - So the last round and the part of one are divided evenly, by steps of keys (stream-K: Osama, Merrill,
//     Cecka, Garland, Owens, arXiv 2301.03598). Rounds before them stay whole: of a tile that is cut, Q is
//     read twice, and O goes through HBM in float. common/stream_k.cuh draws the division. A block knows its
//     share: it asks for no ticket.
//   - A tile that is cut has two blocks. One does its last steps, before all else, and leaves O, divided by l
//     as ever, and L. The other one does its first steps, after all else: so the flag that it waits for has
//     been set long before. (With less than two rounds, for which own_rows is better, blocks wait in a
//     chain: a part leaves in the first step of the next one, which may have to wait itself.)
//   - Nothing is merged. As keys may come in any order, the online softmax goes on where the other block has
//     stopped, from m = L, l = 1 and that O. (A sink is the same, with O = 0.)
//
// That is for masks that let all rows see all keys. With others all is as in hopper_tuned.
//
// In one run (H200, bf16, N = 2048 / 4096 / 16384; TFLOP/s): d=64 513 / 524 / 530 -> 535 / 549 / 541, d=128
// 694 / 709 / 699 -> 699 / 724 / 738, d=256 742 / 776 / 792 -> 735 / 778 / 783. With few steps to divide it
// is slower: N = 1024, B = 8, d=128 640 -> 618; N = 512, B = 4 431 -> 350. (hopper_tuned's 763 at d=128,
// N = 16384, in its header, is of another run.)
//
// Tried at d=64: l by the tensor cores, as eight more columns of P V, beside a panel of ones (n = 72). Alone
// it gains as much over hopper_tuned as this does, 1.04x (N = 2048 to 16384, full). Over this one it gains
// nothing: 0.98 to 1.03x full, and with short_last's order 0.98 to 1.01x causal (H200, N = 1024 to 16384, two
// types). So sums do not bound it. And L is within 2e-3 only, as P is rounded before it is summed.
//
// HBM traffic without caches (hbm, above): of a tile that is cut, Q comes twice, O goes to and fro in float,
// and there are its flags, and L again. (At most: a cut may fall between two tiles.)
//
// Changed from hopper_tuned: this.
#pragma once
#include "common/both_rows.cuh"
#include "common/drop.cuh"
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/ring.cuh"
#include "common/store_panels.cuh"
#include "common/stream_k.cuh"
#include "common/tile16.cuh"
#include "common/turns.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br == 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr bool early_wait = d > 64 || CAUSAL;                            // for K, before the exponentials
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr bool seamless = d <= 128 && Br * pitch <= 128 * 128;    // two buffers of Q and one of O fit; else O
constexpr int Q_buffers = seamless ? 2 : 1;                              // leaves through Q's
constexpr int tile_rows = (seamless ? 3 : 1) * Br + 4 * Bc;              // in shared memory
constexpr int half_cols = Bc % 32 == 0 ? Bc / 2 : Bc;                    // of a tile of S

// Blocks have left nothing so far; or they have asked for no tile after their first ones.
__global__ void clear_kernel(void* workspace) { *left_by(blockIdx.x, workspace) = 0.f; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
  FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
  const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap O_map, int heads_together) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H, all = Tr * heads;         // lines 1, 2
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const float c = exponent_scale(p.scale);

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch);
  const Ring<Q_buffers, Br> Q_smem(smem, barriers);
  const Ring<2, Bc> K_smem(smem + Q_buffers * Br * pitch, barriers + 4);
  const Ring<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  ELEMENT* O_smem = seamless ? V_smem.tiles + 2 * Bc * pitch : smem;      // Br x d, in panels
  Part* handed = reinterpret_cast<Part*>(barriers + 12);                  // for each buffer of Q_i
  Q_smem.init(warps);
  K_smem.init(warps), V_smem.init(warps);
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    int V_row = 0, V_head = 0, V_batch = 0;      // of the V before, which has not been asked for
    for (int n = 0, step = 0, next = blockIdx.x;; n++) {                 // line 3
      Q_smem.wait_until_empty(n);
      const Steps steps = evenly ? share_of(n, all, max(ceil_div(p.N_k, Bc), 1), next) : Steps{};
      if (next >= all) {                    // the consumers end, too
        handed[n % Q_buffers] = {{{-1}}};
        mbarrier_arrive(Q_smem.full + n % Q_buffers);
        if (seamless) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        return;
      }
      const Work work = dispatch_order(Tr, heads, heads_together, next);
      const int i = Tr - 1 - work.tile, b = work.bh / p.H, h = work.bh % p.H, h_kv = h / (p.H / p.H_kv);
      const auto tiles = part_of(Mask(p, b, h).key_tiles(i), steps);
      handed[n % Q_buffers] = {{work, b, h}, steps};
      Q_smem.fill(Q_map, n, i * Br, h, b);                               // line 4
      if (n == 0) wait_for_previous_kernel();                            // clear_kernel
      if (!evenly) next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;
      for (int t = 0; t < max(tiles.end, 1); t++, step++) {              // line 7: K_j, then the V before
        K_smem.fill(K_map, step, tiles[t] * Bc, h_kv, b);
        if (seamless ? step > 0 : t > 0) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        V_row = tiles[t] * Bc, V_head = h_kv, V_batch = b;
      }
      if (!seamless) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
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
  auto wait_for_Q = [&](unsigned n) {       // returns what came with it
    Q_smem.wait_until_full(n);
    return of_lane_0(handed[n % Q_buffers]);
  };
  auto store = [&](const Part& work) {
    rescale(O_reg, inv_l);                                               // line 12
    if (work.first > 0) return leave(O_reg, p.workspace);
    store_panels(O_map, O_smem, O_reg, Br, 16 * warp, first_row(work), work.h, work.b);
    if (!seamless && lane == 0) bulk_wait_read<0>();
  };
  bool is_left = false;                     // P V of the last step of the tile before
  Part before = {}, work = wait_for_Q(0), next;
  for (unsigned n = 0, step = 0, last = 0; work.tile >= 0; n++, before = work, work = next) {    // line 3
    const int warp_row = first_row(work);
    const Mask mask(p, work.b, work.h);
    const auto tiles = part_of(mask.key_tiles(Tr - 1 - work.tile), work);
    const int end = max(tiles.end, 1);
    const auto needed = mask.needed<half_cols>(tiles, end, first_row(work) / 64 * 64 + 63);  // by 64 rows
    const bool some_are_left = start(m, l, p, work, warp_row);           // line 5, or what is left of O
    auto maximum = [&](auto& S, int t) {                                 // line 9
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
      K_smem.release(step);
      maximum(S_reg, 0);
      wgmma_wait<0>();
      V_smem.release(last);
      store(before);
      exponential(S_reg, 0);
    } else {
      turns.end();
      wgmma_wait<0>();
      K_smem.release(step);
      maximum(S_reg, 0);
      exponential(S_reg, 0);
    }
    some_are_left ? take_up(O_reg, alpha, p) : for_each(O_reg, [](float& x, int, int) { x = 0.f; });
    auto step_of = [&](auto& S, int t) {
      if (!early_wait) K_smem.wait_until_full(step + t);
      turns.wait();
      multiply_S(S, step + t, n);
      multiply_O(step + t - 1);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step + t);
      maximum(S, t);
      wgmma_wait<0>();
      V_smem.release(step + t - 1);
      exponential(S, t);
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
        rescale(O_reg, alpha);                                           // line 10
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
    store_L(p, m, l, inv_l, work.bh, warp_row);                          // lines 13, 15
    if (seamless) next = wait_for_Q(n + 1);
    is_left = seamless && next.tile >= 0;
    if (!is_left) {
      multiply_O(last);
      wgmma_wait<0>();
      V_smem.release(last);
      store(work);
    }
    Q_smem.release(n);
    if (!seamless) next = wait_for_Q(n + 1);
  }
  if (lane == 0) bulk_wait<0>();
  turns.end_all();
}

size_t workspace_bytes(const FwdParams& p) {
  return sizeof(float) * (evenly ? min(p.B * p.H * ceil_div(p.N_q, Br), multiprocessors()) * floats_left : 1);
}

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, O_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc);
  if (error == cudaSuccess) error = make_tensor_map(O_map, p.O, p.B, p.H, p.N_q, d_v, 16);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 20 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  const int tiles = p.B * p.H * ceil_div(p.N_q, Br), blocks = min(tiles, multiprocessors());
  if (blocks < tiles) clear_kernel<<<evenly ? blocks : 1, evenly ? 2 * Br : 1, 0, stream>>>(p.workspace);
  const int heads_together = Mask::all_keys ? 1 : heads_in_L2(p.B * p.H, p.N_k, 2 * d, p.H / p.H_kv);
  cudaLaunchKernelEx(EarlyLaunch(blocks, threads, bytes, stream, blocks < tiles), forward_kernel, p, Q_map,
                     K_map, V_map, O_map, heads_together);
  return cudaGetLastError();
}
