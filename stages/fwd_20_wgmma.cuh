// Forward stage 20: wgmma
// idea:    a warpgroup multiplies from shared memory, asynchronously
// types:   fp16, bf16
// needs:   sm_90a
// after:   tma
// tiles:   Br=128 Bc=128; d > 128: Br=128 Bc=64
// limits:  Br % 64 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 16
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.3x at d=64, 1.6x at d=128, 1.8x at d=256: mma.sync does not reach the tensor cores' rate
// measured: 1.06x at d=64 causal, 1.07x full, 1.40x at d=128 causal, 1.43x full, 1.78x at d=256 causal, 2.03x
//          full (H200, bf16, N=4096; make readme)
//
// mma.sync takes its operands from registers: a warp loads each fragment of K and V by ldmatrix, 16 rows at a
// time, and warps that need the same K load it each for itself. On Hopper that keeps the tensor cores well
// below their rate. wgmma (common/wgmma.cuh) is an instruction of four warps together, a warpgroup: it
// multiplies 64 rows by up to 256 columns, and reads K and V, and Q too, from shared memory by itself. So
// ldmatrix is gone, and so are the addresses that lanes worked out for it.
//
//   S_ij = Q_i K_j^T      64 x Bc    A: Q_i in shared memory, B: K_j, K-major      d / 16 instructions
//   O_i += P~_ij V_j      64 x d     A: P~_ij in registers,   B: V_j, MN-major     Bc / 16 instructions
//
// Warp w of a block still has rows 16 w to 16 w + 15, and its lanes have the same elements of S and O: what
// is between the products does not change.
//
// It is also asynchronous. Here that gives nothing yet: each product is waited for at once. But P~ must be
// there as a whole before its product starts, as its registers are read while the product goes on: all of P~
// in 16 bits beside S.
//
// Changed from tma: the two products; the default tiles, as K_j is read once for 64 rows, not 16.
#pragma once
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps;
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int tile_bytes = sizeof(ELEMENT) * Bc * pitch;                 // of K_j or V_j

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
  ELEMENT* Q_smem = smem;                   // Br x d, in panels
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: the t-th K_j is in buffer t % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  uint64_t* arrived_smem = reinterpret_cast<uint64_t*>(V_smem + 2 * Bc * pitch);     // for each buffer
  if (threadIdx.x == 0) {
    mbarrier_init(arrived_smem, 1);
    mbarrier_init(arrived_smem + 1, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  auto load_tiles = [&](int t) {            // K_j and V_j of the t-th tile, by thread 0
    uint64_t* arrived = arrived_smem + t % 2;
    mbarrier_arrive_expect(arrived, 2 * tile_bytes + (t == 0 ? sizeof(ELEMENT) * Br * pitch : 0));
    if (t == 0) load_panels(Q_smem, Q_map, arrived, Br, i * Br, h, b);                   // line 4
    load_panels(K_smem + t % 2 * Bc * pitch, K_map, arrived, Bc, tiles[t] * Bc, h_kv, b);  // line 7
    load_panels(V_smem + t % 2 * Bc * pitch, V_map, arrived, Bc, tiles[t] * Bc, h_kv, b);
  };
  if (threadIdx.x == 0 && tiles.end > 0) load_tiles(0);

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem), V_tile = matrix_at(V_smem, 128 * Bc);

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float O_reg[width / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};                // line 5

  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      mbarrier_wait(arrived_smem + t % 2, t / 2 % 2);
      __syncthreads();                      // K_j and V_j are there; and all are done with the last ones
      const uint32_t K_j = K_tile + t % 2 * (tile_bytes / 16), V_j = V_tile + t % 2 * (tile_bytes / 16);

      float S_reg[Bc / 8][4];                                            // line 8: S_ij = Q_i K_j^T
      wgmma_QK<width / 16>(S_reg, Q_tile, Br, K_j);
      wgmma_wait<0>();

      if (threadIdx.x == 0 && t + 1 < tiles.end) load_tiles(t + 1);      // to where the last K_j and V_j were

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, j * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float alpha = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut);  // line 9
        for_row(O_reg, r, [&](float& x) { x *= alpha; });                // line 10: e^(m - m_new) O
      }

      uint32_t P_frag[Bc / 16][4];
      to_A(P_frag, S_reg);
      wgmma_PV(O_reg, P_frag, V_j);                                      // line 10: + P~_ij V_j
      wgmma_wait<0>();
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
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch + 2 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
