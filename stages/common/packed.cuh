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
  if (!VARLEN) return p;
  p.N_q = sequence.Q.N, p.N_k = sequence.K.N;
  p.L += sequence.Q.first;
  #pragma unroll
  for (int& n : p.mask.ints) n += p.N_k - p.N_q;
  return p;
}

// Of all tiles of Q, or of K, it is `tile`: make it that of its sequence. Returns the sequence, or, without
// packed ones, b. By one thread, which looks for it by halves.
template <bool of_Q, class Params>
__device__ __forceinline__ int enter_by_halves(const Params& p, int& tile, int b) {
  if constexpr (VARLEN) {
    const int* cu_seqlens = of_Q ? p.cu_seqlens_q : p.cu_seqlens_k;
    constexpr int rows = of_Q ? BLOCK_R : BLOCK_C;
    b = 0;
    for (int end = p.sequences; end - b > 1;) {
      const int middle = (b + end) / 2;
      (tiles_before(cu_seqlens, middle, rows) <= tile ? b : end) = middle;
    }
    tile -= tiles_before(cu_seqlens, b, rows);
  }
  return b;
}
