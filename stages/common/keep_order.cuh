// Sums of dQ in a fixed order that are added from registers, or to two copies of dQ. Introduced by: backward
// stage 34, exchanged_semaphores.
//
// In a small call without a mask all tiles of a head begin at once. Then tile j waits for as many sums as
// there are tiles before it (in_order.cuh), a microsecond or two each. So there dQ has two copies: tile j is
// added to copy j % 2, after those before it in this copy, and that wait is half as long. Who converts dQ
// adds the copies up. (So there dQ's last bits depend on whether a call is small.)
//
// (Tile j could begin at tile j Tr / Tc of Q and go round, and nobody would wait. In first_stores, full, B=1,
// N=2048 and 4096, that took 0.97 of augmented's time at d=128, where 1.15 and 1.17 are taken here; at d=64
// 1.18 and 1.25, where 1.23 and 1.15. But all tiles of a head have to be at work at once, which CUDA promises
// to cooperative launches alone. H200.)
#pragma once
#include "in_order.cuh"

// How many copies of dQ? More than one if all items are at work at once, `at_once` of them; with few tiles of
// a head only if there is room for twice as many, at d <= 64 also in two rounds (the fastest on an H200).
// With more queries than twice the keys these waits are a small part of a call, and a copy may be large.
inline int copies_of_dQ(const BwdParams& p, int at_once) {
  const int tiles = ceil_div(p.N_k, BLOCK_C), items = p.B * p.H * tiles;
  const int most = HEAD_DIM <= 64 ? 2 * at_once : tiles > 4 ? at_once : at_once / 2;
  return full && tiles > 1 && items <= most && p.N_q <= 2 * p.N_k ? 2 : 1;
}

// What two warps beside the producer do where others add from registers: one asks for their turns, the other
// one counts what they have added. `added`: two Places, by turns
template <class Tiles>
__device__ __forceinline__ void keep_order(const Place& turn, uint64_t* added, const Mask& mask,
                                           const Tiles& tiles, int j, bool from_last, int* semaphores,
                                           int step, int copies) {
  unsigned n = 0;                           // tiles so far
  wait_for_previous_kernel();
  if (warp_index() % 4 == 1)
    return ask_for_turns(turn, mask, tiles, j, from_last, semaphores, step, n, copies);
  for (int k = 0; k < tiles.end - tiles.first && warp_index() % 4 == 2; k++) {
    const Place place(added + k % 2 * 2);
    place.wait_until_full(k / 2);
    if (threadIdx.x % 32 == 0) count_release(semaphores + tiles[nth_of(tiles, k, from_last)] * step);
    place.emptied();
  }
}
