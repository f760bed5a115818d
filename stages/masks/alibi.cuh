// Mask: ALiBi. A score falls by a slope, the head's own, times the distance of the key from the diagonal.
// (Press, Smith, Lewis, arXiv 2108.12409, section 3.)
// tensors: slopes, float32 (B, H)
// ints: diagonal
struct Rule : AllKeys {
  static constexpr bool scores = true;
  float slope_of_head;
  int diagonal;
  __device__ Rule(const Arguments& a, int b, int h)
      : AllKeys(a, b, h), slope_of_head(a.tensor<float>(0, b, h).at(0, 0)), diagonal(a.integer(0)) {}
  __device__ float score(float x, int row, int col) const {
    return x - slope_of_head * float(abs(row + diagonal - col));
  }
};
