// Packed sequences and the copy engine. Introduced by: forward stage 33, packed.
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
#include "order.cuh"
#include "sequences.cuh"

// Where a box begins, along the dimensions row and batch
struct Corner { int row, batch; };

// A sequence's rows: the first one, and how many
struct Rows {
  int first, N;

  // Of a box with those from `row` on. b: the batch element, without packed sequences
  __device__ __forceinline__ Corner corner(int row, int box_rows, int b) const {
    const int missing = max(row + box_rows - N, 0);
    return VARLEN ? Corner{missing, first + row + box_rows - missing} : Corner{row, b};
  }
};
struct alignas(16) Sequence { Rows Q, K; };

// Of packed sequences the b-th; else a batch element
template <class Params>
__device__ __forceinline__ Sequence nth_sequence(const Params& p, int b) {
  if constexpr (!VARLEN) return {{0, p.N_q}, {0, p.N_k}};
  else return {{p.cu_seqlens_q[b], p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b]},
               {p.cu_seqlens_k[b], p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b]}};
}

// p as it is for a sequence, but for tensors, whose maps are those of all sequences
template <class Params>
__device__ __forceinline__ Params within(Params p, const Sequence& sequence) {
  p.N_q = sequence.Q.N, p.N_k = sequence.K.N;
  p.L += sequence.Q.first;
  for (int& n : p.mask.ints) n += VARLEN ? p.N_k - p.N_q : 0;
  return p;
}

// A tile of Q, as the producer hands it over: of which sequence, and which of its tiles
struct HandedTile : Handed { Sequence rows; };

// The next one that has rows, of those that a block takes; tile is -1 if none is left. By one thread.
template <class Params>
__device__ __forceinline__ HandedTile next_tile_of_Q(const Params& p, int Tr, int heads, int heads_together,
                                                     int all, int& next) {
  while (next < all) {
    const Work work = dispatch_order(Tr, heads, heads_together, next);
    int i = Tr - 1 - work.tile, b = work.bh / p.H;
    if constexpr (VARLEN) b = enter_by_halves(p.cu_seqlens_q, p.sequences, BLOCK_R, i);
    wait_for_previous_kernel();             // it clears the tickets
    next = all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(p.workspace), 1) : all;
    const Sequence rows = nth_sequence(p, b);
    if (i * BLOCK_R < rows.Q.N) return {{{i, work.bh}, b, work.bh % p.H}, rows};
  }
  return {{{-1}}};
}

// The consumers': what a warp has read, so that ptxas sees that all lanes go through the same tiles (C7511)
__device__ __forceinline__ Sequence of_lane_0(const Sequence& rows) {
  return {rows.Q, {rows.K.first, of_lane_0(rows.K.N)}};
}
