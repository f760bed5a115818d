// Backward stage 8: mma
// idea:    the five products on tensor cores; P and dS through shared memory
// types:   fp16, bf16
// needs:   sm_80
// after:   recompute
// deterministic: no
// tiles:   Br=64 Bc=64
// limits:  Br in (32, 64, 128); Bc == Br
// shared:  4 * (Br + Bc) * ((d + 63) // 64 * 64) + 4 * Br * max(Bc, 64)
// workspace: dQ_accum, D
// hbm:     B * (8 * H_kv * N_k * d + H * N_q * (Tc * (12 * d + 16) + 14 * d + 8))
// predicted: 8x at d=64 and d=128: tensor cores multiply, and shared memory holds half the bytes
// measured: 3.93x at d=64 causal, 3.74x full, 5.65x at d=128 causal, 5.90x full (H200, bf16 beside recompute
//          in fp32, N=4096; make readme)
//
// FlashAttention-2's Algorithm 2, as in recompute, with its five products on tensor cores. What the forward
// stages mma and swizzle have found is taken from there: fragments, ldmatrix, tiles without bank conflicts.
// Five products of the same kind are worth a function (common/product.cuh):
//
//   multiply(S_reg, width, as_it_lies(Q_smem, ..), transposed(K_smem, ..))       S_ij += Q_i K_j^T
//
// adds A B to an accumulator, with A and B from shared memory. Which of them is to be transposed is all that
// the five products differ in, and ldmatrix does that on the way:
//
//            result       A                   B                   depth
//   line 10  S_ij         Q_i                 K_j, transposed     d
//   line 13  dP_ij        dO_i                V_j, transposed     d
//   line 12  dV_j         P_ij, transposed    dO_i                Br
//   line 16  dK_j         dS_ij, transposed   Q_i                 Br
//   line 15  dQ_i         dS_ij               K_j                 Bc
//
// Each result has 64 rows by default, and is spread over the warps in the same way: 4 strips of 16 rows, and
// 2 warps that share a strip's columns:
//
//   S_ij, dP_ij                  dV_j, dK_j, dQ_i: every other 16 columns
//   +--------+--------+          +----+----+----+----+
//   | warp 0 | warp 4 | 16 rows  | 0  | 4  | 0  | 4  |
//   +--------+--------+          +----+----+----+----+
//   | warp 1 | warp 5 |          | 1  | 5  | 1  | 5  |
//   +--------+--------+          +----+----+----+----+
//   | warp 2 | warp 6 |          | 2  | 6  | 2  | 6  |
//   +--------+--------+          +----+----+----+----+
//   | warp 3 | warp 7 |          | 3  | 7  | 3  | 7  |
//   +--------+--------+          +----+----+----+----+
//
// P and dS are made where S and dP are, in registers, a row's numbers in 4 lanes. But dV and dK need them by
// columns, and of all rows: so they go to shared memory, rounded to 16 bits, and come back transposed. L and
// D are read once for each of a lane's two rows.
//
// dQ is summed in float, in dQ_accum (B, H, N_q, d), and convert_kernel scales and rounds it at the end. To
// add to a dQ of 16 bits would round once for each tile of keys.
//
// HBM traffic without caches (hbm, above): as in recompute, with 2 bytes an element; L and D are read by two
// warps. dQ_accum has 4 bytes an element: it is set to 0, added to Tc times (read and written), and read
// once.
//
// Changed from recompute: the types, the products, where P and dS are, and dQ_accum.
//
// Bound by waiting: a warp waits 36 % of its time for global memory, and there are 8 warps on a
// multiprocessor. Meanwhile the tensor cores are busy 13 % of the time, shared memory 29 % (H200, bf16, B4
// H12 N1024 d64 causal). That is much for so few products: of each B a warp uses what it reads for 16 rows
// only, so that two mma.m16n8k16 take 512 bytes of B; P and dS are written once and read three times.
#pragma once
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/product.cuh"
#include "common/rowsum.cuh"
#include "common/strips.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next,
constexpr int P_pitch = Bc < 64 ? 64 : Bc;         // and of the tiles of P and dS
constexpr int warp_rows = 16, strips = warp_rows / 16;       // of each result, per warp
constexpr int parts = 2;                           // warps that share these rows,
constexpr int warps = parts * (Br / warp_rows), threads = 32 * warps;
constexpr int cols = Bc / parts;                   // each with so many columns of S and dP,
constexpr int dims = (width / 16 + parts - 1) / parts * 16;  // and of dQ, dK and dV

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

__global__ void __launch_bounds__(256) clear_kernel(float* dQ_accum, int64_t n) {          // line 3
  const int64_t t = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (t < n) dQ_accum[t] = 0.f;
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(BwdParams p, const float* D, float* dQ_accum) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % (Br / 16) * 16, part = warp / (Br / 16);   // of each result

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same
  ELEMENT* dO_smem = Q_smem + Br * pitch;   // Br x d, the same
  ELEMENT* P_smem = dO_smem + Br * pitch;   // Br x Bc, rows P_pitch apart
  ELEMENT* dS_smem = P_smem + Br * P_pitch; // Br x Bc, the same
  for (int t = threadIdx.x; t < 2 * (Br + Bc) * pitch && width < pitch; t += threads) smem[t] = 0.f;
  __syncthreads();                          // what is past d in a row, load_tile leaves as it is
  load_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
  load_tile<threads>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[strips][dims / 8][4] = {}, dV_reg[strips][dims / 8][4] = {};                // line 7
  // Of dK, dV and dQ, and so of the operands B that make them, every parts-th 16 columns are this warp's.
  auto part_of = [&](const ELEMENT* tile) { return as_it_lies(tile, pitch, 0, 16 * part, parts); };
  auto dim = [&](int col) { return 16 * (part + col / 16 * parts) + col % 16; };

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L, D and dQ_accum
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      __syncthreads();                    // all are done with the last tiles, which are now overwritten
      load_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);  // line 9
      load_tile<threads>(dO_smem, tile_index, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
      __syncthreads();                    // nobody reads before everybody has written

      float S_reg[strips][cols / 8][4] = {}, dP_reg[strips][cols / 8][4] = {};
      multiply(S_reg, width, as_it_lies(Q_smem, pitch, warp_row),        // line 10: S_ij = Q_i K_j^T
               transposed(K_smem, pitch, cols * part));
      multiply(dP_reg, width, as_it_lies(dO_smem, pitch, warp_row),      // line 13: dP_ij = dO_i V_j^T
               transposed(V_smem, pitch, cols * part));

      float L_row[2], D_row[2];             // of the two rows that this lane has
      for (int r = 0; r < 2; r++) {
        const int row = i * Br + warp_row + lane / 4 + 8 * r;
        L_row[r] = row < p.N_q ? p.L[first_row + row] : 0.f;             // line 9
        D_row[r] = row < p.N_q ? D[first_row + row] : 0.f;
      }
      for_both(S_reg, dP_reg, [&](float& S, float& dP, int r, int c) {
        const int row = i * Br + warp_row + r, col = j * Bc + cols * part + c;
        const float x = p.scale * S;
        S = mask.sees(row, col) ? fast_exp2(LOG2_E * (mask.score(x, row, col) - L_row[r / 8])) : 0.f;
        dP = mask.through_score(S * (dP - D_row[r / 8]), x, row, col);   // lines 11, 14: P_ij, dS_ij
      });
      auto store = [&](ELEMENT* tile, float (&acc)[strips][cols / 8][4]) {
        for_each_pair(acc, [&](uint32_t packed, int row, int col) {
          *reinterpret_cast<uint32_t*>(tile + swizzled(warp_row + row, cols * part + col, P_pitch)) = packed;
        });
      };
      store(P_smem, S_reg);
      store(dS_smem, dP_reg);
      __syncthreads();                    // a warp now reads columns of P and dS, which all warps wrote

      multiply(dV_reg, Br, transposed(P_smem, P_pitch, 0, warp_row), part_of(dO_smem));           // line 12
      multiply(dK_reg, Br, transposed(dS_smem, P_pitch, 0, warp_row), part_of(Q_smem));           // line 16

      float dQ_reg[strips][dims / 8][4] = {};                            // line 15: dS_ij K_j
      multiply<2>(dQ_reg, Bc, as_it_lies(dS_smem, P_pitch, warp_row), part_of(K_smem));
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + warp_row + r, k = dim(c);
        if (row < p.N_q && k < d) atomicAdd(dQ_accum + (first_row + row) * d + k, x);
      });
    }                                                                    // line 17
  }

  auto store = [&](const Tensor& out, float (&acc)[strips][dims / 8][4]) {                 // line 18
    for_each_pair(acc, [&](uint32_t packed, int r, int c) {
      const int col = j * Bc + warp_row + r, k = dim(c);
      if (col < p.N_k && k < d)
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + k) = packed;
    });
  };
  for_each(dK_reg, [&](float& x, int, int) { x *= p.scale; });
  store(p.dK, dK_reg);
  store(p.dV, dV_reg);
}

__global__ void __launch_bounds__(256) convert_kernel(BwdParams p, const float* dQ_accum) {
  const int64_t t = (int64_t)blockIdx.x * 256 + threadIdx.x, row = t / d;
  if (row >= (int64_t)p.B * p.H * p.N_q) return;
  ELEMENT* dQ = p.dQ.head(row / p.N_q / p.H, row / p.N_q % p.H) + row % p.N_q * p.dQ.stride_n;
  dQ[t % d] = ELEMENT(p.scale * dQ_accum[t]);
}

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * p.B * p.H * p.N_q * (d + 1);        // dQ_accum, D
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  const int64_t elements = (int64_t)p.B * p.H * p.N_q * d;   // of dQ
  float* dQ_accum = static_cast<float*>(p.workspace);
  float* D = dQ_accum + elements;
  launch_D_kernel(p, D, /*clear_dQ=*/false, stream);
  clear_kernel<<<ceil_div(elements, 256), 256, 0, stream>>>(dQ_accum, elements);
  const size_t bytes = 2 * sizeof(ELEMENT) * ((Br + Bc) * pitch + Br * P_pitch);
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D, dQ_accum);
  convert_kernel<<<ceil_div(elements, 256), 256, 0, stream>>>(p, dQ_accum);
  return cudaGetLastError();
}
