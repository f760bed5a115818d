// Backward stage 15: ampere_tuned
// idea:    what is left: order of blocks, masked tiles apart, dK and dV by 16-byte stores, unrolling
// types:   fp16, bf16
// needs:   sm_80
// after:   ordered_dq
// default: sm_80
// deterministic: on request
// takes:   dropout, sink, d_v, varlen
// tiles:   Br=64 Bc=128; d > 128: Br=64 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * max(Br, 64) + 16 * Br
// workspace: dQ_accum, L, D, dK_parts, dV_parts
// hbm:     B * (4 * d * N_k * (H * 5 ** (H > H_kv) + H_kv) + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: 1.05x at d=64, 1.2x at d>64 (larger tiles), 1.1x more if causal: heavy tiles first
// measured: 1.08x at d=64 causal, 1.05x full, 1.16x at d=128 causal, 1.10x full, 1.30x at d=256 causal, 1.27x
//          full (H200, bf16, N=4096; make readme)
//
// What is left: nothing that has an idea of its own, but each a few per cent.
//
//   - Only tiles that the mask cuts, or that reach past the last row or key, look at it; of a window, at the
//     side that cuts them.
//   - Causal: the blocks that most rows see come first, those of 16 heads at a time (common/order.cuh): short
//     ones fill the gaps at the end, and L2 holds what these heads read of Q and dO and add to dQ. With other
//     masks 8 heads: a window of 1024 at N=16384 takes 0.996 of the time with 16 (H200).
//   - dK and dV leave by way of shared memory, where K and V were, 16 bytes at a time.
//   - At d > 64 tiles of Q have 64 rows: all 255 registers of a thread are in use.
//   - The loop that makes dQ is unrolled whole on sm_90. (At d > 64 registers are short: 96 bytes a thread
//     are spilled at d = 128, 4 at d = 256; causal 52 in fp16, 28 in bf16 if deterministic. Unrolled by half
//     none are, but it takes 3 % longer at d = 64, 4 % at d = 128, 11 % at d = 256: H200, bf16, N=4096.)
//
// It is as fast as FlashAttention-2's own program, or faster (docs/measurements.md has the figures).
//
// HBM traffic without caches (hbm, above): as in ordered_dq.
//
// Changed from ordered_dq: the list above. And it takes dropout (common/drop_transposed.cuh), a sink and a V
// of d_v < d columns, as recompute does. With dropout the warps for dV drop of P, those for dK of dP. And it
// takes packed sequences (common/sequences.cuh): 192 bytes a thread are then spilled at d = 128.
//
// Bound by the latency of its own instructions, as registers leave room for 8 warps, and still by barriers:
// tensor cores busy 39 % of the time, shared memory 48 %, issue slots 36 % (H200, bf16, B4 H12 N1024 d64
// causal).
#pragma once
#include "common/copy_tile.cuh"
#include "common/drop_transposed.cuh"
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/order.cuh"
#include "common/pairs.cuh"
#include "common/prepare.cuh"
#include "common/product.cuh"
#include "common/reduce_heads.cuh"
#include "common/sequences.cuh"
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
constexpr int dQ_copies = DETERMINISTIC ? 8 : 1;   // of dQ_accum
// Of the loop that makes dQ, so many steps are unrolled: all of them are faster, but need the most registers
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int unrolled = DETERMINISTIC ? 2 : Bc / 16;
#else
constexpr int unrolled = 2;
#endif

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of K and V, for tiles from first_j on. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads) backward_kernel(BwdParams p, Workspace w, float* dKV_parts,
                                                           int first_j) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H;                 // lines 1, 2
  // line 5: masked, blocks that most rows see come first, of 16 or 8 heads: L2 holds their Q, dO and dQ
  const Work work = dispatch_order(gridDim.x / heads, heads, CAUSAL ? 16 : Mask::all_keys ? 1 : 8);
  int j = first_j + work.tile, b = work.bh / p.H;
  if (!enter_sequence_of_K(p, b, j)) return;
  const int bh = work.bh, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int first_i = tiles_of_Q_before(p, b);       // in L, D and dQ_accum
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    const int64_t from = ((int64_t)bh * Tr + first_i + i) * Br + row;
    copy_tile<threads>(Q_smem + buffer, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q);
    copy_tile<threads, d_v>(dO_smem + buffer, tile_index, p.dO.head(b, h), p.dO.stride_n, i * Br, Br, p.N_q);
    if (threadIdx.x < Br / 4) cp_async_16(shared_address(L_smem + t % 2 * Br + row), w.L + from);
    else if (threadIdx.x < Br / 2) cp_async_16(shared_address(D_smem + t % 2 * Br + row), w.D + from);
    cp_async_commit();
  };
  if (tiles.first < tiles.end) {
    copy_tile<threads>(K_smem, tile_index, p.K.head(b, h_kv), p.K.stride_n, j * Bc, Bc, p.N_k);  // line 6
    copy_tile<threads, d_v>(V_smem, tile_index, p.V.head(b, h_kv), p.V.stride_n, j * Bc, Bc, p.N_k);
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
    float* dQ = w.dQ_accum + ((j % dQ_copies * (int64_t)heads + bh) * Tr + first_i + i) * Br * d;
    #pragma unroll
    for (int step = 0; step < dQ_steps; step++) {
      constexpr int frags = (dQ_frags + dQ_steps - 1) / dQ_steps;
      const int col = step * 16 * frags;    // of this warp's columns
      float dQ_reg[2][2 * frags][4] = {};
      multiply<unrolled>(dQ_reg, Bc, dS, K, col);
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
      #pragma unroll
      for (int side = 0; side < Mask::sides; side++) {     // few tiles of a window are cut on both
        if (!mask.cuts(tiles, t, j, side)) continue;
        for_each_two(X_reg, [&](float& x, float& y, int row, int col) {
          if (!mask.sees(i * Br + col, j * Bc + first_key + row, side)) x = 0.f;
          if (!mask.sees(i * Br + col + 1, j * Bc + first_key + row, side)) y = 0.f;
        });
      }
      if (DROPOUT && !Mask::scores) for_each_pair(X_reg, store);         // for dS: P, before dropout
      if (Mask::scores) {                       // for dS: P times slope
        for_both(X_reg, slope_reg, [](float& P, float& slope, int, int) { slope *= P; });
        for_each_pair(slope_reg, store);
      }
    }
    if (DROPOUT) drop_transposed(X_reg, mask, i * Br, j * Bc + first_key);       // P for dV, or dP
    if (makes_dV) {
      round_to_A(X_frag, X_reg, [&](uint32_t packed, int row, int col) {
        if (!DROPOUT && !Mask::scores) store(packed, row, col);
      });
    }
    __syncthreads();                        // the warps for dK now read P
    if (!makes_dV) {                                                     // line 14: dS_ij, over P_ij
      for_each_two(X_reg, [&](float& x, float& y, int row, int col) {
        const float2 D_row = *reinterpret_cast<const float2*>(D_smem + t % 2 * Br + col);
        const float2 P = unpack(*PT_at(row, col));
        x = P.x * (dropout_scale(p) * x - D_row.x);
        y = P.y * (dropout_scale(p) * y - D_row.y);
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
    float* part = dKV_parts + ((makes_dV ? heads : 0) + bh) * (int64_t)all_rows_of_K(p) * d;
    for_each_two(sum_reg, [&](float& x, float& y, int row, int col) {
      const int key = j * Bc + first_key + row;
      if (key < p.N_k && col < d)
        *reinterpret_cast<float2*>(part + (rows_of_K_before(p, b) + key) * d + col) = make_float2(x, y);
    });
    return;
  }
  __syncthreads();                          // all are done with K and V, which make room for dK and dV
  ELEMENT* sum_smem = makes_dV ? V_smem : K_smem;
  const float scale = makes_dV ? dropout_scale(p) : p.scale;
  for_each(sum_reg, [&](float& x, int, int) { x *= scale; });
  for_each_pair(sum_reg, [&](uint32_t packed, int row, int col) {
    *reinterpret_cast<uint32_t*>(sum_smem + tile_index(first_key + row, col)) = packed;
  });
  __syncwarp();                             // a warp reads the rows that it wrote, now 16 bytes at a time
  enter_outputs_of_K(p, first_j + work.tile);
  TensorOfParams out = makes_dV ? p.dV : p.dK;
  const int col = lane % row_threads * 8, columns = makes_dV ? d_v : d;
  for (int row = first_key + lane / row_threads; row < first_key + warp_rows; row += 32 / row_threads) {
    if (j * Bc + row < p.N_k && col < columns)
      *reinterpret_cast<uint4*>(out.head(b, h) + (j * Bc + row) * out.stride_n + col) =
          *reinterpret_cast<const uint4*>(sum_smem + tile_index(row, col));
  }
}

// Rows of L and D, and of dQ in each copy; numbers in dK and in dV
int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }
int64_t numbers_of_K(const BwdParams& p) { return p.H > p.H_kv ? (int64_t)p.B * p.H * p.N_k * d : 0; }

size_t workspace_bytes(const BwdParams& p) {
  return sizeof(float) * (rows_of_Q(p) * (dQ_copies * d + 2) + 2 * numbers_of_K(p));
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * dQ_copies * d;
  w.D = w.L + rows_of_Q(p);
  float* dKV_parts = w.D + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, dQ_copies);
  const size_t bytes = sizeof(ELEMENT) * 2 * ((Bc + 2 * Br) * pitch + Bc * PT_pitch) + sizeof(float) * 4 * Br;
  allow_shared_memory(backward_kernel, bytes);
  const int Tc = ceil_div(p.N_k, Bc), launch_tiles = DETERMINISTIC ? dQ_copies : Tc;
  for (int first_j = 0; first_j < Tc; first_j += launch_tiles) {
    const int tiles = Tc - first_j < launch_tiles ? Tc - first_j : launch_tiles;
    backward_kernel<<<p.B * p.H * tiles, threads, bytes, stream>>>(p, w, dKV_parts, first_j);
  }
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, dQ_copies);
  reduce_heads(p, dKV_parts, p.H, stream);
  return cudaGetLastError();
}
