// Forward stage 21: warp_specialized
// idea:    a producer warp and consumer warpgroups, setmaxnreg, a ring of buffers
// types:   fp16, bf16
// needs:   sm_90a
// after:   wgmma
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 72
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.2x at d=64 and 128, 1.3x at d=256: no barrier of the block in the loop, larger tiles
//
// Copies and products still meet once a tile, at the block's barrier: all warps stop until the slowest is
// done, as thread 0 may not ask for the next tile before. So the two jobs get warps of their own, which
// mbarriers keep in step, and nothing else:
//
//   producer    one thread of the last warpgroup: waits until a buffer is empty, asks for the next tile to it
//   consumers   the other warpgroups, 64 rows of Q each: wait until a buffer is full, multiply, give it back
//
//   a ring of two buffers for K, another for V; the t-th tile is in buffer t % 2
//   full[t % 2]     phase t / 2: the bytes of the t-th tile have come            1 arrival, and the bytes
//   empty[t % 2]    phase t / 2: all warps of the consumers are done with it     an arrival a warp
//
// The producer waits for the phase of `empty` before, t / 2 - 1. For t = 0 and 1 that counts as complete.
// K_j and V_j have barriers of their own, so S can begin when K_j is there, and K's buffer is given back when
// S is done. Consumers are no longer in step with each other: one may multiply during another's softmax.
//
// The producer needs few registers. setmaxnreg (common/hopper.cuh) hands its share to the consumers: 384
// threads all start with 168, then it is 24 and 240. So consumers have room for larger tiles.
//
// Changed from wgmma: thread 0's part of the loop is the producer's; waits and arrivals stand where the
// block's barrier was.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br <= 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int tile_bytes = sizeof(ELEMENT) * Bc * pitch;                 // of K_j or V_j

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, in panels
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: the t-th K_j is in buffer t % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  uint64_t* Q_full = reinterpret_cast<uint64_t*>(V_smem + 2 * Bc * pitch);
  uint64_t *K_full = Q_full + 1, *K_empty = Q_full + 3, *V_full = Q_full + 5, *V_empty = Q_full + 7;
  if (threadIdx.x == 0) {
    mbarrier_init(Q_full, 1);
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
    mbarrier_arrive_expect(Q_full, sizeof(ELEMENT) * Br * pitch);
    load_panels(Q_smem, Q_map, Q_full, Br, i * Br, h, b);                // line 4
    for (int t = 0; t < tiles.end; t++) {                                // line 7
      const int buffer = t % 2, parity = t / 2 % 2, row = tiles[t] * Bc;
      mbarrier_wait(K_empty + buffer, parity ^ 1);                       // the phase before
      mbarrier_arrive_expect(K_full + buffer, tile_bytes);
      load_panels(K_smem + buffer * Bc * pitch, K_map, K_full + buffer, Bc, row, h_kv, b);
      mbarrier_wait(V_empty + buffer, parity ^ 1);
      mbarrier_arrive_expect(V_full + buffer, tile_bytes);
      load_panels(V_smem + buffer * Bc * pitch, V_map, V_full + buffer, Bc, row, h_kv, b);
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem), V_tile = matrix_at(V_smem, 128 * Bc);

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float O_reg[width / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};                // line 5

  mbarrier_wait(Q_full, 0);
  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      const int buffer = t % 2, parity = t / 2 % 2;
      const uint32_t K_j = K_tile + buffer * (tile_bytes / 16), V_j = V_tile + buffer * (tile_bytes / 16);

      float S_reg[Bc / 8][4];                                            // line 8: S_ij = Q_i K_j^T
      mbarrier_wait(K_full + buffer, parity);
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < width / 16; k++)
        wgmma(S_reg, K_major(Q_tile, k, Br), K_major(K_j, k, Bc), k > 0);
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(K_empty + buffer);

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, j * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float alpha = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut);  // line 9
        for_row(O_reg, r, [&](float& x) { x *= alpha; });                // line 10: e^(m - m_new) O
      }

      uint32_t P_frag[Bc / 16][4];
      to_A(P_frag, S_reg);
      mbarrier_wait(V_full + buffer, parity);
      wgmma_fence();
      #pragma unroll
      for (int k = 0; k < Bc / 16; k++)                                  // line 10: + P~_ij V_j
        wgmma<true>(O_reg, P_frag[k], MN_major(V_j, k));
      wgmma_commit();
      wgmma_wait<0>();
      if (lane == 0) mbarrier_arrive(V_empty + buffer);
    }
  }                                                                      // line 11

  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = warp_row + lane / 4 + 8 * r;
    l[r] = quad_sum(l[r]);
    const float inv_l = l[r] == 0.f ? 0.f : 1.f / l[r];
    for_row(O_reg, r, [&](float& x) { x *= inv_l; });                    // line 12
    if (lane % 4 == 0 && row < p.N_q)                                    // lines 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(l[r]));
  }
  ELEMENT* O = p.O.head(bh / p.H, bh % p.H);
  for_each_pair(O_reg, [&](uint32_t packed, int row, int col) {          // line 14
    if (warp_row + row < p.N_q && col < d)
      *reinterpret_cast<uint32_t*>(O + (warp_row + row) * p.O.stride_n + col) = packed;
  });
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch + 9 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
