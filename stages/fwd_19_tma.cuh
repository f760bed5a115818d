// Forward stage 19: tma
// idea:    whole tiles by the copy engine: tensor maps and mbarriers instead of cp.async
// types:   fp16, bf16
// needs:   sm_90
// after:   exp2
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 16
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.05x at d=64 and 128, 1.0x at d=256: the copies' addresses and comparisons go, the rest stays
// measured: 1.09x at d=64 causal, 1.11x full, 1.09x at d=128 causal, 1.16x full, 1.18x at d=256 causal, 1.13x
//          full (H200, bf16, N=4096; make readme)
//
// Every thread has helped to copy so far: for each 16 bytes it worked out two addresses, compared the row
// with N and issued a cp.async. Hopper has an engine for it, TMA. One thread asks for a box of a tensor, and
// the hardware walks through its rows, fills with zeros what is past the end, and swizzles. common/tma.cuh
// has the instructions, the layout and the tensor map that describes a tensor to the engine.
//
// Nobody waits for a copy of its own any more: an mbarrier in shared memory (common/hopper.cuh) counts the
// bytes that have come, and all threads wait for it. One a buffer is enough:
//
//   arrived[t % 2]     phase t / 2 is complete when K_j and V_j of the t-th tile have come, with Q for t = 0
//
//   time ->    tile t                             tile t + 1
//   thread 0   wait, S, ask for t + 1, softmax    wait, S, ask for t + 2, softmax
//   others     wait, S, softmax, P V              wait, S, softmax, P V
//   engine     ........ K, V of t + 1 ........    ........ K, V of t + 2 ........
//
// The buffer that t + 1 goes to was read by the products of t - 1. The mbarrier does not know that all are
// done with it: the block's barrier stays.
//
// A tile lies in shared memory in panels of 64 columns, one box each: with d = 64 as before, and with more
// columns the second panel comes after the whole first one. tile_index() is panel_index(), and takes the
// tile's number of rows.
//
// Changed from exp2: copy_tile() is load_panels(), called by thread 0; cp_async_wait() is mbarrier_wait();
// launch() makes the three tensor maps.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"

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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    // --- bytes and boxes
    uint64_t* arrived = arrived_smem + t % 2;
    mbarrier_arrive_expect(arrived, 2 * tile_bytes + (t == 0 ? sizeof(ELEMENT) * Br * pitch : 0));
    if (t == 0) load_panels(Q_smem, Q_map, arrived, Br, i * Br, h, b);                   // line 4
    load_panels(K_smem + t % 2 * Bc * pitch, K_map, arrived, Bc, tiles[t] * Bc, h_kv, b);  // line 7
    load_panels(V_smem + t % 2 * Bc * pitch, V_map, arrived, Bc, tiles[t] * Bc, h_kv, b);
    // ---
  };
  if (threadIdx.x == 0 && tiles.end > 0) load_tiles(0);

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float O_reg[width / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};                // line 5

  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      // --- the head of a tile
      mbarrier_wait(arrived_smem + t % 2, t / 2 % 2);
      __syncthreads();                      // K_j and V_j are there; and all are done with the last ones
      // ---
      const int buffer = t % 2 * Bc * pitch;
      const ELEMENT *K_j = K_smem + buffer, *V_j = V_smem + buffer;

      float S_reg[Bc / 8][4] = {};                                       // line 8: S_ij = Q_i K_j^T
      #pragma unroll
      for (int k = 0; k < width / 16; k++) {
        uint32_t Q_frag[4];
        ldmatrix_x4(Q_frag, shared_address(Q_smem + panel_index(16 * warp + Q_row, 16 * k + Q_col, Br)));
        #pragma unroll
        for (int n = 0; n < Bc / 16; n++) {
          uint32_t K_frag[4];
          ldmatrix_x4(K_frag, shared_address(K_j + panel_index(16 * n + K_row, 16 * k + K_col, Bc)));
          mma_m16n16k16(S_reg[2 * n], S_reg[2 * n + 1], Q_frag, K_frag);
        }
      }

      if (threadIdx.x == 0 && t + 1 < tiles.end) load_tiles(t + 1);      // to where the last K_j and V_j were

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, j * Bc, cut);
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float alpha = softmax_step(S_reg, r, m[r], l[r], exponent_scale(p.scale), cut);  // line 9
        for_row(O_reg, r, [&](float& x) { x *= alpha; });                // line 10: e^(m - m_new) O
      }

      #pragma unroll
      for (int k = 0; k < Bc / 16; k++) {                                // line 10: + P~_ij V_j
        uint32_t P_frag[4];
        to_A(P_frag, S_reg, k);
        #pragma unroll
        for (int n = 0; n < width / 16; n++) {
          uint32_t V_frag[4];
          ldmatrix_x4_trans(V_frag, shared_address(V_j + panel_index(16 * k + V_row, 16 * n + V_col, Bc)));
          mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);
        }
      }
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
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch + 2 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
