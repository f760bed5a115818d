// Forward stage 25: persistent
// idea:    as many blocks as multiprocessors, the longest tile first, the epilogue under the next tile
// types:   fp16, bf16
// needs:   sm_90a
// after:   pingpong
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((2 if d <= 128 else 1) * Br + 4 * Bc) * ((d + 63) // 64 * 64) + 104
// workspace: the number of tiles that blocks have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.08x at N=2048, 1.03x at N=16384: no block starts, fills its ring and empties it while the
//          tensor cores wait
// measured: 1.08x at d=64 causal, 0.99x full, 1.05x at d=128 causal, 1.00x full, 1.09x at d=256 causal, 1.01x
//          full (H200, bf16, N=4096; make readme)
//
// A block of this size has a multiprocessor to itself. While it starts, waits for its first tiles, and at its
// end divides and stores O, nothing multiplies. So there are only as many blocks as multiprocessors, and each
// takes one tile of Q after the other. The producer does not stop between them: it asks for the next tile's K
// and V while the consumers are still at the epilogue, and for its Q sooner: Q_i is given back after its last
// product, and up to d = 128 there is room for two. Rings go on: `step` counts the tiles of K and V that a
// block has had before this tile of Q.
//
// A block takes its first tile by its own number, and asks for the next one when it needs it: a counter in
// HBM says which is next (next_smem hands its number to the consumers, together with Q). So who is done early
// takes more. The longest tiles come first. With a causal mask the heads come in groups of about one size,
// whose K and V fit in L2, as all blocks read them at about the same time (common/order.cuh), but of 16 at
// least. (With 64 heads in groups of 9, the last group was one head with its longest tiles: 574 TFLOP/s, with
// 16 it was 619: hopper_tuned, H200, bf16, N=4096, d=128.) The counter is cleared by a kernel of its own, if
// there are more tiles than blocks.
//
// Changed from pingpong: a loop over tiles of Q around both roles, with step + t for t in the rings.
#pragma once
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/ring.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/turns.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br <= 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int Q_buffers = d <= 128 ? 2 : 1;
constexpr int tile_rows = Q_buffers * Br + 4 * Bc;                       // in shared memory

// How many tiles of Q blocks have asked for, after their first ones
__global__ void clear_kernel(int* asked_for) { *asked_for = 0; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H, all = Tr * heads;         // lines 1, 2
  const int heads_together = CAUSAL ? heads_in_L2(heads, p.N_k, sizeof(ELEMENT) * d, p.H / p.H_kv) : 1;
  const int warp = warp_index(), lane = threadIdx.x % 32;

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch);
  const Ring<Q_buffers, Br> Q_smem(smem, barriers);
  const Ring<2, Bc> K_smem(smem + Q_buffers * Br * pitch, barriers + 4);
  const Ring<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  int* next_smem = reinterpret_cast<int*>(barriers + 12);     // the number of the tile that comes with Q_i
  Q_smem.init(warps);
  K_smem.init(warps);
  V_smem.init(warps);
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    for (int n = 0, step = 0, next = blockIdx.x;; n++) {                 // line 3
      // --- hand over the tile's number
      Q_smem.wait_until_empty(n);
      next_smem[n % Q_buffers] = next;
      if (next >= all) return mbarrier_arrive(Q_smem.full + n % Q_buffers);         // the consumers end, too
      // ---
      const Work work = dispatch_order(Tr, heads, heads_together, next);
      const int i = Tr - 1 - work.tile, b = work.bh / p.H, h = work.bh % p.H, h_kv = h / (p.H / p.H_kv);
      const auto tiles = Mask(p, b, h).key_tiles(i);
      Q_smem.fill(Q_map, n, i * Br, h, b);                               // line 4
      // --- a ticket
      next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;
      // ---
      const int end = max(tiles.end, 1);
      for (int t = 0; t <= end; t++) {                                   // line 7: K_j, then the V before
        if (t < end) K_smem.fill(K_map, step + t, tiles[t] * Bc, h_kv, b);
        if (t > 0) V_smem.fill(V_map, step + t - 1, tiles[t - 1] * Bc, h_kv, b);
      }
      step += end;
    }
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);
  const Turns<Br / 64> turns(warp / 4);

  float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                      // line 5
  uint32_t P_frag[Bc / 16][4];
  auto multiply_S = [&](unsigned step, unsigned n) {                     // line 8: S_ij = Q_i K_j^T
    wgmma_QK<width / 16>(S_reg, Q_tile + Q_smem.offset(n), Br, K_tile + K_smem.offset(step));
  };
  auto multiply_O = [&](unsigned step) {                                 // line 10: + P~_ij V_j
    V_smem.wait_until_full(step);
    wgmma_PV(O_reg, P_frag, V_tile + V_smem.offset(step));
  };

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float m[2], l[2], alpha[2];
  for (unsigned n = 0, step = 0;; n++) {                                 // line 3
    // --- take the tile's number
    Q_smem.wait_until_full(n);
    const int next = __shfl_sync(0xffffffff, lane == 0 ? next_smem[n % Q_buffers] : 0, 0);
    if (next >= all) break;
    // ---
    const Work work = dispatch_order(Tr, heads, heads_together, next);
    const int i = Tr - 1 - work.tile, bh = work.bh, b = bh / p.H, h = bh % p.H;
    const int warp_row = i * Br + 16 * warp;       // the first row of this warp's 16
    const Mask mask(p, b, h);
    const auto tiles = mask.key_tiles(i);
    const int end = max(tiles.end, 1);
    for_each(O_reg, [](float& x, int, int) { x = 0.f; });
    for (int r = 0; r < 2; r++) m[r] = -INFINITY, l[r] = 0.f;
    auto softmax = [&](int t) {                                          // line 9
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++)
        alpha[r] = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut, slack);
    };

    K_smem.wait_until_full(step);
    turns.wait();
    multiply_S(step, n);
    turns.end();
    wgmma_wait<0>();
    K_smem.release(step);
    softmax(0);
    to_A(P_frag, S_reg);
    if (end > 1) K_smem.wait_until_full(step + 1);
    for (int t = 1; t < end; t++) {                                      // line 6
      turns.wait();
      multiply_S(step + t, n);
      multiply_O(step + t - 1);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step + t);
      softmax(t);
      if (t + 1 < end) K_smem.wait_until_full(step + t + 1);
      wgmma_wait<0>();
      V_smem.release(step + t - 1);
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
        rescale(O_reg, alpha);                                           // line 10
      to_A(P_frag, S_reg);
    }                                                                    // line 11
    multiply_O(step + end - 1);
    wgmma_wait<0>();
    V_smem.release(step + end - 1);
    Q_smem.release(n);
    step += end;

    float inv_l[2];
    store_L(p, m, l, inv_l, bh, warp_row);                               // lines 13, 15
    rescale(O_reg, inv_l);                                               // line 12
    store_rows(p, O_reg, bh, warp_row);                                  // line 14
  }
  turns.end_all();
}

size_t workspace_bytes(const FwdParams&) { return sizeof(int); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 13 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  const int tiles = p.B * p.H * ceil_div(p.N_q, Br), blocks = min(tiles, multiprocessors());
  if (blocks < tiles) clear_kernel<<<1, 1, 0, stream>>>(static_cast<int*>(p.workspace));
  forward_kernel<<<blocks, threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
