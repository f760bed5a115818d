// Sums of dQ in a fixed order that are added from registers, or to two copies of dQ. Introduced by: backward
// stage 34, exchanged_semaphores.
//
// In the smallest calls without a mask all tiles of all heads begin at once. Then tile j waits for as many
// sums as there are tiles before it (in_order.cuh), a microsecond or two each: at B=1, N=1024, d=256 a call
// took 1.27 of exchanged_tuned's time. So there dQ has two copies: tile j is added to copy j % 2, after those
// before it in this copy, and that wait is half as long (1.21). Who converts dQ adds the copies up. (So there
// dQ's last bits depend on whether a call is small.)
//
// (Tile j could begin at tile j Tr / Tc of Q and go round, and nobody would wait. But all tiles of a head
// have to be at work at once, which CUDA promises to cooperative launches alone. In first_stores, full, B=1,
// N=2048, 0.97 of augmented's time at d=128, 1.18 at d=64; with many heads side by side 1.00 both. H200.)
#pragma once
#include "in_order.cuh"

// How many copies of dQ? Two if all items are at work at once, `at_once` of them. With more queries than
// twice the keys these waits are a small part of a call, and a copy may be large.
inline int copies_of_dQ(const BwdParams& p, int at_once) {
  const int tiles = ceil_div(p.N_k, BLOCK_C);
  return full && tiles > 1 && p.B * p.H * tiles <= at_once && p.N_q <= 2 * p.N_k ? 2 : 1;
}

// How many heads at a time? As heads_in_order(); but if L2 does not hold the sums of half of all, without a
// mask no more than are at work (B=8, N=2048, d=256: 1.05 of exchanged_tuned's time, not 1.11; H200).
inline int heads_of_clusters(const BwdParams& p, int tiles, int at_once) {
  const int heads = p.B * p.H;
  if (full && heads > 2 * heads_with_sums_in_L2(heads, p.N_q, heads)) return ceil_div(at_once, tiles);
  return heads_in_order(p, tiles, at_once);
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
