// Forward stage 21: warp_specialized
// idea:    a producer warp and consumer warpgroups, setmaxnreg, a ring of buffers
// types:   fp16, bf16
// needs:   sm_90a
// after:   wgmma
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 80
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.2x at d=64 and 128, 1.3x at d=256: no barrier of the block in the loop, larger tiles
// measured: 1.31x at d=64 causal, 1.42x full, 1.19x at d=128 causal, 1.21x full, 1.18x at d=256 causal, 1.14x
//          full (H200, bf16, N=4096; make readme)
//
// Copies and products still meet once a tile, at the block's barrier: all warps stop until the slowest is
// done, as thread 0 may not ask for the next tile before. So the two jobs get warps of their own, which
// mbarriers keep in step, and nothing else:
//
//   producer    one thread of the last warpgroup: waits until a buffer is empty, asks for the next tile to it
//   consumers   the other warpgroups, 64 rows of Q each: wait until a buffer is full, multiply, give it back
//
//   rings       two buffers for K, two for V, with two mbarriers each (common/ring.cuh)
//
// K_j and V_j have barriers of their own, so S can begin when K_j is there, and K's buffer is given back when
// S is done. So the producer asks for K_j before V of the tile before, whose buffer is given back later.
// Consumers are no longer in step with each other: one may multiply during another's softmax.
//
// The producer needs few registers. setmaxnreg (common/hopper.cuh) hands its share to the consumers: 384
// threads all start with 168, then it is 24 and 240. So consumers have room for larger tiles.
//
// Changed from wgmma: thread 0's part of the loop is the producer's; waits and arrivals stand where the
// block's barrier was.
#pragma once
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/ring.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br <= 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = warp_index();
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + (Br + 4 * Bc) * pitch);
  const Ring<1, Br> Q_smem(smem, barriers);
  const Ring<2, Bc> K_smem(smem + Br * pitch, barriers + 2);
  const Ring<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  Q_smem.init(warps);
  K_smem.init(warps);
  V_smem.init(warps);
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    Q_smem.fill(Q_map, 0, i * Br, h, b);                                 // line 4
    for (int t = 0; t <= tiles.end; t++) {                               // line 7: K_j, then the V before
      if (t < tiles.end) K_smem.fill(K_map, t, tiles[t] * Bc, h_kv, b);
      if (t > 0) V_smem.fill(V_map, t - 1, tiles[t - 1] * Bc, h_kv, b);
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float O_reg[width / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};                // line 5

  Q_smem.wait_until_full(0);
  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      const uint32_t K_j = K_tile + K_smem.offset(t), V_j = V_tile + V_smem.offset(t);

      float S_reg[Bc / 8][4];                                            // line 8: S_ij = Q_i K_j^T
      K_smem.wait_until_full(t);
      wgmma_QK<width / 16>(S_reg, Q_tile, Br, K_j);
      wgmma_wait<0>();
      K_smem.release(t);

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, j * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float alpha = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut);  // line 9
        for_row(O_reg, r, [&](float& x) { x *= alpha; });                // line 10: e^(m - m_new) O
      }

      uint32_t P_frag[Bc / 16][4];
      to_A(P_frag, S_reg);
      V_smem.wait_until_full(t);
      wgmma_PV(O_reg, P_frag, V_j);                                      // line 10: + P~_ij V_j
      wgmma_wait<0>();
      V_smem.release(t);
    }
  }                                                                      // line 11

  float inv_l[2];
  store_L(p, m, l, inv_l, bh, warp_row);                                 // lines 13, 15
  rescale(O_reg, inv_l);                                                 // line 12
  store_rows(p, O_reg, bh, warp_row);                                    // line 14
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch + 10 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
