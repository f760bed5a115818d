// Mask: causal. The query of `row` sees the key of `col` if col <= row + diagonal.
// ints: diagonal
struct Rule : KeysFrom0 {
  int diagonal;
  __device__ Rule(const Arguments& a, int b, int h) : diagonal(a.integer(0)) {}
  __device__ int end_key(int row) const { return row + 1 + diagonal; }
  __device__ int first_row(int col) const { return col - diagonal; }
};
