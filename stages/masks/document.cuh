// Mask: documents, packed into one sequence. A query sees the keys of its own document.
// tensors: ids of queries, int32 (B, N_q); ids of keys, int32 (B, N_k)
struct Rule : AnyKeys {
  View<int> of_queries, of_keys;
  __device__ Rule(const Arguments& a, int b, int h)
      : of_queries(a.tensor<int>(0, b, h)), of_keys(a.tensor<int>(1, b, h)) {}
  __device__ bool sees(int row, int col) const { return of_queries.at(row, 0) == of_keys.at(0, col); }
  __device__ TileKind kind(const Tile& tile) const {
    const Extent<int> q = extent_of(of_queries.data, of_queries.stride_row, tile.row, tile.end_row);
    const Extent<int> k = extent_of(of_keys.data, of_keys.stride_col, tile.col, tile.end_col);
    if (q.greatest < k.least || k.greatest < q.least) return SKIPPED;
    return q.least == k.greatest && k.least == q.greatest ? WHOLE : CUT;
  }
};
