// Sums of dQ in a fixed order, which gives the same bits in each run. Introduced by: backward stage 33,
// semaphores.
//
// dQ_i is a sum over the tiles j of K and V that it sees. Blocks add their parts of it when they have them,
// and in float the last bits of a sum depend on the order. Here that is the order of j. A semaphore in HBM,
// one for each dQ_i, counts the tiles that have been added. Who is to add tile j waits until it counts those
// before j, and counts its own when the sums are there.
//
// Every wait ends: a block is at work on the tiles before j, or has done them, since it drew them earlier
// (items.cuh), and the first of all tiles that are not done waits for none. (A block's first tile is that of
// its number: so, if not all blocks run, it ends if they start in that order, which CUDA does not promise.)
//
// Few waits are long. Blocks walk through the queries from the last ones up, and those of a head start one
// after the other: j is one sum behind j - 1, and stays that. (From the first ones down, causal, tile j would
// begin at query j, and wait until those before it come there.)
//
// But in a small call all tiles of a head begin at once. Then tile j waits for j sums, a microsecond or two
// each, before it adds its first part. So there dQ has two copies: tile j is added to copy j % 2, after those
// before it in this copy, and that wait is half as long. Who converts dQ adds the copies up.
#pragma once
#include "staged_sums.cuh"

// How many heads at a time? Without a mask blocks take equally long: as many heads as are at work at once. So
// j = 0 of the next heads comes first, when j = 0 of these heads is done.
inline int heads_at_once(int blocks, int tiles) { return ceil_div(blocks, tiles); }

// Masked: about sixteen, so that of a head few tiles are at work, and wait for each other; or another number.
inline int heads_side_by_side(int heads, int about = 16) {
  return ceil_div(heads, ceil_div(heads, about));
}

// How many copies of dQ? More than one if all items are at work at once, `at_once` of them; with few tiles of
// a head only if there is room for twice as many, at d <= 64 also in two rounds (the fastest on an H200).
// With more queries than twice the keys these waits are a small part of a call, and a copy may be large.
inline int copies_of_dQ(const BwdParams& p, int at_once) {
  const int tiles = ceil_div(p.N_k, BLOCK_C), items = p.B * p.H * tiles;
  const int most = HEAD_DIM <= 64 ? 2 * at_once : tiles > 4 ? at_once : at_once / 2;
  return tiles > 1 && items <= most && p.N_q <= 2 * p.N_k ? 2 : 1;
}

// step(t, cut) for each tile of Q that sees something of tile j, as for_each_tile(), the last one first
template <class Tiles, class Step>
__device__ __forceinline__ void for_each_tile_from_last(const Mask& mask, const Tiles& tiles, int j, int& n,
                                                        Step step) {
  int t = tiles.end - 1;
  for (; t >= tiles.first && mask.cuts(tiles, t, j); t--, n++) step(t, true);
  for (; t >= tiles.first && !mask.cuts(tiles, t, j); t--, n++) step(t, false);
  for (; t >= tiles.first; t--, n++) step(t, true);
}

// How many of the tiles before j does tile i of Q see? Of those that are added to the same copy. By a warp.
__device__ __forceinline__ int tiles_before(const Mask& mask, int i, int j, int copies) {
  if constexpr (Mask::is_range && Mask::sides == 1) return j / copies;   // all
  const auto tiles = mask.key_tiles(i);
  int before = 0;
  for (int first = 0; first < tiles.end; first += 32) {
    const int t = first + threadIdx.x % 32;
    const int before_j = t < tiles.end ? j - tiles[t] : 0;
    before += __popc(__ballot_sync(0xffffffff, before_j > 0 && before_j % copies == 0));
  }
  return before;
}

// A warp asks whose turn it is to add to the tiles of dQ that see tile j, and says so in shared memory: those
// that add need not wait for HBM. semaphores: of the tiles of this head, `step` apart. n: tiles so far
template <class Tiles>
__device__ __forceinline__ void ask_for_turns(const Place& turn, const Mask& mask, const Tiles& tiles, int j,
                                              const int* semaphores, int step, unsigned& n,
                                              int copies = 1) {
  for (int t = tiles.end - 1; t >= tiles.first; t--, n++) {
    const int i = tiles[t], before = tiles_before(mask, i, j, copies);
    turn.wait_until_empty(n);
    while (threadIdx.x % 32 == 0 && load_acquire(semaphores + i * step) < before) {}
    turn.filled();
  }
}

// What two warps beside the producer do where others add from registers: one asks for their turns, the other
// one counts what they have added. `added`: two Places, by turns
template <class Tiles>
__device__ __forceinline__ void keep_order(const Place& turn, uint64_t* added, const Mask& mask,
                                           const Tiles& tiles, int j, int* semaphores, int step,
                                           int copies) {
  unsigned n = 0;                           // tiles so far
  wait_for_previous_kernel();
  if (warp_index() % 4 == 1) return ask_for_turns(turn, mask, tiles, j, semaphores, step, n, copies);
  for (int t = tiles.end - 1; t >= tiles.first && warp_index() % 4 == 2; t--, n++) {
    const Place place(added + n % 2 * 2);
    place.wait_until_full(n / 2);
    if (threadIdx.x % 32 == 0) count_release(semaphores + tiles[t] * step);
    place.emptied();
  }
}

// What two warps beside the producer do, so that no consumer waits for a semaphore, or for its sums to be in
// HBM: one asks whose turn it is, the other one adds what is staged, and counts it.
// first_stores: the first sum of a tile of dQ is stored, so that nobody has to clear it.
template <bool first_stores = false, class Item = WholeItem, int buffers, class K_ring>
__device__ __forceinline__ void add_in_order(const StagedSums<buffers>& sums, int* semaphores,
                                             const BwdParams& p, const Items& items,
                                             const K_ring& K_smem, const Handed* handed, int copies = 1) {
  const Place turn = sums.turn();
  const int tiles_of_dQ = p.B * p.H * ceil_div(p.N_q, BLOCK_R);          // in a copy
  unsigned n = 0;                           // tiles so far
  for_each_item<Item>(p, items, K_smem, handed, [&](const Mask& mask, int j, int first) {
    const auto tiles = mask.query_tiles(j);
    first += j % copies * tiles_of_dQ;
    if (warp_index() % 4 == 1) return ask_for_turns(turn, mask, tiles, j, semaphores + first, 1, n, copies);
    for (int t = tiles.end - 1; t >= tiles.first; t--, n++) {
      turn.wait_until_full(n);
      turn.emptied();
      sums.add(n, first + tiles[t], first_stores && tiles_before(mask, tiles[t], j, copies) == 0);
      if (threadIdx.x % 32 > 0) continue;
      bulk_wait<0>();
      count_release(semaphores + first + tiles[t]);
    }
  });
}
