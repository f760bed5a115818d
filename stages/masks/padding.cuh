// Mask: padding. Of a batch element, the keys from `first` to end - 1 are there, the others are padding.
// tensors: first, int32 (B); end, int32 (B)
struct Rule : KeyRange {
  int first, end;
  __device__ Rule(const Arguments& a, int b, int h)
      : first(a.tensor<int>(0, b, h).at(0, 0)), end(a.tensor<int>(1, b, h).at(0, 0)) {}
  __device__ int first_key(int row) const { return first; }
  __device__ int end_key(int row) const { return end; }
};
