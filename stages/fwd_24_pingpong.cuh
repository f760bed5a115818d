// Forward stage 24: pingpong
// idea:    one warpgroup's softmax under the other's products
// types:   fp16, bf16
// needs:   sm_90a
// after:   lazy_rescale
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 80
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.05x at d=64, 1.0x at d=128 and 256: overlap within a warpgroup has taken most of it
// measured: 1.00x at d=64 causal, 1.00x full, 1.00x at d=128 causal, 1.00x full, 1.00x at d=256 causal, 1.00x
//          full (H200, bf16, N=4096; make readme)
//
// Two warpgroups issue their products whenever they are ready. Often both are at once: then they share the
// tensor cores, finish at the same time, and make their exponentials at the same time, while the tensor cores
// have P V alone to do. So they take turns (FlashAttention-3, section 3.1): a warpgroup issues its products
// of a step when the other one has issued its own, and then makes exponentials while the other multiplies.
//
//   turn            1     2     1     2
//   warpgroup 0     S, PV softmax     S, PV softmax
//   warpgroup 1           S, PV softmax     S, PV
//
// Stays because the next rungs keep the turns, as FlashAttention-3 does: alone they give nothing here, as P V
// runs under the softmax already (overlap).
//
// Changed from lazy_rescale: turns.wait() before the products, turns.end() after them (common/turns.cuh).
#pragma once
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
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
  const int end = max(tiles.end, 1);      // of the steps: a tile that sees no key has one, which is masked

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
    for (int t = 0; t <= end; t++) {                                     // line 7: K_j, then the V before
      if (t < end) K_smem.fill(K_map, t, tiles[t] * Bc, h_kv, b);
      if (t > 0) V_smem.fill(V_map, t - 1, tiles[t - 1] * Bc, h_kv, b);
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);
  const Turns<Br / 64> turns(warp / 4);

  float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                      // line 5
  uint32_t P_frag[Bc / 16][4];
  auto multiply_S = [&](unsigned step) {                                 // line 8: S_ij = Q_i K_j^T
    wgmma_QK<width / 16>(S_reg, Q_tile, Br, K_tile + K_smem.offset(step));
  };
  auto multiply_O = [&](unsigned step) {                                 // line 10: + P~_ij V_j
    V_smem.wait_until_full(step);
    wgmma_PV(O_reg, P_frag, V_tile + V_smem.offset(step));
  };

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

  Q_smem.wait_until_full(0);
  K_smem.wait_until_full(0);
  turns.wait();
  multiply_S(0);
  turns.end();
  wgmma_wait<0>();
  K_smem.release(0);
  softmax(0);
  to_A(P_frag, S_reg);
  if (end > 1) K_smem.wait_until_full(1);
  for (int t = 1; t < end; t++) {                                        // line 6
    turns.wait();
    multiply_S(t);
    multiply_O(t - 1);
    turns.end();
    wgmma_wait<1>();
    K_smem.release(t);
    softmax(t);
    if (t + 1 < end) K_smem.wait_until_full(t + 1);
    wgmma_wait<0>();
    V_smem.release(t - 1);
    if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
      rescale(O_reg, alpha);                                             // line 10
    to_A(P_frag, S_reg);
  }                                                                      // line 11
  multiply_O(end - 1);
  wgmma_wait<0>();

  float inv_l[2];
  store_L(p, m, l, inv_l, bh, warp_row);                                 // lines 13, 15
  rescale(O_reg, inv_l);                                                 // line 12
  store_rows(p, O_reg, bh, warp_row);                                    // line 14
  turns.end_all();
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
