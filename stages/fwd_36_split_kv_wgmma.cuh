// Forward stage 36: split_kv_wgmma
// idea:    decoding with many packed rows: split_kv's packing and ranges, with a producer and warpgroups
// types:   fp16, bf16
// needs:   sm_90a
// after:   warp_specialized
// default: sm_90a if N_q <= 16 and N_q * H // H_kv > 32 and N_k >= 512 and not gradients
// takes:   sink, d_v
// refuses: masks by head
// tiles:   Br=64 Bc=64; 64 < d <= 128 and rows < 256 * packed: Br=64 Bc=128; packed > 64: Br=128 Bc=64
// limits:  Br % 64 == 0; Br <= 128; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + (6 if Bc <= 64 else 4) * Bc) * ((d + 63) // 64 * 64) + (96 if Bc <= 64 else 64)
// splits:  ceil_div(Tc, ceil_div(Tc, max(1, multiprocessors * (2 if Br + Bc <= 128 and d <= 128 else 1) //
//          (B * H_kv * ceil_div(N_q * H // H_kv, Br)))))
// workspace: parts
// hbm:     4 * B * H_kv * ceil_div(N_q * H // H_kv, Br) * N_k * d + 2 * B * H * N_q * (d * (splits + 1) + 2 +
//          (0 if splits == 1 else 2 * (splits + max(splits, 4)) * d + 4 * splits * ceil_div(splits + 4, 4)))
// predicted: with 16 queries, H=32 H_kv=8 d=128, over split_kv: 1.07x at B=8 N_k=8192, 1.3x at B=1: products
//          and softmax take no time that copies wait for
// measured: 0.79x at d=64 causal, 0.72x full, 0.87x at d=128 causal, 0.81x full, 0.95x at d=256 causal, 0.90x
//          full (H200, bf16, N=4096; make readme)
//
// split_kv is as fast as K and V come, as long as it hardly computes. With 64 packed rows it is not: each of
// its warps reads all of K and V from shared memory, for 16 rows, and asks for the next tile only when all
// warps have met. (16 queries, H=32 H_kv=8 d=128, H200: 1.05 times FlashAttention-3's time at B=8,
// N_k=8192; 1.08 at B=1, N_k=64k; 1.31 at B=1, N_k=8192.)
//
// Here its packed rows and its ranges of keys (common/packed_rows.cuh, merge_ranges.cuh) come to
// warp_specialized. A warpgroup multiplies 64 rows at once, and a producer keeps buffers full. Q comes by
// cp.async, row by row, to where wgmma expects it, as a box of TMA could hold packed rows only if G divided
// 64. So the copies go through the generic proxy, and a fence must follow.
//
// What bounds such a call is HBM, so how K and V are asked for counts (H200, us; Bc = 128, without the hint):
//
//                                        N_q =  16, B=8, 8k   16, B=1, 64k   1, B=8, 8k   1, B=1, 64k
//   L2 fetches 256 bytes for a miss              74.3           75.2          70.2         70.4
//              128                               71.6           72.3          66.8         66.5
//   (FlashAttention-3)                           74.3           73.2          70.8         71.2
//   (this without products and softmax, 256      72.0           72.9          67.8         67.8)
//
// The map says which (common/tma.cuh). Large calls of training take 0.99 to 1.01 of the time with either.
// tma_load_once() tells L2 to give up K and V first, so that it keeps Q and the parts: 1.01x to 1.03x.
//
// Tiles: 64 x 128 and one block for each multiprocessor at d > 64; with many heads, and at d <= 64, 64 x 64
// and two (B=64, N_k=1024: 70.1 us for 75.2). Three buffers of 128 keys are not better than two (70.6 and
// 70.6 us at B=8; 71.6 and 70.8 at B=1), nor six of 64.
//
// With few packed rows it is as fast as split_kv (N_q = 1: 66.1 us for 65.8 at B=8, 14.2 for 14.6 at B=1,
// N_k=8192), which also knows caches: tiles by TMA would bring what lies behind a sequence's keys.
// Stays because decoding with more than 32 packed rows takes it: docs/use.md has figures.
//
// Changed from warp_specialized: these. HBM (hbm, above): as in split_kv.
#pragma once
#include "common/copy_tile.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/merge_ranges.cuh"
#include "common/mma.cuh"
#include "common/packed_rows.cuh"
#include "common/ring_once.cuh"
#include "common/softmax.cuh"
#include "common/tile16.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int blocks_per_sm = Br + Bc <= 128 && d <= 128 ? 2 : 1;
constexpr int producer_registers = 24, consumer_registers = blocks_per_sm == 2 ? 232 : 240;
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int buffers = Bc <= 64 ? 3 : 2;  // tiles each of K and V in shared memory

// One block per tile of packed rows and range of keys. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(blocks_per_sm == 2 ? threads : 384, blocks_per_sm) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap V_map) {
  start_next_kernel();                      // as early as there is room for its blocks
  const int Tr = ceil_div(p.N_q * (p.H / p.H_kv), Br);                   // lines 1, 2
  const int split = blockIdx.x % p.splits, tile = blockIdx.x / p.splits, i = tile % Tr;    // line 3
  const PackedRows packed(p, tile / Tr);
  const int warp = warp_index();
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  if (!Mask::is_range || p.mask.tensors[0].data) wait_for_previous_kernel();     // they are read
  const Mask mask(p, packed.b, packed.head_of(0));
  auto tiles = part_of(mask.key_tiles(i / packed.G), split, p.splits);
  tiles.first = pinned(uint32_t(tiles.first)), tiles.end = pinned(uint32_t(tiles.end));    // before the wait

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + (Br + 2 * buffers * Bc) * pitch);
  ELEMENT* Q_smem = smem;                   // Br x d, in panels
  const RingOnce<buffers, Bc> K_smem(smem + Br * pitch, barriers);
  const RingOnce<buffers, Bc> V_smem(K_smem.tiles + buffers * Bc * pitch, barriers + 2 * buffers);
  K_smem.init(warps);
  V_smem.init(warps);
  __syncthreads();
  wait_for_previous_kernel();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    for (int t = 0; t < tiles.end; t++) {                                // line 7
      K_smem.fill(K_map, t, tiles[t] * Bc, packed.h_kv, packed.b);
      V_smem.fill(V_map, t, tiles[t] * Bc, packed.h_kv, packed.b);
    }
    return;
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers
  copy_rows<32 * warps>(Q_smem, [](int row, int col) { return panel_index(row, col, Br); },        // line 4
                        [&](int row) { return packed.at(p.Q, row); }, i * Br, Br, packed.rows);
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();                      // what wgmma reads
  named_barrier_sync(1, 32 * warps);

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float O_reg[width / 8][4] = {}, m[2], l[2];                            // line 5
  for (int r = 0; r < 2; r++) packed.start(p, split, m[r], l[r], warp_row + 8 * r);

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
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, j * Bc, cut, packed.G);
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

  packed.store(p, split, O_reg, m, l, warp_row);                         // lines 12 to 15
}

size_t workspace_bytes(const FwdParams& p) { return bytes_of_parts(p); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap K_map, V_map;
  cudaError_t error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d_v, Bc);
  if (error != cudaSuccess) return error;
  const int blocks = p.B * p.H_kv * p.splits * ceil_div(p.N_q * p.H / p.H_kv, Br);
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * buffers * Bc) * pitch + 4 * buffers * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  cudaLaunchKernelEx(EarlyLaunch(blocks, threads, bytes, stream), forward_kernel, p, K_map, V_map);
  if (p.splits > 1) merge_ranges(p, stream);
  return cudaGetLastError();
}
