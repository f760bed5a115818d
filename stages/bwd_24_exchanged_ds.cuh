// Backward stage 24: exchanged_ds
// idea:    two blocks exchange dS: each adds half of the columns of dQ, over the keys of both; clusters
// types:   fp16, bf16
// needs:   sm_90a
// after:   consumer_roles
// deterministic: no
// tiles:   Br=64 Bc=128
// limits:  Br in (64,); Bc in (128,)
// shared:  (3 * Bc + 6 * Br) * ((d + 63) // 64 * 64) + 4 * Bc * Br + 12 * Br + 136
// workspace: dQ_accum, L, D
// hbm:     B * (10 * H_kv * N_k * d + H * (N_q * (8 * Tc * d + 10 * d + 4) +
//          Tr * Br * (8 * Tc * (d + 2) + 4 * d + 8)))
// predicted: at d=256 1.15x consumer_roles, 1.19 to 1.34x FlashAttention-3 (a study's kernel of this kind,
//          with more buffers of dO: H200, N = 2048 to 16384)
// measured: 0.76x at d=64 causal, 0.74x full, 0.97x at d=128 causal, 0.97x full, 1.13x at d=256 causal, 1.13x
//          full (H200, bf16, N=4096; make readme)
//
// At d = 256 a block adds 64 KB to dQ for each tile of Q, by 64 keys alone. These sums bound the stage
// before. Here two blocks of neighbouring keys are a cluster, and each sends its dS to the other one (the
// peer). So both have dS of 128 keys. Each makes half of the columns of dQ, over all of these keys: as many
// products, half the sums.
//
//   block 0    dS of keys 0 - 63   --->  dQ, columns 0 - 127    = dS K over keys 0 - 127
//                                X
//   block 1    dS of keys 64 - 127 --->  dQ, columns 128 - 255  = dS K over keys 0 - 127
//
// Each warp of warpgroup 1 stores its 16 keys of dS, 2 KB, and sends them: bulk_send() (common/cluster.cuh)
// is a copy from shared memory to that of another block. It counts bytes at an mbarrier there, as a load
// does. Who has sent gets no notice. So one mbarrier, `empty` of dS_place, says that both copies have been
// read: 4 warps here arrive, and 4 of the peer, from there. That wait sees what the other block has done, and
// only that one must: acquire at the scope of a cluster costs more (with it in every wait that study lost a
// quarter).
//
//   - For the peer's keys a block needs K of them, too: another 32 KB. So dO has one buffer.
//   - BLOCK_C is the cluster's: a mask is asked for tiles of 128 keys, and both blocks walk through the same
//     tiles of Q, in the same order. If one has no key there, or none at all past N_k, it sends zeros.
//   - No block may begin before the other's mbarriers are there, nor end while it may still send or arrive:
//     cluster_sync() at both ends.
//   - The launch says that two blocks are a cluster (common/cluster.cuh).
//
// HBM traffic without caches (hbm, above): half the sums, but each tile of Q and dO is read twice for 128
// keys.
//
// Changed from consumer_roles: this. At d=256 4 bytes a thread are spilled with a causal or a full mask,
// 24 with a window, up to 184 with masks that read tensors or change scores; at d=192 up to 24.
#pragma once
#include "common/cluster.cuh"
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
constexpr int Br = BLOCK_R, Bc = BLOCK_C / 2;      // Bc: of a block, as a cluster of two has BLOCK_C
constexpr int pitch = panel * panels;              // elements in shared memory for a row of a tile
constexpr int columns = (panels + 1) / 2 * panel;  // of dV and dK in an accumulator: one has the first half,
constexpr int second = pitch - columns;            // one those from here on: maybe some of the first's, too
constexpr int threads = 512;                       // three warpgroups of consumers; and the producer's
constexpr int producer_registers = 24, dQ_registers = 104, consumer_registers = 192;

// The third warpgroup's part, line 15: dQ_i += dS_ij K_j, 64 columns at a time
__device__ __forceinline__ void add_dQ(const BwdParams& p, const Workspace& w, int j, int b, int h_kv,
                                       const Ring<1, Bc>& K_smem, const ELEMENT* dST_smem,
                                       const Place& dS_place, const Ring<1, Bc>& peer_K_smem,
                                       const ELEMENT* peer_dST_smem, uint64_t* peer_dS_full) {
  const int warp_row = warp_index() % 4 * 16, group = p.H / p.H_kv, Tr = ceil_div(p.N_q, Br);
  const int rank = cluster_rank(), first_col = rank * second;
  const uint32_t K_columns = matrix_at<2>(K_smem.tiles + first_col * Bc, 128 * Bc);
  const uint32_t peer_K_columns = matrix_at<2>(peer_K_smem.tiles + first_col * Bc, 128 * Bc);
  K_smem.wait_until_full(0);
  peer_K_smem.wait_until_full(0);
  int n = 0;                                // tiles so far
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const auto tiles = Mask(p, b, h).query_tiles(j);
    for (int t = tiles.first; t < tiles.end; t++, n++) {
      float* dQ = w.dQ_accum + (((int64_t)b * p.H + h) * Tr + tiles[t]) * Br * d;
      uint32_t dS_frag[Bc / 16][4], peer_dS_frag[Bc / 16][4];
      if (threadIdx.x % 128 == 0) mbarrier_arrive_expect(peer_dS_full, sizeof(ELEMENT) * Bc * Br);
      dS_place.wait_until_full(n);
      load_transposed(dS_frag, dST_smem, warp_row);
      mbarrier_wait(peer_dS_full, n % 2);
      load_transposed(peer_dS_frag, peer_dST_smem, warp_row);
      #pragma unroll
      for (int col = 0; col < columns; col += panel) {
        float dQ_reg[panel / 8][4];
        wgmma_dQ_registers(dQ_reg, dS_frag, K_columns + col * Bc / 8);
        wgmma_dQ_registers(dQ_reg, peer_dS_frag, peer_K_columns + col * Bc / 8, true);
        if (col == 0) dS_place.emptied();   // now all of it is in registers, certainly
        if (col == 0 && threadIdx.x % 32 == 0) mbarrier_arrive_in_block(dS_place.empty, 1 - rank);
        wgmma_wait<0>();
        if (first_col + col >= rank * columns)
          add_fragments(dQ, one_strip(dQ_reg), warp_row, first_col + col, 1);
      }
    }
  }
}

// A cluster of two blocks per tile of K and V. Line numbers are those of Algorithm 2.
__global__ void __launch_bounds__(threads, 1) backward_kernel(
    BwdParams p, Workspace w, const __grid_constant__ CUtensorMap Q_map,
    const __grid_constant__ CUtensorMap K_map, const __grid_constant__ CUtensorMap V_map,
    const __grid_constant__ CUtensorMap dO_map) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, 2 * Bc);      // lines 1, 2
  const int j = blockIdx.x / 2 % Tc, bh = blockIdx.x / 2 / Tc;           // line 5
  const int rank = cluster_rank(), peer = 1 - rank, block_key = (2 * j + rank) * Bc;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int warpgroup = warp_index() / 4, warp_row = warp_index() % 4 * 16;    // of dQ, or of dV and dK

  extern __shared__ __align__(1024) ELEMENT smem[];
  ELEMENT* dST_smem = smem + (3 * Bc + 3 * Br) * pitch;        // Bc x Br, a panel
  ELEMENT* peer_dST_smem = dST_smem + Bc * Br;
  uint4* P_smem = reinterpret_cast<uint4*>(peer_dST_smem + Bc * Br);     // as registers lie; and then slopes
  float* L_smem = reinterpret_cast<float*>(P_smem + Bc * Br / 4);        // Br, -L / c, twice
  float* D_smem = L_smem + 2 * Br;          // Br
  uint64_t* barriers = reinterpret_cast<uint64_t*>(D_smem + Br);
  const Ring<1, Bc> K_smem(smem, barriers), V_smem(K_smem.tiles + Bc * pitch, barriers + 2);
  const Ring<2, Br> Q_smem(V_smem.tiles + Bc * pitch, barriers + 4);
  const Ring<1, Br> dO_smem(Q_smem.tiles + 2 * Br * pitch, barriers + 8);
  const Ring<1, Bc> peer_K_smem(dO_smem.tiles + Br * pitch, barriers + 10);
  const Place P_place(barriers + 12), dS_place(barriers + 14);
  uint64_t* peer_dS_full = barriers + 16;
  K_smem.init(4);
  V_smem.init(4);
  Q_smem.init(8);
  dO_smem.init(8);
  P_place.init(4, 4);
  dS_place.init(4, 8);                      // 4 warps of the peer empty what they have of it
  if (threadIdx.x == 0) mbarrier_init(peer_dS_full, 1);
  peer_K_smem.init(4);
  cluster_sync();

  int n = 0;                                // tiles so far
  if (warpgroup == 3) {                     // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 384) return;
    K_smem.fill(K_map, 0, block_key, h_kv, b);                           // line 6
    V_smem.fill(V_map, 0, block_key, h_kv, b);
    peer_K_smem.fill(K_map, 0, (2 * j + peer) * Bc, h_kv, b);
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
    add_dQ(p, w, j, b, h_kv, K_smem, dST_smem, dS_place, peer_K_smem, peer_dST_smem, peer_dS_full);
    return cluster_sync();
  }
  setmaxnreg_inc<consumer_registers>();

  // What wgmma reads: K_j and V_j; Q_i and dO_i in buffer 0, both ways
  const uint32_t K_tile = matrix_at<2>(K_smem.tiles), V_tile = matrix_at<2>(V_smem.tiles);
  const uint32_t Q_tile = matrix_at<2>(Q_smem.tiles), dO_tile = matrix_at<2>(dO_smem.tiles);
  const uint32_t Q_columns = matrix_at<2>(Q_smem.tiles, 128 * Br), Q_second = Q_columns + second * Br / 8;
  const uint32_t dO_columns = matrix_at<2>(dO_smem.tiles, 128 * Br), dO_second = dO_columns + second * Br / 8;

  float first_reg[columns / 8][4] = {}, second_reg[columns / 8][4] = {};         // line 7: of dV, or of dK

  K_smem.wait_until_full(0);
  V_smem.wait_until_full(0);
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const Mask mask(p, b, h);
    const auto tiles = mask.query_tiles(j);
    for (int t = tiles.first; t < tiles.end; t++, n++) {                 // line 8
      const int i = tiles[t];
      const uint32_t buffer = Q_smem.offset(n);                          // as descriptors count
      const float *L_i = L_smem + n % 2 * Br, *D_i = D_smem;
      float S_reg[Br / 8][4], dP_reg[Br / 8][4], slope_reg[Br / 8][4];
      uint32_t P_frag[Br / 16][4], dS_frag[Br / 16][4], slope_frag[Br / 16][4];

      if (warpgroup == 0) {               // dV
        const float c = factor_of_S(p.scale);
        Q_smem.wait_until_full(n);
        if (!Mask::scores) seed(S_reg, L_i);
        wgmma_QK<width / 16>(S_reg, K_tile, Bc, Q_tile + buffer, !Mask::scores);         // line 10
        wgmma_wait<0>();
        if (Mask::scores) change_scores(S_reg, slope_reg, mask, p.scale, i * Br, block_key + warp_row, L_i);
        for_each(S_reg, [&](float& x, int r, int col) {                  // line 11: P_ij; without a branch
          const float P = fast_exp2(c * x);
          x = mask.sees(i * Br + col, block_key + warp_row + r) ? P : 0.f;
        });
        Q_smem.release(n);
        to_A(P_frag, S_reg);
        if (Mask::scores) to_A(slope_frag, slope_reg);
        dO_smem.wait_until_full(n);
        wgmma_PV(first_reg, P_frag, dO_columns);                         // line 12: + P_ij^T dO_i
        wgmma_PV(second_reg, P_frag, dO_second);
        P_place.wait_until_empty(n);
        hand_over(P_smem, P_frag);
        if (Mask::scores) hand_over(P_smem + Bc * Br / 8, slope_frag);
        P_place.filled();
        wgmma_wait<0>();
        dO_smem.release(n);
      } else {                            // dK
        dO_smem.wait_until_full(n);
        seed(dP_reg, D_i);
        wgmma_QK<width / 16>(dP_reg, V_tile, Bc, dO_tile, true);                         // line 13
        wgmma_wait<0>();
        __syncwarp();                     // all lanes have read D_i
        dO_smem.release(n);
        P_place.wait_until_full(n);
        take(P_frag, P_smem);
        if (Mask::scores) take(slope_frag, P_smem + Bc * Br / 8);
        for_both(P_frag, dP_reg, [&](float P, float& dP, int r, int col) { // line 14: dS_ij
          dP = P * dP;
          mask.keep_gradient(dP, i * Br + col, block_key + warp_row + r);
        });
        if (Mask::scores) for_both(slope_frag, dP_reg, [](float slope, float& dS, int, int) { dS *= slope; });
        P_place.emptied();
        to_A(dS_frag, dP_reg);
        Q_smem.wait_until_full(n);
        wgmma_PV(first_reg, dS_frag, Q_columns + buffer);                // line 16: + dS_ij^T Q_i
        wgmma_PV(second_reg, dS_frag, Q_second + buffer);
        mbarrier_wait_for_blocks(dS_place.empty, n % 2 ^ 1);
        store_fragments(dST_smem, dS_frag, Bc, warp_row);
        fence_proxy_async();
        dS_place.filled();
        if (threadIdx.x % 32 == 0)
          bulk_send(peer_dST_smem + warp_row * Br, dST_smem + warp_row * Br, sizeof(ELEMENT) * 16 * Br,
                    peer_dS_full, peer);
        wgmma_wait<0>();
        Q_smem.release(n);
      }
    }                                                                    // line 17
  }

  auto store = [&](const Tensor& out, float (&acc)[columns / 8][4], int first_col, int from_col) {
    for_each(acc, [&](float& x, int, int) { x *= warpgroup == 0 ? 1.f : p.scale; });
    for_each_pair(acc, [&](uint32_t packed, int r, int c) {
      const int col = block_key + warp_row + r, k = first_col + c;
      if (col < p.N_k && k < d && k >= from_col)
        *reinterpret_cast<uint32_t*>(out.head(b, h_kv) + col * out.stride_n + k) = packed;
    });
  };
  store(warpgroup == 0 ? p.dV : p.dK, first_reg, 0, 0);                  // line 18
  store(warpgroup == 0 ? p.dV : p.dK, second_reg, second, columns);
  cluster_sync();
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
  const size_t bytes = sizeof(ELEMENT) * (3 * (Bc + Br) * pitch + 4 * Bc * Br) +
                       sizeof(float) * 3 * Br + 17 * sizeof(uint64_t);
  allow_shared_memory(backward_kernel, bytes);
  const int blocks = 2 * p.B * p.H_kv * ceil_div(p.N_k, 2 * Bc);
  cudaLaunchKernelEx(ClusterLaunch(2, blocks, threads, bytes, stream), backward_kernel, p, w, Q_map, K_map,
                     V_map, dO_map);
  convert_dQ_kernel<<<p.B * p.H * ceil_div(p.N_q, convert_rows), 256, 0, stream>>>(p, w.dQ_accum, 1);
  return cudaGetLastError();
}
