// Forward stage 27: early_wait
// idea:    P V is waited for before the exponentials: rounding and rescaling run between them
// types:   fp16, bf16
// needs:   sm_90a
// after:   seamless
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((2 if d <= 128 else 1) * Br + 4 * Bc) * ((d + 63) // 64 * 64) + 104
// workspace: the number of tiles that blocks have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.05x at d=64, 1.03x at d=128, 1.0x at d=256: rounding P~ and rescaling O cost no time
// measured: 1.01x at d=64 causal, 1.01x full, 1.04x at d=128 causal, 1.04x full, 1.00x at d=256 causal, 0.99x
//          full (H200, bf16, N=4096; make readme)
//
// In a step a warp had 1500 cycles between S and its next products (ncu, H200, d = 128): 330 for the maximum,
// 870 for the exponentials, and 300 to round P~ and to multiply O by alpha. An exponential keeps the special
// unit of a quarter of the multiprocessor for 8 cycles a warp, so others would fit between two of them. But
// P~ is rounded to registers that P V of the step before still reads, and O is what that adds to. So both
// came after the wait for it, and the wait after the exponentials.
//
// Now the wait comes before them, when the maximum is known. By then P V has run for as long as S did, or
// nearly. What is left to wait is less than what is won: the compiler mixes rounding and rescaling with the
// exponentials.
//
//   seamless     maximum   exponentials                              wait   rescale, round
//   here         maximum   wait   exponentials, rescale, round
//
// The next step's K is waited for there, too: then nothing stands between the exponentials and the products.
// But at d <= 64 it is better waited for when its turn comes (stream_k, H200, bf16, full, N = 2048, 4096,
// 16384: 0.99 of the time; in packed 1.02). Causal that leaves ptxas too few registers here, and in most that
// follows.
//
// Changed from seamless: softmax() is maximum() and exponential(), with the wait between.
#pragma once
#include "common/both_rows.cuh"
#include "common/epilogue.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/order.cuh"
#include "common/ring.cuh"
#include "common/tile16.cuh"
#include "common/turns.cuh"
#include "common/wgmma.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps + 128;               // consumers; and the producer's
constexpr int producer_registers = Br <= 128 ? 24 : 32, consumer_registers = Br <= 128 ? 240 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr bool early_wait = d > 64 || CAUSAL;                            // for K, before the exponentials
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int Q_buffers = d <= 128 ? 2 : 1;
constexpr int tile_rows = Q_buffers * Br + 4 * Bc;                       // in shared memory

// How many tiles of Q blocks have asked for, after their first ones
__global__ void clear_kernel(int* asked_for) { *asked_for = 0; }

// Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(
    FwdParams p, const __grid_constant__ CUtensorMap Q_map, const __grid_constant__ CUtensorMap K_map,
    const __grid_constant__ CUtensorMap V_map) {
  const int Tr = ceil_div(p.N_q, Br), heads = p.B * p.H, all = Tr * heads;         // lines 1, 2
  const int heads_together = CAUSAL ? heads_in_L2(heads, p.N_k, sizeof(ELEMENT) * d, p.H / p.H_kv) : 1;
  const int warp = warp_index(), lane = threadIdx.x % 32;
  const float c = exponent_scale(p.scale);

  extern __shared__ __align__(1024) ELEMENT smem[];
  uint64_t* barriers = reinterpret_cast<uint64_t*>(smem + tile_rows * pitch);
  const Ring<Q_buffers, Br> Q_smem(smem, barriers);
  const Ring<2, Bc> K_smem(smem + Q_buffers * Br * pitch, barriers + 4);
  const Ring<2, Bc> V_smem(K_smem.tiles + 2 * Bc * pitch, K_smem.full + 4);
  int* next_smem = reinterpret_cast<int*>(barriers + 12);     // the number of the tile that comes with Q_i
  Q_smem.init(warps);
  K_smem.init(warps), V_smem.init(warps);
  __syncthreads();

  if (warp >= warps) {                      // the producer
    setmaxnreg_dec<producer_registers>();
    if (threadIdx.x > 32 * warps) return;
    int V_row = 0, V_head = 0, V_batch = 0;      // of the V before, which has not been asked for
    for (int n = 0, step = 0, next = blockIdx.x;; n++) {                 // line 3
      Q_smem.wait_until_empty(n);
      next_smem[n % Q_buffers] = next;
      if (next >= all) {                    // the consumers end, too
        mbarrier_arrive(Q_smem.full + n % Q_buffers);
        V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        return;
      }
      const Work work = dispatch_order(Tr, heads, heads_together, next);
      const int i = Tr - 1 - work.tile, b = work.bh / p.H, h = work.bh % p.H, h_kv = h / (p.H / p.H_kv);
      const auto tiles = Mask(p, b, h).key_tiles(i);
      Q_smem.fill(Q_map, n, i * Br, h, b);                               // line 4
      next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;
      for (int t = 0; t < max(tiles.end, 1); t++, step++) {              // line 7: K_j, then the V before
        K_smem.fill(K_map, step, tiles[t] * Bc, h_kv, b);
        if (step > 0) V_smem.fill(V_map, step - 1, V_row, V_head, V_batch);
        V_row = tiles[t] * Bc, V_head = h_kv, V_batch = b;
      }
    }
  }
  setmaxnreg_inc<consumer_registers>();     // the consumers

  // What wgmma reads: this warpgroup's 64 rows of Q_i; K_j and V_j in buffer 0
  const uint32_t Q_tile = matrix_at(Q_smem.tiles + warp / 4 * 64 * panel);
  const uint32_t K_tile = matrix_at(K_smem.tiles), V_tile = matrix_at(V_smem.tiles, 128 * Bc);
  const Turns<Br / 64> turns(warp / 4);

  float S_reg[Bc / 8][4], O_reg[width / 8][4] = {};                      // line 5
  uint32_t P_frag[Bc / 16][4];
  auto multiply_S = [&](unsigned step, unsigned n) {                     // line 8: S_ij = Q_i K_j^T
    wgmma_QK<width / 16>(S_reg, Q_tile + Q_smem.offset(n), Br, K_tile + K_smem.offset(step));
  };
  auto multiply_O = [&](unsigned step) {                                 // line 10: + P~_ij V_j
    V_smem.wait_until_full(step);
    wgmma_PV(O_reg, P_frag, V_tile + V_smem.offset(step));
  };

  // m and l of this lane's two rows; l: the sum over its columns only, until the end
  float m[2], l[2], inv_l[2], alpha[2], shift[2];
  Work work = {};
  auto first_row = [&](const Work& work) { return (Tr - 1 - work.tile) * Br + 16 * warp; };   // of this warp
  auto wait_for_Q = [&](unsigned n) {       // returns its tile's number
    Q_smem.wait_until_full(n);
    return __shfl_sync(0xffffffff, lane == 0 ? next_smem[n % Q_buffers] : 0, 0);
  };
  auto store = [&](const Work& work) {
    rescale(O_reg, inv_l);                                               // line 12
    store_rows(p, O_reg, work.bh, first_row(work));                      // line 14
  };
  bool is_left = false;                     // P V of the last step of the tile before
  for (unsigned n = 0, step = 0, next = wait_for_Q(0); next < all; n++) {           // line 3
    const Work before = work;
    work = dispatch_order(Tr, heads, heads_together, next);
    const int warp_row = first_row(work);
    const Mask mask(p, work.bh / p.H, work.bh % p.H);
    const auto tiles = mask.key_tiles(Tr - 1 - work.tile);
    const int end = max(tiles.end, 1);
    for (int r = 0; r < 2; r++) m[r] = -INFINITY, l[r] = 0.f;
    auto maximum = [&](int t) {                                          // line 9
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S_reg, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S_reg, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      maximum_step(S_reg, m, alpha, shift, c, cut, slack);
      if (early_wait && t + 1 < end) K_smem.wait_until_full(step + t + 1);
    };
    auto exponential = [&] {
      exponentials(S_reg, l, alpha, c, shift);
      to_A(P_frag, S_reg);
    };

    K_smem.wait_until_full(step);
    turns.wait();
    multiply_S(step, n);
    if (is_left) {
      multiply_O(step - 1);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step);
      maximum(0);
      wgmma_wait<0>();
      V_smem.release(step - 1);
      store(before);
      exponential();
    } else {
      turns.end();
      wgmma_wait<0>();
      K_smem.release(step);
      maximum(0);
      exponential();
    }
    for_each(O_reg, [](float& x, int, int) { x = 0.f; });                // line 5
    for (int t = 1; t < end; t++) {                                      // line 6
      if (!early_wait) K_smem.wait_until_full(step + t);
      turns.wait();
      multiply_S(step + t, n);
      multiply_O(step + t - 1);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step + t);
      maximum(t);
      wgmma_wait<0>();
      V_smem.release(step + t - 1);
      exponential();
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
        rescale(O_reg, alpha);                                           // line 10
    }                                                                    // line 11
    Q_smem.release(n);
    step += end;
    store_L(p, m, l, inv_l, work.bh, warp_row);                          // lines 13, 15
    next = wait_for_Q(n + 1);
    is_left = next < all;
    if (!is_left) {
      multiply_O(step - 1);
      wgmma_wait<0>();
      V_smem.release(step - 1);
      store(work);
    }
  }
  turns.end_all();
}

size_t workspace_bytes(const FwdParams&) { return sizeof(int); }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  CUtensorMap Q_map, K_map, V_map;
  cudaError_t error = make_tensor_map(Q_map, p.Q, p.B, p.H, p.N_q, d, Br);
  if (error == cudaSuccess) error = make_tensor_map(K_map, p.K, p.B, p.H_kv, p.N_k, d, Bc);
  if (error == cudaSuccess) error = make_tensor_map(V_map, p.V, p.B, p.H_kv, p.N_k, d, Bc);
  if (error != cudaSuccess) return error;
  const size_t bytes = sizeof(ELEMENT) * tile_rows * pitch + 13 * sizeof(uint64_t);
  allow_shared_memory(forward_kernel, bytes);
  const int tiles = p.B * p.H * ceil_div(p.N_q, Br), blocks = min(tiles, multiprocessors());
  if (blocks < tiles) clear_kernel<<<1, 1, 0, stream>>>(static_cast<int*>(p.workspace));
  forward_kernel<<<blocks, threads, bytes, stream>>>(p, Q_map, K_map, V_map);
  return cudaGetLastError();
}
