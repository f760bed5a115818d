// Products of a warpgroup: 128 threads multiply, from shared memory, while they go on. Introduced by: forward
// stage 20, wgmma. (PTX ISA, section "Asynchronous Warpgroup Level Matrix Instructions"; sm_90a.)
//
// D += A B with A of 64 x 16, B of 16 x n, n a multiple of 16 up to 256, elements of 16 bits, D in float:
// float D[n / 8][4] a thread. Warp w of the warpgroup has rows 16 w to 16 w + 15 of D, laid out as an
// accumulator of mma.sync (common/mma.cuh): the same for_each(), for_row(), to_A() hold.
// B is in shared memory. A is there, too, or in registers, as to_A() makes it for mma.sync.
//
// A product is asynchronous, as a copy by cp.async is:
//
//   wgmma_fence()       what was written to D and A in registers is there
//   wgmma(D, A, B)      ... as many as one likes; those on the same D are in order
//   wgmma_commit()      they are a group
//   wgmma_wait<n>()     until all but the last n groups are done. Until then nobody touches D or A in
//                       registers, and nobody overwrites A or B in shared memory.
//
// All of a warpgroup's threads do each of these together. The compiler must know each register of D: indices
// are constants, and no function that is not inlined comes between. Else ptxas says that it has serialised
// the products (C7510 and its like), and they are synchronous.
#pragma once
#include "hopper.cuh"
#include "mma.cuh"

// This warp's number. That it is the same in all lanes the compiler knows after a shuffle only: then what is
// worked out from it, as descriptors are, is worked out once a warp.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffff, threadIdx.x / 32, 0); }

// Where a matrix lies in shared memory: a descriptor of 64 bits, for tiles as TMA brings them, with the
// 128-byte swizzle (common/tma.cuh).
//
//   bits  0 - 13   address / 16
//        16 - 29   LBO / 16, leading byte offset
//        32 - 45   SBO / 16, stride byte offset
//        49 - 51   0: the swizzle's pattern of 8 rows begins at a multiple of 1024 bytes
//        62 - 63   1: 128-byte swizzle
//
// A pattern is 8 rows of 128 bytes. How far the next one is, the offsets say:
//
//   K-major: rows of the tile run along k (Q and K in Q K^T). SBO: to the next 8 rows, 1024. LBO: not used.
//     The next 16 of k are 32 bytes further on in the same rows; after 64 of them comes the next panel.
//   MN-major: rows of the tile are k (V in P V). SBO: to the next 8 of k, 1024. LBO: to the next 64 of n,
//     which are in the next panel. The next 16 of k are 2048 bytes further on.
//
// The upper half is the same for all. So a tile is known by the lower half, in units of 16 bytes: to go n
// bytes further, n / 16 is added to it, which is one instruction. A product wants its descriptors in the
// registers that a warp has in common. After the shuffle the compiler knows that they are the same in all
// lanes, and works them out there. (Without it two moves stood before each product, R2UR. With it, and Q
// given back sooner, hopper_tuned had 1.5 to 5 % more: H200, 12 shapes.)
//
// In a cluster, of so many blocks, an address has the block's rank, too, from bit 24 on. It must not come
// into LBO. (On an H100 dK and dV of every second block were wrong, and dQ right: its n of 64 needs no LBO.
// Without a cluster the instruction is left out: ptxas serialises products of hopper_tuned for it.)
template <int blocks_together = 1>
__device__ __forceinline__ uint32_t matrix_at(const ELEMENT* tile, int leading_bytes = 16) {
  const uint32_t address = shared_address(tile) & (blocks_together > 1 ? 0x3ffffu : ~0u);
  // --- the lower half
  return __shfl_sync(0xffffffff, address >> 4 | leading_bytes >> 4 << 16, 0);
  // ---
}

__device__ __forceinline__ uint64_t descriptor(uint32_t matrix) {
  // --- and the upper half
  return uint64_t(1024 >> 4 | 1 << 30) << 32 | matrix;
  // ---
}

// Columns 16 k to 16 k + 15 of a tile of tile_rows rows, in panels of 64 columns: A, or B^T
__device__ __forceinline__ uint64_t K_major(uint32_t matrix, int k, int tile_rows) {
  // --- 16 columns further
  return descriptor(matrix + (k / 4 * 128 * tile_rows + k % 4 * 32) / 16);
  // ---
}

// Rows 16 k to 16 k + 15 of such a tile, whose leading_bytes are 128 * tile_rows: B, or A^T
__device__ __forceinline__ uint64_t MN_major(uint32_t matrix, int k) {
  // --- 16 rows further
  return descriptor(matrix + k * 2048 / 16);
  // ---
}

// All columns of an accumulator, rounded, as operands A (mma.cuh: to_A); what A has more is 0
template <int k_steps, int n_tiles>
__device__ __forceinline__ void to_A(uint32_t (&A)[k_steps][4], const float (&acc)[n_tiles][4]) {
  #pragma unroll
  for (int k = 0; k < k_steps; k++) {
    if (2 * k < n_tiles) to_A(A[k], acc, k);
    else for (int e = 0; e < 4; e++) A[k][e] = 0;
  }
}

// The first columns of an accumulator
template <int n_tiles, int all>
__device__ __forceinline__ float (&first(float (&acc)[all][4]))[n_tiles][4] {
  return reinterpret_cast<float(&)[n_tiles][4]>(acc);
}

// wgmma(D, A, B), for each n
#include "wgmma_widths.cuh"

// A group of products, S = Q K^T: 64 rows of Q, whose tile has Q_rows in each panel, and the first 8 n_tiles
// of the K_rows of K. With `accumulate` S += Q K^T.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void wgmma_QK(float (&S)[n_tiles][4], uint32_t Q, int Q_rows, uint32_t K,
                                         bool accumulate = false, int K_rows = 8 * n_tiles) {
  wgmma_fence();
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    wgmma(S, K_major(Q, k, Q_rows), K_major(K, k, K_rows), accumulate || k > 0);
  wgmma_commit();
}

// Another, O += P V, with P from registers
template <int n_tiles, int k_steps>
__device__ __forceinline__ void wgmma_PV(float (&O)[n_tiles][4], const uint32_t (&P)[k_steps][4],
                                         uint32_t V) {
  wgmma_fence();
  #pragma unroll
  for (int k = 0; k < k_steps; k++)
    wgmma<true>(O, P[k], MN_major(V, k));
  wgmma_commit();
}
