// Forward stage 9: cp_async
// idea:    asynchronous copies, double buffering, exp2 with the scale folded in, masked tiles split off
// types:   fp16, bf16
// needs:   sm_80
// after:   swizzle
// default: sm_80
// tiles:   Br=128 Bc=128; d > 64: Br=128 Bc=64;
//          rows < 65536 and d <= 64 or rows < 32768 and causal: Br=64 Bc=64; d > 128: Br=64 Bc=80
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + (4 if d <= 128 else 2) * Bc) * ((d + 63) // 64 * 64) + 16 * Br
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
//
// The algorithm and the fragments are those of swizzle. What changes is that the tensor cores wait less.
//
//   - cp.async copies 16 bytes from HBM to shared memory and lets the thread go on. For d <= 128 there is
//     room for two tiles each of K and V: while tile j is used, tile j + 1 is under way. One barrier a tile
//     is enough:
//
//       wait until this thread's copies of tile j are done; barrier: everybody's are, and tile j - 1, where
//       j + 1 goes, is used up; S = Q K_j^T; start to copy tile j + 1; softmax; O += P V_j
//
//     (The copies start after S, so that its multiplications need not wait until they are issued.)
//   - e^(scale (x - m)) = 2^(c x - c m), with c = scale log2(e): one multiply-add and one ex2 per element
//     (common/exp2.cuh). m is kept with its factor c, as rounded: then 2^(m - m_new) is 1 if m stays. For
//     a negative scale the largest c x is not that of the largest x: so Q changes its sign, once.
//   - The mask is in a loop of its own, over the last tiles, which it cuts or which reach past the last key;
//     the loop before has neither comparisons nor a test for rows without a key.
//   - Br = 128 for d <= 128, so 32 rows a warp: each fragment of K and V serves two strips, which halves what
//     ldmatrix has to bring of them. (Small calls get Br = 64, for more blocks, where that was faster.)
//   - For d > 128 a warp has registers for 16 rows only. A second block on the multiprocessor helps, whose
//     products run while this one makes exponentials; but then shared memory has room for one tile each of K
//     and V: V_j comes during S, K_j+1 after it, and a tile takes a second barrier. (At d = 256, two blocks
//     with Bc = 80 fill the 228 KB of an H100 or H200 to the last byte. Others have room for one.)
//   - ldmatrix's addresses are computed once: in the loops a few of their bits change (`beside`).
//   - O leaves through the warp's own rows of Q_smem, so that rows go to HBM in pieces of 16 bytes.
//   - The order of the blocks. Causal: the last tiles of Q of all heads come first, as they see most keys.
//     Else 16 heads at a time, whose K and V the L2 cache can hold while all tiles of Q pass by: 0.27 GB from
//     HBM instead of 2.06, and 3 % less time (H200, fp16, B8 H16 N2048 d128).
//   - l waits in shared memory, as it is needed only once a tile: for d = 128, O and S alone are 192 of the
//     255 registers that a thread may have, and the compiler would find none for it.
//
// HBM traffic without caches (hbm, above): as in flash2, with 2 bytes an element; L stays a float. Half
// as much of K and V as in swizzle where Br is twice as large.
//
// Changed from swizzle: the loads, the order of blocks and of a tile's steps, the exponent, the epilogue.
//
// Bound by shared memory and by the latency of its own instructions, one after the other: tensor cores busy
// 39 % of the time, shared memory 61 %, issue slots 48 % (H200, bf16, B4 H12 N1024 d64 causal). Larger calls,
// with 32 rows a warp, read half as much from shared memory.
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/exp2.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int width = (d + 15) / 16 * 16;          // d, rounded up to whole fragments: the rest are zeros
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next
constexpr int rows = Br % 128 == 0 && d <= 128 ? 32 : 16;    // rows of a tile per warp,
constexpr int strips = rows / 16;                  // in strips of 16
constexpr int warps = Br / rows, threads = 32 * warps;
constexpr int blocks = Br > 64 ? 1 : d <= 64 ? 4 : 2;        // on a multiprocessor, at least
constexpr int buffers = d <= 128 ? 2 : 1;          // tiles each of K and V in shared memory
// Registers for a lane's part of O, S and Q: is there room for all three? Else Q is read anew for each tile.
constexpr bool Q_in_registers = strips * (width / 2 + Bc / 2 + width / 4) <= 192;

// Where the element (row, col) of a tile is: pieces of 8 elements change places
__device__ __forceinline__ int at(int row, int col) { return row * pitch + (col ^ row % 8 * 8); }

// The address of what is `row` rows below and `col` columns right of address `from`, both multiples of 16, if
// `from` is in the first 16 columns. The swizzle stays the same 16 rows on; and as ^ takes bits one by one,
// 16 columns on are other bits of the address, until the next 128 bytes.
__device__ __forceinline__ uint32_t beside(uint32_t from, int row, int col) {
  return (from ^ 2 * (col % 64)) + 2 * (row * pitch + col / 64 * 64);
}

// Start to copy rows [first, first + tile_rows) of `matrix` to `tile`, by all threads of the block together:
// 8 of them take 128 bytes of a row. Rows from N on and columns from d on become zeros (and are not read).
__device__ __forceinline__ void copy_tile(ELEMENT* tile, const ELEMENT* matrix, int64_t stride_n, int first,
                                          int tile_rows, int N) {
  const int first_row = threadIdx.x / 8, first_col = threadIdx.x % 8 * 8;
  const ELEMENT* from = matrix + (first + first_row) * stride_n + first_col;
  #pragma unroll
  for (int row = 0; row < tile_rows; row += threads / 8) {
    if (tile_rows % (threads / 8) != 0 && first_row + row >= tile_rows) break;
    #pragma unroll
    for (int col = 0; col < pitch; col += 64) {
      const bool inside = first + first_row + row < N && (d % 64 == 0 || first_col + col < d);
      cp_async_16(shared_address(tile + at(first_row + row, first_col + col)), from + col, inside ? 16 : 0);
    }
    from += threads / 8 * stride_n;
  }
}

// One block per tile of Q, from the one before `end` downwards. Of heads, gridDim.x are next to each other in
// time: x counts fastest, z slowest. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, blocks) cp_async_kernel(FwdParams p, int end) {
  const int i = end - 1 - blockIdx.y, bh = blockIdx.z * gridDim.x + blockIdx.x;    // 1, 2, 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4 * 2;   // this lane's place in D: rows group and group + 8
  const int first_row = i * Br + warp * rows + group;
  const ELEMENT* K = p.K.head(b, h_kv);
  const ELEMENT* V = p.V.head(b, h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                       // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;        // Bc x d, the same, `buffers` times; K_j: j % buffers
  ELEMENT* V_smem = K_smem + buffers * Bc * pitch;     // the same

  // causal: row q sees q + 1 + diagonal keys, and the tile's last row is (i + 1) * Br - 1
  const int keys = CAUSAL ? min(p.N_k, (i + 1) * Br + p.diagonal) : p.N_k;
  const int common_keys = CAUSAL ? min(p.N_k, i * Br + 1 + p.diagonal) : p.N_k;     // those that all rows see
  const int Tc = keys > 0 ? ceil_div(keys, Bc) : 0, whole = common_keys / Bc;       // tiles; unmasked ones

  copy_tile(Q_smem, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);               // 4
  copy_tile(K_smem, K, p.K.stride_n, 0, Bc, p.N_k);                                 // 7
  if (buffers == 2) copy_tile(V_smem, V, p.V.stride_n, 0, Bc, p.N_k);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  if (p.scale < 0.f) {                          // (-scale) (-Q) K^T: each warp changes the signs of its rows
    for (int t = lane; t < rows * pitch / 2; t += 32)
      reinterpret_cast<uint32_t*>(Q_smem + warp * rows * pitch)[t] ^= 0x80008000;
    __syncwarp();
  }

  // As in mma: the rows that this lane points ldmatrix to, here as addresses
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;
  const uint32_t Q_at = shared_address(Q_smem + at(warp * rows + Q_row, Q_col));
  const uint32_t K_at = shared_address(K_smem + at(K_row, K_col));
  const uint32_t V_at = shared_address(V_smem + at(V_row, V_col));
  uint32_t Q_reg[strips][width / 16][4];
  auto load_Q = [&](int k) {
    #pragma unroll
    for (int s = 0; s < strips; s++) ldmatrix_x4(Q_reg[s][k], beside(Q_at, 16 * s, 16 * k));
  };
  #pragma unroll
  for (int k = 0; k < width / 16; k++)
    if (Q_in_registers) load_Q(k);

  float O_reg[strips][width / 8][4] = {}, m[strips][2];                  // 5
  float* l_smem = reinterpret_cast<float*>(V_smem + buffers * Bc * pitch) + threadIdx.x;  // next: + threads
  #pragma unroll
  for (int s = 0; s < strips; s++) {
    for (int r = 0; r < 2; r++) {
      m[s][r] = -INFINITY;
      l_smem[(2 * s + r) * threads] = 0.f;
    }
  }

  int j = 0;
  #pragma unroll                                // two loops over j: tiles without and with a mask
  for (int masked = 0; masked < 2; masked++) {
    for (; j < (masked ? Tc : whole); j++) {                             // 6
      // --- the head of a tile
      cp_async_wait<0>();
      __syncthreads();                          // K_j and V_j are there; and all are done with V_j-1
      const int here = j % buffers * Bc * pitch, next = (j + 1) % buffers * Bc * pitch;
      // ---
      const uint32_t K_j = K_at + 2 * here, V_j = V_at + 2 * here;
      if (buffers == 1) {                       // V_j is not
        copy_tile(V_smem, V, p.V.stride_n, j * Bc, Bc, p.N_k);
        cp_async_commit();
      }

      float S_reg[strips][Bc / 8][4] = {};                               // 8: S_ij = Q_i K_j^T
      #pragma unroll
      for (int k = 0; k < width / 16; k++) {
        if (!Q_in_registers) load_Q(k);
        #pragma unroll
        for (int n = 0; n < Bc / 16; n++) {
          uint32_t K_reg[4];
          ldmatrix_x4(K_reg, beside(K_j, 16 * n, 16 * k));
          #pragma unroll
          for (int s = 0; s < strips; s++)
            mma_m16n16k16(S_reg[s][2 * n], S_reg[s][2 * n + 1], Q_reg[s][k], K_reg);
        }
      }

      if (buffers == 1) {
        cp_async_wait<0>();
        __syncthreads();                        // now it is; and all are done with K_j
      }
      // --- the next tile is on its way
      if ((j + 1) * Bc < keys) {                // into the room of K_j-1 and V_j-1, or of K_j
        copy_tile(K_smem + next, K, p.K.stride_n, (j + 1) * Bc, Bc, p.N_k);         // 7
        if (buffers == 2) copy_tile(V_smem + next, V, p.V.stride_n, (j + 1) * Bc, Bc, p.N_k);
        cp_async_commit();
      }
      // ---

      // Not 0: 0 times -inf is NaN. (In here, as it costs less than a register.)
      const float scale = fmaxf(fabsf(p.scale) * LOG2_E, 1.2e-38f);
      #pragma unroll
      for (int s = 0; s < strips; s++) {                                 // 9
        #pragma unroll
        for (int r = 0; r < 2; r++) {     // this lane's two rows of a strip: d[0], d[1] and d[2], d[3]
          const int row = first_row + 16 * s + 8 * r;
          const int last = CAUSAL ? min(p.N_k - 1, row + p.diagonal) : p.N_k - 1;   // the last key it sees
          float x_max = -INFINITY;
          #pragma unroll
          for (int n = 0; n < Bc / 8; n++) {
            #pragma unroll
            for (int c = 0; c < 2; c++) {
              float& x = S_reg[s][n][2 * r + c];
              if (masked && 8 * n + c > last - j * Bc - pair) x = -INFINITY;
              x_max = fmaxf(x_max, x);
            }
          }
          const float m_new = fmaxf(m[s][r], scale * quad_max(x_max));
          const float shift = masked && m_new == -INFINITY ? 0.f : m_new;   // no key: -inf - -inf is NaN
          const float alpha = fast_exp2(m[s][r] - shift);
          m[s][r] = m_new;
          float l_tile = 0.f;
          #pragma unroll
          for (int n = 0; n < Bc / 8; n++) {
            #pragma unroll
            for (int c = 0; c < 2; c++) {
              float& x = S_reg[s][n][2 * r + c];
              x = fast_exp2(scale * x - shift);   // P
              l_tile += x;
            }
          }
          l_smem[(2 * s + r) * threads] = alpha * l_smem[(2 * s + r) * threads] + l_tile;
          #pragma unroll
          for (int n = 0; n < width / 8; n++) {                          // 10: e^(m - m_new) O
            O_reg[s][n][2 * r] *= alpha;
            O_reg[s][n][2 * r + 1] *= alpha;
          }
        }
      }

      #pragma unroll
      for (int k = 0; k < Bc / 16; k++) {                                // 10: + P~_ij V_j
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
          ldmatrix_x4_trans(V_reg, beside(V_j, 16 * k, 16 * n));
          #pragma unroll
          for (int s = 0; s < strips; s++)
            mma_m16n16k16(O_reg[s][2 * n], O_reg[s][2 * n + 1], P_reg[s], V_reg);
        }
      }
    }
  }                                                                      // 11

  ELEMENT* O = p.O.head(bh / p.H, bh % p.H);
  ELEMENT* O_smem = Q_smem + warp * rows * pitch;   // this warp's rows, which no other one reads
  __syncwarp();
  #pragma unroll
  for (int s = 0; s < strips; s++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first_row + 16 * s + 8 * r;
      const float l = quad_sum(l_smem[(2 * s + r) * threads]);
      const float factor = l == 0.f ? 0.f : __fdividef(1.f, l);    // l is 1 or more: this may be fast
      #pragma unroll
      for (int n = 0; n < width / 8; n++) {                              // 12
        const float (&x)[4] = O_reg[s][n];
        *reinterpret_cast<uint32_t*>(O_smem + at(16 * s + 8 * r + group, 8 * n + pair)) =
            pack<ELEMENT>(factor * x[2 * r], factor * x[2 * r + 1]);
      }
      if (pair == 0 && row < p.N_q)                                      // 13, 15
        p.L[(int64_t)bh * p.N_q + row] = l == 0.f ? -INFINITY : LN_2 * (m[s][r] + log2f(l));
    }
  }
  __syncwarp();
  for (int t = lane; t < rows * (d / 8); t += 32) {                      // 14
    const int row = t / (d / 8), col = t % (d / 8) * 8, row_of_O = first_row - group + row;
    if (row_of_O < p.N_q)
      *reinterpret_cast<uint4*>(O + row_of_O * p.O.stride_n + col) =
          *reinterpret_cast<const uint4*>(O_smem + at(row, col));
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * buffers * Bc) * pitch + sizeof(float) * 4 * Br;
  allow_shared_memory(cp_async_kernel, bytes);
  constexpr int most = 65535;             // of y and z in a grid
  const int heads = p.B * p.H;
  int at_once = CAUSAL ? heads : 16;      // or fewer, so that they divide the heads evenly
  while (at_once > 8 && heads % at_once != 0) at_once--;
  if (heads % at_once != 0 || heads / at_once > most) at_once = heads;
  for (int end = ceil_div(p.N_q, Br); end > 0; end -= most) {
    const dim3 grid(at_once, end < most ? end : most, heads / at_once);
    cp_async_kernel<<<grid, threads, bytes, stream>>>(p, end);
  }
  return cudaGetLastError();
}
