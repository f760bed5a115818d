// Forward stage 14: exp2
// idea:    fewer instructions a score: 2^x with the scale folded in, the mask only in tiles that it cuts
// types:   fp16, bf16
// needs:   sm_80
// after:   cp_async
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.2x at d=64, 1.1x at d=128, 1.05x at d=256: three instructions less for each score
// measured: 1.46x at d=64 causal, 1.43x full, 1.19x at d=128 causal, 1.15x full, 1.15x at d=256 causal, 1.18x
//          full (H200, bf16, N=4096; make readme)
//
// Two ways to fewer instructions for each element of S. Both are of FlashAttention-2's section 3.1: what is
// not a matrix product runs at a sixteenth of its rate.
//
//   - e^(scale (x - m)) = 2^(c x - c m), with c = scale log2(e): one multiply-add and one ex2. Before, there
//     were a multiplication by scale, a subtraction, and expf, which multiplies by log2(e) and takes care of
//     results below the normal range. m is kept with its factor c, as rounded: then 2^(m - m_new) is 1 if m
//     stays. L = ln(2) (m + log2(l)). For a negative scale the largest c x is not that of the largest x: then
//     S changes its sign, and c is positive again. (NEGATIVE_SCALE is a constant: else that line is gone.)
//   - Whole tiles come first, whatever the mask: those before tiles.cut. The others are cut, by the diagonal
//     or by the last key, and have a loop of their own. The loop before it has no comparisons, and need not
//     ask whether a row has seen a key.
//
// Changed from cp_async: the loop over the tiles is two; what happens to S between the products is in
// common/softmax.cuh, for this stage and the later ones.
//
// Bound by the latency of its own instructions, one after the other: a warp multiplies, or makes
// exponentials. The tensor cores are busy 35 % of the time, issue slots are used 42 % (H200, bf16, B4 H12
// N1024 d64 causal).
#pragma once
#include "common/copy_tile.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/softmax.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps;
constexpr int pitch = (d + 63) / 64 * 64; // from a row of a tile in shared memory to the next

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const ELEMENT* K = p.K.head(b, h_kv);
  const ELEMENT* V = p.V.head(b, h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: the t-th K_j is in buffer t % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  copy_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4
  copy_tile<threads>(K_smem, tile_index, K, p.K.stride_n, tiles[0] * Bc, Bc, p.N_k);     // line 7
  copy_tile<threads>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);
  cp_async_commit();

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
      cp_async_wait<0>();
      __syncthreads();                      // K_j and V_j are there; and all are done with the last ones
      const int buffer = t % 2 * Bc * pitch, next_buffer = (t + 1) % 2 * Bc * pitch;
      const ELEMENT *K_j = K_smem + buffer, *V_j = V_smem + buffer;

      float S_reg[Bc / 8][4] = {};                                       // line 8: S_ij = Q_i K_j^T
      #pragma unroll
      for (int k = 0; k < width / 16; k++) {
        uint32_t Q_frag[4];
        ldmatrix_x4(Q_frag, shared_address(Q_smem + tile_index(16 * warp + Q_row, 16 * k + Q_col)));
        #pragma unroll
        for (int n = 0; n < Bc / 16; n++) {
          uint32_t K_frag[4];
          ldmatrix_x4(K_frag, shared_address(K_j + tile_index(16 * n + K_row, 16 * k + K_col)));
          mma_m16n16k16(S_reg[2 * n], S_reg[2 * n + 1], Q_frag, K_frag);
        }
      }

      if (t + 1 < tiles.end) {              // to where the last K_j and V_j were
        const int next = tiles[t + 1] * Bc;
        copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, next, Bc, p.N_k);
        copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);
        cp_async_commit();
      }

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
          ldmatrix_x4_trans(V_frag, shared_address(V_j + tile_index(16 * k + V_row, 16 * n + V_col)));
          mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);
        }
      }
    }
  }                                                                      // line 11
  cp_async_wait<0>();                       // no copy outlives its block: of a tile of Q that sees no key

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
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch;
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
