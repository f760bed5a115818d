// Sums of dQ that consumers add when it is their turn. Introduced by: backward stage 40, packed_semaphores.
#pragma once
#include "bulk_sums.cuh"
#include "in_order.cuh"
#include "packed_items.cuh"

// How many heads at a time? Without a mask many, as in heads_in_order(); else as many as L2 has room for
// twice if sequences have the mean length (others the host does not know), and 8 at most.
template <class Params>
inline int heads_of_sequences(const Params& p, const Items& items) {
  int rows = p.N_q;
  if constexpr (VARLEN) rows /= p.sequences;
  return full ? (HEAD_DIM <= 64 ? 32 : 16) : heads_with_sums_in_L2(items.heads, 2 * rows, 8);
}

// The n-th item, as nth_in_sequence(), if a sequence's tiles come from the last one down
__device__ __forceinline__ Handed nth_from_last(const BwdParams& p, const Items& items, int n, int* ticket) {
  Handed work = nth_in_sequence(p, items, n, ticket);
  if (work.tile >= 0) work.tile = ceil_div(nth_sequence(p, work.b).K.N, BLOCK_C) - 1 - work.tile;
  return work;
}

// StagedSums and their turns, so that a stage can have these or what is below
template <int buffers>
struct StagedInTurn : StagedSums<buffers> {
  __device__ __forceinline__ void init(int warps) const {
    StagedSums<buffers>::init(warps);
    this->turn().init(1, 1);
  }
  __device__ __forceinline__ void tell(int, int) const {}
};

// As StagedInTurn, for d > 192, where shared memory has no room for a tile. So consumers add it in parts, and
// wait for the turn themselves. They do not wait until their sums are in HBM: they tell it when the next
// tile's products have begun, or at the item's end. (Not later: the next items may have no tiles of Q, and
// their K is not given back before this tile is counted.) For an item that is once more than it has tiles,
// first of nothing.
struct SumsInTurn {
  static constexpr int adders = BLOCK_R / 8, all = 64 * BLOCK_C, room = all / adders;    // of a warp
  float *staged, *dQ_accum;
  uint64_t* barriers;

  __device__ __forceinline__ Place turn() const { return Place(barriers); }
  __device__ __forceinline__ Place told(unsigned k) const { return Place(barriers + 2 + k % 2 * 2); }

  __device__ __forceinline__ void init(int warps) const {
    turn().init(1, warps);
    for (int k = 0; k < 2; k++) told(k).init(warps, 1);
  }

  // tile: of all tiles of dQ
  template <int strips, int n_tiles>
  __device__ __forceinline__ void stage(int n, const float (&acc)[strips][n_tiles][4], int row, int col,
                                        int first_col, int tile) const {
    turn().wait_until_full(n);
    bulk_add_fragments<room / 128>(dQ_accum + int64_t(tile) * (BLOCK_R * HEAD_DIM),
                                   staged + warp_index() * room, acc, row, col, first_col);
    turn().emptied();
  }

  // With the n-th tile, of the m-th item: the sums of the one before are there
  __device__ __forceinline__ void tell(int n, int m) const { wait_until_left(n, 0, m); }

  __device__ __forceinline__ void wait_until_left(int n, int, int m) const {
    if (threadIdx.x % 32 == 0) bulk_wait<0>();
    told(n + m).wait_until_empty((n + m) / 2);
    told(n + m).filled();
  }
};

// One of two warps beside the producer asks whose turn it is, the other one counts what is there.
template <bool, class Item, class K_ring>
__device__ __forceinline__ void add_in_order(const SumsInTurn& sums, int* semaphores, const BwdParams& p,
                                             const Items& items, const K_ring& K_smem, const Handed* handed) {
  unsigned n = 0, k = 0, heads = 0;         // tiles so far, what has been told, heads
  int added = -1;                           // the tile that is being added
  auto count = [&](int next) {
    sums.told(k).wait_until_full(k / 2);
    sums.told(k++).emptied();
    if (threadIdx.x % 32 == 0 && added >= 0) count_release(semaphores + added);
    added = next;
  };
  for_each_item<Item>(p, items, K_smem, handed, [&](const Mask& mask, const Handed& work, int first) {
    const auto tiles = mask.query_tiles(work.tile);
    if (warp_index() % 4 == 1)
      return ask_for_turns(sums.turn(), mask, tiles, work.tile, true, semaphores + first, 1, n);
    for (int t = tiles.first; t < tiles.end; t++) count(first + tiles[t]);
    if (++heads % items.block_heads == 0) count(-1);
  });
}
