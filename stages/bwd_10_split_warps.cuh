// Backward stage 10: split_warps
// idea:    half of the warps make dV, the others dK: twice the keys a warp
// types:   fp16, bf16
// needs:   sm_80
// after:   transposed
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Br + Bc) * ((d + 63) // 64 * 64) + 2 * Bc * max(Br, 64) + 8 * Br
// workspace: dQ_accum, D
// hbm:     B * (8 * H_kv * N_k * d + H * N_q * (Tc * (12 * d + 8) + 14 * d + 8))
// predicted: 1.1x at d=64 and d=128: half the loads of Q and dO; 3x at d=256: no spills
// measured: 1.04x at d=64 causal, 1.03x full, 1.08x at d=128 causal, 1.06x full, 1.61x at d=256 causal, 1.48x
//          full (H200, bf16, N=4096; make readme)
//
// In transposed, the two lines
//
//   S^T  = K Q^T     P^T  = exp(scale * S^T - L)     dV += P^T dO
//   dP^T = V dO^T    dS^T = P^T * (dP^T - D)         dK += dS^T Q
//
// are the same two products, of other tiles. So a warp takes one of the lines, for 32 keys (16 for d > 128).
// It has one sum, dV or dK, and one accumulator before it, S^T or dP^T: d + Br registers for 32 keys, as many
// as transposed has for 16. And as its keys share what it reads of Q and dO from shared memory, it reads half
// as much for a multiplication. (16 keys take half of these registers: d = 256 fits.)
//
// The price: dS^T needs P^T, which is in other warps. It goes through shared memory, and each half waits for
// the other:
//
//   warps for dV                    warps for dK
//   S^T = K Q^T                     dP^T = V dO^T
//   P^T, which they keep and store
//   ----------------------------- barrier -----------------------------
//   dV += P^T dO                    read P^T; dS^T, which they keep and store in its place; dK += dS^T Q
//   ----------------------------- barrier -----------------------------
//   all warps: dQ += dS K, 32 rows each, from the dS^T that has been stored
//
// P is rounded for dV, and dS is made of this P. (If the mask changes scores, dS needs the derivative, too.
// It depends on S, which the warps for dV have, so they store P times this slope.)
//
// HBM traffic without caches (hbm, above): as in transposed.
//
// Changed from transposed: which warp makes what. (X is S and P, or dP and dS: half of the warps know it by
// one name, half by the other.)
//
// Bound by waiting: a warp waits 34 % of its time for global memory, above all for the tiles of Q and dO
// (cp_async, which has these copied meanwhile, waits half as much), and 12 % at three barriers. The tensor
// cores are busy 19 % of the time, shared memory 28 %, issue slots are used 25 % (H200, bf16, B4 H12 N1024
// d64 causal). At d = 128 without a mask some 20 bytes are spilled, beside the registers that a tile waits in
// on its way from HBM: the next stage needs none.
#pragma once
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/pairs.cuh"
#include "common/product.cuh"
#include "common/rowsum.cuh"
#include "common/strips.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = (d + 63) / 64 * 64;          // from a row of a tile in shared memory to the next,
constexpr int PT_pitch = Br < 64 ? 64 : Br;        // and of the tiles of P^T and dS^T
constexpr int warp_rows = d <= 128 ? 32 : 16;      // rows of dK or dV per warp,
constexpr int strips = warp_rows / 16;             // in strips of 16
constexpr int warps = 2 * (Bc / warp_rows), threads = 32 * warps;
constexpr int dQ_warps = warps / (Br / 32);        // share 32 rows of dQ,
constexpr int dQ_frags = (width / 16 + dQ_warps - 1) / dQ_warps;         // each with so many 16 columns

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

__global__ void __launch_bounds__(256) clear_kernel(float* dQ_accum, int64_t n) {          // line 3
  const int64_t t = (int64_t)blockIdx.x * 256 + threadIdx.x;
  if (t < n) dQ_accum[t] = 0.f;
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, const float* D, float* dQ_accum) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32;
  const bool makes_dV = warp < warps / 2;            // else dK
  const int first_key = warp % (warps / 2) * warp_rows;                  // this warp's rows of the tile

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same
  ELEMENT* dO_smem = Q_smem + Br * pitch;   // Br x d, the same
  ELEMENT* PT_smem = dO_smem + Br * pitch;  // Bc x Br, rows PT_pitch apart: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + Bc * PT_pitch);     // Br, to the base 2
  float* D_smem = L_smem + Br;              // Br
  for (int t = threadIdx.x; t < 2 * (Br + Bc) * pitch && width < pitch; t += threads) smem[t] = 0.f;
  __syncthreads();                          // what is past d in a row, load_tile leaves as it is
  load_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
  load_tile<threads>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);

  const int dQ_row = warp / dQ_warps * 32, dQ_col = warp % dQ_warps * 16;          // of this warp
  const Operand K_or_V = as_it_lies(makes_dV ? K_smem : V_smem, pitch, first_key);
  const Operand Q_or_dO = transposed(makes_dV ? Q_smem : dO_smem, pitch);
  const Operand dO_or_Q = as_it_lies(makes_dV ? dO_smem : Q_smem, pitch);
  const Operand dS = transposed(PT_smem, PT_pitch, 0, dQ_row);
  const Operand K = as_it_lies(K_smem, pitch, 0, dQ_col, dQ_warps);

  float sum_reg[strips][width / 8][4] = {};                              // line 7: dV or dK
  const float scale2 = p.scale * LOG2_E;
  const float exponent_scale = Mask::scores ? 1.f : scale2;     // a mask that changes scores applies it
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
      __syncthreads();                      // nobody reads before everybody has written

      float X_reg[strips][Br / 8][4] = {};                               // lines 10, 13: K Q^T, or V dO^T
      multiply(X_reg, width, K_or_V, Q_or_dO);

      auto PT_at = [&](int row, int col) {    // where two neighbours of P^T or dS^T are
        return reinterpret_cast<uint32_t*>(PT_smem + swizzled(first_key + row, col, PT_pitch));
      };
      uint32_t X_frag[strips][Br / 16][4];
      auto store = [&](uint32_t packed, int row, int col) { *PT_at(row, col) = packed; };
      float slope_reg[strips][Br / 8][4];       // of a mask that changes scores
      if (makes_dV) {                                                    // line 11: P_ij
        if (Mask::scores) {
          for_both(X_reg, slope_reg, [&](float& S, float& slope, int r, int c) {
            const int row = i * Br + c, col = j * Bc + first_key + r;
            const float x = scale2 * S;
            slope = mask.slope(LN_2 * x, row, col);
            S = score2(mask, x, row, col);
          });
        }
        for_each_two(X_reg, [&](float& x, float& y, int, int col) {
          const float2 L_row = *reinterpret_cast<const float2*>(L_smem + col);
          x = fast_exp2(exponent_scale * x - L_row.x);
          y = fast_exp2(exponent_scale * y - L_row.y);
        });
        for_each_two(X_reg, [&](float& x, float& y, int row, int col) {
          if (!mask.sees(i * Br + col, j * Bc + first_key + row)) x = 0.f;
          if (!mask.sees(i * Br + col + 1, j * Bc + first_key + row)) y = 0.f;
        });
        round_to_A(X_frag, X_reg, store);
        if (Mask::scores) {                       // for dS: P times slope
          for_both(X_reg, slope_reg, [](float& P, float& slope, int, int) { P *= slope; });
          for_each_pair(X_reg, store);
        }
      }
      __syncthreads();                        // the warps for dK now read P
      if (!makes_dV) {                                                   // line 14: dS_ij, over P_ij
        for_each_two(X_reg, [&](float& x, float& y, int row, int col) {
          const float2 D_row = *reinterpret_cast<const float2*>(D_smem + col);
          const float2 P = unpack(*PT_at(row, col));
          x = P.x * (x - D_row.x);
          y = P.y * (y - D_row.y);
          mask.keep_gradient(x, i * Br + col, j * Bc + first_key + row);
          mask.keep_gradient(y, i * Br + col + 1, j * Bc + first_key + row);
        });
        round_to_A(X_frag, X_reg, store);
      }
      multiply<Br / 16>(sum_reg, Br, X_frag, dO_or_Q);                   // lines 12, 16
      __syncthreads();                      // a warp now reads all of dS, which many warps wrote

      float dQ_reg[2][2 * dQ_frags][4] = {};                             // line 15: dS_ij K_j
      multiply<2>(dQ_reg, Bc, dS, K);
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + dQ_row + r, k = dQ_col + c / 16 * 16 * dQ_warps + c % 16;
        if (row < p.N_q && k < d) atomicAdd(dQ_accum + (first_row + row) * d + k, x);
      });
    }                                                                    // line 17
  }

  const Tensor& out = makes_dV ? p.dV : p.dK;
  const float scale = makes_dV ? 1.f : p.scale;
  for_each_two(sum_reg, [&](float& x, float& y, int row, int col) {
    const int key = j * Bc + first_key + row;
    if (key < p.N_k && col < d)
      *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + key * out.stride_n + col) =
          pack<ELEMENT>(scale * x, scale * y);
  });
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
  const size_t bytes = sizeof(ELEMENT) * (2 * (Br + Bc) * pitch + Bc * PT_pitch) + sizeof(float) * 2 * Br;
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, D, dQ_accum);
  convert_kernel<<<ceil_div(elements, 256), 256, 0, stream>>>(p, dQ_accum);
  return cudaGetLastError();
}
