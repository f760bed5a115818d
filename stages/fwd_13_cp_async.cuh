// Forward stage 13: cp_async
// idea:    asynchronous copies into a second buffer: the next tile comes while this one is multiplied
// types:   fp16, bf16
// needs:   sm_80
// after:   swizzle
// tiles:   Br=64 Bc=64; d > 128: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 256; Bc % 16 == 0; Bc <= 128
// shared:  2 * (Br + 4 * Bc) * ((d + 63) // 64 * 64)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 1.3x at d=64, 1.25x at d=128: no waiting for the next tile; no registers on its way
// measured: 1.34x at d=64 causal, 1.35x full, 1.64x at d=128 causal, 1.66x full, 1.91x at d=256 causal, 1.93x
//          full (H200, bf16, N=4096; make readme)
//
// A load from HBM takes hundreds of cycles. So far a block waited for loads in every tile. Its tensor cores
// were idle, unless another block on the multiprocessor had work for them.
//
// cp.async copies 16 bytes from HBM to shared memory, past the registers, and lets the thread go on. K and V
// have two buffers each: while tile j is used, tile j + 1 is under way to the other ones. (Where the mask
// leaves tiles out, the next one has another number: the t-th is j = tiles[t], in buffer t % 2.)
//
//   time ->    tile j - 1               tile j                   tile j + 1
//   copies     K_j, V_j                 K_j+1, V_j+1             K_j+2, V_j+2
//   buffers    j % 2                    (j + 1) % 2              j % 2
//   products   S_i,j-1  P_i,j-1 V_j-1   S_ij     P_ij V_j        S_i,j+1  P_i,j+1 V_j+1
//
// One barrier a tile is enough:
//
//   wait until this thread's copies of tile j are done; barrier: everybody's are, and tile j - 1, where
//   j + 1 goes, is used up; S = Q K_j^T; start to copy tile j + 1; softmax; O += P V_j
//
// The copies start after S, so that its multiplications need not wait until the copies are issued. The first
// tile comes before the loop, together with Q.
//
// HBM traffic without caches (hbm, above): as in swizzle.
//
// Changed from swizzle: load_tile is copy_tile (common/copy_tile.cuh), K and V have two buffers, and a tile
// takes one barrier, not two. The price is room: a block needs more shared memory, so fewer of them fit on a
// multiprocessor.
//
// Bound by its own instructions, one after the other: each score takes a mask, a scale, a maximum, expf's
// several instructions and a sum. Issue slots are used 57 % of the time, the tensor cores are busy 26 %. For
// global memory a warp waits 4 % of its time, in swizzle 16 % (H200, bf16, B4 H12 N1024 d64 causal). The next
// stage, exp2, has fewer instructions.
#pragma once
#include "common/copy_tile.cuh"
#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/mma.cuh"
#include "common/swizzle.cuh"
#include "common/tile16.cuh"

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps;
constexpr int pitch = (d + 63) / 64 * 64; // from a row of a tile in shared memory to the next

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return swizzled(row, col, pitch); }

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const ELEMENT* K = p.K.head(b, h_kv);
  const ELEMENT* V = p.V.head(b, h_kv);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same, twice: the t-th K_j is in buffer t % 2
  ELEMENT* V_smem = K_smem + 2 * Bc * pitch;     // the same
  copy_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4
  copy_tile<threads>(K_smem, tile_index, K, p.K.stride_n, tiles[0] * Bc, Bc, p.N_k);     // line 7
  copy_tile<threads>(V_smem, tile_index, V, p.V.stride_n, tiles[0] * Bc, Bc, p.N_k);
  cp_async_commit();

  // The rows that this lane points ldmatrix to: lanes 0 to 7 to those of the first 8 x 8 matrix, and so on.
  // Q and V: upper left, lower left, upper right, lower right. K: in K^T that is how it is.
  const int Q_row = lane % 16, Q_col = lane / 16 * 8;
  const int K_row = lane / 16 * 8 + lane % 8, K_col = lane / 8 % 2 * 8;
  const int V_row = Q_row, V_col = Q_col;

  float O_reg[width / 8][4] = {}, m[2], l[2];                            // line 5
  for (int r = 0; r < 2; r++) {             // this lane's two rows
    m[r] = -INFINITY;
    l[r] = 0.f;                             // over its columns only, until the end
  }

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    // --- the head of a tile
    cp_async_wait<0>();
    __syncthreads();                        // K_j and V_j are there; and all are done with the last ones
    const int buffer = t % 2 * Bc * pitch, next_buffer = (t + 1) % 2 * Bc * pitch;
    // ---
    const ELEMENT *K_j = K_smem + buffer, *V_j = V_smem + buffer;

    float S_reg[Bc / 8][4] = {};                                         // line 8: S_ij = Q_i K_j^T
    #pragma unroll
    for (int k = 0; k < width / 16; k++) {
      uint32_t Q_frag[4];
      ldmatrix_x4(Q_frag, shared_address(Q_smem + tile_index(16 * warp + Q_row, 16 * k + Q_col)));
      #pragma unroll
      for (int n = 0; n < Bc / 16; n++) {
        uint32_t K_frag[4];
        ldmatrix_x4(K_frag, shared_address(K_j + tile_index(16 * n + K_row, 16 * k + K_col)));
        mma_m16n16k16(S_reg[2 * n], S_reg[2 * n + 1], Q_frag, K_frag);
      }
    }

    // --- the next tile is on its way
    if (t + 1 < tiles.end) {                // to where the last K_j and V_j were
      const int next = tiles[t + 1] * Bc;
      copy_tile<threads>(K_smem + next_buffer, tile_index, K, p.K.stride_n, next, Bc, p.N_k);
      copy_tile<threads>(V_smem + next_buffer, tile_index, V, p.V.stride_n, next, Bc, p.N_k);
      cp_async_commit();
    }
    // ---

    for_each(S_reg, [&](float& x, int r, int c) {
      const int row = warp_row + r, col = j * Bc + c;
      x = mask.sees(row, col) ? mask.score(p.scale * x, row, col) : -INFINITY;
    });
    #pragma unroll
    for (int r = 0; r < 2; r++) {                                        // line 9
      float m_new = m[r];
      for_row(S_reg, r, [&](float& x) { m_new = fmaxf(m_new, x); });
      m_new = quad_max(m_new);
      const float shift = m_new == -INFINITY ? 0.f : m_new;              // no key: -inf - -inf is NaN
      const float alpha = expf(m[r] - shift);
      m[r] = m_new;
      l[r] *= alpha;
      for_row(S_reg, r, [&](float& x) {
        x = expf(x - shift);                // P
        l[r] += x;
      });
      for_row(O_reg, r, [&](float& x) { x *= alpha; });                  // line 10: e^(m - m_new) O
    }

    #pragma unroll
    for (int k = 0; k < Bc / 16; k++) {                                  // line 10: + P~_ij V_j
      uint32_t P_frag[4];
      to_A(P_frag, S_reg, k);
      #pragma unroll
      for (int n = 0; n < width / 16; n++) {
        uint32_t V_frag[4];
        ldmatrix_x4_trans(V_frag, shared_address(V_j + tile_index(16 * k + V_row, 16 * n + V_col)));
        mma_m16n16k16(O_reg[2 * n], O_reg[2 * n + 1], P_frag, V_frag);
      }
    }
  }                                                                      // line 11
  cp_async_wait<0>();                       // no copy outlives its block: of a tile of Q that sees no key

  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = warp_row + lane / 4 + 8 * r;
    l[r] = quad_sum(l[r]);
    const float inv_l = l[r] == 0.f ? 0.f : 1.f / l[r];
    for_row(O_reg, r, [&](float& x) { x *= inv_l; });                    // line 12
    if (lane % 4 == 0 && row < p.N_q)                                    // lines 13, 15
      p.L[(int64_t)bh * p.N_q + row] = l[r] == 0.f ? -INFINITY : m[r] + logf(l[r]);
  }
  ELEMENT* O = p.O.head(bh / p.H, bh % p.H);
  for_each_pair(O_reg, [&](uint32_t packed, int row, int col) {          // line 14
    if (warp_row + row < p.N_q && col < d)
      *reinterpret_cast<uint32_t*>(O + (warp_row + row) * p.O.stride_n + col) = packed;
  });
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 4 * Bc) * pitch;
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
