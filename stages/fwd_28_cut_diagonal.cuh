// Forward stage 28: cut_diagonal
// idea:    on the diagonal a warpgroup multiplies half a tile, or none, if its own rows see no more
// types:   fp16, bf16
// needs:   sm_90a
// after:   early_wait
// tiles:   Br=192 Bc=128; d > 64: Br=128 Bc=128; d > 128: Br=128 Bc=80
// limits:  Br % 64 == 0; Br <= 192; Bc % 16 == 0; Bc <= 128
// shared:  2 * ((2 if d <= 128 else 1) * Br + 4 * Bc) * ((d + 63) // 64 * 64) + 104
// workspace: the number of tiles that blocks have asked for
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: if causal, N=2048 / 4096: 1.06x / 1.04x at d=64, 1.02x / 1.01x at d=128, 1.03x / 1.015x at d=256
// measured: 1.03x at d=64 causal, 0.99x full, 1.01x at d=128 causal, 0.97x full, 1.00x at d=256 causal, 1.04x
//          full (H200, bf16, N=4096; make readme)
//
// Causal, a block's rows do not all see as many keys. With tiles of 192 x 128 the first 64 rows may see
// nothing of the last tile of K, and of half of the one before:
//
//   rows of a warpgroup    K_j       K_j+1
//   0 to 63                half
//   64 to 127              all
//   128 to 191             all       half
//
// Before, each warpgroup multiplied all that the block needs. So at N=2048 6 % of the products and 8 % of the
// exponentials were of scores that no row of the warpgroup sees, with 128 x 128 1 and 3 %, with 128 x 80 3.
//
// Now a warpgroup asks how much its own last row needs (Mask::needed). It passes the last tile by if it needs
// none of it: it waits for it and gives it back. Only one: of V there are two buffers, and P V of the tile
// before is still to come. And if half of its last tile is enough, S, the maximum and the exponentials are of
// that half: the first registers of S. P V is of the whole tile, with zeros. (With half of it, too, ptxas
// serialises all products at d=128. So it does with half of 80 keys.)
//
// Changed from early_wait: a step is step_of(), of a tile or half of one; without a mask nothing. The
// producer has 40 registers, where it had 24, and spilled some with a mask.
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
constexpr int producer_registers = Br <= 128 ? 40 : 32, consumer_registers = Br <= 128 ? 232 : 160;
constexpr float slack = d > 64 ? 8.f : 0.f;                              // how far scores may pass m, base 2
constexpr bool early_wait = d > 64 || CAUSAL;                            // for K, before the exponentials
constexpr int pitch = panel * panels;      // elements in shared memory for a row of a tile
constexpr int Q_buffers = d <= 128 ? 2 : 1;
constexpr int tile_rows = Q_buffers * Br + 4 * Bc;                       // in shared memory
constexpr int half_cols = Bc % 32 == 0 ? Bc / 2 : Bc;                    // of a tile of S

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
  auto multiply_S = [&](auto& S, unsigned step, unsigned n) {            // line 8: S_ij = Q_i K_j^T
    wgmma_QK<width / 16>(S, Q_tile + Q_smem.offset(n), Br, K_tile + K_smem.offset(step), false, Bc);
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
  for (unsigned n = 0, step = 0, last = 0, next = wait_for_Q(0); next < all; n++) { // line 3
    const Work before = work;
    work = dispatch_order(Tr, heads, heads_together, next);
    const int warp_row = first_row(work);
    const Mask mask(p, work.bh / p.H, work.bh % p.H);
    const auto tiles = mask.key_tiles(Tr - 1 - work.tile);
    const int end = max(tiles.end, 1);
    const auto needed = mask.needed<half_cols>(tiles, end, first_row(work) / 64 * 64 + 63);  // by 64 rows
    for (int r = 0; r < 2; r++) m[r] = -INFINITY, l[r] = 0.f;
    auto maximum = [&](auto& S, int t) {                                 // line 9
      const bool cut = t >= tiles.cut;
      if (NEGATIVE_SCALE) for_each(S, [](float& x, int, int) { x = -x; });
      if (cut || Mask::scores) mask_tile(S, mask, p.scale, warp_row, tiles[t] * Bc, cut);
      maximum_step(S, m, alpha, shift, c, cut, slack);
      if (early_wait && t + 1 < needed.tiles) K_smem.wait_until_full(step + t + 1);
    };
    auto exponential = [&](auto& S) {
      exponentials(S, l, alpha, c, shift);
      to_A(P_frag, S);
    };

    K_smem.wait_until_full(step);
    turns.wait();
    multiply_S(S_reg, step, n);
    if (is_left) {
      multiply_O(last);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step);
      maximum(S_reg, 0);
      wgmma_wait<0>();
      V_smem.release(last);
      store(before);
      exponential(S_reg);
    } else {
      turns.end();
      wgmma_wait<0>();
      K_smem.release(step);
      maximum(S_reg, 0);
      exponential(S_reg);
    }
    for_each(O_reg, [](float& x, int, int) { x = 0.f; });                // line 5
    auto step_of = [&](auto& S, int t) {
      if (!early_wait) K_smem.wait_until_full(step + t);
      turns.wait();
      multiply_S(S, step + t, n);
      multiply_O(step + t - 1);
      turns.end();
      wgmma_wait<1>();
      K_smem.release(step + t);
      maximum(S, t);
      wgmma_wait<0>();
      V_smem.release(step + t - 1);
      exponential(S);
      if (slack == 0.f || __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f))
        rescale(O_reg, alpha);                                           // line 10
    };
    for (int t = 1; t < needed.tiles - needed.some_are_enough; t++) step_of(S_reg, t);         // line 6
    if (needed.some_are_enough) step_of(first<half_cols / 8>(S_reg), needed.tiles - 1);        // line 11
    Q_smem.release(n);
    last = step + needed.tiles - 1;
    if (needed.tiles < end) {                     // this warpgroup's rows see nothing of the last tile
      turns.skip();
      K_smem.pass(last + 1);
      V_smem.pass(last + 1);
    }
    step += end;
    store_L(p, m, l, inv_l, work.bh, warp_row);                          // lines 13, 15
    next = wait_for_Q(n + 1);
    is_left = next < all;
    if (!is_left) {
      multiply_O(last);
      wgmma_wait<0>();
      V_smem.release(last);
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
