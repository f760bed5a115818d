// Forward stage 23: lazy_rescale
// idea:    O is rescaled only when the factor would exceed 2^8
// types:   fp16, bf16
// needs:   sm_90a
// after:   overlap
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 72
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.0x at d=64, 1.03x at d=128 and 256: d / 2 multiplications a thread and tile become a vote
//
// m need not be the maximum. O and l are sums of 2^(c x - m), and any m gives the same O / l and L in the
// end, as long as no power overflows. So m stays until it would have to grow by more than 8: until then P~ is
// at most 2^8, and alpha is 1. If that holds for all rows of a warp, the warp leaves O alone. Of 2048 rows of
// normal data with 4096 keys not one needs a rescale after the first tile. (FlashAttention-4 does this on
// Blackwell.)
//
// In 16 bits P~ has the same relative error as before, but one: a row's largest P~ was 1, and exact. Now it
// is rounded as the others are.
//
// At d = 64 there is little of O to rescale: there it does not pay, and slack is 0 (in hopper_tuned with
// 16384 keys: 495 TFLOP/s with slack, 564 without; H200, bf16).
//
// The worst case is a row whose maximum grows by more than 8 in each tile: then nothing is gained, and
// nothing lost but the vote.
//
// Changed from overlap: softmax_step() is given its slack; O is rescaled after a vote.
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
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
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

  float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                      // line 5
  uint32_t P_frag[Bc / 16][4];
  auto wait_for_K = [&](unsigned step) { mbarrier_wait(K_full + step % 2, step / 2 % 2); };
  auto multiply_S = [&](unsigned step) {                                 // line 8: S_ij = Q_i K_j^T
    const uint32_t K_j = K_tile + step % 2 * (tile_bytes / 16);
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < width / 16; k++)
      wgmma(S_reg, K_major(Q_tile, k, Br), K_major(K_j, k, Bc), k > 0);
    wgmma_commit();
  };
  auto multiply_O = [&](unsigned step) {                                 // line 10: + P~_ij V_j
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
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, alpha[2];
  auto softmax = [&](int t) {                                            // line 9
    const bool cut = t >= tiles.cut;
    if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
    if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, tiles[t] * Bc, cut);
    #pragma unroll
    for (int r = 0; r < 2; r++)
      alpha[r] = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut, slack);
  };

  mbarrier_wait(Q_full, 0);
  if (tiles.end > 0) {
    wait_for_K(0);
    multiply_S(0);
    wgmma_wait<0>();
    release(K_empty, 0);
    softmax(0);
    to_A(P_frag, S_reg);
    if (tiles.end > 1) wait_for_K(1);
    for (int t = 1; t < tiles.end; t++) {                                // line 6
      multiply_S(t);
      multiply_O(t - 1);
      wgmma_wait<1>();
      release(K_empty, t);
      softmax(t);
      if (t + 1 < tiles.end) wait_for_K(t + 1);
      wgmma_wait<0>();
      release(V_empty, t - 1);
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) {
        #pragma unroll
        for (int r = 0; r < 2; r++) for_row(O_reg, r, [&](float& x) { x *= alpha[r]; });   // line 10
      }
      to_A(P_frag, S_reg);
    }                                                                    // line 11
    multiply_O(tiles.end - 1);
    wgmma_wait<0>();
  }

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
