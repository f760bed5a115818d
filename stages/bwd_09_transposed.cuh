// Backward stage 9: transposed
// idea:    S^T = K Q^T and dP^T = V dO^T: P^T and dS^T are operands A as they lie in registers
// types:   fp16, bf16
// needs:   sm_80
// after:   mma
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Br + Bc) * ((d + 63) // 64 * 64) + 2 * Bc * max(Br, 64) + 8 * Br
// workspace: dQ_accum, D
// hbm:     B * (8 * H_kv * N_k * d + H * N_q * (Tc * (12 * d + 8) + 14 * d + 8))
// predicted: 1.2x at d=64, 1.1x at d=128: P stays in registers, two operands A need no load; d=256 spills
// measured: 1.41x at d=64 causal, 1.48x full, 1.22x at d=128 causal, 1.11x full, 0.59x at d=256 causal, 0.67x
//          full (H200, bf16, N=4096; make readme)
//
// In the forward pass P is made where the next product wants it: an accumulator of S = Q K^T, rounded, is the
// operand A of O += P V. Here the next products are dV += P^T dO and dK += dS^T Q, with P and dS transposed.
// So S and dP are made transposed in the first place, a row for a key:
//
//   S^T  = K Q^T     P^T  = exp(scale * S^T - L)     dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T * (dP^T - D)         dK += dS^T Q
//
// A warp has 16 keys, of all the tile's queries, and so all that its 16 rows of dV and dK need: P^T and dS^T
// are operands A as they lie in registers (round_to_A in common/pairs.cuh). P does not go to shared memory
// any more, and no warp waits for another one between S and dK. Only dQ = dS K still wants dS of all warps:
// dS^T is stored, and ldmatrix transposes it back.
//
//   mma                                          transposed
//   S, dP -> P, dS -> shared memory              S^T, dP^T -> P^T, dS^T -> dV, dK
//   ---------------- barrier ----------------        dS^T -> shared memory
//   P^T, dS^T from shared memory -> dV, dK       ---------------- barrier ----------------
//   dS from shared memory -> dQ                  dS from shared memory -> dQ
//
// L and D now belong to columns, so that a lane needs those of Br / 4 queries: they are in shared memory, L
// times log2(e). (FlashAttention-2's own program makes S as it is, and stores both P and dS for other warps
// to transpose.)
//
// HBM traffic without caches (hbm, above): as in mma, but a tile's L and D are read once.
//
// Changed from mma: the operands of the first four products, where P and dS are, and which rows a warp has.
//
// Bound by registers: a warp has dV and dK for 16 keys, d registers a lane, beside S^T and dP^T. So there is
// one block on a multiprocessor. The compiler spills at d > 64, 0.1 KB a thread at d = 128 and 1.5 KB at d =
// 256: the next stage mends that.
#pragma once
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/pairs.cuh"
#include "common/product.cuh"
#include "common/rowsum.cuh"
#include "common/strips.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next,
constexpr int dST_pitch = Br < 64 ? 64 : Br;       // and of the tile of dS^T
constexpr int warp_rows = 16, strips = warp_rows / 16;       // of dK and dV, and of dQ, per warp
constexpr int warps = Bc / warp_rows, threads = 32 * warps;
constexpr int parts = warps * warp_rows / Br;      // warps that share rows of dQ,
constexpr int dims = (width / 16 + parts - 1) / parts * 16;  // each with so many columns of it

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
  const int warp = threadIdx.x / 32;
  const int first_key = warp * warp_rows;            // this warp's rows of dK and dV, and
  const int warp_row = warp % (Br / 16) * 16, part = warp / (Br / 16);   // of dQ

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same
  ELEMENT* dO_smem = Q_smem + Br * pitch;   // Br x d, the same
  ELEMENT* dST_smem = dO_smem + Br * pitch; // Bc x Br, rows dST_pitch apart
  float* L_smem = reinterpret_cast<float*>(dST_smem + Bc * dST_pitch);   // Br, to the base 2
  float* D_smem = L_smem + Br;              // Br
  for (int t = threadIdx.x; t < 2 * (Br + Bc) * pitch && width < pitch; t += threads) smem[t] = 0.f;
  __syncthreads();                          // what is past d in a row, load_tile leaves as it is
  load_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
  load_tile<threads>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  float dK_reg[strips][width / 8][4] = {}, dV_reg[strips][width / 8][4] = {};              // line 7
  // Of dQ, and so of the operand B that makes it, every parts-th 16 columns are this warp's.
  auto part_of = [&](const ELEMENT* tile) { return as_it_lies(tile, pitch, 0, 16 * part, parts); };
  auto dim = [&](int col) { return 16 * (part + col / 16 * parts) + col % 16; };
  const float scale2 = p.scale * LOG2_E;

  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in L, D and dQ_accum
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      // The last tiles were last read before the last barrier, so they may be overwritten.
      load_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);  // line 9
      load_tile<threads>(dO_smem, tile_index, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
      for (int r = threadIdx.x; r < Br; r += threads) {
        const int row = i * Br + r;
        L_smem[r] = row < p.N_q ? LOG2_E * p.L[first_row + row] : 0.f;
        D_smem[r] = row < p.N_q ? D[first_row + row] : 0.f;
      }
      __syncthreads();                    // nobody reads before everybody has written

      // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
      float S_reg[strips][Br / 8][4] = {}, dP_reg[strips][Br / 8][4] = {};
      multiply(S_reg, width, as_it_lies(K_smem, pitch, first_key), transposed(Q_smem, pitch));
      multiply(dP_reg, width, as_it_lies(V_smem, pitch, first_key), transposed(dO_smem, pitch));

      for_both(S_reg, dP_reg, [&](float& S, float& dP, int r, int c) {
        const int row = i * Br + c, col = j * Bc + first_key + r;
        const float x = scale2 * S;
        S = mask.sees(row, col) ? fast_exp2(score2(mask, x, row, col) - L_smem[c]) : 0.f;  // line 11: P_ij
        dP = mask.through_score(S * (dP - D_smem[c]), LN_2 * x, row, col);                 // line 14: dS_ij
      });
      uint32_t P_frag[strips][Br / 16][4], dS_frag[strips][Br / 16][4];
      round_to_A(P_frag, S_reg, [](uint32_t, int, int) {});
      round_to_A(dS_frag, dP_reg, [&](uint32_t packed, int row, int col) {
        *reinterpret_cast<uint32_t*>(dST_smem + swizzled(first_key + row, col, dST_pitch)) = packed;
      });
      multiply<Br / 16>(dV_reg, Br, P_frag, as_it_lies(dO_smem, pitch));  // line 12: + P_ij^T dO_i
      multiply<Br / 16>(dK_reg, Br, dS_frag, as_it_lies(Q_smem, pitch));  // line 16: + dS_ij^T Q_i
      __syncthreads();                    // a warp now reads all of dS, which many warps wrote

      float dQ_reg[strips][dims / 8][4] = {};                            // line 15: dS_ij K_j
      multiply<2>(dQ_reg, Bc, transposed(dST_smem, dST_pitch, 0, warp_row), part_of(K_smem));
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + warp_row + r, k = dim(c);
        if (row < p.N_q && k < d) atomicAdd(dQ_accum + (first_row + row) * d + k, x);
      });
    }                                                                    // line 17
  }

  auto store = [&](const Tensor& out, float (&acc)[strips][width / 8][4]) {                // line 18
    for_each_pair(acc, [&](uint32_t packed, int r, int c) {
      const int col = j * Bc + first_key + r;
      if (col < p.N_k && c < d)
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + c) = packed;
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
  const size_t bytes = sizeof(ELEMENT) * (2 * (Br + Bc) * pitch + Bc * dST_pitch) + sizeof(float) * 2 * Br;
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D, dQ_accum);
  convert_kernel<<<ceil_div(elements, 256), 256, 0, stream>>>(p, dQ_accum);
  return cudaGetLastError();
}
