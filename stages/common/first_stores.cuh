// dQ in a fixed order, without zeros before and a kernel after. Introduced by: backward stage 38,
// first_stores.
//
// In a fixed order it is known which sum of dQ_i comes first: it is stored, and nothing has to be there
// before (in_order.cuh). And a semaphore that has counted all of them says that dQ_i can be converted, as
// counters do in idle_warps.cuh.
//
// Copies of dQ have a semaphore each. Consumers alone add them up, in the end: idle warps have too few
// registers.
//
// Every wait ends: those for turns, as blocks draw their items in order (in_order.cuh); and nobody waits for
// what has been converted.
#pragma once
#include "idle_warps.cuh"
#include "keep_order.cuh"

// Until copies of a tile have `complete` sums together. By a warp. semaphores: the tile's, `step` apart
__device__ __forceinline__ void wait_for_copies(const int* semaphores, int step, int copies, int complete) {
  for (int counted = -1; threadIdx.x % 32 == 0 && counted < complete; __nanosleep(100)) {
    counted = 0;
    for (int copy = 0; copy < copies; copy++) counted += load_acquire(semaphores + copy * step);
  }
  __syncwarp();
}

// As convert_strip(), copies of sums that are added up. All loads from one are under way together.
__device__ __forceinline__ void add_up_strip(const BwdParams& p, const float* sums, int bh, int first_row,
                                             int copies) {
  constexpr int parts = (HEAD_DIM + 31) / 32;                  // of a row: 32 columns, eight of a thread
  const int64_t numbers = (int64_t)p.B * p.H * padded(p.N_q) * HEAD_DIM;       // in a copy
  const int row = first_row + threadIdx.x % 8, first_col = threadIdx.x % 32 / 8 * 8;
  ELEMENT* to = p.dQ.head(bh / p.H, bh % p.H) + row * p.dQ.stride_n;
  float sum[parts][2][8] = {};
  for (int copy = 0; copy < copies; copy++) {
    const float* from = sums + copy * numbers + 16 * (first_col + threadIdx.x % 8);
    #pragma unroll
    for (int k = 0; k < parts; k++)
      if (first_col + 32 * k < HEAD_DIM) add_two_rows(sum[k], from + 16 * 32 * k);
  }
  #pragma unroll
  for (int k = 0; k < parts; k++) {
    const int col = first_col + 32 * k;
    if (col < HEAD_DIM && row < p.N_q) store8(to, col, sum[k][0], scale_of_dS(p));
    if (col < HEAD_DIM && row + 8 < p.N_q) store8(to + 8 * p.dQ.stride_n, col, sum[k][1], scale_of_dS(p));
  }
}

// A ticket is a quarter to convert. By an idle warp, and by consumers in the end. What nobody adds to is 0.
__device__ __forceinline__ void convert_complete(const BwdParams& p, const Workspace& w, const Items& items,
                                                 int dQ_copies) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), tiles = p.B * p.H * Tr;       // of a copy
  #pragma unroll 1
  for (;;) {
    int n = 0;
    if (threadIdx.x % 32 == 0) n = next_item(w.ticket + 1);
    n = of_lane_0(n);
    if (n >= 4 * tiles) return;
    const Quarter q(p, 2 * items.heads_together * items.block_heads, n);
    const int complete = q.sums_of_tile(p);
    if (!full || dQ_copies == 1) {
      if (complete == 0) q.clear(w);
      q.convert(p, w, complete);
      continue;
    }
    wait_for_copies(counters_of(w) + q.bh * Tr + q.tile, tiles, dQ_copies, complete);
    for (int first = 0; first < quarter && q.row + first < p.N_q; first += 16)
      add_up_strip(p, w.dQ_accum + q.sums + first * HEAD_DIM, q.bh, q.row + first, dQ_copies);
  }
}

// What three warps beside the producer do
template <int buffers, class K_ring>
__device__ __forceinline__ void add_and_convert(const StagedSums<buffers>& sums, const BwdParams& p,
                                                const Workspace& w, const Items& items, const K_ring& K_smem,
                                                const Handed* handed, int dQ_copies) {
  if (warp_index() % 4 < 3)
    add_in_order<true>(sums, counters_of(w), p, items, K_smem, handed, dQ_copies);
  else if (dQ_copies == 1)
    convert_complete(p, w, items, 1);
}
