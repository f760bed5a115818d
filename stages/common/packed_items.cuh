// Items of packed sequences, by the copy engine. Introduced by: backward stage 39, packed.
#pragma once
#include "items.cuh"
#include "packed.cuh"
#include "ring_rows.cuh"

// An item, its sequence, p as it is for that, and what is where
struct ItemInSequence {
  Handed work;
  Sequence rows;
  BwdParams p;
  int heads_before;                         // query heads of batch elements before,
  int first_i;                              // tiles of Q of sequences before: in L, D and dQ_accum

  __device__ __forceinline__ ItemInSequence(const BwdParams& all, const Handed& work)
      : work(work), rows(nth_sequence(all, work.b)), p(within(all, rows)),
        heads_before(VARLEN ? 0 : work.b * all.H), first_i(tiles_of_Q_before(all, work.b)) {}

  // Those of dQ; tile: bh Tr + i, without the sequences before
  __device__ __forceinline__ float* sums(const Workspace& w, int tile) const {
    return w.dQ_accum + int64_t(first_i + tile) * (BLOCK_R * HEAD_DIM);
  }

  // Where a box of keys begins, of dK or dV: its row, as `tile`, its head, and its batch, as b
  __device__ __forceinline__ Handed box_of_keys(int row, int box_rows) const {
    const Corner at = rows.K.corner(row, box_rows, work.b);
    return {{at.row}, at.batch, work.h};
  }

  // The producer's: ask for the item's tile of K or V; and for tile i of Q or dO, with a float for each row
  template <class Ring>
  __device__ __forceinline__ void fill_keys(const Ring& ring, const CUtensorMap& map, unsigned step) const {
    const Corner at = rows.K.corner(work.tile * BLOCK_C, BLOCK_C, work.b);
    ring.fill(map, step, at.row, work.h, at.batch);
  }
  template <class Ring>
  __device__ __forceinline__ void fill_queries(const Ring& ring, const CUtensorMap& map, unsigned step, int i,
                                               int head, float* floats, const float* from) const {
    const Corner at = rows.Q.corner(i * BLOCK_R, BLOCK_R, work.b);
    fill(ring, map, step, at.row, head, at.batch, floats, from);
  }
};

// The n-th item; or, if its tile has no rows, so that nothing is to be done, that of the next ticket. b and
// tile are those of a sequence. By one thread.
template <class Params>
__device__ __forceinline__ Handed nth_in_sequence(const Params& p, const Items& items, int n, int* ticket) {
  Handed work = items.nth(p, n);
  for (; work.tile >= 0; work = items.nth(p, next_item(ticket))) {
    if constexpr (VARLEN) work.b = enter_by_halves(p.cu_seqlens_k, p.sequences, BLOCK_C, work.tile);
    if (work.tile * BLOCK_C < nth_sequence(p, work.b).K.N) break;
  }
  return work;
}
