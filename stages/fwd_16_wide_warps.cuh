// Forward stage 16: wide_warps
// idea:    32 rows a warp: a fragment of K or V serves two products
// types:   fp16, bf16
// needs:   sm_80
// after:   saved_registers
// tiles:   Br=128 Bc=128; d > 64: Br=128 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64) + 16 * Br
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.15x at d=64, 1.3x at d=128, 1x at d=256: half the loads from shared memory
// measured: 1.05x at d=64 causal, 1.06x full, 1.12x at d=128 causal, 1.19x full, 1.00x at d=256 causal, 1.00x
//          full (H200, bf16, N=4096; make readme)
//
// A warp has 32 rows of the tile of Q, two strips of 16, where it had one. Each fragment of K and V that
// ldmatrix brings serves both: half of the loads for the same products. And two products in a row that do not
// depend on each other keep the tensor cores busier.
//
// It takes registers: for d = 128 and Bc = 64, O and S alone are 192 of the 255. So it needs the stage
// before, and is for d <= 128 only. For d > 128 all is as it was. A block has 128 rows with 4 warps: half the
// traffic of K and V, too, and one block on a multiprocessor.
//
// Changed from saved_registers: O, S, P and Q have a dimension more, `strips`. (common/strips.cuh visits
// them.) The row of an accumulator that a lane has as its r-th is acc[r / 2], and there r % 2.
//
// HBM traffic without caches (hbm, above): half as much of K and V as with Br = 64.
//
// Bound by the latency of its own instructions, one after the other. With a causal mask, on sm_90, 40
// bytes of a thread's registers are spilled for d = 64, 8 for d = 128. The next stage has none.
#pragma once
#include "common/address.cuh"
#include "common/copy_tile.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
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
constexpr int blocks_per_sm = Br > 64 ? 1 : d <= 64 ? 4 : 2;  // at least: so many registers may a thread have
// Registers for a lane's part of O, S and Q: is there room for all three? Else Q is read anew for each tile.
constexpr bool Q_in_registers = strips * (width / 2 + Bc / 2 + width / 4) <= 192;

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, blocks_per_sm) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + warp * warp_rows;    // the first of this warp's rows
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const ELEMENT* K = p.K.head(b, h_kv);
  const ELEMENT* V = p.V.head(b, h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: the t-th K_j is in buffer t % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  float* l_smem = reinterpret_cast<float*>(V_smem + 2 * Bc * pitch) + threadIdx.x;   // next: + threads
  copy_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4
  copy_tile<threads>(K_smem, tile_index, K, p.K.stride_n, tiles[0] * Bc, Bc, p.N_k);     // line 7
  copy_tile<threads>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);
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
    m[r] = -INFINITY;
    l_smem[r * threads] = 0.f;
  }

  int t = 0;
  #pragma unroll                            // two loops over t: whole tiles, then those that the mask cuts
  for (int cut = 0; cut < 2; cut++) {
    for (; t < (cut ? tiles.end : tiles.cut); t++) {                     // line 6
      const int j = tiles[t];
      cp_async_wait<0>();
      __syncthreads();                      // K_j and V_j are there; and all are done with the last ones
      const int buffer = t % 2 * Bc * pitch, next_buffer = (t + 1) % 2 * Bc * pitch;
      const uint32_t K_j = K_address + 2 * buffer, V_j = V_address + 2 * buffer;

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

      if (t + 1 < tiles.end) {              // to where the last K_j and V_j were
        const int next = tiles[t + 1] * Bc;
        copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, next, Bc, p.N_k);
        copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);
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

  // With 32 rows a warp, no register is left to keep bh through the loops. So it is worked out again, from
  // another expression for Tr, as the compiler would recognise the same one and keep it.
  const int Tr_again = gridDim.x / (p.B * p.H), bh_again = strips == 1 ? bh : blockIdx.x / Tr_again;
  #pragma unroll
  for (int r = 0; r < 2 * strips; r++) {
    const int row = warp_row + lane / 4 + 8 * r;
    const float l = quad_sum(l_smem[r * threads]);
    const float inv_l = l == 0.f ? 0.f : 1.f / l;
    for_row(O_reg[r / 2], r % 2, [&](float& x) { x *= inv_l; });         // line 12
    if (lane % 4 == 0 && row < p.N_q)                                    // lines 13, 15
      p.L[(int64_t)bh_again * p.N_q + row] = l == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(l));
  }
  ELEMENT* O = p.O.head(bh_again / p.H, bh_again % p.H);
  for_each_pair(O_reg, [&](uint32_t packed, int row, int col) {          // line 14
    if (warp_row + row < p.N_q && col < d)
      *reinterpret_cast<uint32_t*>(O + (warp_row + row) * p.O.stride_n + col) = packed;
  });
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch + sizeof(float) * 4 * Br;
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
