// Which scores count. Introduced by: forward stage 4, flash2. (Another mask is another file like this one.)
#pragma once

// Made once a block. Asked in two places: which tiles there are (S_ij is skipped, cut or whole), and within a
// tile that it cuts, element by element.
struct Mask {
  int N_q, N_k, diagonal;

  template <class Params>
  __device__ explicit Mask(const Params& p) : N_q(p.N_q), N_k(p.N_k), diagonal(p.diagonal) {}

  // Does the query of `row` see the key of `col`? Rows and keys past the end are not there.
  __device__ bool sees(int row, int col) const {
    return row < N_q && col < N_k && (!CAUSAL || col <= row + diagonal);
  }

  // Does it see the key of col + c? Any row may be asked for, where nobody uses what is past the end. c is
  // apart, as it is a constant where a loop is unrolled: then an element takes one comparison, with a
  // constant.
  __device__ bool sees_key(int row, int col, int c) const {
    return c < (CAUSAL ? min(N_k - col, row + 1 + diagonal - col) : N_k - col);
  }

  // Tile i of Q, causal: its last row, (i + 1) * Br - 1, sees the most keys. From j = end_j(i) on S_ij is
  // skipped. Its first row, i * Br, sees the fewest keys: before j = cut_j(i) S_ij is whole.
  __device__ int end_j(int i) const { return ceil_div(seen_by((i + 1) * BLOCK_R - 1), BLOCK_C); }
  __device__ int cut_j(int i) const { return seen_by(i * BLOCK_R) / BLOCK_C; }

  // Tile j of K and V, causal: the first row that sees key j * Bc is j * Bc - diagonal. S_ij is skipped
  // before i = first_i(j).
  __device__ int first_i(int j) const { return CAUSAL ? max(j * BLOCK_C - diagonal, 0) / BLOCK_R : 0; }

  // Does S_ij have an element that does not count? (By cut_j(i), the backward at d=64 took 1 % longer: H200.)
  __device__ bool cuts(int i, int j) const {
    const int end_row = (i + 1) * BLOCK_R, end_col = (j + 1) * BLOCK_C;
    return end_row > N_q || end_col > N_k || (CAUSAL && end_col - 1 > i * BLOCK_R + diagonal);
  }

 private:
  // --- how many keys a row sees
  // causal: the keys 0 to row + diagonal
  __device__ int seen_by(int row) const { return CAUSAL ? max(min(N_k, row + 1 + diagonal), 0) : N_k; }
  // ---
};
