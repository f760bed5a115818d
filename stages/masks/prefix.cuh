// Mask: prefix-LM. All queries see the prefix, the first keys of a batch element; what follows is causal.
// (Raffel et al., arXiv 1910.10683, section 3.2.1.)
// tensors: length, int32 (B)
// ints: diagonal
struct Rule : KeysFrom0 {
  int length, diagonal;
  __device__ Rule(const Arguments& a, int b, int h)
      : length(a.tensor<int>(0, b, h).at(0, 0)), diagonal(a.integer(0)) {}
  __device__ int end_key(int row) const { return max(length, row + 1 + diagonal); }
  __device__ int first_row(int col) const { return col < length ? 0 : col - diagonal; }
};
