// Sums of dQ that a warp of their own adds. Introduced by: backward stage 32, writer_warp.
#pragma once
#include "items.cuh"
#include "place.cuh"

// Tiles of sums on their way to dQ_accum, `buffers` of them in shared memory by turns, as dQ_accum has them
// (gradients.cuh). Consumers stage them, and go on: a warp beside the producer starts the copies, and waits
// for them.
template <int buffers>
struct StagedSums {
  static constexpr int numbers = BLOCK_R * HEAD_DIM, room = BLOCK_R * panel * panels, all = buffers * room;
  float *staged, *dQ_accum;
  uint64_t* barriers;        // of each buffer

  __device__ __forceinline__ Place place(int n) const { return Place(barriers + n % buffers * 2); }
  __device__ __forceinline__ Place turn() const { return Place(barriers + buffers * 2); }   // in_order.cuh

  // By the block, before a barrier. warps: those that stage a tile
  __device__ __forceinline__ void init(int warps) const {
    for (int n = 0; n < buffers; n++) place(n).init(warps, 1);
  }

  // By consumers, the n-th tile: strips of 16 rows, the first one from `row` on, the next one 64 further on.
  // Columns before first_col are another warp's. (What else there is, here and below, is SumsInTurn's.)
  template <int strips, int n_tiles>
  __device__ __forceinline__ void stage(int n, const float (&acc)[strips][n_tiles][4], int row, int col,
                                        int first_col, int = 0) const {
    place(n).wait_until_empty(n / buffers);
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      float4* to = reinterpret_cast<float4*>(staged + n % buffers * room + (row + 64 * s) * HEAD_DIM);
      #pragma unroll
      for (int k = 0; k < n_tiles; k++) {
        const auto& x = acc[s][k];
        if (col + 8 * k >= first_col && col + 8 * k < HEAD_DIM)
          to[4 * (col + 8 * k) + threadIdx.x % 32] = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
    fence_proxy_async();
    place(n).filled();
  }

  // By consumers that have staged: until all before the n-th have left. buffer: theirs
  __device__ __forceinline__ void wait_until_left(int n, int buffer, int = 0) const {
    place(buffer).wait_until_empty((n + buffers - 1 - buffer) / buffers);
  }

  // By the other warp: the n-th, which is added to this tile of dQ_accum, or stored there if it is its first
  // one. It has left then.
  __device__ __forceinline__ void add(unsigned n, int tile, bool first = false) const {
    place(n).wait_until_full(n / buffers);
    if (threadIdx.x % 32 == 0) {
      float *to = dQ_accum + (int64_t)tile * numbers, *from = staged + n % buffers * room;
      first ? bulk_store(to, from, sizeof(float) * numbers) : bulk_add(to, from, sizeof(float) * numbers);
      bulk_commit();
      bulk_wait_read<0>();
    }
    place(n).emptied();
  }
};

// An item of a call without packed sequences; packed_items.cuh has the others
struct WholeItem {
  const BwdParams& p;
  Handed work;
  int heads_before, first_i;

  __device__ __forceinline__ WholeItem(const BwdParams& p, const Handed& work)
      : p(p), work(work), heads_before(work.b * p.H), first_i(0) {}
};

// f(mask, work, first) for each item of a block and each of its query heads, by a warp beside the producer.
// first: the head's first tile of dQ, of all there are
template <class Item = WholeItem, class K_ring, class F>
__device__ __forceinline__ void for_each_item(const BwdParams& p, const Items& items, const K_ring& K_smem,
                                              const Handed* handed, F f) {
  const int Tr = ceil_div(p.N_q, BLOCK_R);
  wait_for_previous_kernel();
  for (int m = 0;; m++) {
    K_smem.wait_until_full(m);
    const Handed work = of_lane_0(handed);
    K_smem.release(m);
    if (work.tile < 0) return;
    const Item in(p, work);
    for (int bh = work.bh; bh < work.bh + items.block_heads; bh++)
      f(Mask(in.p, in.work.b, bh - in.heads_before), in.work, bh * Tr + in.first_i);
  }
}

// What that warp does
template <int buffers, class K_ring>
__device__ __forceinline__ void add_sums(const StagedSums<buffers>& sums, const BwdParams& p,
                                         const Items& items, const K_ring& K_smem, const Handed* handed) {
  unsigned n = 0;                           // tiles so far
  for_each_item(p, items, K_smem, handed, [&](const Mask& mask, const Handed& work, int first) {
    const auto tiles = mask.query_tiles(work.tile);
    for (int t = tiles.first; t < tiles.end; t++, n++) sums.add(n, first + tiles[t]);
  });
  if (threadIdx.x % 32 == 0) bulk_wait<0>();
}
