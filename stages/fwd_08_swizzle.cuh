// Forward stage 8: swizzle
// idea:    the XOR swizzle: no bank conflicts
// types:   fp16, bf16
// needs:   sm_80
// after:   mma
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 2 * Bc) * ((d + 63) // 64 * 64)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
//
// ldmatrix reads 8 rows at a time, 16 bytes of each: a piece. In a plain tile these 8 pieces lie above each
// other, in the same 4 banks. So each row is shuffled, in its own way: in row r, piece c goes to the place
// c ^ r % 8 (^: exclusive or), within every 8 pieces, 128 bytes, which are all 32 banks:
//
//   place    0   1   2   3   4   5   6   7       Pieces c of 8 rows and where they lie. Find the 0s: each in
//   banks   0-3 4-7  ..                28-31     another column, so in other banks: 8 rows, one wavefront.
//   row 0    0   1   2   3   4   5   6   7       The same holds for 1s, 2s, ..., 7s. And a row still has all
//   row 1    1   0   3   2   5   4   7   6       its pieces, in its own 128 bytes: what stores 8 of them
//   row 2    2   3   0   1   6   7   4   5       finds all banks, as before.
//   row 3    3   2   1   0   7   6   5   4
//   row 4    4   5   6   7   0   1   2   3       Why ^ and not c + r? Both would do; ^ needs no % 8 after it
//   row 5    5   4   7   6   1   0   3   2       and is its own inverse, and for c = 2 * k + (0 or 1), as in
//   row 6    6   7   4   5   2   3   0   1       the loops below, it takes k apart from the rest: the address
//   row 7    7   6   5   4   3   2   1   0       is (what depends on the lane) ^ (what depends on k).
//
// For this the rows of a tile are whole groups of 8 pieces: for a d that is no multiple of 64 the end of each
// row stays empty. (Then stores have some conflicts, as 8 lanes store the end of a row and the next one's
// start.) It is only an address, so it costs nothing but the room; padding each row by 16 bytes would do as
// well here, but not in later stages, where hardware copies whole tiles and knows just this pattern.
//
// Changed from mma: where an element of a tile is: `at` and `pitch`. Nothing else.
//
// Bound by waiting, for the next tiles and for its own instructions: issue slots are used 55 % of the time,
// shared memory is busy 35 %, the tensor cores 19 % (H200, bf16, B4 H12 N1024 d64 causal; mma: 89 % and 8 %).
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int width = (d + 15) / 16 * 16;          // d, rounded up to whole fragments: the rest are zeros
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next
constexpr int rows = Br % 128 == 0 && d <= 128 ? 32 : 16;    // rows of a tile per warp,
constexpr int strips = rows / 16;                  // in strips of 16
constexpr int warps = Br / rows, threads = 32 * warps;
// Registers for a lane's part of O, S and Q: is there room for all three? Else Q is read anew for each tile.
constexpr bool Q_in_registers = strips * (width / 2 + Bc / 2 + width / 4) <= 192;

// Where the element (row, col) of a tile is: pieces of 8 elements change places
// --- its address
__device__ __forceinline__ int at(int row, int col) { return row * pitch + (col ^ row % 8 * 8); }
// ---

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
__global__ void __launch_bounds__(threads) swizzle_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4 * 2;   // this lane's place in D: rows group and group + 8
  ELEMENT* O = p.O.head(b, h);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  load_tile(Q_smem, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);               // 4
  __syncthreads();

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;
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
        const float (&left)[4] = S_reg[s][2 * k], (&right)[4] = S_reg[s][2 * k + 1];
        P_reg[s][0] = pack<ELEMENT>(left[0], left[1]);
        P_reg[s][1] = pack<ELEMENT>(left[2], left[3]);
        P_reg[s][2] = pack<ELEMENT>(right[0], right[1]);
        P_reg[s][3] = pack<ELEMENT>(right[2], right[3]);
      }
      #pragma unroll
      for (int n = 0; n < width / 16; n++) {
        uint32_t V_reg[4];
        ldmatrix_x4_trans(V_reg, shared_address(V_smem + at(16 * k + V_row, 16 * n + V_col)));
        #pragma unroll
        for (int s = 0; s < strips; s++)
          mma_m16n16k16(O_reg[s][2 * n], O_reg[s][2 * n + 1], P_reg[s], V_reg);
      }
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
  allow_shared_memory(swizzle_kernel, bytes);
  swizzle_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
