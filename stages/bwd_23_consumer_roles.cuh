// Backward stage 23: consumer_roles
// idea:    a warpgroup for each of dV, dK and dQ; P and dS pass from one to the next through shared memory
// types:   fp16, bf16
// needs:   sm_90a
// after:   seeded
// deterministic: no
// tiles:   Br=64 Bc=64
// limits:  Br in (64,); Bc in (64,)
// shared:  (4 * Bc + 8 * Br) * ((d + 63) // 64 * 64) + 6 * Bc * Br + 16 * Br + 128
// workspace: dQ_accum, L, D
// hbm:     B * (8 * H_kv * N_k * d + H * (N_q * (4 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 1) + 4 * d + 8)))
// predicted: at d=256 1.01 to 1.08x FlashAttention-3 (a study's kernel of this kind: H200, full, N = 2048 to
//          16384); slower at d <= 128, where a warpgroup has room for both accumulators
// measured: 0.88x at d=64 causal, 0.84x full, 0.95x at d=128 causal, 0.90x full, 1.43x at d=256 causal, 1.43x
//          full (H200, bf16, N=4096; make readme)
//
// At d = 256 dV and dK of 64 keys take 128 registers a thread each, if a warpgroup has all of one. So far two
// warpgroups had half of the columns of both, and each made all of S^T and dP^T. Here three warpgroups do
// different work, and each product is made once:
//
//   warpgroup 0   S^T = K Q^T     P                           dV += P^T dO      |
//   warpgroup 1   dP^T = V dO^T        P -> dS = P * (dP - D)     dK += dS^T Q  |  a tile of Q
//   warpgroup 2                                  dS ->                dQ = dS K |
//   warpgroup 3   the producer
//
// P and dS are operands A in registers, as before, of those who have made them. They pass on through shared
// memory, P to the thread of the same number: its accumulator has the same elements, so 16 bytes a thread lie
// side by side. dS is read transposed, by ldmatrix.trans (common/hand_over.cuh). Nobody meets: each place has
// two mbarriers, as a ring's buffer has. So a warpgroup waits for the one before it alone, and while one
// waits for its product, the others' exponentials and products go on.
//
//   - Registers: 24 for the producer, 104 for dQ, 192 for dV and dK. With 128 to start with, that is all.
//   - 64 columns of dQ at a time: 128 would not fit beside dS. ldmatrix has certainly written dS's registers
//     when a product that reads them is issued. Then, and not before, its place is given back.
//   - With 512 threads a product has 128 columns at most here (ptxas: C7602). So dV and dK are two
//     accumulators each, for either half of the columns.
//   - dQ leaves as in late_dq: four numbers a lane, as registers lie (common/gradients.cuh). In that study
//     cp.reduce.async.bulk was slower here: dQ's registers would pass through shared memory once more.
//   - A mask that changes scores needs its slope where dS is made: it is handed over behind P.
//
// HBM traffic without caches (hbm, above): as in late_dq.
//
// Changed from seeded: who multiplies what. At d=256 nothing is spilled with causal and full masks, 44 bytes
// a thread with a window, up to 264 with masks that read tensors or change scores.
#pragma once
#include "common/exp2.cuh"
#include "common/gradients.cuh"
#include "common/hand_over.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/pairs.cuh"
#include "common/ring_rows.cuh"
#include "common/seed.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int columns = (panels + 1) / 2 * panel;  // of dV and dK in an accumulator: one has the first half,
constexpr int second = pitch - columns;            // one those from here on: maybe some of the first's, too
constexpr int threads = 512;                       // three warpgroups of consumers; and the producer's
constexpr int producer_registers = 24, dQ_registers = 104, consumer_registers = 192;

// The third warpgroup's part, line 15: dQ_i += dS_ij K_j, 64 columns at a time
__device__ __forceinline__ void add_dQ(const BwdParams& p, const Workspace& w, int j, int b, int h_kv,
                                       const Ring<1, Bc>& K_smem, const ELEMENT* dST_smem,
                                       const Place& dS_place) {
  const int warp_row = warp_index() % 4 * 16, group = p.H / p.H_kv, Tr = ceil_div(p.N_q, Br);
  const uint32_t K_columns = matrix_at(K_smem.tiles, 128 * Bc);
  K_smem.wait_until_full(0);
  int n = 0;                                // tiles so far
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const auto tiles = Mask(p, b, h).query_tiles(j);
    for (int t = tiles.first; t < tiles.end; t++, n++) {
      float* dQ = w.dQ_accum + (((int64_t)b * p.H + h) * Tr + tiles[t]) * Br * d;
      uint32_t dS_frag[Bc / 16][4];
      dS_place.wait_until_full(n);
      load_transposed(dS_frag, dST_smem, warp_row);
      #pragma unroll
      for (int col = 0; col < pitch; col += panel) {
        float dQ_reg[panel / 8][4];
        wgmma_dQ_registers(dQ_reg, dS_frag, K_columns + col * Bc / 8);
        if (col == 0) dS_place.emptied();   // now all of it is in registers, certainly
        wgmma_wait<0>();
        add_fragments(dQ, one_strip(dQ_reg), warp_row, col, 1);
      }
    }
  }
}

// One block per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, const __grid_constant__ CUtensorMap Q_map,
    const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap V_map,
    const __grid_constant__ CUtensorMap dO_map) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);          // lines 1, 2
  const int j = blockIdx.x % Tc, bh = blockIdx.x / Tc;                   // line 5
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warpgroup = warp_index() / 4, warp_row = warp_index() % 4 * 16;    // of dQ, or of dV and dK

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* dST_smem = smem + (2 * Bc + 4 * Br) * pitch;        // Bc x Br, a panel
  uint4* P_smem = reinterpret_cast<uint4*>(dST_smem + Bc * Br);          // as registers lie; and then slopes
  float* L_smem = reinterpret_cast<float*>(P_smem + Bc * Br / 4);        // Br, -L / c, twice
  float* D_smem = L_smem + 2 * Br;          // Br, twice
  uint64_t* barriers = reinterpret_cast<uint64_t*>(D_smem + 2 * Br);
  const Ring<1, Bc> K_smem(smem, barriers), V_smem(K_smem.tiles + Bc * pitch, barriers + 2);
  const Ring<2, Br> Q_smem(V_smem.tiles + Bc * pitch, barriers + 4);
  const Ring<2, Br> dO_smem(Q_smem.tiles + 2 * Br * pitch, barriers + 8);
  const Place P_place(barriers + 12), dS_place(barriers + 14);
  K_smem.init(4);
  V_smem.init(4);
  Q_smem.init(8);
  dO_smem.init(8);
  P_place.init(4, 4);
  dS_place.init(4, 4);
  __syncthreads();

  int n = 0;                                // tiles so far
  if (warpgroup == 3) {                     // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 384) return;
    K_smem.fill(K_map, 0, j * Bc, h_kv, b);                              // line 6
    V_smem.fill(V_map, 0, j * Bc, h_kv, b);
    for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
      const auto tiles = Mask(p, b, h).query_tiles(j);
      for (int t = tiles.first; t < tiles.end; t++, n++) {               // line 9
        const int i = tiles[t];
        const int64_t row = (((int64_t)b * p.H + h) * Tr + i) * Br;      // in L and D
        fill(Q_smem, Q_map, n, i * Br, h, b, L_smem, w.L + row);
        fill(dO_smem, dO_map, n, i * Br, h, b, D_smem, w.D + row);
      }
    }
    return;
  }

  if (warpgroup == 2) {
    setmaxnreg_dec<dQ_registers>();
    return add_dQ(p, w, j, b, h_kv, K_smem, dST_smem, dS_place);
  }
  setmaxnreg_inc<consumer_registers>();

  // What wgmma reads: K_j and V_j; Q_i and dO_i in buffer 0, both ways
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles);
  const uint32_t Q_tile = matrix_at(Q_smem.tiles), dO_tile = matrix_at(dO_smem.tiles);
  const uint32_t Q_columns = matrix_at(Q_smem.tiles, 128 * Br), Q_second = Q_columns + second * Br / 8;
  const uint32_t dO_columns = matrix_at(dO_smem.tiles, 128 * Br), dO_second = dO_columns + second * Br / 8;

  float first_reg[columns / 8][4] = {}, second_reg[columns / 8][4] = {};         // line 7: of dV, or of dK

  K_smem.wait_until_full(0);
  V_smem.wait_until_full(0);
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    for (int t = tiles.first; t < tiles.end; t++, n++) {                 // line 8
      const int i = tiles[t];
      const uint32_t buffer = Q_smem.offset(n);                          // as descriptors count
      const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem + n % 2 * Br;
      float S_reg[Br / 8][4], dP_reg[Br / 8][4], slope_reg[Br / 8][4];
      uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4], slope_frag[Br / 16][4];

      if (warpgroup == 0) {               // dV
        const float c = factor_of_S(p.scale);
        Q_smem.wait_until_full(n);
        if (!Mask::scores) seed(S_reg, L_i);
        wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);         // line 10
        wgmma_wait<0>();
        if (Mask::scores) change_scores(S_reg, slope_reg, mask, p.scale, i * Br, j * Bc + warp_row, L_i);
        for_each(S_reg, [&](float& x, int r, int col) {                  // line 11: P_ij; without a branch
          const float P = fast_exp2(c * x);
          x = mask.sees(i * Br + col, j * Bc + warp_row + r) ? P : 0.f;
        });
        Q_smem.release(n);
        to_A(P_frag, S_reg);
        if (Mask::scores) to_A(slope_frag, slope_reg);
        dO_smem.wait_until_full(n);
        wgmma_PV(first_reg, P_frag, dO_columns + buffer);                // line 12: + P_ij^T dO_i
        wgmma_PV(second_reg, P_frag, dO_second + buffer);
        P_place.wait_until_empty(n);
        hand_over(P_smem, P_frag);
        if (Mask::scores) hand_over(P_smem + Bc * Br / 8, slope_frag);
        P_place.filled();
        wgmma_wait<0>();
        dO_smem.release(n);
      } else {                            // dK
        dO_smem.wait_until_full(n);
        seed(dP_reg, D_i);
        wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile + buffer, true);                // line 13
        wgmma_wait<0>();
        dO_smem.release(n);
        P_place.wait_until_full(n);
        take(P_frag, P_smem);
        if (Mask::scores) take(slope_frag, P_smem + Bc * Br / 8);
        for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int col) { // line 14: dS_ij
          dP = P * dP;
          mask.keep_gradient(dP, i * Br + col, j * Bc + warp_row + r);
        });
        if (Mask::scores) for_both(slope_frag, dP_reg, [](float slope, float& dS, int, int) { dS *= slope; });
        P_place.emptied();
        to_A(dS_frag, dP_reg);
        Q_smem.wait_until_full(n);
        wgmma_PV(first_reg, dS_frag, Q_columns + buffer);                // line 16: + dS_ij^T Q_i
        wgmma_PV(second_reg, dS_frag, Q_second + buffer);
        dS_place.wait_until_empty(n);
        store_fragments(dST_smem, dS_frag, Bc, warp_row);
        dS_place.filled();
        wgmma_wait<0>();
        Q_smem.release(n);
      }
    }                                                                    // line 17
  }

  auto store = [&](const Tensor& out, float (&acc)[columns / 8][4], int first_col, int from_col) {
    for_each(acc, [&](float& x, int, int) { x *= warpgroup == 0 ? 1.f : p.scale; });
    for_each_pair(acc, [&](uint32_t packed, int r, int c) {
      const int col = j * Bc + warp_row + r, k = first_col + c;
      if (col < p.N_k && k < d && k >= from_col)
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + k) = packed;
    });
  };
  store(warpgroup == 0 ? p.dV : p.dK, first_reg, 0, 0);                  // line 18
  store(warpgroup == 0 ? p.dV : p.dK, second_reg, second, columns);
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
  prepare_seeds(w, p.scale);
  prepare(p, w, rows_of_Q(p), 1, stream);
  const size_t bytes = sizeof(ELEMENT) * (2 * (Bc + 2 * Br) * pitch + 3 * Bc * Br) +
                       sizeof(float) * 4 * Br + 16 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = p.B * p.H_kv * ceil_div(p.N_k, Bc);
  backward_kernel<<<blocks, threads, bytes, stream>>>(p, w, Q_map, K_map, V_map, dO_map);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  return cudaGetLastError();
}
