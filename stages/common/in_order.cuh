// Sums of dQ in a fixed order, which gives the same bits in each run. Introduced by: backward stage 33,
// semaphores.
//
// dQ_i is a sum over the tiles j of K and V that it sees. Blocks add their parts of it when they have them,
// and in float the last bits of a sum depend on the order. Here that is the order in which a head's tiles j
// are drawn. A semaphore in HBM, one for each dQ_i, counts the tiles that have been added. Who is to add tile
// j waits until it counts those before j, and counts its own when the sums are there.
//
// Every wait ends: a block is at work on the tiles before j, or has done them, since it drew them earlier
// (items.cuh), and the first of all tiles that are not done waits for none. (A block's first tile is that of
// its number: so, if not all blocks run, it ends if they start in that order, which CUDA does not promise.)
//
// Few waits are long: causal, tiles come to and fro. Those of even heads come "to", from the last one down,
// and each goes through its queries from the first one up. So j begins where no tile after it has to add, and
// comes everywhere after j + 1: it need not wait, even if all begin at once. Short tiles come first, so
// blocks get ready one after the other. That is what odd heads need, which come next, "fro": from the first
// tile up, and each from the last query down, so that j is a sum later than j - 1. In both together a block
// has a short and a long tile. (Fro alone, all blocks that begin at once wait; to alone, the longest tiles
// are the last to end. Packed sequences are faster to alone: of each head tiles of many come one after the
// other.) And the order of a sum does not depend on how many sequences a call has.
//
// Without a mask all tiles take equally long, and begin at query 0, one after the other: j is one sum behind
// j + 1, and stays that. So few tiles of a head should begin at once: heads are side by side, as many as L2
// has room for.
#pragma once
#include "staged_sums.cuh"

constexpr bool full = !CAUSAL && Mask::all_keys, to_and_fro = !full && Mask::sides == 1;

// How many heads at a time? As many as are at work at once, if L2 holds their sums: then the next ones begin
// as these end. (At d = 64 twice as many, and of a window more than L2 holds: faster on an H200.) Without a
// mask more, if L2 holds their sums. And less without pairs, if blocks have several query heads: all come to,
// so the longest items end last. (first_stores, 16 query heads of one, d=128, B=8, N=2048: two together 0.98
// of augmented's time, eight 1.05; H200.)
inline int heads_in_order(const BwdParams& p, int tiles, int at_once, int block_heads = 1) {
  const int heads = p.B * p.H / block_heads, all_come_to = block_heads > 1 && p.H_kv % 2;
  if (full) return max(ceil_div(at_once, tiles), heads_with_sums_in_L2(heads, p.N_q, heads));
  const int in_L2 = heads_with_sums_in_L2(heads, parts_of_L2 * p.N_q, all_come_to ? 4 / block_heads : 16);
  if (!to_and_fro) return HEAD_DIM <= 64 ? 4 * in_L2 : in_L2;
  return max(1, min(in_L2, (HEAD_DIM <= 64 ? 2 : 1) * at_once / tiles));
}

// Do a head's tiles come from the last one down, and their queries from the first one up, or both the other
// way round? h: of so many heads in a batch element (of K and V, if a block has several that read these)
__device__ __forceinline__ bool from_last(int h, int heads) {
  return !to_and_fro || heads % 2 || h % 2 == 0;
}

// The n-th tile and its head in that order, as dispatch_order() but for even heads and then for the odd ones
// that follow them. per_head: numbers that are one head, if heads are those of items
__device__ __forceinline__ Work dispatch_to_and_fro(int tiles, int heads, bool in_pairs, int heads_together,
                                                    int n, int per_head = 1) {
  const int pair = in_pairs && to_and_fro ? 2 : 1;
  const Work work = dispatch_order(pair * tiles, heads / pair, heads_together, n);
  const int odd = work.tile >= tiles, first = work.bh / per_head * (pair * per_head) + work.bh % per_head;
  return {odd ? work.tile - tiles : tiles - 1 - work.tile, first + odd * per_head};
}

// The n-th item, as the producer hands it over
__device__ __forceinline__ Handed nth_in_order(const BwdParams& p, const Items& items, int n) {
  if (n >= items.all) return {{-1}};
  return items.handed(p, dispatch_to_and_fro(items.tiles, items.heads, p.H_kv % 2 == 0, items.heads_together,
                                             n, p.H / p.H_kv / items.block_heads));
}

// The n-th of an item's tiles of Q is tiles[this].
template <class Tiles>
__device__ __forceinline__ int nth_of(const Tiles& tiles, int n, bool from_last) {
  return from_last ? tiles.first + n : tiles.end - 1 - n;
}

// step(t, cut) for each tile of Q that sees something of tile j, as for_each_tile(), in that order
template <class Tiles, class Step>
__device__ __forceinline__ void for_each_tile_in_order(const Mask& mask, const Tiles& tiles, int j,
                                                       bool from_last, int& n, Step step) {
  int t = nth_of(tiles, 0, from_last);
  const int way = from_last ? 1 : -1, end = t + way * max(tiles.end - tiles.first, 0);
  for (; t != end && mask.cuts(tiles, t, j); t += way, n++) step(t, true);
  for (; t != end && !mask.cuts(tiles, t, j); t += way, n++) step(t, false);
  for (; t != end; t += way, n++) step(t, true);
}

// How many tiles that tile i of Q sees come before j? Of those that are added to the same copy. By a warp.
// (Copies are one or two. A division by their number took 1.01 to 1.09 of the time, causal, H200.)
__device__ __forceinline__ int tiles_before(const Mask& mask, int i, int j, bool from_last, int copies = 1) {
  const auto tiles = mask.key_tiles(i);
  if constexpr (Mask::is_range && Mask::sides == 1)            // all
    return (from_last ? tiles.end - 1 - j : j) >> (copies - 1);
  int before = 0;
  for (int first = 0; first < tiles.end; first += 32) {
    const int t = first + threadIdx.x % 32, after_j = t < tiles.end ? tiles[t] - j : 0;
    before += __popc(__ballot_sync(0xffffffff, from_last ? after_j > 0 : after_j < 0));
  }
  return before;
}

// A warp asks whose turn it is to add to the tiles of dQ that see tile j, and says so in shared memory: those
// that add need not wait for HBM. semaphores: of the tiles of this head, `step` apart. n: tiles so far
template <class Tiles>
__device__ __forceinline__ void ask_for_turns(const Place& turn, const Mask& mask, const Tiles& tiles, int j,
                                              bool from_last, const int* semaphores, int step, unsigned& n,
                                              int copies = 1) {
  for (int k = 0; k < tiles.end - tiles.first; k++, n++) {
    const int i = tiles[nth_of(tiles, k, from_last)], before = tiles_before(mask, i, j, from_last, copies);
    turn.wait_until_empty(n);
    while (threadIdx.x % 32 == 0 && load_acquire(semaphores + i * step) < before) {}
    turn.filled();
  }
}

// What two warps beside the producer do, so that no consumer waits for a semaphore, or for its sums to be in
// HBM: one asks whose turn it is, the other one adds what is staged, and counts it.
// first_stores: the first sum of a tile of dQ is stored, so that nobody has to clear it.
template <bool first_stores = false, class Item = WholeItem, int buffers, class K_ring>
__device__ __forceinline__ void add_in_order(const StagedSums<buffers>& sums, int* semaphores,
                                             const BwdParams& p, const Items& items,
                                             const K_ring& K_smem, const Handed* handed) {
  const Place turn = sums.turn();
  unsigned n = 0;                           // tiles so far
  for_each_item<Item>(p, items, K_smem, handed, [&](const Mask& mask, const Handed& work, int first) {
    const int j = work.tile;
    const bool last = !std::is_same_v<Item, WholeItem> || from_last(work.h, p.H_kv);   // sequences: to alone
    const auto tiles = mask.query_tiles(j);
    if (warp_index() % 4 == 1) return ask_for_turns(turn, mask, tiles, j, last, semaphores + first, 1, n);
    for (int k = 0; k < tiles.end - tiles.first; k++, n++) {
      const int i = tiles[nth_of(tiles, k, last)];
      turn.wait_until_full(n);
      turn.emptied();
      sums.add(n, first + i, first_stores && tiles_before(mask, i, j, last) == 0);
      if (threadIdx.x % 32 > 0) continue;
      bulk_wait<0>();
      count_release(semaphores + first + i);
    }
  });
}
