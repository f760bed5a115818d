// Forward stage 11: mma
// idea:    mma.sync and ldmatrix: S and P never leave registers
// types:   fp16, bf16
// needs:   sm_80
// after:   wmma
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 2 * Bc) * ((d + 15) // 16 * 16)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 0.6x at d=64 and d=128: S, P and O are out of shared memory, but 8-way bank conflicts are in
// measured: 0.51x at d=64 causal, 0.51x full, 0.56x at d=128 causal, 0.56x full, 0.83x at d=256 causal, 0.81x
//          full (H200, bf16, N=4096; make readme)
//
// The tensor cores' own instruction instead of the portable API. It multiplies A, 16 x 16, by B, 16 x 8, and
// adds the product to D, 16 x 8; each matrix is spread over the registers of a warp's lanes T0 to T31. The
// API keeps to itself how; the instruction's manual says it (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//
//   A     columns                               a lane: 8 elements, two neighbours of a row in a register
//   rows  0 1  2 3  4 5  6 7    8 9 .. 14 15
//     0   T0   T1   T2   T3     T0 ..  T3       a[0]: upper left      a[2]: upper right
//     1   T4   T5   T6   T7     T4 ..  T7
//     :    :    :    :    :      :      :
//     7   T28  T29  T30  T31    T28 .. T31
//
//     8   T0   T1   T2   T3     T0 ..  T3       a[1]: lower left      a[3]: lower right
//     :    :    :    :    :      :      :
//    15   T28  T29  T30  T31    T28 .. T31
//
//   B     columns                               a lane: 4 elements, two neighbours of a column in a register
//   rows   0    1    2   ..   7
//    0 1  T0   T4   T8   ..  T28                b[0]: upper half
//    2 3  T1   T5   T9   ..  T29
//    4 5  T2   T6   T10  ..  T30
//    6 7  T3   T7   T11  ..  T31
//
//    8 9  T0   T4   T8   ..  T28                b[1]: lower half
//     :    :    :    :         :
//  14 15 T3   T7   T11  ..  T31
//
//   D     columns                               a lane: 4 floats
//   rows  0 1  2 3  4 5  6 7
//     0   T0   T1   T2   T3                     d[0], d[1]: upper half
//     :    :    :    :    :
//     7   T28  T29  T30  T31
//
//     8   T0   T1   T2   T3                     d[2], d[3]: lower half
//     :    :    :    :    :
//    15   T28  T29  T30  T31
//
// P stays where S was made. D's upper half looks like a[0], its lower half like a[1]; the tile of S to its
// right is a[2] and a[3]. So two neighbouring tiles of S, 16 x 8 each, are an A of 16 x 16: for O += P V a
// lane rounds its own numbers and packs them by two. No shuffle, no shared memory.
//
// A row of S is within the 4 lanes of a quad. So a warp takes 16 rows of the tile, as before, and all Bc
// keys, and a lane has two of the rows. A maximum takes 2 shuffles; so does a sum, and that once, at the end.
// As O is spread like S, e^(m - m_new) is in the lane that needs it. for_each, for_row and for_each_pair of
// common/mma.cuh visit the elements that a lane has.
//
// ldmatrix fills these registers from shared memory: four matrices of 8 x 8 by one instruction, a row of one
// being 16 bytes. Q is A as it lies. A column of B = K^T is a row of K, so K does as it lies, too. A column
// of B = V crosses V's rows: ldmatrix.trans transposes each 8 x 8 on the way.
//
// Bank conflicts: rows of a tile are d elements apart, rounded up to 16. For d = 64 that is 128 bytes, all 32
// banks: the 8 rows of a matrix start in the same bank, and each takes a wavefront of its own: 8 instead of
// 1. So it is for every multiple of 64 (else 4 or 2). The next stage mends that.
//
// HBM traffic without caches (hbm, above): as in flash2, with 2 bytes an element; L stays a float.
//
// Changed from wmma: a fragment is a plain array of registers whose elements have known places. S, P and O
// have left shared memory, and what is done to them is done in registers, as in flash2.
//
// Bound by shared memory: it is busy 88 % of the time, as bank conflicts make an ldmatrix take 32 wavefronts
// instead of 4; the tensor cores are busy 7 % (H200, bf16, B4 H12 N1024 d64 causal). So this stage is slower
// than wmma, whose tiles are padded.
//
// Stays because it is the lesson of the next rung: S, P and O have left shared memory, and bank conflicts
// cost more than that saves. swizzle changes where numbers lie, and nothing else.
#pragma once
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps;
constexpr int pitch = width;              // from a row of a tile in shared memory to the next

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return row * pitch + col; }

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
  // --- row and column
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;
  // ---

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
      // --- its product with V_j
      #pragma unroll
      for (int n = 0; n < width / 16; n++) {
        uint32_t V_frag[4];
        ldmatrix_x4_trans(V_frag, shared_address(V_smem + tile_index(16 * k + V_row, 16 * n + V_col)));
        mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);
      }
      // ---
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
