// Mask: block-causal. Queries and keys belong to blocks; a query sees the keys of its own block and of those
// with smaller numbers. A negative number is padding: it sees nothing and is not seen.
// (As vision-language-action models use it: Black et al., pi0, arXiv 2410.24164, section IV.)
// tensors: blocks of queries, int32 (B, N_q); blocks of keys, int32 (B, N_k)
struct Rule : AnyKeys {
  View<int> of_queries, of_keys;
  __device__ Rule(const Arguments& a, int b, int h)
      : of_queries(a.tensor<int>(0, b, h)), of_keys(a.tensor<int>(1, b, h)) {}
  __device__ bool sees(int row, int col) const {
    const int key = of_keys.at(0, col), query = of_queries.at(row, 0);
    return (key >= 0) & (key <= query);
  }
  __device__ TileKind kind(const Tile& tile) const {
    const Extent<int> q = extent_of(of_queries.data, of_queries.stride_row, tile.row, tile.end_row);
    const unsigned* keys = reinterpret_cast<const unsigned*>(of_keys.data);       // padding is beyond INT_MAX
    const Extent<unsigned> k = extent_of(keys, of_keys.stride_col, tile.col, tile.end_col);
    // --- what a tile is
    if (q.greatest < 0 || k.least > unsigned(q.greatest)) return SKIPPED;
    return q.least >= 0 && k.greatest <= unsigned(q.least) ? WHOLE : CUT;
    // ---
  }
};
