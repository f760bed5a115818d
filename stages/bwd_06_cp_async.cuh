// Backward stage 6: cp_async
// idea:    copies under way while tensor cores work; dQ under the exponentials; a block for each query head
// types:   fp16, bf16
// needs:   sm_80
// after:   mma
// default: sm_80
// deterministic: on request
// tiles:   Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * max(Br, 64) + 16 * Br
// workspace: dQ_sum, L, D, dK_sum, dV_sum
// hbm:     4 * B * d * ((H * 5 ** (H > H_kv) + H_kv) * N_k + H * (N_q * (Tc + 3) + Tr * Br * (2 * Tc + 1)))
//
// The products and who makes them are mma's. What is new keeps the tensor cores from waiting:
//
// Copies. Q, dO, L and D have room for two tiles: cp.async brings the next one while this one is multiplied.
// L and D come from a first kernel, in whole tiles, L times log2(e). So P = 2^(scale * log2(e) * S - L) takes
// two instructions.
//
// dQ. The warps for dV make exponentials, and in mma those for dK wait for them meanwhile. Now these make dQ,
// alone and one tile late. P^T and dS^T have room for two tiles, too, and one barrier less is needed:
//
//   warps for dV                    warps for dK and dQ
//   -------------------- barrier: tile i is here, dS of tile i - 1 is done ---------------------
//   S^T = K Q^T                     dQ += dS K of tile i - 1
//   P^T (exponentials)              dP^T = V dO^T
//   -------------------------------- barrier: P is done ----------------------------------------
//   dV += P^T dO                    dS^T; dK += dS^T Q
//
// dQ_sum lies as the registers do: of each 16 x 8 fragment 4 numbers of lane 0, then 4 of lane 1, and so on.
// A lane adds them by one instruction where the GPU can (sm_90), a warp to 512 bytes in a row. The last
// kernel finds the rows of dQ again. There is room for whole tiles of Q: what lies past N_q, nobody reads.
//
// Heads. In mma a block walks along all query heads that read its key head (GQA): few blocks, and long ones.
// Here each query head has blocks of its own. If H > H_kv, what they have of dK and dV goes to HBM as it is,
// and one more kernel adds it up in the order of the heads: memory for 2 * B * H * N_k * d floats.
//
// Besides, dK and dV leave by way of shared memory (where K and V were), 16 bytes at a time. Causal: the
// blocks with most rows still come first, but of 16 heads at a time.
//
// Asked to be deterministic, it does as mma does: 8 copies of dQ_sum, and a launch for 8 tiles of keys.
//
// HBM traffic without caches (hbm, above, where L and D are only roughly in it): as in mma, but K and V once
// for each query head; and if H > H_kv, dK and dV of each written and read as floats.
//
// Changed from mma: where the copies, the barriers and dQ are; what is before and after the kernel. The
// products stay. The file is long for what is around them: three small kernels and the launches.
//
// Bound by the latency of its own instructions, as registers leave room for 8 warps, and still by barriers:
// tensor cores busy 39 % of the time, shared memory 48 %, issue slots 35 % (H200, bf16, B4 H12 N1024 d64
// causal).
#pragma once
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/exp2.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int width = (d + 15) / 16 * 16;          // d, rounded up to whole fragments: the rest are zeros
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next,
constexpr int PT_pitch = Br < 64 ? 64 : Br;        // and of the tile of P^T and dS^T
constexpr int keys = d <= 128 ? 32 : 16;           // rows of dK or dV per warp,
constexpr int strips = keys / 16;                  // in strips of 16
constexpr int warps = 2 * (Bc / keys), threads = 32 * warps;
constexpr int dQ_warps = warps / 2 / (Br / 32);    // of those for dK: share 32 rows of dQ,
constexpr int dQ_parts = (width / 16 + dQ_warps - 1) / dQ_warps;         // each with so many 16 columns
constexpr int copies = DETERMINISTIC ? 8 : 1;      // of dQ_sum
// Of the loop that makes dQ, so many steps are unrolled: all of them are faster, but need the most registers
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int dQ_steps = DETERMINISTIC ? 2 : Bc / 16;
#else
constexpr int dQ_steps = 2;
#endif
// The other kernels: 8 columns of a row a thread, so many threads a row and rows a block
constexpr int lanes = d <= 64 ? 8 : d <= 128 ? 16 : 32, block_rows = 256 / lanes;

// Where the element (row, col) of a tile is: pieces of 8 elements change places
__device__ __forceinline__ int at(int row, int col, int row_pitch = pitch) {
  return row * row_pitch + (col ^ row % 8 * 8);
}

// From the address of the element (row, col) that of (row + rows, col + cols): for rows a multiple of 8, and
// cols a sum of powers of 2, 16 or more, that col is not: then ^ adds, whatever the row has shuffled
__device__ __forceinline__ uint32_t beside(uint32_t address, int rows, int cols, int row_pitch = pitch) {
  return (address ^ 2 * (cols % 64)) + 2 * (rows * row_pitch + cols / 64 * 64);
}

// Start to copy rows [first, first + tile_rows) of `matrix` to `tile`, by all threads of the block together:
// 8 of them take 128 bytes of a row. Rows from N on and columns from d on become zeros.
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

// Two elements of a register, as floats
__device__ __forceinline__ float2 unpack(uint32_t both) {
  const ELEMENT* two = reinterpret_cast<const ELEMENT*>(&both);
  return make_float2(float(two[0]), float(two[1]));
}

// Four sums at a time, where the GPU can (sm_90)
__device__ __forceinline__ void atomic_add4(float* to, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(to), make_float4(x[0], x[1], x[2], x[3]));
#else
  for (int e = 0; e < 4; e++) atomicAdd(to + e, x[e]);
#endif
}

struct Sums {              // in HBM, all in float
  float* dQ;               // (copies, B, H, Tr * Br / 16, d / 8) fragments of 16 x 8, each (32 lanes, 4)
  float* L;                // (B, H, Tr * Br), to the base 2
  float* D;                // (B, H, Tr * Br)
  float *dK, *dV;          // (B, H, N_k, d): used if H > H_kv
};

// Zeros in dQ; L and D. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(256) prepare_kernel(BwdParams p, Sums sums) {
  const int N = ceil_div(p.N_q, Br) * Br, blocks = N / block_rows;       // `blocks` of a head
  const int bh = blockIdx.x / blocks, b = bh / p.H, h = bh % p.H;
  const int row = blockIdx.x % blocks * block_rows + threadIdx.x / lanes, k = threadIdx.x % lanes * 8;
  const int64_t from = (int64_t)bh * p.N_q + row, at = (int64_t)bh * N + row;

  float sum = 0.f;
  if (row < p.N_q && k < d) {
    const uint4 O = *reinterpret_cast<const uint4*>(p.O.head(b, h) + row * p.O.stride_n + k);
    const uint4 dO = *reinterpret_cast<const uint4*>(p.dO.head(b, h) + row * p.dO.stride_n + k);
    auto add = [&](uint32_t x, uint32_t y) {                             // 4
      const float2 a = unpack(x), b = unpack(y);
      sum += a.x * b.x + a.y * b.y;
    };
    add(O.x, dO.x);
    add(O.y, dO.y);
    add(O.z, dO.z);
    add(O.w, dO.w);
  }
  for (int distance = 1; distance < lanes; distance *= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
  if (k < d) {                                                           // 3
    for (int copy = 0; copy < copies; copy++) {
      float4* dQ = reinterpret_cast<float4*>(sums.dQ + (copy * (int64_t)p.B * p.H * N + at) * d + k);
      dQ[0] = make_float4(0.f, 0.f, 0.f, 0.f);
      dQ[1] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
  if (k > 0) return;
  const float L = row < p.N_q ? p.L[from] : -INFINITY;
  if (p.dL && row < p.N_q) sum -= p.dL[from];      // P_ij is also the derivative of L_i by S_ij
  sums.L[at] = LOG2_E * L;
  sums.D[at] = L == -INFINITY ? 0.f : sum;         // no key seen: P is 0, but dL may be infinite
}

// One block per tile of K and V, for tiles from first_j on. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) cp_async_kernel(BwdParams p, Sums sums, int first_j) {
  // 5: which tile of K and V. Causal: of 16 heads (so that the cache holds their Q, dO and dQ) those come
  // first that most rows see.
  const int Tr = ceil_div(p.N_q, Br), tiles = gridDim.x / (p.B * p.H), heads = min(p.B * p.H, 16);     // 1, 2
  const int first_head = blockIdx.x / (heads * tiles) * heads, block = blockIdx.x % (heads * tiles);
  const int heads_here = min(p.B * p.H - first_head, heads);
  const int j = first_j + (CAUSAL ? block / heads_here : block % tiles);
  const int bh = first_head + (CAUSAL ? block % heads_here : block / tiles);
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int group = lane / 4, pair = lane % 4 * 2;   // this lane's place in an accumulator
  const bool makes_dV = warp < warps / 2;            // else dK and dQ
  const int first_key = warp % (warps / 2) * keys;   // this warp's rows of the tile

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: for even and odd i
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* PT_smem = dO_smem + 2 * Br * pitch;       // Bc x Br, rows PT_pitch apart, twice: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + 2 * Bc * PT_pitch);     // Br, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice

  auto start_copies = [&](int i) {
    copy_tile(Q_smem + i % 2 * Br * pitch, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);       // 9
    copy_tile(dO_smem + i % 2 * Br * pitch, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
    const int t = threadIdx.x % (Br / 4) * 4;
    const int64_t from = ((int64_t)bh * Tr + i) * Br + t;
    if (threadIdx.x < Br / 4) cp_async_16(shared_address(L_smem + i % 2 * Br + t), sums.L + from);
    else if (threadIdx.x < Br / 2) cp_async_16(shared_address(D_smem + i % 2 * Br + t), sums.D + from);
    cp_async_commit();
  };

  // causal: the first row that sees key j * Bc is j * Bc - diagonal; the tiles of Q before it see none
  const int first_i = CAUSAL ? max(j * Bc - p.diagonal, 0) / Br : 0;
  if (first_i < Tr) {
    copy_tile(K_smem, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);          // 6
    copy_tile(V_smem, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    start_copies(first_i);
  }

  // Where this lane points ldmatrix to, in the first of the fragments that it reads: lanes 0 to 7 to the rows
  // of an 8 x 8 matrix, and so on. a: upper left, lower left, upper right, lower right. b: upper left, upper
  // right, lower left, lower right.
  const int a_row = lane % 16, a_col = lane / 16 * 8;
  const int b_row = lane / 16 * 8 + lane % 8, b_col = lane / 8 % 2 * 8;
  const int dQ_warp = warp % (warps / 2), dQ_row = dQ_warp / dQ_warps * 32, dQ_col = dQ_warp % dQ_warps * 16;
  const uint32_t left = shared_address((makes_dV ? K_smem : V_smem) + at(first_key + a_row, a_col));
  const uint32_t right_at = shared_address((makes_dV ? Q_smem : dO_smem) + at(b_row, b_col));
  const uint32_t factor_at = shared_address((makes_dV ? dO_smem : Q_smem) + at(a_row, a_col));
  const uint32_t dS_at = shared_address(PT_smem + at(b_row, dQ_row + b_col, PT_pitch));
  const uint32_t K_at = shared_address(K_smem + at(a_row, dQ_col + a_col));

  // 15: dS_ij K_j, to HBM, beside other blocks: 32 rows and dQ_parts times 16 columns a warp, 4 times at once
  auto add_dQ = [&](int i) {
    const uint32_t dS = dS_at + i % 2 * 2 * Bc * PT_pitch;
    float* dQ = sums.dQ + ((j % copies * (int64_t)p.B * p.H + bh) * Tr + i) * Br * d + 4 * lane;
    #pragma unroll
    for (int part = 0; part < dQ_parts; part += 4) {
      float dQ_reg[2][8][4] = {};
      #pragma unroll dQ_steps
      for (int k = 0; k < Bc / 16; k++) {
        uint32_t dS_reg[2][4];
        #pragma unroll
        for (int s = 0; s < 2; s++) ldmatrix_x4_trans(dS_reg[s], beside(dS, 16 * k, 16 * s, PT_pitch));
        #pragma unroll
        for (int n = 0; n < 4 && part + n < dQ_parts; n++) {
          const int col = 16 * dQ_warps * (part + n);
          if (width % (16 * dQ_warps) && dQ_col + col >= width) continue;
          uint32_t K_reg[4];
          ldmatrix_x4_trans(K_reg, beside(K_at, 16 * k, col));
          #pragma unroll
          for (int s = 0; s < 2; s++) mma_m16n16k16(dQ_reg[s][2 * n], dQ_reg[s][2 * n + 1], dS_reg[s], K_reg);
        }
      }
      #pragma unroll
      for (int n = 0; n < 4 && part + n < dQ_parts; n++) {
        const int col = dQ_col + 16 * dQ_warps * (part + n);
        if (width % (16 * dQ_warps) && col >= width) continue;
        #pragma unroll
        for (int s = 0; s < 2; s++) {
          float* to = dQ + (dQ_row + 16 * s) * d + 16 * col;             // 16 numbers for each column
          atomic_add4(to, dQ_reg[s][2 * n]);
          if (width == d || col + 8 < d) atomic_add4(to + 16 * 8, dQ_reg[s][2 * n + 1]);
        }
      }
    }
  };

  float sum_reg[strips][width / 8][4] = {};                              // 7: dV or dK
  const float scale2 = p.scale * LOG2_E;
  for (int i = first_i; i < Tr; i++) {                                   // 8
    cp_async_wait<0>();
    __syncthreads();                      // the tiles are here, and all are done with the last ones
    if (i + 1 < Tr) start_copies(i + 1);
    if (!makes_dV && i > first_i) add_dQ(i - 1);

    // 10, 13: S^T = K Q^T, or dP^T = V dO^T
    const uint32_t right = right_at + i % 2 * 2 * Br * pitch;
    float X_reg[strips][Br / 8][4] = {};
    #pragma unroll 4                      // 64 columns: then the swizzle's addresses start again
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

    uint32_t X_half[strips][Br / 8][2];   // P^T or dS^T, rounded: as it is, the left factor of 12 and 16
    auto X_at = [&](int s, int n, int r) {         // and where two of them are in shared memory
      ELEMENT* X = PT_smem + i % 2 * Bc * PT_pitch +
                   at(first_key + 16 * s + 8 * r + group, 8 * n + pair, PT_pitch);
      return reinterpret_cast<uint32_t*>(X);
    };
    auto round_and_store = [&]() {
      #pragma unroll
      for (int n = 0; n < Br / 8; n++) {
        #pragma unroll
        for (int s = 0; s < strips; s++) {
          #pragma unroll
          for (int r = 0; r < 2; r++) {   // this lane's two rows of a strip: d[0], d[1] and d[2], d[3]
            X_half[s][n][r] = pack<ELEMENT>(X_reg[s][n][2 * r], X_reg[s][n][2 * r + 1]);
            *X_at(s, n, r) = X_half[s][n][r];
          }
        }
      }
    };
    if (makes_dV) {                                                      // 11: P_ij
      const bool masked = (i + 1) * Br > p.N_q || (j + 1) * Bc > p.N_k ||
                          (CAUSAL && (j + 1) * Bc - 1 > i * Br + p.diagonal);
      #pragma unroll
      for (int n = 0; n < Br / 8; n++) {
        const float2 L = *reinterpret_cast<const float2*>(L_smem + i % 2 * Br + 8 * n + pair);
        #pragma unroll
        for (int s = 0; s < strips; s++) {
          #pragma unroll
          for (int e = 0; e < 4; e++)
            X_reg[s][n][e] = fast_exp2(scale2 * X_reg[s][n][e] - (e % 2 ? L.y : L.x));
        }
      }
      if (masked) {
        #pragma unroll
        for (int n = 0; n < Br / 8; n++) {
          #pragma unroll
          for (int s = 0; s < strips; s++) {
            #pragma unroll
            for (int e = 0; e < 4; e++) {
              const int row = i * Br + 8 * n + pair + e % 2;
              const int col = j * Bc + first_key + 16 * s + e / 2 * 8 + group;
              const bool visible = row < p.N_q && col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
              if (!visible) X_reg[s][n][e] = 0.f;
            }
          }
        }
      }
      round_and_store();
    }
    __syncthreads();                      // the warps for dK now read P
    if (!makes_dV) {                                                     // 14: dS_ij, in the place of P_ij
      #pragma unroll
      for (int n = 0; n < Br / 8; n++) {
        const float2 D = *reinterpret_cast<const float2*>(D_smem + i % 2 * Br + 8 * n + pair);
        #pragma unroll
        for (int s = 0; s < strips; s++) {
          #pragma unroll
          for (int r = 0; r < 2; r++) {
            const float2 P = unpack(*X_at(s, n, r));
            float& x = X_reg[s][n][2 * r], &y = X_reg[s][n][2 * r + 1];
            x = P.x * (x - D.x);
            y = P.y * (y - D.y);
          }
        }
      }
      round_and_store();
    }

    // 12, 16: dV += P^T dO, or dK += dS^T Q
    const uint32_t factor = factor_at + i % 2 * 2 * Br * pitch;
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
  }                                                                      // 17
  __syncthreads();                        // the last dS is there
  if (!makes_dV && first_i < Tr) add_dQ(Tr - 1);

  if (p.H > p.H_kv) {                     // 18: this head's part
    float* sum = (makes_dV ? sums.dV : sums.dK) + (int64_t)bh * p.N_k * d;
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int col = j * Bc + first_key + 16 * s + 8 * r + group;
        if (col >= p.N_k) continue;
        #pragma unroll
        for (int n = 0; n < d / 8; n++)
          *reinterpret_cast<float2*>(sum + (int64_t)col * d + 8 * n + pair) =
              make_float2(sum_reg[s][n][2 * r], sum_reg[s][n][2 * r + 1]);
      }
    }
    return;
  }
  __syncthreads();                        // all are done with K and V, which make room for dK and dV
  ELEMENT* sum_smem = makes_dV ? V_smem : K_smem;
  const float scale = makes_dV ? 1.f : p.scale;
  #pragma unroll
  for (int s = 0; s < strips; s++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      #pragma unroll
      for (int n = 0; n < d / 8; n++) {
        const float (&x)[4] = sum_reg[s][n];
        *reinterpret_cast<uint32_t*>(sum_smem + at(first_key + 16 * s + 8 * r + group, 8 * n + pair)) =
            pack<ELEMENT>(scale * x[2 * r], scale * x[2 * r + 1]);
      }
    }
  }
  __syncwarp();                           // a warp reads the rows that it wrote, now 16 bytes at a time
  const Tensor& out = makes_dV ? p.dV : p.dK;
  const int k = lane % lanes * 8;
  for (int row = first_key + lane / lanes; row < first_key + keys; row += 32 / lanes) {
    if (j * Bc + row < p.N_k && k < d)
      *reinterpret_cast<uint4*>(out.head(b, h) + (j * Bc + row) * out.stride_n + k) =
          *reinterpret_cast<const uint4*>(sum_smem + at(row, k));
  }
}

// Eight numbers, times scale and rounded, to element `at` of `matrix`, a multiple of 8. (Counted in pieces of
// 16 bytes. In elements nvcc takes it for unaligned, and stores 4 times 4 bytes.)
__device__ __forceinline__ void store8(ELEMENT* matrix, int64_t at, const float (&x)[8], float scale) {
  uint32_t rounded[4];
  for (int e = 0; e < 4; e++) rounded[e] = pack<ELEMENT>(scale * x[2 * e], scale * x[2 * e + 1]);
  reinterpret_cast<uint4*>(matrix)[at / 8] = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
}

// dQ = scale * sums.dQ. Of 8 columns, 4 lanes had 2 each.
__global__ void __launch_bounds__(256) dQ_kernel(BwdParams p, Sums sums) {
  const int blocks = ceil_div(p.N_q, block_rows), bh = blockIdx.x / blocks, N = ceil_div(p.N_q, Br) * Br;
  const int row = blockIdx.x % blocks * block_rows + threadIdx.x / lanes, k = threadIdx.x % lanes * 8;
  if (row >= p.N_q || k >= d) return;
  float sum[8] = {};
  for (int copy = 0; copy < copies; copy++) {
    const float* from = sums.dQ + ((copy * (int64_t)p.B * p.H + bh) * N + row / 16 * 16) * d + 16 * k +
                        row % 8 * 16 + row % 16 / 8 * 2;
    for (int e = 0; e < 8; e += 2) {
      const float2 x = *reinterpret_cast<const float2*>(from + 2 * e);
      sum[e] += x.x;
      sum[e + 1] += x.y;
    }
  }
  store8(p.dQ.head(bh / p.H, bh % p.H), row * p.dQ.stride_n + k, sum, p.scale);
}

// dK and dV: the sums over the query heads of a key head, in their order
__global__ void __launch_bounds__(256) dKV_kernel(BwdParams p, Sums sums) {
  const int blocks = ceil_div(p.N_k, block_rows), bh = blockIdx.x / blocks;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, heads_per_key = p.H / p.H_kv;
  const int row = blockIdx.x % blocks * block_rows + threadIdx.x / lanes, k = threadIdx.x % lanes * 8;
  if (row >= p.N_k || k >= d) return;
  auto add_up = [&](const float* parts, const Tensor& out, float scale) {
    float sum[8] = {};
    for (int h = 0; h < heads_per_key; h++) {
      const float* from = parts + (((int64_t)bh * heads_per_key + h) * p.N_k + row) * d + k;
      for (int e = 0; e < 8; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + e);
        sum[e] += x.x;
        sum[e + 1] += x.y;
        sum[e + 2] += x.z;
        sum[e + 3] += x.w;
      }
    }
    store8(out.head(b, h_kv), row * out.stride_n + k, sum, scale);
  };
  add_up(sums.dK, p.dK, p.scale);
  add_up(sums.dV, p.dV, 1.f);
}

// Rows of L and D, and of dQ in each copy; numbers in dK and in dV
int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * ceil_div(p.N_q, Br) * Br; }
int64_t numbers_of_K(const BwdParams& p) { return p.H > p.H_kv ? (int64_t)p.B * p.H * p.N_k * d : 0; }

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (copies * d + 2) + 2 * numbers_of_K(p));
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  Sums sums;
  sums.dQ = static_cast<float*>(p.workspace);
  sums.L = sums.dQ + rows_of_Q(p) * copies * d;
  sums.D = sums.L + rows_of_Q(p);
  sums.dK = sums.D + rows_of_Q(p);
  sums.dV = sums.dK + numbers_of_K(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, sums);
  const size_t bytes = sizeof(ELEMENT) * 2 * ((Bc + 2 * Br) * pitch + Bc * PT_pitch) + sizeof(float) * 4 * Br;
  allow_shared_memory(cp_async_kernel, bytes);
  const int Tc = ceil_div(p.N_k, Bc), at_once = DETERMINISTIC ? copies : Tc;
  for (int first_j = 0; first_j < Tc; first_j += at_once) {
    const int tiles = Tc - first_j < at_once ? Tc - first_j : at_once;
    cp_async_kernel<<<p.B * p.H * tiles, threads, bytes, stream>>>(p, sums, first_j);
  }
  dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, block_rows), 256, 0, stream>>>(p, sums);
  if (p.H > p.H_kv) dKV_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, block_rows), 256, 0, stream>>>(p, sums);
  return cudaGetLastError();
}
