// Backward stage 12: late_dq
// idea:    dQ one tile late, under the exponentials; summed as the registers lie
// types:   fp16, bf16
// needs:   sm_80
// after:   cp_async
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * max(Br, 64) + 16 * Br
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.3x at d=64, 1.2x at d=128: one barrier less, dQ under the exponentials; atomics of 16 bytes
// measured: 1.46x at d=64 causal, 1.48x full, 1.46x at d=128 causal, 1.50x full, 1.61x at d=256 causal, 1.57x
//          full (H200, bf16, N=4096; make readme)
//
// The warps for dV make exponentials, and in cp_async those for dK wait for them meanwhile. Now these make
// dQ, alone and one tile late. P^T and dS^T have room for two tiles, so that dS of the last tile is still
// there, and one barrier less is needed:
//
//   warps for dV                    warps for dK and dQ
//   -------------------- barrier: tile i is here, dS of tile i - 1 is done ---------------------
//   S^T = K Q^T                     dQ += dS K of tile i - 1
//   P^T (exponentials)              dP^T = V dO^T
//   -------------------------------- barrier: P is done ----------------------------------------
//   dV += P^T dO                    dS^T; dK += dS^T Q
//
// dQ_accum now lies as registers do (common/gradients.cuh): of each fragment of 16 x 8, 4 numbers of lane 0
// come first, then 4 of lane 1, and so on. A lane adds them by one instruction where the GPU can (sm_90), a
// warp to 512 bytes in a row. convert_dQ_kernel finds the rows of dQ again, and stores 16 bytes at a time.
// There is room for whole tiles of Q: what lies past N_q, nobody reads.
//
// HBM traffic without caches (hbm, above): as in cp_async, but all rows of a tile are added to dQ_accum.
//
// Changed from cp_async: when dQ is made, by whom, and where its sums are.
//
// Bound by the latency of its own instructions, as registers leave room for 8 warps on a multiprocessor: a
// warp waits 33 % of its time for these, and 10 % at two barriers. The tensor cores are busy 37 % of the time
// (H200, bf16, B4 H12 N1024 d64 causal).
#pragma once
#include "common/copy_tile.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
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
constexpr int dQ_warps = warps / 2 / (Br / 32);    // of those for dK: share 32 rows of dQ,
constexpr int dQ_frags = (width / 16 + dQ_warps - 1) / dQ_warps;         // each with so many 16 columns,
constexpr int dQ_steps = (dQ_frags + 3) / 4;       // in so many steps: at most 4 of them at a time

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, Workspace w) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32;
  const bool makes_dV = warp < warps / 2;            // else dK and dQ
  const int first_key = warp % (warps / 2) * warp_rows;                  // this warp's rows of the tile

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: for even and odd t
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* PT_smem = dO_smem + 2 * Br * pitch;       // Bc x Br, rows PT_pitch apart, twice: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + 2 * Bc * PT_pitch);     // Br, twice
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

  const int dQ_warp = warp % (warps / 2), dQ_row = dQ_warp / dQ_warps * 32, dQ_col = dQ_warp % dQ_warps * 16;
  const Operand K_or_V = as_it_lies(makes_dV ? K_smem : V_smem, pitch, first_key);
  const Operand Q_or_dO = transposed(makes_dV ? Q_smem : dO_smem, pitch);
  const Operand dO_or_Q = as_it_lies(makes_dV ? dO_smem : Q_smem, pitch);
  const Operand dST = transposed(PT_smem, PT_pitch, 0, dQ_row);
  const Operand K = as_it_lies(K_smem, pitch, 0, dQ_col, dQ_warps);

  auto add_dQ = [&](int h, int i, int t) {                               // line 15: dS_ij K_j, added in HBM
    const Operand dS = dST + t % 2 * Bc * PT_pitch;
    float* dQ = w.dQ_accum + (((int64_t)b * p.H + h) * Tr + i) * Br * d;
    #pragma unroll
    for (int step = 0; step < dQ_steps; step++) {
      constexpr int frags = (dQ_frags + dQ_steps - 1) / dQ_steps;
      const int col = step * 16 * frags;    // of this warp's columns
      float dQ_reg[2][2 * frags][4] = {};
      multiply<d <= 128 ? 2 : 1>(dQ_reg, Bc, dS, K, col);
      add_fragments(dQ, dQ_reg, dQ_row, dQ_col + col * dQ_warps, dQ_warps);
    }
  };

  float sum_reg[strips][width / 8][4] = {};                              // line 7: dV or dK
  const float scale2 = p.scale * LOG2_E;
  const float exponent_scale = Mask::scores ? 1.f : scale2;     // a mask that changes scores applies it
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    if (tiles.first < tiles.end) start_copies(h, tiles[tiles.first], tiles.first);
    for (int t = tiles.first; t < tiles.end; t++) {                      // line 8
      const int i = tiles[t];
      cp_async_wait<0>();
      __syncthreads();                        // the tiles are here, and all are done with the last ones
      if (t + 1 < tiles.end) start_copies(h, tiles[t + 1], t + 1);
      if (!makes_dV && t > tiles.first) add_dQ(h, tiles[t - 1], t - 1);

      const int buffer = t % 2 * Br * pitch;
      float X_reg[strips][Br / 8][4] = {};                               // lines 10, 13: K Q^T, or V dO^T
      multiply(X_reg, width, K_or_V, Q_or_dO + buffer);

      auto PT_at = [&](int row, int col) {    // where two neighbours of P^T or dS^T are
        ELEMENT* tile = PT_smem + t % 2 * Bc * PT_pitch;
        return reinterpret_cast<uint32_t*>(tile + swizzled(first_key + row, col, PT_pitch));
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
    }                                                                    // line 17
    __syncthreads();                          // the last dS is there
    if (!makes_dV && tiles.first < tiles.end) add_dQ(h, tiles[tiles.end - 1], tiles.end - 1);
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

int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }     // and of L and D

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * rows_of_Q(p) * (d + 2); }

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, 1);
  const size_t bytes = sizeof(ELEMENT) * 2 * ((Bc + 2 * Br) * pitch + Bc * PT_pitch) + sizeof(float) * 4 * Br;
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, w);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  return cudaGetLastError();
}
