// Forward stage 26: hopper_tuned
// idea:    what is left: O by TMA stores, the fast division
// types:   fp16, bf16
// needs:   sm_90a
// after:   persistent
// takes:   dropout, sink, d_v
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((2 if d <= 128 else 1) * Br + 4 * Bc) * ((d + 63) // 64 * 64) + 88
// workspace: the number of tiles that blocks have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.04x: stores of 4 bytes a lane become a box a warp
//
// What is left.
//
//   - O leaves by the copy engine: a warp stores its 16 rows to shared memory in panels, by stmatrix, and one
//     lane asks for the copy (common/store_panels.cuh). Before, a lane stored 4 bytes at a time. The copy
//     goes on while the warp is at the next tile. With d <= 128 it has a buffer of its own; else Q's, which
//     is then given back when the copy has read it.
//   - The division by l is the fast one.
//
// Changed from persistent: these. And it takes a sink, dropout and a V of d_v < d columns: V's map has d_v
// columns, so the engine fills up with zeros, and O's map has them, so it stores no more.
//
// HBM traffic without caches (hbm, above): as in flash2, with 2 bytes an element; L stays a float.
#pragma once
#include "common/drop.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/softmax.cuh"
#include "common/store_panels.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br <= 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr bool O_in_Q = d > 128;           // O leaves through Q's buffer, or one of its own
constexpr int tile_rows = (O_in_Q ? 1 : 2) * Br + 4 * Bc;                // in shared memory
constexpr int tile_bytes = sizeof(ELEMENT) * Bc * pitch;                 // of K_j or V_j

// How many tiles of Q blocks have asked for, after their first ones
__global__ void clear_kernel(int* asked_for) { *asked_for = 0; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map, const __grid_constant__ CUtensorMap O_map) {
  const int Tr = ceil_div(p.N_q, Br), all = Tr * p.B * p.H;              // lines 1, 2
  const int heads_together = CAUSAL ? max(16, heads_in_L2(p.N_k, sizeof(ELEMENT) * d, p.H / p.H_kv)) : 1;
  const int warp = warp_index(), lane = threadIdx.x % 32;

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, in panels
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: K_j of step s is in buffer s % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  ELEMENT* O_smem = O_in_Q ? Q_smem : V_smem + 2 * Bc * pitch;           // Br x d, in panels
  uint64_t *Q_full = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch), *Q_empty = Q_full + 9;
  uint64_t *K_full = Q_full + 1, *K_empty = Q_full + 3, *V_full = Q_full + 5, *V_empty = Q_full + 7;
  int* next_smem = reinterpret_cast<int*>(Q_full + 10);       // the number of the tile of Q that comes with Q
  if (threadIdx.x == 0) {
    mbarrier_init(Q_full, 1);
    mbarrier_init(Q_empty, warps);
    for (int n = 0; n < 2; n++) {
      mbarrier_init(K_full + n, 1);
      mbarrier_init(V_full + n, 1);
      mbarrier_init(K_empty + n, warps);
      mbarrier_init(V_empty + n, warps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (warp > warps || lane > 0) return;
    for (int n = 0, step = 0, next = blockIdx.x;; n++) {                 // line 3
      mbarrier_wait(Q_empty, n % 2 ^ 1);
      *next_smem = next;
      if (next >= all) return mbarrier_arrive(Q_full);                   // the consumers end, too
      const Work work = dispatch_order(Tr, all / Tr, heads_together, next);
      const int i = Tr - 1 - work.tile, b = work.bh / p.H, h = work.bh % p.H, h_kv = h / (p.H / p.H_kv);
      const auto tiles = Mask(p, b, h).key_tiles(i);
      mbarrier_arrive_expect(Q_full, sizeof(ELEMENT) * Br * pitch);
      load_panels(Q_smem, Q_map, Q_full, Br, i * Br, h, b);              // line 4
      next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;
      for (int t = 0; t < tiles.end; t++, step++) {                      // line 7
        const int buffer = step % 2, parity = step / 2 % 2, row = tiles[t] * Bc;
        mbarrier_wait(K_empty + buffer, parity ^ 1);                     // the phase before
        mbarrier_arrive_expect(K_full + buffer, tile_bytes);
        load_panels(K_smem + buffer * Bc * pitch, K_map, K_full + buffer, Bc, row, h_kv, b);
        mbarrier_wait(V_empty + buffer, parity ^ 1);
        mbarrier_arrive_expect(V_full + buffer, tile_bytes);
        load_panels(V_smem + buffer * Bc * pitch, V_map, V_full + buffer, Bc, row, h_kv, b);
      }
    }
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem), V_tile = matrix_at(V_smem, 128 * Bc);

  constexpr int warpgroups = Br / 64;
  const int warpgroup = warp / 4;
  auto wait_for_turn = [&] { if (warpgroups > 1) named_barrier_sync(1 + warpgroup, 256); };
  auto end_turn = [&] { if (warpgroups > 1) named_barrier_arrive(1 + (warpgroup + 1) % warpgroups, 256); };
  if (warpgroup == warpgroups - 1) end_turn();                           // the first turn is warpgroup 0's

  for (int n = 0, step = 0;; n++) {                                      // line 3
    mbarrier_wait(Q_full, n % 2);
    const int next = __shfl_sync(0xffffffff, lane == 0 ? *next_smem : 0, 0);   // who reads it releases it
    if (next >= all) break;
    const Work work = dispatch_order(Tr, all / Tr, heads_together, next);
    const int i = Tr - 1 - work.tile, bh = work.bh, b = bh / p.H, h = bh % p.H;
    const int warp_row = i * Br + 16 * warp;       // the first row of this warp's 16
    const Mask mask(p, b, h);
    const auto tiles = mask.key_tiles(i);
    float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                    // line 5
    uint32_t P_frag[Bc / 16][4];
    auto wait_for_K = [&](unsigned step) { mbarrier_wait(K_full + step % 2, step / 2 % 2); };
    auto multiply_S = [&](unsigned step) {                               // line 8: S_ij = Q_i K_j^T
      const uint32_t K_j = K_tile + step % 2 * (tile_bytes / 16);
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < width / 16; k++)
        wgmma(S_reg, K_major(Q_tile, k, Br), K_major(K_j, k, Bc), k > 0);
      wgmma_commit();
    };
    auto multiply_O = [&](unsigned step) {                               // line 10: + P~_ij V_j
      const uint32_t V_j = V_tile + step % 2 * (tile_bytes / 16);
      mbarrier_wait(V_full + step % 2, step / 2 % 2);
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < Bc / 16; k++)
        wgmma<true>(O_reg, P_frag[k], MN_major(V_j, k));
      wgmma_commit();
    };
    auto release = [&](uint64_t* empty, unsigned step) { if (lane == 0) mbarrier_arrive(empty + step % 2); };

    // m and l of this lane's two rows; l: the sum over its columns only, until the end
    const float m_0 = SINK ? LOG2_E * p.sink[h] : -INFINITY, l_0 = SINK && lane % 4 == 0;
    float m[2] = {m_0, m_0}, l[2] = {l_0, l_0}, alpha[2];
    auto softmax = [&](int t) {                                          // line 9
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++)
        alpha[r] = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut, slack);
      if (DROPOUT) drop(S_reg, mask, warp_row, tiles[t] * Bc);
    };

    if (tiles.end > 0) {
      wait_for_K(step);
      wait_for_turn();
      multiply_S(step);
      end_turn();
      wgmma_wait<0>();
      release(K_empty, step);
      softmax(0);
      to_A(P_frag, S_reg);
      if (tiles.end > 1) wait_for_K(step + 1);
      for (int t = 1; t < tiles.end; t++) {                              // line 6
        wait_for_turn();
        multiply_S(step + t);
        multiply_O(step + t - 1);
        end_turn();
        wgmma_wait<1>();
        release(K_empty, step + t);
        softmax(t);
        if (t + 1 < tiles.end) wait_for_K(step + t + 1);
        wgmma_wait<0>();
        release(V_empty, step + t - 1);
        if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) {
          #pragma unroll
          for (int r = 0; r < 2; r++) for_row(O_reg, r, [&](float& x) { x *= alpha[r]; });  // line 10
        }
        to_A(P_frag, S_reg);
      }                                                                  // line 11
      multiply_O(step + tiles.end - 1);
      wgmma_wait<0>();
      release(V_empty, step + tiles.end - 1);
    }
    if (!O_in_Q) release(Q_empty, 0);
    step += tiles.end;

    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = warp_row + lane / 4 + 8 * r;
      l[r] = quad_sum(l[r]);
      const float inv_l = l[r] == 0.f ? 0.f : __fdividef(dropout_scale(p), l[r]);
      for_row(O_reg, r, [&](float& x) { x *= inv_l; });                  // line 12
      if (lane % 4 == 0 && row < p.N_q)                                  // lines 13, 15
        p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(l[r]));
    }
    store_panels(O_map, O_smem, O_reg, Br, 16 * warp, warp_row, h, b);   // line 14
    if (O_in_Q && lane == 0) bulk_wait_read<0>();
    if (O_in_Q) release(Q_empty, 0);
  }
  if (lane == 0) bulk_wait<0>();
  if (warpgroup == 0) wait_for_turn();      // one more than it needs: no arrival is left over
}

size_t workspace_bytes(const FwdParams&) { return sizeof(int); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, O_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc);
  if (error == cudaSuccess) error = make_tensor_map(O_map, p.O, p.B, p.H, p.N_q, d_v, 16);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 11 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  int device, multiprocessors;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const int blocks = min(multiprocessors, p.B * p.H * ceil_div(p.N_q, Br));
  if (blocks < p.B * p.H * ceil_div(p.N_q, Br))
    clear_kernel<<<1, 1, 0, stream>>>(static_cast<int*>(p.workspace));
  forward_kernel<<<blocks, threads, bytes, stream>>>(p, Q_map, K_map, V_map, O_map);
  return cudaGetLastError();
}
