// Backward stage 13: split_heads
// idea:    a block for each query head; dK and dV of a group added up in a fixed order
// types:   fp16, bf16
// needs:   sm_80
// after:   late_dq
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * max(Br, 64) + 16 * Br
// workspace: dQ_accum, L, D, dK_parts, dV_parts
// hbm:     B * (4 * d * N_k * (H * 5 ** (H > H_kv) + H_kv) + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.0x if H = H_kv; with 4 query heads a key head 1.5x at N = 1024, 1.1x at N = 4096 and more
// measured: 1.02x at d=64 causal, 0.99x full, 1.01x at d=128 causal, 0.99x full, 1.03x at d=256 causal, 1.07x
//          full (H200, bf16, N=4096; make readme)
//
// Up to here a block walks along all query heads that read its key head (GQA): there are B * H_kv * Tc
// blocks, few and long ones. B = 1, H_kv = 2, N_k = 1024 and Bc = 128 make 16 of them, for 132
// multiprocessors. Here each query head has blocks of its own, H / H_kv times as many, and each as much
// shorter.
//
// Then several blocks have a part in dK and dV of a key. If H > H_kv, they write their parts to HBM in float,
// as they are, and one more kernel adds them up in the order of the heads (common/reduce_heads.cuh). So dK
// and dV still are the same bits in every run. Atomics would need less memory than 2 * B * H * N_k * d
// floats, but their order is any. If H = H_kv, nothing changes.
//
// HBM traffic without caches (hbm, above): as in late_dq, but K and V come once for each query head; and if H
// > H_kv, dK and dV of each are written and read as floats.
//
// Changed from late_dq: the loop over h is gone, and bh counts query heads; reduce_heads_kernel.
//
// Bound by what bounds late_dq.
#pragma once
#include "common/copy_tile.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/pairs.cuh"
#include "common/prepare.cuh"
#include "common/product.cuh"
#include "common/reduce_heads.cuh"
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

// One block per tile of K and V and query head. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, Workspace w, float* dKV_parts) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32;
  const bool makes_dV = warp < warps / 2;            // else dK and dQ
  const int first_key = warp % (warps / 2) * warp_rows;                  // this warp's rows of the tile
  const Mask mask(p, b, h);
  const auto tiles = mask.query_tiles(j);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, rows `pitch` apart
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: for even and odd t
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* PT_smem = dO_smem + 2 * Br * pitch;       // Bc x Br, rows PT_pitch apart, twice: P^T, then dS^T
  float* L_smem = reinterpret_cast<float*>(PT_smem + 2 * Bc * PT_pitch);     // Br, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice

  auto start_copies = [&](int t) {                                       // line 9
    const int i = tiles[t], buffer = t % 2 * Br * pitch, row = threadIdx.x % (Br / 4) * 4;
    const int64_t from = ((int64_t)bh * Tr + i) * Br + row;
    copy_tile<threads>(Q_smem + buffer, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);
    copy_tile<threads>(dO_smem + buffer, tile_index, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
    if (threadIdx.x < Br / 4) cp_async_16(shared_address(L_smem + t % 2 * Br + row), w.L + from);
    else if (threadIdx.x < Br / 2) cp_async_16(shared_address(D_smem + t % 2 * Br + row), w.D + from);
    cp_async_commit();
  };
  if (tiles.first < tiles.end) {
    copy_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
    copy_tile<threads>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
    start_copies(tiles.first);
  }

  const int dQ_warp = warp % (warps / 2), dQ_row = dQ_warp / dQ_warps * 32, dQ_col = dQ_warp % dQ_warps * 16;
  const Operand K_or_V = as_it_lies(makes_dV ? K_smem : V_smem, pitch, first_key);
  const Operand Q_or_dO = transposed(makes_dV ? Q_smem : dO_smem, pitch);
  const Operand dO_or_Q = as_it_lies(makes_dV ? dO_smem : Q_smem, pitch);
  const Operand dST = transposed(PT_smem, PT_pitch, 0, dQ_row);
  const Operand K = as_it_lies(K_smem, pitch, 0, dQ_col, dQ_warps);

  auto add_dQ = [&](int t) {                                             // line 15: dS_ij K_j, added in HBM
    const int i = tiles[t];
    const Operand dS = dST + t % 2 * Bc * PT_pitch;
    float* dQ = w.dQ_accum + ((int64_t)bh * Tr + i) * Br * d;
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
  for (int t = tiles.first; t < tiles.end; t++) {                        // line 8
    const int i = tiles[t];
    cp_async_wait<0>();
    __syncthreads();                        // the tiles are here, and all are done with the last ones
    if (t + 1 < tiles.end) start_copies(t + 1);
    if (!makes_dV && t > tiles.first) add_dQ(t - 1);

    const int buffer = t % 2 * Br * pitch;
    float X_reg[strips][Br / 8][4] = {};                                 // lines 10, 13: K Q^T, or V dO^T
    multiply(X_reg, width, K_or_V, Q_or_dO + buffer);

    auto PT_at = [&](int row, int col) {    // where two neighbours of P^T or dS^T are
      ELEMENT* tile = PT_smem + t % 2 * Bc * PT_pitch;
      return reinterpret_cast<uint32_t*>(tile + swizzled(first_key + row, col, PT_pitch));
    };
    uint32_t X_frag[strips][Br / 16][4];
    auto store = [&](uint32_t packed, int row, int col) { *PT_at(row, col) = packed; };
    float slope_reg[strips][Br / 8][4];       // of a mask that changes scores
    if (makes_dV) {                                                      // line 11: P_ij
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
    if (!makes_dV) {                                                     // line 14: dS_ij, over P_ij
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
    multiply<Br / 16>(sum_reg, Br, X_frag, dO_or_Q + buffer);            // lines 12, 16
  }                                                                      // line 17
  __syncthreads();                          // the last dS is there
  if (!makes_dV && tiles.first < tiles.end) add_dQ(tiles.end - 1);

  if (p.H > p.H_kv) {                                                    // line 18: this head's part
    float* part = dKV_parts + ((makes_dV ? p.B * p.H : 0) + bh) * (int64_t)p.N_k * d;
    for_each_two(sum_reg, [&](float& x, float& y, int row, int col) {
      const int key = j * Bc + first_key + row;
      if (key < p.N_k && col < d)
        *reinterpret_cast<float2*>(part + (int64_t)key * d + col) = make_float2(x, y);
    });
    return;
  }
  const Tensor& out = makes_dV ? p.dV : p.dK;
  const float scale = makes_dV ? 1.f : p.scale;
  for_each_two(sum_reg, [&](float& x, float& y, int row, int col) {
    const int key = j * Bc + first_key + row;
    if (key < p.N_k && col < d)
      *reinterpret_cast<uint32_t*>(out.head(b, h) + key * out.stride_n + col) =
          pack<ELEMENT>(scale * x, scale * y);
  });
}

// Rows of dQ, L and D; numbers in dK and in dV
int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }
int64_t numbers_of_K(const BwdParams& p) { return p.H > p.H_kv ? (int64_t)p.B * p.H * p.N_k * d : 0; }

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (d + 2) + 2 * numbers_of_K(p));
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  float* dKV_parts = w.D + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, 1);
  const size_t bytes = sizeof(ELEMENT) * 2 * ((Bc + 2 * Br) * pitch + Bc * PT_pitch) + sizeof(float) * 4 * Br;
  allow_shared_memory(backward_kernel, bytes);
  backward_kernel<<<p.B * p.H * ceil_div(p.N_k, Bc), threads, bytes, stream>>>(p, w, dKV_parts);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  reduce_heads(p, dKV_parts, p.H, stream);
  return cudaGetLastError();
}
