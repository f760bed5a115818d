// Backward stage 5: mma
// idea:    tensor cores: half of the warps make dV, the others dK; P^T and dS^T stay in registers
// types:   fp16, bf16
// needs:   sm_80
// after:   recompute
// deterministic: on request
// tiles:   Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= 2 * Bc
// shared:  2 * (2 * (Br + Bc) * ((d + 63) // 64 * 64) + Bc * max(Br, 64)) + 8 * Br
// workspace: dQ_sum, D
// hbm:     B * (8 * H_kv * N_k * d + H * N_q * (Tc * (12 * d + 8) + 14 * d + 8))
//
// FlashAttention-2's Algorithm 2 as in the stages before, its five products on tensor cores. What was learnt
// in the forward stages mma and swizzle is taken from there: fragments, ldmatrix, no bank conflicts.
//
// In the forward pass P is made where the next product wants it: an accumulator of S = Q K^T, rounded, is the
// left factor of O = P V. Here the next products are dV = P^T dO and dK = dS^T Q, so S and dP are made
// transposed, a row for a key (L and D now belong to columns):
//
//   S^T  = K Q^T     P^T  = exp(scale * S^T - L)     dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T * (dP^T - D)         dK += dS^T Q
//
// Both lines are the same two products, of other tiles. So a warp takes one of the lines, for 32 keys (16 for
// d > 128), and has one sum, dV or dK, and one accumulator before it, S^T or dP^T: d + Br registers (for 16
// keys, half of that). With both lines a warp would have room for half as many keys; and as its keys share
// what it reads of Q and dO from shared memory, it would read twice as much for a multiplication.
//
//   warps for dV                    warps for dK
//   S^T = K Q^T                     dP^T = V dO^T
//   P^T, which they keep and store
//   ----------------------------- barrier -----------------------------
//   dV += P^T dO                    read P^T; dS^T, which they keep and store in its place; dK += dS^T Q
//   ----------------------------- barrier -----------------------------
//   all warps: dQ += dS K, from the dS^T that has been stored: ldmatrix transposes it
//
// (FlashAttention-2's own program makes S as it is, and stores both P and dS for other warps to transpose.)
//
// P is rounded for dV, and dS is made of this P. dQ is summed in float in dQ_sum (B, H, N_q, d), two numbers
// at a time where the GPU can (sm_90); a last kernel scales and rounds it. To add to a dQ of 16 bits would
// round once for each tile of keys.
//
// Asked to be deterministic, no two blocks that run at the same time may add to the same row. Then dQ_sum has
// 8 copies, and a launch has 8 tiles of K and V of each head, one for a copy; the next one waits for it. So
// each copy is a sum in a fixed order, and the last kernel adds them up in a fixed order. It costs memory, 32
// bytes for an element of dQ instead of 4; and launches of 8 * B * H_kv blocks may leave parts of a GPU idle.
//
// HBM traffic without caches (hbm, above): as in recompute, with 2 bytes an element. dQ_sum has 4, and is set
// to 0, added to Tc times, and read once (of 8 copies, hbm counts one); then dQ is written.
//
// Changed from vectorized: the products, and which thread has what. The steps and their names stay.
//
// Bound by waiting, for the tiles of Q and dO and at three barriers: tensor cores busy 22 % of the time,
// shared memory 31 %, issue slots 26 % (H200, bf16, B4 H12 N1024 d64 causal).
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/rowsum.cuh"
#include "common/exp2.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int width = (d + 15) / 16 * 16;          // d, rounded up to whole fragments: the rest are zeros
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next,
constexpr int PT_pitch = Br < 64 ? 64 : Br;        // and of the tile of P^T and dS^T
constexpr int keys = d <= 128 ? 32 : 16;           // rows of dK or dV per warp,
constexpr int strips = keys / 16;                  // in strips of 16
constexpr int warps = 2 * (Bc / keys), threads = 32 * warps;
constexpr int lanes = d <= 64 ? 8 : d <= 128 ? 16 : 32;        // that copy a row of a tile, and of dQ
constexpr int dQ_warps = warps / (Br / 32);        // that share 32 rows of dQ,
constexpr int dQ_parts = (width / 16 + dQ_warps - 1) / dQ_warps;         // each with so many 16 columns
constexpr int copies = DETERMINISTIC ? 8 : 1;      // of dQ_sum

// Where the element (row, col) of a tile is: pieces of 8 elements change places
__device__ __forceinline__ int at(int row, int col, int row_pitch = pitch) {
  return row * row_pitch + (col ^ row % 8 * 8);
}

// From the address of the element (row, col) that of (row + rows, col + cols): for rows a multiple of 8, and
// cols a sum of powers of 2, 16 or more, that col is not: then ^ adds, whatever the row has shuffled
__device__ __forceinline__ uint32_t beside(uint32_t address, int rows, int cols, int row_pitch = pitch) {
  return (address ^ 2 * (cols % 64)) + 2 * (rows * row_pitch + cols / 64 * 64);
}

// Copy rows [first, first + rows) of `matrix` to `tile`, by all threads of the block together, 8 elements (16
// bytes) at a time. Rows from N on and columns from d on become zeros.
__device__ __forceinline__ void load_tile(ELEMENT* tile, const ELEMENT* matrix, int64_t stride_n, int first,
                                          int rows, int N) {
  const int col = threadIdx.x % lanes * 8;
  if (col >= width) return;
  #pragma unroll
  for (int n = 0; n < rows; n += threads / lanes) {
    const int row = n + threadIdx.x / lanes;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (first + row < N && col < d)
      x = *reinterpret_cast<const uint4*>(matrix + (first + row) * stride_n + col);
    *reinterpret_cast<uint4*>(tile + at(row, col)) = x;
  }
}

// Two elements of a register, as floats
__device__ __forceinline__ float2 unpack(uint32_t both) {
  const ELEMENT* two = reinterpret_cast<const ELEMENT*>(&both);
  return make_float2(float(two[0]), float(two[1]));
}

// Two sums at a time, where the GPU can (sm_90)
__device__ __forceinline__ void atomic_add2(float* to, float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(to), make_float2(x, y));
#else
  atomicAdd(to, x);
  atomicAdd(to + 1, y);
#endif
}

__global__ void __launch_bounds__(256) clear_kernel(float4* dQ_sum, int64_t n) {         // 3
  const int64_t t = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (t < n) dQ_sum[t] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// One block per tile of K and V, for tiles from first_j on. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) mma_kernel(BwdParams p, const float* D, float* dQ_sum,
                                                      int first_j) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H_kv, tiles = gridDim.x / heads;    // 1, 2
  const int j = first_j + (CAUSAL ? blockIdx.x / heads : blockIdx.x % tiles);    // 5; causal: most see j = 0
  const int bh = CAUSAL ? blockIdx.x % heads : blockIdx.x / tiles;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, heads_per_key = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4 * 2;   // this lane's place in an accumulator
  const bool makes_dV = warp < warps / 2;            // else dK
  const int first_key = warp % (warps / 2) * keys;   // this warp's rows of the tile

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same
  ELEMENT* dO_smem = Q_smem + Br * pitch;   // Br x d, the same
  ELEMENT* PT_smem = dO_smem + Br * pitch;  // Bc x Br, rows PT_pitch apart: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + Bc * PT_pitch);     // Br
  float* D_smem = L_smem + Br;              // Br
  load_tile(K_smem, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);            // 6
  load_tile(V_smem, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  // Where this lane points ldmatrix to, in the first of the fragments that it reads: lanes 0 to 7 to the rows
  // of an 8 x 8 matrix, and so on. a: upper left, lower left, upper right, lower right. b: upper left, upper
  // right, lower left, lower right.
  const int a_row = lane % 16, a_col = lane / 16 * 8;
  const int b_row = lane / 16 * 8 + lane % 8, b_col = lane / 8 % 2 * 8;
  const int dQ_row = warp / dQ_warps * 32, dQ_col = warp % dQ_warps * 16;         // of this warp
  const uint32_t left = shared_address((makes_dV ? K_smem : V_smem) + at(first_key + a_row, a_col));
  const uint32_t right = shared_address((makes_dV ? Q_smem : dO_smem) + at(b_row, b_col));
  const uint32_t factor = shared_address((makes_dV ? dO_smem : Q_smem) + at(a_row, a_col));
  const uint32_t dS_at = shared_address(PT_smem + at(b_row, dQ_row + b_col, PT_pitch));
  const uint32_t K_at = shared_address(K_smem + at(a_row, dQ_col + a_col));

  float sum_reg[strips][width / 8][4] = {};                              // 7: dV or dK

  // causal: the first row that sees key j * Bc is j * Bc - diagonal; the tiles of Q before it see none
  const int first_i = CAUSAL ? max(j * Bc - p.diagonal, 0) / Br : 0;
  for (int h = h_kv * heads_per_key; h < (h_kv + 1) * heads_per_key; h++) {
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L, D and dQ_sum
    const ELEMENT* Q = p.Q.head(b, h);
    const ELEMENT* dO = p.dO.head(b, h);
    for (int i = first_i; i < Tr; i++) {                                 // 8
      // The last tiles were last read before the last barrier, so they may be overwritten.
      load_tile(Q_smem, Q, p.Q.stride_n, i * Br, Br, p.N_q);                      // 9
      load_tile(dO_smem, dO, p.dO.stride_n, i * Br, Br, p.N_q);
      if (threadIdx.x < Br) {
        const int row = i * Br + threadIdx.x;
        L_smem[threadIdx.x] = row < p.N_q ? p.L[first_row + row] : 0.f;
        D_smem[threadIdx.x] = row < p.N_q ? D[first_row + row] : 0.f;
      }
      __syncthreads();                    // nobody reads before everybody has written

      // 10, 13: S^T = K Q^T, or dP^T = V dO^T
      float X_reg[strips][Br / 8][4] = {};
      #pragma unroll
      for (int k = 0; k < width / 16; k++) {
        uint32_t left_reg[strips][4];
        #pragma unroll
        for (int s = 0; s < strips; s++) ldmatrix_x4(left_reg[s], beside(left, 16 * s, 16 * k));
        #pragma unroll
        for (int n = 0; n < Br / 16; n++) {
          uint32_t right_reg[4];
          ldmatrix_x4(right_reg, beside(right, 16 * n, 16 * k));
          #pragma unroll
          for (int s = 0; s < strips; s++)
            mma_m16n16k16(X_reg[s][2 * n], X_reg[s][2 * n + 1], left_reg[s], right_reg);
        }
      }

      uint32_t X_half[strips][Br / 8][2]; // P^T or dS^T, rounded: as it is, the left factor of 12 and 16
      auto X_at = [&](int s, int n, int r) {       // and where two of them are in shared memory
        ELEMENT* X = PT_smem + at(first_key + 16 * s + 8 * r + group, 8 * n + pair, PT_pitch);
        return reinterpret_cast<uint32_t*>(X);
      };
      auto round_and_store = [&]() {
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
          #pragma unroll
          for (int s = 0; s < strips; s++) {
            #pragma unroll
            for (int r = 0; r < 2; r++) { // this lane's two rows of a strip: d[0], d[1] and d[2], d[3]
              X_half[s][n][r] = pack<ELEMENT>(X_reg[s][n][2 * r], X_reg[s][n][2 * r + 1]);
              *X_at(s, n, r) = X_half[s][n][r];
            }
          }
        }
      };
      if (makes_dV) {                                                    // 11: P_ij
        const bool masked = (i + 1) * Br > p.N_q || (j + 1) * Bc > p.N_k ||
                            (CAUSAL && (j + 1) * Bc - 1 > i * Br + p.diagonal);
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
          #pragma unroll
          for (int c = 0; c < 2; c++) {
            const float L = L_smem[8 * n + pair + c];
            #pragma unroll
            for (int s = 0; s < strips; s++) {
              #pragma unroll
              for (int r = 0; r < 2; r++) {
                float& x = X_reg[s][n][2 * r + c];
                x = fast_exp2(LOG2_E * (p.scale * x - L));
                if (!masked) continue;
                const int row = i * Br + 8 * n + pair + c, col = j * Bc + first_key + 16 * s + 8 * r + group;
                const bool visible = row < p.N_q && col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
                if (!visible) x = 0.f;
              }
            }
          }
        }
        round_and_store();
      }
      __syncthreads();                    // the warps for dK now read P
      if (!makes_dV) {                                                   // 14: dS_ij, in the place of P_ij
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
          const float2 D_row = *reinterpret_cast<const float2*>(D_smem + 8 * n + pair);
          #pragma unroll
          for (int s = 0; s < strips; s++) {
            #pragma unroll
            for (int r = 0; r < 2; r++) {
              const float2 P = unpack(*X_at(s, n, r));
              float& x = X_reg[s][n][2 * r], &y = X_reg[s][n][2 * r + 1];
              x = P.x * (x - D_row.x);
              y = P.y * (y - D_row.y);
            }
          }
        }
        round_and_store();
      }

      // 12, 16: dV += P^T dO, or dK += dS^T Q
      #pragma unroll
      for (int k = 0; k < Br / 16; k++) {
        #pragma unroll
        for (int n = 0; n < width / 16; n++) {
          uint32_t factor_reg[4];
          ldmatrix_x4_trans(factor_reg, beside(factor, 16 * k, 16 * n));
          #pragma unroll
          for (int s = 0; s < strips; s++) {
            const uint32_t (&x)[2] = X_half[s][2 * k], (&y)[2] = X_half[s][2 * k + 1];
            const uint32_t four[4] = {x[0], x[1], y[0], y[1]};
            mma_m16n16k16(sum_reg[s][2 * n], sum_reg[s][2 * n + 1], four, factor_reg);
          }
        }
      }
      __syncthreads();                    // a warp now reads all columns of dS, which many warps wrote

      // 15: dS_ij K_j: 32 rows and dQ_parts times 16 columns a warp
      float dQ_reg[2][2 * dQ_parts][4] = {};
      #pragma unroll 2
      for (int k = 0; k < Bc / 16; k++) {
        uint32_t dS_reg[2][4];
        #pragma unroll
        for (int s = 0; s < 2; s++) ldmatrix_x4_trans(dS_reg[s], beside(dS_at, 16 * k, 16 * s, PT_pitch));
        #pragma unroll
        for (int n = 0; n < dQ_parts; n++) {
          if (width % (16 * dQ_warps) && dQ_col + 16 * dQ_warps * n >= width) continue;
          uint32_t K_reg[4];
          ldmatrix_x4_trans(K_reg, beside(K_at, 16 * k, 16 * dQ_warps * n));
          #pragma unroll
          for (int s = 0; s < 2; s++)
            mma_m16n16k16(dQ_reg[s][2 * n], dQ_reg[s][2 * n + 1], dS_reg[s], K_reg);
        }
      }
      float* dQ = dQ_sum + (j % copies * (int64_t)p.B * p.H * p.N_q + first_row) * d;
      #pragma unroll
      for (int s = 0; s < 2; s++) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {     // 15: to HBM, beside other blocks
          const int row = i * Br + dQ_row + 16 * s + 8 * r + group;
          if (row >= p.N_q) continue;
          #pragma unroll
          for (int n = 0; n < 2 * dQ_parts; n++) {
            const int k = dQ_col + 16 * dQ_warps * (n / 2) + 8 * (n % 2) + pair;
            if (k < d) atomic_add2(dQ + (int64_t)row * d + k, dQ_reg[s][n][2 * r], dQ_reg[s][n][2 * r + 1]);
          }
        }
      }
    }                                                                    // 17
  }

  const Tensor& out = makes_dV ? p.dV : p.dK;                            // 18
  const float scale = makes_dV ? 1.f : p.scale;
  #pragma unroll
  for (int s = 0; s < strips; s++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int col = j * Bc + first_key + 16 * s + 8 * r + group;
      if (col >= p.N_k) continue;
      #pragma unroll
      for (int n = 0; n < d / 8; n++) {
        const float (&x)[4] = sum_reg[s][n];
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + 8 * n + pair) =
            pack<ELEMENT>(scale * x[2 * r], scale * x[2 * r + 1]);
      }
    }
  }
}

// dQ = scale * dQ_sum: 8 columns of a row a thread
__global__ void __launch_bounds__(256) dQ_kernel(BwdParams p, const float* dQ_sum) {
  const int blocks = ceil_div(p.N_q, 256 / lanes), bh = blockIdx.x / blocks;     // `blocks` a head
  const int row = blockIdx.x % blocks * (256 / lanes) + threadIdx.x / lanes, k = threadIdx.x % lanes * 8;
  if (row >= p.N_q || k >= d) return;
  float sum[8] = {};
  for (int copy = 0; copy < copies; copy++) {
    const float* from = dQ_sum + ((copy * (int64_t)p.B * p.H + bh) * p.N_q + row) * d + k;
    for (int e = 0; e < 8; e += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + e);
      sum[e] += x.x;
      sum[e + 1] += x.y;
      sum[e + 2] += x.z;
      sum[e + 3] += x.w;
    }
  }
  uint4* dQ = reinterpret_cast<uint4*>(p.dQ.head(bh / p.H, bh % p.H));
  uint32_t rounded[4];
  for (int e = 0; e < 4; e++) rounded[e] = pack<ELEMENT>(p.scale * sum[2 * e], p.scale * sum[2 * e + 1]);
  // (Counted in pieces of 16 bytes. In elements nvcc takes it for unaligned, and stores 4 times 4 bytes.)
  dQ[(row * p.dQ.stride_n + k) / 8] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
}

// dQ_sum, and then D, as float4s start at multiples of 16 bytes
size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q * (copies * d + 1); }

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  const int64_t elements = (int64_t)p.B * p.H * p.N_q * d;
  float* dQ_sum = static_cast<float*>(p.workspace);
  float* D = dQ_sum + copies * elements;
  launch_D_kernel(p, D, /*clear_dQ=*/false, stream);
  clear_kernel<<<ceil_div(copies * elements / 4, 256), 256, 0, stream>>>(reinterpret_cast<float4*>(dQ_sum),
                                                                         copies * elements / 4);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Br + Bc) * pitch + Bc * PT_pitch) + 2 * sizeof(float) * Br;
  allow_shared_memory(mma_kernel, bytes);
  const int Tc = ceil_div(p.N_k, Bc), at_once = DETERMINISTIC ? copies : Tc;
  for (int first_j = 0; first_j < Tc; first_j += at_once) {
    const int tiles = Tc - first_j < at_once ? Tc - first_j : at_once;
    mma_kernel<<<p.B * p.H_kv * tiles, threads, bytes, stream>>>(p, D, dQ_sum, first_j);
  }
  dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, 256 / lanes), 256, 0, stream>>>(p, dQ_sum);
  return cudaGetLastError();
}
