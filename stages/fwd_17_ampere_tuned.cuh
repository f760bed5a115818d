// Forward stage 17: ampere_tuned
// idea:    what is left: order of blocks, tile sizes, one buffer at d > 128, O by 16-byte stores
// types:   fp16, bf16
// needs:   sm_80
// after:   wide_warps
// default: sm_80
// takes:   dropout, sink, d_v, varlen, kv_cache
// tiles:   Br=128 Bc=128; d > 64: Br=128 Bc=64;
//          (rows < 65536 or window <= 1024) and d <= 64 or rows < 32768 and causal: Br=64 Bc=64;
//          d > 128: Br=64 Bc=80
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + (4 if d <= 128 else 2) * Bc) * ((d + 63) // 64 * 64) + 16 * Br
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.05x at d=64 and d=128, 1.2x at d=256; causal 1.15x: the heaviest tiles start first
// measured: 1.07x at d=64 causal, 0.99x full, 1.13x at d=128 causal, 0.99x full, 1.28x at d=256 causal, 1.15x
//          full (H200, bf16, N=4096; make readme)
//
// What is left: constants, order and scheduling. Each is a few lines.
//
//   - The order of the blocks (common/order.cuh). Causal: the last tiles of Q of all heads come first, as
//     they see most keys. Else 16 heads at a time: L2 holds their K and V while all tiles of Q pass by.
//   - Tile sizes by the size of the call. Small ones get Br = 64: more blocks, with 16 rows a warp, where
//     multiprocessors would be idle. So does a narrow window at d = 64, of which larger tiles hold less: with
//     1024 keys, N = 16384 and 16 heads it takes 0.984 of the time (H200).
//   - For d > 128, one buffer each for K and V, so that two blocks fit on a multiprocessor: the products of
//     one run while the other makes exponentials. V_j comes during S, K_j+1 after it, and a tile takes a
//     second barrier. (At d = 256, two blocks with Bc = 80 fill the 228 KB of an H100 or H200 to the last
//     byte. Others have room for one.)
//   - O leaves through the warp's own rows of Q_smem, so that rows go to HBM in 16-byte stores. The division
//     by l is the fast one.
//
// Changed from wide_warps: these. And it takes a sink, dropout (common/drop.cuh: sixteen elements of a lane
// share four random words) and a V of d_v < d columns, as the fp32 stages do from flash2 on. K and V may be a
// cache, of which each batch element has as many keys as seqlens_k says, and which may lie in pages: then up
// to 44 bytes a thread are spilled. And it takes packed sequences, then up to 16 are. With what these need
// (common/sequences.cuh) the step is larger than the ladder's limit; a call without them does not see it.
//
// HBM traffic without caches (hbm, above): as in flash2, with 2 bytes an element; L stays a float.
//
// Bound by the latency of its own instructions, as the stages before: the tensor cores are busy 40 % of the
// time, shared memory 61 %, issue slots are used 49 % (H200, bf16, B4 H12 N1024 d64 causal).
#pragma once
#include "common/address.cuh"
#include "common/copy_tile.cuh"
#include "common/drop.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/sequences.cuh"
#include "common/softmax.cuh"
#include "common/strips.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"

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

// One block per tile of Q, from the last one on. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, blocks_per_sm) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H;                 // lines 1, 2
  const Work work = dispatch_order(Tr, heads, CAUSAL ? heads : 16);      // line 3
  int i = Tr - 1 - work.tile, b = work.bh / p.H;
  if (!enter_sequence_of_Q(p, b, i)) return;
  const int bh = work.bh, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + warp * warp_rows;    // the first of this warp's rows
  if (KV_CACHE) p.N_k = p.seqlens_k[b];
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const auto K = rows_of(p.K, p, b, h_kv);
  const auto V = rows_of(p.V, p, b, h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, `buffers` times: the t-th in t % buffers
  ELEMENT* V_smem = K_smem + buffers * Bc * pitch;    // the same
  float* l_smem = reinterpret_cast<float*>(V_smem + buffers * Bc * pitch) + threadIdx.x;   // next: + threads
  copy_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4
  copy_tile<threads>(K_smem, tile_index, K, p.K.stride_n, tiles[0] * Bc, Bc, p.N_k);     // line 7
  if (buffers == 2) copy_tile<threads, d_v>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);
  cp_async_commit();
  cp_async_wait<0>();
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
    m[r] = SINK ? LOG2_E * p.sink[h] : -INFINITY;
    l_smem[r * threads] = SINK && lane % 4 == 0 ? 1.f : 0.f;
  }

  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      cp_async_wait<0>();
      __syncthreads();                      // K_j and V_j are there; and all are done with the last ones
      const int buffer = t % buffers * Bc * pitch, next_buffer = (t + 1) % buffers * Bc * pitch;
      const uint32_t K_j = K_address + 2 * buffer, V_j = V_address + 2 * buffer;
      if (buffers == 1) {                   // V_j is not
        copy_tile<threads, d_v>(V_smem, tile_index, V, p.V.stride_n, j * Bc, Bc, p.N_k);
        cp_async_commit();
      }

      float S_reg[strips][Bc / 8][4] = {};                               // line 8: S_ij = Q_i K_j^T
      #pragma unroll
      for (int k = 0; k < width / 16; k++) {
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
      }
      if (t + 1 < tiles.end) {              // to where the last K_j and V_j were, or K_j
        const int next = tiles[t + 1] * Bc;
        copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, next, Bc, p.N_k);
        if (buffers == 2)
          copy_tile<threads, d_v>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);
        cp_async_commit();
      }

      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) {
        #pragma unroll
        for (int s = 0; s < strips; s++)
          mask_tile(S_reg[s], mask, p.scale, warp_row + 16 * s, j * Bc, cut);
      }
      #pragma unroll
      for (int r = 0; r < 2 * strips; r++) {                             // line 9
        float& l = l_smem[r * threads];
        const float alpha = softmax_step(S_reg[r / 2], r % 2, m[r], l, exponent_scale(p.scale), cut);
        for_row(O_reg[r / 2], r % 2, [&](float& x) { x *= alpha; });     // line 10: e^(m - m_new) O
      }

      uint4 words[strips];                  // of dropout, for 128 keys
      #pragma unroll
      for (int k = 0; k < Bc / 16; k++) {                                // line 10: + P~_ij V_j
        uint32_t P_frag[strips][4];
        #pragma unroll
        for (int s = 0; s < strips; s++) {
          to_A(P_frag[s], S_reg[s], k);
          if (!DROPOUT) continue;
          const unsigned n = Bc % 128 == 0 ? k : k + j * Bc / 16;        // which 16 of 128 keys?
          if (n % 8 == 0 || k == 0)
            words[s] = words_of_lane(mask, warp_row + 16 * s, j * Bc + 16 * k, warp_row / 16 + s);
          drop(P_frag[s], words[s], n, mask);
        }
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

  // With 32 rows a warp, no register is left to keep bh through the loops. So it is worked out again, from
  // another expression for the number of heads, as the compiler would recognise the same one and keep it.
  const Work again = dispatch_order(Tr, gridDim.x / Tr, CAUSAL ? gridDim.x / Tr : 16);
  const int bh_again = strips == 1 ? bh : again.bh;
  enter_outputs_of_Q(p, Tr - 1 - again.tile);
  #pragma unroll
  for (int r = 0; r < 2 * strips; r++) {
    const int row = warp_row + lane / 4 + 8 * r;
    const float l = quad_sum(l_smem[r * threads]);
    const float inv_l = l == 0.f ? 0.f : __fdividef(dropout_scale(p), l);     // l is 1 or more: may be fast
    for_row(O_reg[r / 2], r % 2, [&](float& x) { x *= inv_l; });         // line 12
    if (lane % 4 == 0 && row < p.N_q)                                    // lines 13, 15
      p.L[(int64_t)bh_again * all_rows_of_L(p) + row] = l == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(l));
  }
  ELEMENT* O = p.O.head(bh_again / p.H, bh_again % p.H);
  ELEMENT* O_smem = Q_smem + warp * warp_rows * pitch;     // this warp's rows, which no other one reads
  __syncwarp();
  for_each_pair(O_reg, [&](uint32_t packed, int row, int col) {
    *reinterpret_cast<uint32_t*>(O_smem + tile_index(row, col)) = packed;
  });
  __syncwarp();
  for (int t = lane; t < warp_rows * (d_v / 8); t += 32) {                 // line 14
    const int row = t / (d_v / 8), col = t % (d_v / 8) * 8;
    if (warp_row + row < p.N_q)
      *reinterpret_cast<uint4*>(O + (warp_row + row) * p.O.stride_n + col) =
          *reinterpret_cast<const uint4*>(O_smem + tile_index(row, col));
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * buffers * Bc) * pitch + sizeof(float) * 4 * Br;
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
