// Mask: a sliding window. The query of `row` sees the keys from row + from to row + to.
// (Beltagy, Peters, Cohan, arXiv 2004.05150, section 3.1.)
// ints: from, to
// --- which keys a query sees
struct Rule : KeyRange {
  int from, to;
  __device__ Rule(const Arguments& a, int b, int h) : from(a.integer(0)), to(a.integer(1)) {}
  __device__ int first_key(int row) const { return row + from; }
  __device__ int end_key(int row) const { return row + to + 1; }
  // Optional, for the backward pass: which queries see a key
  static constexpr bool has_rows = true;
  __device__ int first_row(int col) const { return col - to; }
  __device__ int end_row(int col) const { return col - from + 1; }
};
// ---
