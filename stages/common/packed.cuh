// Packed sequences and the copy engine. Introduced by: backward stage 39, packed.
//
// What lies past the end of a tensor's map comes as zeros, and is not stored. A packed sequence ends where
// the next one begins, in the middle of the tensor. So here a map has the rows twice, as two dimensions with
// the same stride: `row` has as many rows as a box, `batch` all of them, from a box before the first one on
// (rows_twice(), sequences.cuh). A box that would go over the sequence's end by `missing` rows begins at row
// = missing, and that many less along batch: the same address; but its last `missing` rows are past the end
// of the dimension `row`.
//
//      a sequence of rows 0 to 5, boxes of 4:     box 0    row 0, batch 4
//                                                 box 1    row 2, batch 6: rows 4 and 5, then zeros
//
// (Strides may be equal: the driver checks each by itself.)
#pragma once
#include "items.cuh"
#include "ring_rows.cuh"
#include "sequences.cuh"

#include <type_traits>

// An item, and p as it is for its sequence, but for tensors: their maps are those of all sequences. (Without
// packed sequences an item of a batch element, and p itself.)
struct InSequence {
  Handed work;
  std::conditional_t<VARLEN, BwdParams, const BwdParams&> p;
  int heads_before = 0;                     // query heads of batch elements before
  int first_q = 0, first_k = 0;             // the sequence's first rows,
  int first_i;                              // and its first tile of Q in L, D and dQ_accum

  __device__ __forceinline__ InSequence(const BwdParams& all, const Handed& work)
      : work(work), p(all), first_i(tiles_of_Q_before(all, work.b)) {
    if constexpr (VARLEN) enter_lengths(p);
    else heads_before = work.b * p.H;
  }

  // Where a box begins that has the rows from `row` on: its row, as `tile`, its head, and b
  template <int box_rows>
  __device__ __forceinline__ Handed corner(int row, int N, int first, int head) const {
    if (!VARLEN) return {{row}, work.b, head};
    const int missing = max(row + box_rows - N, 0);
    return {{missing}, first + row + box_rows - missing, head};
  }
  // Of K and V, or their gradients
  template <int box_rows>
  __device__ __forceinline__ Handed keys(int row) const {
    return corner<box_rows>(row, p.N_k, first_k, work.h);
  }

  // Those of dQ; tile: bh Tr + i, without the sequences before
  __device__ __forceinline__ float* sums(const Workspace& w, int tile) const {
    return w.dQ_accum + int64_t(first_i + tile) * (BLOCK_R * HEAD_DIM);
  }

  // The producer's: ask for the item's tile of K or V; and for tile i of Q or dO, with a float for each row
  template <class Rows>
  __device__ __forceinline__ void fill_keys(const Rows& ring, const CUtensorMap& map, unsigned step) const {
    const Handed at = keys<BLOCK_C>(work.tile * BLOCK_C);
    ring.fill(map, step, at.tile, at.h, at.b);
  }
  template <class Rows>
  __device__ __forceinline__ void fill_queries(const Rows& ring, const CUtensorMap& map, unsigned step, int i,
                                               int head, float* floats, const float* from) const {
    const Handed at = corner<BLOCK_R>(i * BLOCK_R, p.N_q, first_q, head);
    fill(ring, map, step, at.tile, at.h, at.b, floats, from);
  }

 private:
  template <class Params>
  __device__ __forceinline__ void enter_lengths(Params& p) {
    first_q = p.cu_seqlens_q[work.b];
    first_k = p.cu_seqlens_k[work.b];
    p.N_q = p.cu_seqlens_q[work.b + 1] - first_q;
    p.N_k = p.cu_seqlens_k[work.b + 1] - first_k;
    #pragma unroll
    for (int& n : p.mask.ints) n += p.N_k - p.N_q;
  }
};

// The n-th item; or, if its tile has no rows, so that nothing is to be done, that of the next ticket. b and
// tile are those of a sequence.
// By one thread, which looks for it by halves.
template <class Params>
__device__ __forceinline__ Handed nth_in_sequence(const Params& p, const Items& items, int n, int* ticket) {
  Handed work = items.nth(p, n);
  if constexpr (VARLEN) {
    for (; work.tile >= 0; work = items.nth(p, next_item(ticket))) {
      int b = 0;
      for (int end = p.sequences; end - b > 1;) {
        const int middle = (b + end) / 2;
        if (tiles_before(p.cu_seqlens_k, middle, BLOCK_C) <= work.tile) b = middle;
        else end = middle;
      }
      work.tile -= tiles_before(p.cu_seqlens_k, b, BLOCK_C);
      work.b = b;
      if (work.tile * BLOCK_C < p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]) break;
    }
  }
  return work;
}
