// Backward stage 11: cp_async
// idea:    the next Q and dO under way: asynchronous copies into a second buffer
// types:   fp16, bf16
// needs:   sm_80
// after:   split_warps
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 2 * Bc * max(Br, 64) + 16 * Br
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (12 * Tc * d + 10 * d + 4) + Tr * Br * (8 * Tc + 4 * d + 8)))
// predicted: 1.3x at d=64, 1.2x at d=128: nobody waits for Q and dO
// measured: 1.34x at d=64 causal, 1.43x full, 1.34x at d=128 causal, 1.56x full, 1.33x at d=256 causal, 1.34x
//          full (H200, bf16, N=4096; make readme)
//
// As in the forward stage cp_async, the tiles of the loop come asynchronously: Q, dO, L and D have room for
// two tiles each, and cp.async brings the next one while this one is multiplied.
//
//   i      wait for the copies of tile i; barrier
//   i      start the copies of tile i + 1, into the other buffer
//   i      S^T, dP^T, ... dQ of tile i
//   i + 1  wait for the copies of tile i + 1; barrier
//
// The other buffer was last read for dV and dK of tile i - 1, before the barrier that comes ahead of dQ. So
// the copies may start at once, and there are no more barriers than in split_warps.
//
// cp.async copies 16 bytes, four numbers of L or D. These are contiguous in HBM, but N_q need not be a
// multiple of 4. So a kernel that runs first copies them into whole tiles, and does three more things on its
// way (common/prepare.cuh): it makes D, multiplies L by log2(e), and sets dQ_accum to 0. Rows past the end
// get L = infinity, and so P = 0.
//
// HBM traffic without caches (hbm, above): as in split_warps, but L and D are read in whole tiles.
//
// Changed from split_warps: the loads; prepare_kernel instead of D_kernel and clear_kernel.
//
// Bound by latencies: of its time a warp waits 26 % for its own instructions, 18 % for global memory (in
// split_warps 34 %), and 12 % at barriers: for the half of the warps that makes exponentials, and for dQ,
// which no other work hides. The tensor cores are busy 26 % of the time (H200, bf16, B4 H12 N1024 d64
// causal).
#pragma once
#include "common/copy_tile.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/pairs.cuh"
#include "common/prepare.cuh"
#include "common/product.cuh"
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

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, Workspace w) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32;
  const bool makes_dV = warp < warps / 2;            // else dK
  const int first_key = warp % (warps / 2) * warp_rows;                  // this warp's rows of the tile

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: for even and odd t
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* PT_smem = dO_smem + 2 * Br * pitch;       // Bc x Br, rows PT_pitch apart: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + Bc * PT_pitch);     // Br, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice

  auto start_copies = [&](int h, int i, int t) {                         // line 9
    const int buffer = t % 2 * Br * pitch, row = threadIdx.x % (Br / 4) * 4;
    const int64_t from = (((int64_t)b * p.H + h) * Tr + i) * Br + row;
    copy_tile<threads>(Q_smem + buffer, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);
    copy_tile<threads>(dO_smem + buffer, tile_index, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
    if (threadIdx.x < Br / 4) cp_async_16(shared_address(L_smem + t % 2 * Br + row), w.L + from);
    else if (threadIdx.x < Br / 2) cp_async_16(shared_address(D_smem + t % 2 * Br + row), w.D + from);
    cp_async_commit();
  };
  copy_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);    // line 6
  copy_tile<threads>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
  cp_async_commit();

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
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in dQ_accum
    if (tiles.first < tiles.end) start_copies(h, tiles[tiles.first], tiles.first);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      cp_async_wait<0>();
      __syncthreads();                        // the tiles are here, and all are done with the last ones
      if (t + 1 < tiles.end) start_copies(h, tiles[t + 1], t + 1);

      const int buffer = t % 2 * Br * pitch;
      float X_reg[strips][Br / 8][4] = {};                               // lines 10, 13: K Q^T, or V dO^T
      multiply(X_reg, width, K_or_V, Q_or_dO + buffer);

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
          const float2 L_row = *reinterpret_cast<const float2*>(L_smem + t % 2 * Br + col);
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
          const float2 D_row = *reinterpret_cast<const float2*>(D_smem + t % 2 * Br + col);
          const float2 P = unpack(*PT_at(row, col));
          x = P.x * (x - D_row.x);
          y = P.y * (y - D_row.y);
          mask.keep_gradient(x, i * Br + col, j * Bc + first_key + row);
          mask.keep_gradient(y, i * Br + col + 1, j * Bc + first_key + row);
        });
        round_to_A(X_frag, X_reg, store);
      }
      multiply<Br / 16>(sum_reg, Br, X_frag, dO_or_Q + buffer);          // lines 12, 16
      __syncthreads();                      // a warp now reads all of dS, which many warps wrote

      float dQ_reg[2][2 * dQ_frags][4] = {};                             // line 15: dS_ij K_j
      multiply<2>(dQ_reg, Bc, dS, K);
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + dQ_row + r, k = dQ_col + c / 16 * 16 * dQ_warps + c % 16;
        if (row < p.N_q && k < d) atomicAdd(w.dQ_accum + (first_row + row) * d + k, x);
      });
    }                                                                    // line 17
  }
  cp_async_wait<0>();                       // no copy outlives its block: of a tile that no row sees

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

int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }     // and of L and D

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * rows_of_Q(p) * (d + 2); }

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, 1);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + Bc * PT_pitch) + sizeof(float) * 4 * Br;
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, w);
  convert_kernel<<<ceil_div((int64_t)p.B * p.H * p.N_q * d, 256), 256, 0, stream>>>(p, w.dQ_accum);
  return cudaGetLastError();
}
