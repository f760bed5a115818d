// Forward stage 18: split_kv
// idea:    decoding: query heads of a key head in one tile, which reads K and V once; keys split over blocks
// types:   fp16, bf16
// needs:   sm_80
// after:   ampere_tuned
// default: sm_80 if N_q <= 16 and N_k >= 512 and not gradients
// takes:   sink, d_v, kv_cache
// refuses: masks by head
// tiles:   Br=32 Bc=64; rows >= 400 * packed and 64 < d <= 128: Br=32 Bc=32;
//          packed > 32: Br=64 Bc=64; packed > 32 and d <= 64: Br=128 Bc=64
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + (4 if d <= 128 else 2) * Bc) * ((d + 63) // 64 * 64) + 16 * Br
// splits:  ceil_div(Tc, ceil_div(Tc, max(1, min(blocks, multiprocessors * (16384 if d <= 128 else 32768) //
//          (Bc * d)) // (B * H_kv * ceil_div(N_q * H // H_kv, Br)))))
// workspace: parts
// hbm:     4 * B * H_kv * ceil_div(N_q * H // H_kv, Br) * N_k * d + 2 * B * H * N_q * (d * (splits + 1) + 2 +
//          (0 if splits == 1 else 2 * (splits + max(splits, 4)) * d + 4 * splits * ceil_div(splits + 4, 4)))
// predicted: with one query, H=32 H_kv=8 d=128 N_k=8192: 10x at B=1 (396 blocks, not 32), 3x at B=32 (K and V
//          are read once, not four times); 0.9x where there are many queries
// measured: 0.88x at d=64 causal, 0.94x full, 0.77x at d=128 causal, 0.83x full, 0.84x at d=256 causal, 0.96x
//          full (H200, bf16, N=4096; make readme)
//
// Decoding: a call takes as long as it takes to read K and V. ampere_tuned has two faults there:
//
//   - Each query head has a block of its own, so K and V are read once for each of the G = H / H_kv heads
//     that share them. Here these heads are packed into one tile: of a key head, row r is query r / G of head
//     r % G. Warps whose rows are empty only copy.
//   - B * H_kv blocks, each of which walks over all keys, are too few for a GPU. So keys are split: the tiles
//     that a tile of Q sees are cut into `splits` ranges, a block each. O and L of a range go to HBM in
//     float, and a second kernel merges them:
//     L = log(sum_s e^L_s), O = sum_s e^(L_s - L) O_s      (Dao, Haziza, Massa, Sizov, "Flash-Decoding for
//     long-context inference", 2023)
//
// So that HBM is never idle, 4.8 TB/s times some 0.8 us have to be under way (Little's law): 30 KB for each
// of an H200's 132 multiprocessors. A block asks for two tiles of K and V at first, then for the next one
// before it multiplies: always 32 KB at d = 128. `splits` makes two such blocks for each multiprocessor, and
// shared_memory_of() leaves no room for a third one that starts early (B=8, d=128, N_k=8192: 69 us, not 72).
// Three or four tiles, or more keys in each, take 70.5 to 82 us there, for 70.3.
//
// A merge launched in the usual way costs 4 to 9 us. So both kernels may start before the one in front of
// them has ended (common/launch.cuh), work out what they can, and wait. A thread of the merge loads four
// ranges at a time, O_s with L_s, and neighbours share what is more: 1 to 4 us. (O_s after the greatest L_s,
// and all worked out after the wait: B=1, d=128, N_k=64k 69.8 us for 68.6, 8k 17.7 for 16.6: H200.) A lane
// stores the two neighbouring columns that it has of a part by one instruction (8k: 14.6 us for 16.7).
//
// Tiles: where the heads alone make blocks enough, Bc = 32, as five of them then share a multiprocessor
// (B=64, N_k=1024: 64.5 us, with Bc = 64 77). More than 32 packed rows take Br = 64, at d <= 64 Br = 128.
// Then products and shared memory count, too: 16 queries, B=8, N_k=8192: 74 us, for 66 with one query. (A
// warp of 32 rows reads K and V half as often. But two of them, 84 us for 77, are too few; four, by halves of
// a tile's keys, have no registers for Q: 94 us.) On Hopper split_kv_wgmma is for them, without a cache.
// Stays because it is for decoding, which `measured` knows nothing of: docs/use.md has it.
//
// Changed from ampere_tuned: these, and the order of blocks. A mask is asked about a row's query: one by head
// is refused, as is dropout. The sink belongs to the first range. One without a key has L = -inf: no weight.
// HBM (hbm, above): K and V once for each tile of packed rows; Q, O and L once for each range.
#pragma once
#include "common/address.cuh"
#include "common/copy_tile.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/merge_ranges.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/packed_rows.cuh"
#include "common/softmax.cuh"
#include "common/strips.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"
#include "common/warp.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warp_rows = Br % 128 == 0 && d <= 128 ? 32 : 16;
constexpr int strips = warp_rows / 16;
constexpr int warps = Br / warp_rows, threads = 32 * warps;
constexpr int pitch = (d + 63) / 64 * 64; // from a row of a tile in shared memory to the next
constexpr int buffers = d <= 128 ? 2 : 1; // tiles each of K and V in shared memory
constexpr int blocks_per_sm = Br > 64 ? 1 : d <= 64 ? 4 : 2;  // at least: so many registers may a thread have
// Registers for a lane's part of O, S and Q: is there room for all three? Else Q is read anew for each tile.
constexpr bool Q_in_registers = strips * (width / 2 + Bc / 2 + width / 4) <= 192;

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of packed rows and range of keys. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, blocks_per_sm) forward_kernel(FwdParams p) {
  start_next_kernel();                      // as early as there is room for its blocks
  const int Tr = ceil_div(p.N_q * (p.H / p.H_kv), Br);                   // lines 1, 2
  const Work work = dispatch_order(Tr, p.B * p.H_kv * p.splits, 1);      // line 3
  const PackedRows packed(p, work.bh / p.splits);
  const int i = work.tile, split = work.bh % p.splits, G = packed.G, rows = packed.rows, b = packed.b;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + warp * warp_rows;    // the first of this warp's rows
  if (KV_CACHE || !Mask::is_range || p.mask.tensors[0].data) wait_for_previous_kernel();   // they are read
  if (KV_CACHE) p.N_k = p.seqlens_k[b];
  const Mask mask(p, b, packed.head_of(0));
  auto tiles = part_of(mask.key_tiles(i / G), split, p.splits);          // of Br queries: these are some
  tiles.first = pinned(uint32_t(tiles.first)), tiles.end = pinned(uint32_t(tiles.end));    // before the wait
  wait_for_previous_kernel();
  const auto K = rows_of(p.K, p, b, packed.h_kv);
  const auto V = rows_of(p.V, p, b, packed.h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, `buffers` times: the t-th in t % buffers
  ELEMENT* V_smem = K_smem + buffers * Bc * pitch;    // the same
  float* l_smem = reinterpret_cast<float*>(V_smem + buffers * Bc * pitch) + threadIdx.x;   // next: + threads
  auto row_of_Q = [&](int row) { return packed.at(p.Q, row); };
  auto copy_K_and_V = [&](int t) {          // line 7; with one buffer V_j comes later
    const int buffer = t % buffers * Bc * pitch;
    if (t == 0 || t < tiles.end)
      copy_tile<threads>(K_smem + buffer, tile_index, K, p.K.stride_n, tiles[t] * Bc, Bc, p.N_k);
    if (buffers == 2 && (t == 0 || t < tiles.end))
      copy_tile<threads, d_v>(V_smem + buffer, tile_index, V, p.V.stride_n, tiles[t] * Bc, Bc, p.N_k);
    cp_async_commit();
  };
  copy_rows<threads>(Q_smem, tile_index, row_of_Q, i * Br, Br, rows);    // line 4
  copy_K_and_V(0);
  if (buffers == 2) copy_K_and_V(1);
  cp_async_wait<buffers - 1>();
  __syncthreads();

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;
  const uint32_t Q_address = shared_address(Q_smem + tile_index(warp * warp_rows + Q_row, Q_col));
  const uint32_t K_address = shared_address(K_smem + tile_index(K_row, K_col));
  const uint32_t V_address = shared_address(V_smem + tile_index(V_row, V_col));
  uint32_t Q_frag[strips][width / 16][4];
  auto load_Q = [&](int k) {
    #pragma unroll
    for (int s = 0; s < strips; s++) ldmatrix_x4(Q_frag[s][k], advance(Q_address, 16 * s, 16 * k, pitch));
  };
  #pragma unroll
  for (int k = 0; k < width / 16; k++)
    if (Q_in_registers) load_Q(k);

  // m and l of this lane's rows, which are 8 apart; l: the sum over its columns only, until the end
  float O_reg[strips][width / 8][4] = {}, m[2 * strips];                 // line 5
  for (int r = 0; r < 2 * strips; r++) {
    packed.start(p, split, m[r], l_smem[r * threads], warp_row + 8 * r);
  }

  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      if (t > 0) {
        cp_async_wait<0>();
        __syncthreads();                    // K_j and V_j are there; and all are done with the last ones
      }
      const uint32_t K_j = K_address + 2 * (t % buffers * Bc * pitch), V_j = K_j + (V_address - K_address);
      if (buffers == 2 && t > 0) copy_K_and_V(t + 1);        // to where the last K_j and V_j were
      if (buffers == 1) {                   // V_j is not there
        copy_tile<threads, d_v>(V_smem, tile_index, V, p.V.stride_n, j * Bc, Bc, p.N_k);
        cp_async_commit();
      }

      float S_reg[strips][Bc / 8][4] = {};                               // line 8: S_ij = Q_i K_j^T
      #pragma unroll
      for (int k = 0; warp_row < rows && k < width / 16; k++) {
        if (!Q_in_registers) load_Q(k);
        #pragma unroll
        for (int n = 0; n < Bc / 16; n++) {
          uint32_t K_frag[4];
          ldmatrix_x4(K_frag, advance(K_j, 16 * n, 16 * k, pitch));
          #pragma unroll
          for (int s = 0; s < strips; s++)
            mma_m16n16k16(S_reg[s][2 * n], S_reg[s][2 * n + 1], Q_frag[s][k], K_frag);
        }
      }

      if (buffers == 1) {
        cp_async_wait<0>();
        __syncthreads();                    // now it is; and all are done with K_j
        copy_K_and_V(t + 1);                // to where K_j was
      }
      if (warp_row >= rows) continue;       // this warp only copies

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) {
        #pragma unroll
        for (int s = 0; s < strips; s++)
          mask_tile(S_reg[s], mask, p.scale, warp_row + 16 * s, j * Bc, cut, G);
      }
      #pragma unroll
      for (int r = 0; r < 2 * strips; r++) {                             // line 9
        float& l = l_smem[r * threads];
        const float alpha = softmax_step(S_reg[r / 2], r % 2, m[r], l, exponent_scale(p.scale), cut);
        for_row(O_reg[r / 2], r % 2, [&](float& x) { x *= alpha; });     // line 10: e^(m - m_new) O
      }

      #pragma unroll
      for (int k = 0; k < Bc / 16; k++) {                                // line 10: + P~_ij V_j
        uint32_t P_frag[strips][4];
        #pragma unroll
        for (int s = 0; s < strips; s++) to_A(P_frag[s], S_reg[s], k);
        #pragma unroll
        for (int n = 0; n < width / 16; n++) {
          uint32_t V_frag[4];
          ldmatrix_x4_trans(V_frag, advance(V_j, 16 * k, 16 * n, pitch));
          #pragma unroll
          for (int s = 0; s < strips; s++)
            mma_m16n16k16(O_reg[s][2 * n], O_reg[s][2 * n + 1], P_frag[s], V_frag);
        }
      }
    }
  }                                                                      // line 11

  #pragma unroll
  for (int s = 0; s < strips; s++) {                                     // lines 12 to 15
    const float l[] = {l_smem[2 * s * threads], l_smem[(2 * s + 1) * threads]};
    packed.store(p, split, O_reg[s], m + 2 * s, l, warp_row + 16 * s);
  }
}

size_t workspace_bytes(const FwdParams& p) { return bytes_of_parts(p); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const int blocks = p.B * p.H_kv * p.splits * ceil_div(p.N_q * p.H / p.H_kv, Br);
  const size_t bytes = shared_memory_of(blocks, 2 * (Br + 2 * buffers * Bc) * pitch + 4 * 4 * Br);
  allow_shared_memory(forward_kernel, bytes);
  cudaLaunchKernelEx(EarlyLaunch(blocks, threads, bytes, stream), forward_kernel, p);
  if (p.splits > 1) merge_ranges(p, stream);
  return cudaGetLastError();
}
