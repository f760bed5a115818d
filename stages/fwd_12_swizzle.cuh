// Forward stage 12: swizzle
// idea:    the XOR swizzle: no bank conflicts
// types:   fp16, bf16
// needs:   sm_80
// after:   mma
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 2 * Bc) * ((d + 63) // 64 * 64)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 2.3x at d=64, 2x at d=128: an ldmatrix takes 4 wavefronts, not 32
// measured: 2.97x at d=64 causal, 3.12x full, 3.24x at d=128 causal, 3.39x full, 2.73x at d=256 causal, 2.84x
//          full (H200, bf16, N=4096; make readme)
//
// ldmatrix reads 8 rows at a time, 16 bytes of each: a chunk. In a plain tile these 8 chunks lie above each
// other, in the same 4 banks. So each row is shuffled, in its own way: in row r, chunk c goes to the place
// c ^ r % 8 (^: exclusive or), within every 8 chunks, 128 bytes, which are all 32 banks:
//
//   place    0   1   2   3   4   5   6   7       Chunks c of 8 rows and where they lie. Find the 0s: each in
//   banks   0-3 4-7  ..                28-31     another column, so in other banks: 8 rows, one wavefront.
//   row 0    0   1   2   3   4   5   6   7       The same holds for 1s, 2s, ..., 7s. And a row still has all
//   row 1    1   0   3   2   5   4   7   6       its chunks, in its own 128 bytes: what stores 8 of them
//   row 2    2   3   0   1   6   7   4   5       finds all banks, as before.
//   row 3    3   2   1   0   7   6   5   4
//   row 4    4   5   6   7   0   1   2   3       Why ^ and not c + r? Both would do; ^ needs no % 8 after it
//   row 5    5   4   7   6   1   0   3   2       and is its own inverse, and for c = 2 * k + (0 or 1), as in
//   row 6    6   7   4   5   2   3   0   1       the loops below, it takes k apart from the rest: the address
//   row 7    7   6   5   4   3   2   1   0       is (what depends on the lane) ^ (what depends on k).
//
// For this the rows of a tile are whole groups of 8 chunks: for a d that is no multiple of 64 the end of each
// row stays empty. (Then stores have some conflicts, as 8 lanes store the end of a row and the next one's
// start.) It is only an address, so it costs nothing but the room.
//
// Padding each row by 16 bytes would do as well here, but not in later stages, where hardware copies whole
// tiles, and multiplies them where they lie. It knows three such patterns: within 32, 64 or 128 bytes. This
// is the one of 128.
//
// Changed from mma: where an element of a tile is: tile_index() and `pitch`. Nothing else. swizzled() is in
// common/swizzle.cuh.
//
// Bound by waiting, for the next tiles and for its own instructions: issue slots are used 54 % of the time,
// shared memory is busy 36 %, the tensor cores 19 % (H200, bf16, B4 H12 N1024 d64 causal; mma: 88 % and 7 %).
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
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
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same
  ELEMENT* V_smem = K_smem + Bc * pitch;    // the same
  load_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;

  float O_reg[width / 8][4] = {}, m[2], l[2];                            // line 5
  for (int r = 0; r < 2; r++) {             // this lane's two rows
    m[r] = -INFINITY;
    l[r] = 0.f;                             // over its columns only, until the end
  }

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                        // all are done with the last tiles, which are now overwritten
    load_tile<threads>(K_smem, tile_index, K, p.K.stride_n, j * Bc, Bc, p.N_k);            // line 7
    load_tile<threads>(V_smem, tile_index, V, p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                        // nobody reads before everybody has written

    float S_reg[Bc / 8][4] = {};                                         // line 8: S_ij = Q_i K_j^T
    #pragma unroll
    for (int k = 0; k < width / 16; k++) {
      uint32_t Q_frag[4];
      ldmatrix_x4(Q_frag, shared_address(Q_smem + tile_index(16 * warp + Q_row, 16 * k + Q_col)));
      #pragma unroll
      for (int n = 0; n < Bc / 16; n++) {
        uint32_t K_frag[4];
        ldmatrix_x4(K_frag, shared_address(K_smem + tile_index(16 * n + K_row, 16 * k + K_col)));
        mma_m16n16k16(S_reg[2 * n], S_reg[2 * n + 1], Q_frag, K_frag);
      }
    }

    for_each(S_reg, [&](float& x, int r, int c) {
      const int row = warp_row + r, col = j * Bc + c;
      x = mask.sees(row, col) ? mask.score(p.scale * x, row, col) : -INFINITY;
    });
    #pragma unroll
    for (int r = 0; r < 2; r++) {                                        // line 9
      float m_new = m[r];
      for_row(S_reg, r, [&](float& x) { m_new = fmaxf(m_new, x); });
      m_new = quad_max(m_new);
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      const float alpha = expf(m[r] - shift);
      m[r] = m_new;
      l[r] *= alpha;
      for_row(S_reg, r, [&](float& x) {
        x = expf(x - shift);                // P
        l[r] += x;
      });
      for_row(O_reg, r, [&](float& x) { x *= alpha; });                  // line 10: e^(m - m_new) O
    }

    #pragma unroll
    for (int k = 0; k < Bc / 16; k++) {                                  // line 10: + P~_ij V_j
      uint32_t P_frag[4];
      to_A(P_frag, S_reg, k);
      #pragma unroll
      for (int n = 0; n < width / 16; n++) {
        uint32_t V_frag[4];
        ldmatrix_x4_trans(V_frag, shared_address(V_smem + tile_index(16 * k + V_row, 16 * n + V_col)));
        mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);
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
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : m[r] + logf(l[r]);
  }
  ELEMENT* O = p.O.head(bh / p.H, bh % p.H);
  for_each_pair(O_reg, [&](uint32_t packed, int row, int col) {          // line 14
    if (warp_row + row < p.N_q && col < d)
      *reinterpret_cast<uint32_t*>(O + (warp_row + row) * p.O.stride_n + col) = packed;
  });
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * Bc) * pitch;
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
