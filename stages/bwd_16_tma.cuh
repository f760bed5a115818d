// Backward stage 16: tma
// idea:    tiles by the copy engine, L and D, too: tensor maps and mbarriers
// types:   fp16, bf16
// needs:   sm_90
// after:   transposed
// deterministic: no
// tiles:   Br=64 Bc=128; d > 64: Br=32 Bc=128; d > 128: Br=32 Bc=64
// limits:  Br in (32, 64, 128); Bc in (32, 64, 128); Br <= Bc
// shared:  4 * (Bc + 2 * Br) * ((d + 63) // 64 * 64) + 2 * Bc * max(Br, 64) + 16 * Br + 16
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (12 * Tc * d + 10 * d + 4) + Tr * Br * (8 * Tc + 4 * d + 8)))
// predicted: 1.3x at d=64 and 128, as cp_async over its parent: nobody waits for Q and dO, or copies them
// measured: 1.47x at d=64 causal, 1.53x full, 1.41x at d=128 causal, 1.60x full, 1.38x at d=256 causal, 1.34x
//          full (H200, bf16, N=4096; make readme)
//
// In transposed all threads copy Q_i and dO_i, and then wait for them. Here thread 0 asks the copy engine for
// them, as in the forward stage tma (common/tma.cuh), a tile ahead: Q, dO, L and D have two buffers each, and
// an mbarrier a buffer counts the bytes that have come.
//
//   arrived[n % 2]     phase n / 2 is complete when Q_i, dO_i, L_i and D_i of the n-th tile have come, with
//                      K_j and V_j for n = 0. Tiles are counted through all heads of the group.
//
//   time ->    tile n                                          tile n + 1
//   thread 0   wait, barrier, ask for n + 1, S^T, dP^T, ...    wait, barrier, ask for n + 2, S^T, dP^T, ...
//   others     wait, barrier, S^T, dP^T, ...                   wait, barrier, S^T, dP^T, ...
//   engine     ....... Q, dO, L, D of n + 1 ........           ....... Q, dO, L, D of n + 2 ........
//
// The buffer that n + 1 goes to was read by the products of n - 1. The barrier says that all are done with
// it. dS^T is between the same barriers as before.
//
// A row of L or D is no tile: bulk_load() (common/hopper.cuh) copies bytes as they lie, 16 at least. So the
// kernel that runs first lays them out in whole tiles, makes D, and sets dQ_accum to 0, as in cp_async
// (common/prepare.cuh). Rows past the end get L = infinity, and so P = 0.
//
// HBM traffic without caches (hbm, above): as in cp_async. At d=256 a thread spills 1.6 KB.
//
// Changed from transposed: the loads; tiles in panels; prepare_kernel instead of D_kernel and clear_kernel.
#pragma once
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/pairs.cuh"
#include "common/prepare.cuh"
#include "common/product.cuh"
#include "common/strips.cuh"
#include "common/tile16.cuh"
#include "common/tma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int dST_pitch = Br < 64 ? 64 : Br;       // from a row of the tile of dS^T to the next
constexpr int warp_rows = 16, strips = warp_rows / 16;       // of dK and dV, and of dQ, per warp
constexpr int warps = Bc / warp_rows, threads = 32 * warps;
constexpr int parts = warps * warp_rows / Br;      // warps that share rows of dQ,
constexpr int dims = (width / 16 + parts - 1) / parts * 16;  // each with so many columns of it
constexpr int Q_bytes = sizeof(ELEMENT) * Br * pitch, K_bytes = sizeof(ELEMENT) * Bc * pitch;    // of a tile

// An operand in a tile of tile_rows rows, in panels
__device__ __forceinline__ Operand in_panels(Operand x, int tile_rows) {
  x.panel_stride = tile_rows * panel;
  return x;
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, const __grid_constant__ CUtensorMap Q_map,
    const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap V_map,
    const __grid_constant__ CUtensorMap dO_map) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warp = threadIdx.x / 32;
  const int first_key = warp * warp_rows;            // this warp's rows of dK and dV, and
  const int warp_row = warp % (Br / 16) * 16, part = warp / (Br / 16);   // of dQ

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* K_smem = smem;                   // Bc x d, in panels
  ELEMENT* V_smem = K_smem + Bc * pitch;    // Bc x d, the same
  ELEMENT* Q_smem = V_smem + Bc * pitch;    // Br x d, the same, twice: the n-th Q_i is in buffer n % 2
  ELEMENT* dO_smem = Q_smem + 2 * Br * pitch;        // Br x d, the same, twice
  ELEMENT* dST_smem = dO_smem + 2 * Br * pitch;      // Bc x Br, rows dST_pitch apart
  float* L_smem = reinterpret_cast<float*>(dST_smem + Bc * dST_pitch);   // Br, to the base 2, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice
  uint64_t* arrived_smem = reinterpret_cast<uint64_t*>(D_smem + 2 * Br);     // for each buffer
  if (threadIdx.x == 0) {
    mbarrier_init(arrived_smem, 1);
    mbarrier_init(arrived_smem + 1, 1);
    fence_mbarrier_init();
  }
  __syncthreads();

  auto load_tiles = [&](int n, int h, int i) {       // of the n-th tile, by thread 0
    uint64_t* arrived = arrived_smem + n % 2;
    const int64_t row = (((int64_t)b * p.H + h) * Tr + i) * Br;          // in L and D
    const int stats_bytes = sizeof(float) * Br;
    mbarrier_arrive_expect(arrived, 2 * (Q_bytes + stats_bytes) + (n == 0 ? 2 * K_bytes : 0));
    if (n == 0) load_panels(K_smem, K_map, arrived, Bc, j * Bc, h_kv, b);                // line 6
    if (n == 0) load_panels(V_smem, V_map, arrived, Bc, j * Bc, h_kv, b);
    load_panels(Q_smem + n % 2 * Br * pitch, Q_map, arrived, Br, i * Br, h, b);          // line 9
    load_panels(dO_smem + n % 2 * Br * pitch, dO_map, arrived, Br, i * Br, h, b);
    bulk_load(L_smem + n % 2 * Br, w.L + row, stats_bytes, arrived);
    bulk_load(D_smem + n % 2 * Br, w.D + row, stats_bytes, arrived);
  };

  float dK_reg[strips][width / 8][4] = {}, dV_reg[strips][width / 8][4] = {};              // line 7
  // Of dQ, and so of the operand B that makes it, every parts-th 16 columns are this warp's.
  const Operand K_part = in_panels(as_it_lies(K_smem, panel, 0, 16 * part, parts), Bc);
  auto dim = [&](int col) { return 16 * (part + col / 16 * parts) + col % 16; };
  const Operand K = in_panels(as_it_lies(K_smem, panel, first_key), Bc);
  const Operand V = in_panels(as_it_lies(V_smem, panel, first_key), Bc);
  const float scale2 = p.scale * LOG2_E;

  int n = 0;                                // tiles so far
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;            // of this head, in dQ_accum
    if (threadIdx.x == 0 && tiles.first < tiles.end) load_tiles(n, h, tiles[tiles.first]);
    for (int t = tiles.first; t < tiles.end; t++, n++) {                 // line 8
      const int i = tiles[t];
      mbarrier_wait(arrived_smem + n % 2, n / 2 % 2);
      __syncthreads();                    // the tiles are here, and all are done with the last ones
      if (threadIdx.x == 0 && t + 1 < tiles.end) load_tiles(n + 1, h, tiles[t + 1]);
      const ELEMENT *Q_i = Q_smem + n % 2 * Br * pitch, *dO_i = dO_smem + n % 2 * Br * pitch;
      const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;

      // lines 10, 13: S^T = K_j Q_i^T, dP^T = V_j dO_i^T
      float S_reg[strips][Br / 8][4] = {}, dP_reg[strips][Br / 8][4] = {};
      multiply(S_reg, width, K, in_panels(transposed(Q_i, panel), Br));
      multiply(dP_reg, width, V, in_panels(transposed(dO_i, panel), Br));

      for_both(S_reg, dP_reg, [&](float& S, float& dP, int r, int c) {
        const int row = i * Br + c, col = j * Bc + first_key + r;
        const float x = scale2 * S;
        S = mask.sees(row, col) ? fast_exp2(score2(mask, x, row, col) - L_i[c]) : 0.f;  // line 11: P_ij
        dP = mask.through_score(S * (dP - D_i[c]), LN_2 * x, row, col);                 // line 14: dS_ij
      });
      uint32_t P_frag[strips][Br / 16][4], dS_frag[strips][Br / 16][4];
      round_to_A(P_frag, S_reg, [](uint32_t, int, int) {});
      round_to_A(dS_frag, dP_reg, [&](uint32_t packed, int row, int col) {
        *reinterpret_cast<uint32_t*>(dST_smem + swizzled(first_key + row, col, dST_pitch)) = packed;
      });
      multiply<Br / 16>(dV_reg, Br, P_frag, in_panels(as_it_lies(dO_i, panel), Br));  // line 12
      multiply<Br / 16>(dK_reg, Br, dS_frag, in_panels(as_it_lies(Q_i, panel), Br));  // line 16
      __syncthreads();                    // a warp now reads all of dS, which many warps wrote

      float dQ_reg[strips][dims / 8][4] = {};                            // line 15: dS_ij K_j
      multiply<2>(dQ_reg, Bc, transposed(dST_smem, dST_pitch, 0, warp_row), K_part);
      for_each(dQ_reg, [&](float& x, int r, int c) {                     // line 15: to HBM, with other blocks
        const int row = i * Br + warp_row + r, k = dim(c);
        if (row < p.N_q && k < d) atomicAdd(w.dQ_accum + (first_row + row) * d + k, x);
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

int64_t rows_of_Q(const BwdParams& p) { return (int64_t)p.B * p.H * padded(p.N_q); }     // and of L and D

size_t workspace_bytes(const BwdParams& p) { return sizeof(float) * rows_of_Q(p) * (d + 2); }

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map, dO_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(dO_map, p.dO, p.B, p.H, p.N_q, d, Br);
  if (error != cudaSuccess) return error;
  Workspace w;
  w.dQ_accum = static_cast<float*>(p.workspace);
  w.L = w.dQ_accum + rows_of_Q(p) * d;
  w.D = w.L + rows_of_Q(p);
  prepare_kernel<<<ceil_div(rows_of_Q(p), block_rows), 256, 0, stream>>>(p, w, 1);
  const size_t bytes = 2 * (K_bytes + 2 * Q_bytes) + sizeof(ELEMENT) * Bc * dST_pitch +
                       sizeof(float) * 4 * Br + 2 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = p.B * p.H_kv * ceil_div(p.N_k, Bc);
  backward_kernel<<<blocks, threads, bytes, stream>>>(p, w, Q_map, K_map, V_map, dO_map);
  convert_kernel<<<ceil_div((int64_t)p.B * p.H * p.N_q * d, 256), 256, 0, stream>>>(p, w.dQ_accum);
  return cudaGetLastError();
}
