// Packed sequences of several lengths in one call. Introduced by: forward stage 17, ampere_tuned. Stages
// whose header says `takes: varlen` take them; -DVARLEN=1 asks for them.
//
// Q and O are (total_q, H, d), K and V (total_k, H_kv, d), L is (H, total_q): the rows of a sequence follow
// those of the one before. Sequence b has the rows of Q from cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. The
// host does not know these numbers. So a launch has as many tiles as there can be, total / rows + sequences,
// and the tiles of sequence b begin with tile cu_seqlens[b] / rows + b:
//
//   tile         0  1  2  3  4  5  6       tiles of 64 rows, cu_seqlens = 0, 100, 100, 300
//   of sequence  0  0  1  2  2  2  2       0: 100 rows; 1: none; 2: 200 rows
//
// At most one tile a sequence has no rows, as sequence 1's: its block ends at once. Scratch memory has whole
// tiles, in the same order. To the host it is a call of one batch element with so many tiles; and to a block
// that has entered a sequence, p is what it would be if that were the only one.
#ifndef STAGES_COMMON_SEQUENCES     // not #pragma once, as in mask.cuh: mutants have a copy in the stage
#define STAGES_COMMON_SEQUENCES

#ifndef VARLEN
#define VARLEN 0
#endif

// Of tiles with so many rows, those of the sequences before b
__device__ __forceinline__ int tiles_before(const int* cu_seqlens, int b, int rows) {
  return cu_seqlens[b] / rows + b;
}

// Which sequence has a tile, of all there are: the last one that begins with it, or before it. It is one of
// the `span` sequences from b on. The lanes of a warp look at 32 of them, `step` apart; then it is one of the
// `step` from the last of these that has begun.
__device__ __forceinline__ int sequence_of(int tile, const int* cu_seqlens, int sequences, int rows) {
  int b = 0;
  for (int span = sequences; span > 0;) {
    const int step = (span + 31) / 32, n = b + threadIdx.x % 32 * step;
    const bool begun = n < sequences && tiles_before(cu_seqlens, n, rows) <= tile;
    b += (__popc(__ballot_sync(0xffffffff, begun)) - 1) * step;
    span = step > 1 ? step : 0;
  }
  return b;
}

// The same by one thread, by binary search; and `tile` becomes that of its sequence.
__device__ __forceinline__ int enter_by_halves(const int* cu_seqlens, int sequences, int rows, int& tile) {
  int b = 0;
  for (int end = sequences; end - b > 1;) {
    const int middle = (b + end) / 2;
    (tiles_before(cu_seqlens, middle, rows) <= tile ? b : end) = middle;
  }
  tile -= tiles_before(cu_seqlens, b, rows);
  return b;
}

// Of all tiles it is `tile`: make it that of its sequence, b and p those of the sequence. Returns whether it
// has rows. All lanes of a warp call it together.
template <class Params>
__device__ __forceinline__ bool enter_sequence(Params& p, int& b, int& tile, const int* cu_seqlens,
                                               int rows) {
  b = sequence_of(tile, cu_seqlens, p.sequences, rows);
  tile -= tiles_before(cu_seqlens, b, rows);
  const int first_q = p.cu_seqlens_q[b], first_k = p.cu_seqlens_k[b];
  p.N_q = p.cu_seqlens_q[b + 1] - first_q;
  p.N_k = p.cu_seqlens_k[b + 1] - first_k;
  #pragma unroll
  for (int& n : p.mask.ints) n += p.N_k - p.N_q;       // diagonals, all of them: flash_ladder/sequences.py
  p.skip_inputs(first_q, first_k);
  return tile * rows < cu_seqlens[b + 1] - cu_seqlens[b];
}

// What follows does nothing, and is worked out by nobody, without VARLEN.
// Tile i of Q
template <class Params>
__device__ __forceinline__ bool enter_sequence_of_Q(Params& p, int& b, int& i) {
  if constexpr (VARLEN) return enter_sequence(p, b, i, p.cu_seqlens_q, BLOCK_R);
  else return true;
}

// Tile j of K and V
template <class Params>
__device__ __forceinline__ bool enter_sequence_of_K(Params& p, int& b, int& j) {
  if constexpr (VARLEN) return enter_sequence(p, b, j, p.cu_seqlens_k, BLOCK_C);
  else return true;
}

// Outputs, too, become those of the sequence; apart from the rest, and looking for the sequence once more: so
// no register holds anything for it through the loops.
template <class Params>
__device__ __forceinline__ void enter_outputs(Params& p, int tile, const int* cu_seqlens, int rows) {
  const int b = sequence_of(tile, cu_seqlens, p.sequences, rows);
  const int first_q = p.cu_seqlens_q[b], first_k = p.cu_seqlens_k[b];
  p.N_q = p.cu_seqlens_q[b + 1] - first_q;
  p.N_k = p.cu_seqlens_k[b + 1] - first_k;
  p.skip_outputs(first_q, first_k);
}

template <class Params>
__device__ __forceinline__ void enter_outputs_of_Q(Params& p, int i) {
  if constexpr (VARLEN) enter_outputs(p, i, p.cu_seqlens_q, BLOCK_R);
}

template <class Params>
__device__ __forceinline__ void enter_outputs_of_K(Params& p, int j) {
  if constexpr (VARLEN) enter_outputs(p, j, p.cu_seqlens_k, BLOCK_C);
}

// A row of tiles of Q becomes that of its sequence; outputs, too
template <class Params>
__device__ __forceinline__ void enter_sequence_of_row(Params& p, int& row) {
  if constexpr (VARLEN) {
    int b, tile = row / BLOCK_R;
    const int in_tile = row % BLOCK_R;
    enter_sequence(p, b, tile, p.cu_seqlens_q, BLOCK_R);
    p.skip_outputs(p.cu_seqlens_q[b], p.cu_seqlens_k[b]);
    row = tile * BLOCK_R + in_tile;
  }
}

// Tiles of Q, and rows of K, of the sequences before b
template <class Params>
__device__ __forceinline__ int tiles_of_Q_before(const Params& p, int b) {
  if constexpr (VARLEN) return tiles_before(p.cu_seqlens_q, b, BLOCK_R);
  else return 0;
}

template <class Params>
__device__ __forceinline__ int64_t rows_of_K_before(const Params& p, int b) {
  if constexpr (VARLEN) return p.cu_seqlens_k[b];
  else return 0;
}

// Rows of a head, in L and its like, and in K
template <class Params>
__host__ __device__ int all_rows_of_L(const Params& p) {
  if constexpr (VARLEN) return p.total_q;
  else return p.N_q;
}

template <class Params>
__host__ __device__ int all_rows_of_K(const Params& p) {
  if constexpr (VARLEN) return p.total_k;
  else return p.N_k;
}

// For the copy engine's map (packed.cuh): dimension N has a box's rows, B has all rows, a box earlier, both a
// row apart
inline void rows_twice(Tensor& x, int& B, int& N, int box_rows) {
  x.data -= box_rows * x.stride_n;
  x.stride_b = x.stride_n;
  B = N + box_rows;
  N = box_rows;
}

// A tensor of p, to choose one of two. With VARLEN p is a copy, in registers, which have no address.
#if VARLEN
using TensorOfParams = Tensor;
#else
using TensorOfParams = const Tensor&;
#endif
#endif
