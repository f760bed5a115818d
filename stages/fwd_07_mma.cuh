// Forward stage 7: mma
// idea:    mma.sync and ldmatrix: S and P never leave registers
// types:   fp16, bf16
// needs:   sm_80
// after:   wmma
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 2 * Bc) * ((d + 15) // 16 * 16)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
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
// A row of S is within the 4 lanes of a quad. So a warp takes 16 rows of the tile (32 if Br is a multiple of
// 128 and d <= 128) and all Bc keys: a maximum takes 2 shuffles; so does a sum, and that once, at the end. As
// O is spread like S, e^(m - m_new) is in the lane that needs it.
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
// Changed from wmma: a fragment is a plain array of registers whose elements have known places. S and P have
// left shared memory, and what is done to them is done in registers, as in flash2.
//
// Bound by shared memory: busy 89 % of the time, by bank conflicts, which make an ldmatrix take 32 wavefronts
// instead of 4; the tensor cores 8 % (H200, bf16, B4 H12 N1024 d64 causal). So it is slower than wmma, whose
// tiles are padded.
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int width = (d + 15) / 16 * 16;          // d, rounded up to whole fragments: the rest are zeros
constexpr int pitch = width;                       // from a row of a tile in shared memory to the next
constexpr int rows = Br % 128 == 0 && d <= 128 ? 32 : 16;    // rows of a tile per warp,
constexpr int strips = rows / 16;                  // in strips of 16
constexpr int warps = Br / rows, threads = 32 * warps;
// Registers for a lane's part of O, S and Q: is there room for all three? Else Q is read anew for each tile.
constexpr bool Q_in_registers = strips * (width / 2 + Bc / 2 + width / 4) <= 192;

// Where the element (row, col) of a tile is
__device__ __forceinline__ int at(int row, int col) { return row * pitch + col; }

// Copy rows [first, first + rows) of `matrix` to `tile`, by all threads of the block together, 8 elements (16
// bytes) at a time. Rows from N on and columns from d on become zeros.
__device__ __forceinline__ void load_tile(ELEMENT* tile, const ELEMENT* matrix, int64_t stride_n, int first,
                                          int rows, int N) {
  #pragma unroll (d > 128 ? 2 : 4)        // as many loads at a time, for there must be registers for them
  for (int t = threadIdx.x; t < rows * (width / 8); t += threads) {
    const int row = t / (width / 8), col = t % (width / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (first + row < N && col < d)
      x = *reinterpret_cast<const uint4*>(matrix + (first + row) * stride_n + col);
    *reinterpret_cast<uint4*>(tile + at(row, col)) = x;
  }
}

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads) mma_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4 * 2;   // this lane's place in D: rows group and group + 8
  ELEMENT* O = p.O.head(b, h);

  extern __shared__ __align__(16) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  load_tile(Q_smem, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);               // 4
  __syncthreads();

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  // --- row and column
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;
  // ---
  uint32_t Q_reg[strips][width / 16][4];
  auto load_Q = [&](int k) {
    #pragma unroll
    for (int s = 0; s < strips; s++)
      ldmatrix_x4(Q_reg[s][k], shared_address(Q_smem + at(warp * rows + 16 * s + Q_row, 16 * k + Q_col)));
  };
  #pragma unroll
  for (int k = 0; k < width / 16; k++)
    if (Q_in_registers) load_Q(k);

  float O_reg[strips][width / 8][4] = {}, m[strips][2], l[strips][2];    // 5
  #pragma unroll
  for (int s = 0; s < strips; s++) {
    for (int r = 0; r < 2; r++) {
      m[s][r] = -INFINITY;
      l[s][r] = 0.f;
    }
  }

  // causal: row q sees q + 1 + diagonal keys, and the tile's last row is (i + 1) * Br - 1
  const int keys = CAUSAL ? min(p.N_k, (i + 1) * Br + p.diagonal) : p.N_k;
  for (int j = 0; j * Bc < keys; j++) {                                  // 6
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile(K_smem, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);          // 7
    load_tile(V_smem, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    float S_reg[strips][Bc / 8][4] = {};                                 // 8: S_ij = Q_i K_j^T
    #pragma unroll
    for (int k = 0; k < width / 16; k++) {
      if (!Q_in_registers) load_Q(k);
      #pragma unroll
      for (int n = 0; n < Bc / 16; n++) {
        uint32_t K_reg[4];
        ldmatrix_x4(K_reg, shared_address(K_smem + at(16 * n + K_row, 16 * k + K_col)));
        #pragma unroll
        for (int s = 0; s < strips; s++)
          mma_m16n16k16(S_reg[s][2 * n], S_reg[s][2 * n + 1], Q_reg[s][k], K_reg);
      }
    }

    #pragma unroll
    for (int s = 0; s < strips; s++) {                                   // 9
      #pragma unroll
      for (int r = 0; r < 2; r++) {       // this lane's two rows of a strip: d[0], d[1] and d[2], d[3]
        const int row = i * Br + warp * rows + 16 * s + 8 * r + group;
        float m_new = m[s][r];
        #pragma unroll
        for (int n = 0; n < Bc / 8; n++) {
          #pragma unroll
          for (int c = 0; c < 2; c++) {
            float& x = S_reg[s][n][2 * r + c];
            const int col = j * Bc + 8 * n + pair + c;
            const bool visible = col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
            x = visible ? p.scale * x : -INFINITY;
            m_new = fmaxf(m_new, x);
          }
        }
        m_new = quad_max(m_new);
        const float shift = m_new == -INFINITY ? 0.f : m_new;            // no key: -inf - -inf is NaN
        const float alpha = expf(m[s][r] - shift);
        m[s][r] = m_new;
        l[s][r] *= alpha;                 // of this lane's columns only, until the end
        #pragma unroll
        for (int n = 0; n < Bc / 8; n++) {
          #pragma unroll
          for (int c = 0; c < 2; c++) {
            float& x = S_reg[s][n][2 * r + c];
            x = expf(x - shift);          // P
            l[s][r] += x;
          }
        }
        #pragma unroll
        for (int n = 0; n < width / 8; n++) {                            // 10: e^(m - m_new) O
          O_reg[s][n][2 * r] *= alpha;
          O_reg[s][n][2 * r + 1] *= alpha;
        }
      }
    }

    #pragma unroll
    for (int k = 0; k < Bc / 16; k++) {                                  // 10: + P~_ij V_j
      uint32_t P_reg[strips][4];
      #pragma unroll
      for (int s = 0; s < strips; s++) {
        // --- from S to a fragment of P
        const float (&left)[4] = S_reg[s][2 * k], (&right)[4] = S_reg[s][2 * k + 1];
        P_reg[s][0] = pack<ELEMENT>(left[0], left[1]);
        P_reg[s][1] = pack<ELEMENT>(left[2], left[3]);
        P_reg[s][2] = pack<ELEMENT>(right[0], right[1]);
        P_reg[s][3] = pack<ELEMENT>(right[2], right[3]);
        // ---
      }
      // --- its product with V_j
      #pragma unroll
      for (int n = 0; n < width / 16; n++) {
        uint32_t V_reg[4];
        ldmatrix_x4_trans(V_reg, shared_address(V_smem + at(16 * k + V_row, 16 * n + V_col)));
        #pragma unroll
        for (int s = 0; s < strips; s++)
          mma_m16n16k16(O_reg[s][2 * n], O_reg[s][2 * n + 1], P_reg[s], V_reg);
      }
      // ---
    }
  }                                                                      // 11

  #pragma unroll
  for (int s = 0; s < strips; s++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = i * Br + warp * rows + 16 * s + 8 * r + group;
      l[s][r] = quad_sum(l[s][r]);
      if (row >= p.N_q) continue;
      const float factor = l[s][r] == 0.f ? 0.f : 1.f / l[s][r];
      #pragma unroll
      for (int n = 0; n < d / 8; n++) {                                  // 12, 14
        const float (&x)[4] = O_reg[s][n];
        *reinterpret_cast<uint32_t*>(O + row * p.O.stride_n + 8 * n + pair) =
            pack<ELEMENT>(factor * x[2 * r], factor * x[2 * r + 1]);
      }
      if (pair == 0)                                                     // 13, 15
        p.L[(int64_t)bh * p.N_q + row] = l[s][r] == 0.f ? -INFINITY : m[s][r] + logf(l[s][r]);
    }
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * Bc) * pitch;
  allow_shared_memory(mma_kernel, bytes);
  mma_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
