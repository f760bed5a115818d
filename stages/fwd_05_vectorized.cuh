// Forward stage 5: vectorized
// idea:    float4, 8 x 8 numbers of S a thread, operands transposed: near what fp32 multipliers give
// types:   fp32
// needs:   any GPU
// after:   flash2
// default: any GPU
// tiles:   Br=128 Bc=64; d > 64: Br=128 Bc=32; rows < 65536: Br=64 Bc=64; d > 128: Br=64 Bc=32;
//          32768 <= rows < 65536 and d == 64 and not causal: Br=128 Bc=32
// limits:  Br in (32, 64, 128); Bc in (32, 64)
// shared:  4 * (Br * d + Bc * (d + (d + 31) // 32 * 32) + Br * Bc)
// hbm:     4 * B * H * (2 * Tr * N_k * d + N_q * (2 * d + 1))
//
// The algorithm is flash2's, FlashAttention-2's Algorithm 1. What changes is how a thread gets its numbers.
//
// Register tiles. In flash2 a thread has 8 x 2 numbers of S: 10 loads from shared memory for 16
// multiplications. Here it has 8 x 8 with the largest tiles (8 x 4 for d > 64, as O takes more registers;
// half as many in smaller calls and for d > 128), and a load brings four numbers: 4 loads for 64. One step of
// S = Q K^T is the outer product of a column of Q and a row of K^T, 8 numbers each (common/outer_product.cuh); one
// step of O += P V that of a column of P and a row of V.
//
// So Q, K and P lie transposed in shared memory: then a float4 is four rows of Q, or four keys, at the same
// k. (With float4s along d, the loads would be as many. But at each step all products need the same one of
// their four numbers: the first, say, of each, an even-numbered register. Registers seem to be what the
// multipliers wait for; a kernel like this one with two such operands took 2 to 6 %
// longer.)
//
// No bank conflicts: the lanes of a warp are 4 x 8 (common/conflict_free.cuh), and where a store would meet one,
// some columns of the tile change places (`swap`). The checker shows the least possible wavefronts in each
// line.
//
//   - The scale is multiplied into Q once, with log2(e): S is then an exponent of 2 instead of e, and 2^x is
//     one instruction.
//   - A warp owns whole rows, 8 lanes each, so a maximum takes 3 shuffles; sums are added up at the end only.
//   - The mask is looked at in those tiles alone that it cuts, or that reach past the last key. Tiles that no
//     row sees are not computed; and the tiles of Q that see most keys start first.
//   - With registers to spare (`ahead`), the next tile of K is on its way while the multiplications run.
//   - Small calls get smaller tiles (`tiles`; rows is B * H * N_q): or else too few blocks for the GPU.
//     Between small and large, without a mask, Br = 128 and Bc = 32: three blocks fit on a multiprocessor,
//     396 on an H200, for up to 50688 rows at once.
//
// HBM traffic without caches (hbm, above): as in flash2; half as much of K and V where Br is twice flash2's.
//
// Changed from flash2: nearly every line, as a tile is loaded, held and multiplied differently; the order of
// the steps and their names stay.
//
// Bound by how fast registers reach the multipliers, it seems: these are busy 62 % of the time, issue slots
// 76 %, shared memory 52 %, HBM 5 % (H200, B4 H12 N1024 d64 causal). PyTorch's product of large fp32 matrices
// gets 77 % of the multipliers.
#pragma once
#include "common/conflict_free.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/outer_product.cuh"
#include "common/vector.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int rows = Br >= 128 && d <= 128 ? 8 : 4;  // rows of S and O per thread
constexpr int cols = Bc / 8;                         // columns of S per thread
constexpr int dims = (d + 31) / 32 * 4;              // columns of O per thread
constexpr int width = 8 * dims;                      // d, rounded up
constexpr int warps = Br / (4 * rows), threads = 32 * warps;
constexpr bool lean = rows == 4 ? d <= 64 : d == 64 && Bc == 32 && !CAUSAL;    // will 168 registers do?
constexpr int resident = lean ? 384 : 256;           // threads that a multiprocessor has registers for
constexpr int blocks = resident > threads ? resident / threads : 1;
constexpr bool ahead = d <= 64;                      // are there registers left for the next tile of K?
constexpr int unroll_S = (rows == 4 && d > 64) || (rows == 8 && lean) ? 2 : 1;      // as measured
constexpr int unroll_P = rows == 4 && d <= 64 ? 2 : 1;

// What a thread carries of a tile of K or V, from HBM to shared memory
constexpr int pieces = Bc * width / 4 / threads;
struct Pieces { float4 x[pieces]; };

// A warp takes 32 / L rows x L float4s of a tile at a time. Where is this lane the n-th time? (What depends
// on n is kept apart from what depends on the thread: so the compiler can put it into constants.)
template <int L>
__device__ __forceinline__ int2 place(int n, int tile_rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int down = tile_rows * L / 32;                   // such pieces above each other
  const int at_once = warps < down ? warps : down, times = down / at_once;
  const int row = 32 / L * (warp % at_once) + lane / L + 32 / L * at_once * (n % times);
  const int k = L * (warp / at_once) + lane % L + L * (warps / at_once) * (n / times);
  return make_int2(row, k);                              // k counts float4s
}

// Rows from `left` on, and columns from d on, are zeros.
template <int L>
__device__ __forceinline__ void fetch(Pieces& next, const float* tile, int64_t stride_n, int left) {
  #pragma unroll
  for (int n = 0; n < pieces; n++) {
    const int2 at = place<L>(n, Bc);
    const bool inside = at.x < left && (width == d || 4 * at.y < d);
    next.x[n] = inside ? load4(tile + at.x * stride_n + 4 * at.y) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

__device__ __forceinline__ void put_K(float* K_smem, const Pieces& next) {
  #pragma unroll
  for (int n = 0; n < pieces; n++) {
    const int2 at = place<2>(n, Bc);
    if (width == d || 4 * at.y < d) store_transposed(K_smem, Bc, at.x, at.y, next.x[n]);
  }
}

__device__ __forceinline__ void put_V(float* V_smem, const Pieces& next) {
  #pragma unroll
  for (int n = 0; n < pieces; n++) {
    const int2 at = place<8>(n, Bc);
    const float4 x = next.x[n];
    store4(V_smem + at.x * width + 4 * at.y, x.x, x.y, x.z, x.w);
  }
}

// Column c of row x of P_smem is at c ^ P_swap(x), so that the 8 float4s which a quarter of a warp stores at
// a time, two in each of four rows, fall into different banks.
// --- the swap
__device__ __forceinline__ int P_swap(int x) { return x % 4 * 8; }
// ---

// Over the 8 lanes that share a row, which differ in the bits 0, 2 and 3 (lane_col8)
__device__ __forceinline__ float max_of_8(float x) {
  for (int distance : {1, 4, 8}) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  return x;
}

__device__ __forceinline__ float sum_of_8(float x) {
  for (int distance : {1, 4, 8}) x += __shfl_xor_sync(0xffffffff, x, distance);
  return x;
}

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, blocks) vectorized_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H;                 // 1, 2
  const int i = CAUSAL ? Tr - 1 - blockIdx.x / heads : blockIdx.x % Tr;  // 3; causal: the last sees most keys
  const int bh = CAUSAL ? blockIdx.x % heads : blockIdx.x / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  // Rows and columns come in fours; first_row and first_col are where this thread's first four start.
  const int first_row = threadIdx.x / 32 * 4 * rows + 4 * lane_row4(), first_col = 4 * lane_col8();
  auto row_of = [&](int r) { return first_row + r / 4 * 16 + r % 4; };   // this thread's r-th row of a tile
  auto col_of = [&](int c) { return first_col + c / 4 * 32 + c % 4; };

  extern __shared__ __align__(16) float smem[];
  float* Q_smem = smem;                   // d x Br: transposed
  float* K_smem = Q_smem + Br * d;        // d x Bc: transposed
  float* V_smem = K_smem + Bc * d;        // Bc x width
  float* P_smem = V_smem + Bc * width;    // Bc x Br: transposed
  const float* Q = p.Q.head(b, h) + (int64_t)i * Br * p.Q.stride_n;
  const float* K = p.K.head(b, h_kv);
  const float* V = p.V.head(b, h_kv);

  const float scale = p.scale * LOG2_E;   // into Q at once: e^x = 2^(x log2(e))
  for (int n = 0; n < Br * width / 4 / threads; n++) {                   // 4
    const int2 at = place<2>(n, Br);
    if (4 * at.y >= d) continue;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (i * Br + at.x < p.N_q) x = load4(Q + at.x * p.Q.stride_n + 4 * at.y);
    store_transposed(Q_smem, Br, at.x, at.y, make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w));
  }
  Pieces next;
  fetch<2>(next, K, p.K.stride_n, p.N_k);
  put_K(K_smem, next);
  __syncthreads();

  float O_reg[rows][dims] = {}, m[rows], l[rows];                        // 5
  #pragma unroll
  for (int r = 0; r < rows; r++) {
    m[r] = -INFINITY;
    l[r] = 0.f;
  }

  const int keys = CAUSAL ? min(p.N_k, (i + 1) * Br + p.diagonal) : p.N_k;
  for (int j = 0; j * Bc < keys; j++) {                                  // 6
    float S_reg[rows][cols] = {};                                        // 8: S_ij = Q_i K_j^T
    // --- S_ij, from Q_smem and K_smem
    const float* Q_at = Q_smem;
    const float* K_at = K_smem;
    #pragma unroll (unroll_S)
    for (int k8 = 0; k8 < d; k8 += 8) {
      #pragma unroll
      for (int k = 0; k < 8; k++) {
        float query[rows], key[cols];
        load(query, Q_at + k * Br, first_row, 16, swizzle_of(k));
        load(key, K_at + k * Bc, first_col, 32, swizzle_of(k));
        add_outer_product<(cols < rows)>(S_reg, query, key);     // 8 x 4: along the rows, as measured
      }
      Q_at += 8 * Br;
      K_at += 8 * Bc;
    }
    // ---
    const bool masked = (j + 1) * Bc > p.N_k || (CAUSAL && (j + 1) * Bc - 1 > i * Br + p.diagonal);
    if (masked) {
      #pragma unroll
      for (int r = 0; r < rows; r++) {
        #pragma unroll
        for (int c = 0; c < cols; c++) {
          const int row = i * Br + row_of(r), col = j * Bc + col_of(c);
          const bool visible = col < p.N_k && (!CAUSAL || col <= row + p.diagonal);
          if (!visible) S_reg[r][c] = -INFINITY;
        }
      }
    }

    #pragma unroll
    for (int r = 0; r < rows; r++) {                                     // 9
      float m_new = m[r];
      #pragma unroll
      for (int c = 0; c < cols; c++) m_new = fmaxf(m_new, S_reg[r][c]);
      m_new = max_of_8(m_new);
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      const float alpha = fast_exp2(m[r] - shift);
      m[r] = m_new;
      l[r] *= alpha;
      #pragma unroll
      for (int c = 0; c < cols; c++) {
        S_reg[r][c] = fast_exp2(S_reg[r][c] - shift);                    // P
        l[r] += S_reg[r][c];
      }
      #pragma unroll
      for (int c = 0; c < dims; c++) O_reg[r][c] *= alpha;               // 10: e^(m - m_new) O
    }
    #pragma unroll
    for (int c = 0; c < cols; c++) {
      // The row of P_smem for key col_of(c). It is not col_of(c) itself: like this, x % 4 is known when the
      // loop over x below is unrolled, and with it P_swap(x).
      const int x = lane_col8() + c % 4 * 8 + c / 4 * 32;
      // --- P, four numbers at a time
      #pragma unroll
      for (int r = 0; r < rows; r += 4) {
        store4(P_smem + x * Br + (row_of(r) ^ P_swap(lane_col8())),
               S_reg[r][c], S_reg[r + 1][c], S_reg[r + 2][c], S_reg[r + 3][c]);
      }
      // ---
    }

    fetch<8>(next, V, p.V.stride_n, p.N_k - j * Bc);                     // 7
    put_V(V_smem, next);
    __syncthreads();                      // V_j is there; and all are done with K_j
    K += Bc * p.K.stride_n;
    V += Bc * p.V.stride_n;
    if (ahead) fetch<2>(next, K, p.K.stride_n, p.N_k - (j + 1) * Bc);

    const float* P_at = P_smem;
    #pragma unroll (unroll_P)
    for (int y = 0; y < Bc / 8; y++) {                                   // 10: + P~_ij V_j
      #pragma unroll
      for (int x = 0; x < 8; x++) {       // row 8 * y + x of P_smem is that of this key:
        const int col = 4 * x + y % 4 + y / 4 * 32;
        float P[rows], value[dims];
        load(P, P_at + x * Br, first_row, 16, P_swap(x));
        load(value, V_smem + col * width, first_col, 32);
        add_outer_product(O_reg, P, value);
      }
      P_at += 8 * Br;
    }

    if (!ahead) fetch<2>(next, K, p.K.stride_n, p.N_k - (j + 1) * Bc);
    put_K(K_smem, next);
    __syncthreads();                      // K_j+1 is there; and all are done with V_j
  }                                                                      // 11

  float* O = p.O.head(bh / p.H, bh % p.H);
  #pragma unroll
  for (int r = 0; r < rows; r++) {
    const int row = i * Br + row_of(r);
    l[r] = sum_of_8(l[r]);
    if (row >= p.N_q) continue;
    const float factor = l[r] == 0.f ? 0.f : 1.f / l[r];
    #pragma unroll
    for (int c = 0; c < dims; c += 4) {                                  // 12, 14
      const int k = col_of(c);
      if (k >= d) continue;
      store4(O + row * p.O.stride_n + k, factor * O_reg[r][c], factor * O_reg[r][c + 1],
             factor * O_reg[r][c + 2], factor * O_reg[r][c + 3]);
    }
    if (first_col == 0)                                                  // 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(l[r]));
  }
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(float) * (Br * d + Bc * d + Bc * width + Br * Bc);
  allow_shared_memory(vectorized_kernel, bytes);
  vectorized_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
