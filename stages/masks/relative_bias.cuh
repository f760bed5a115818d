// Mask: a bias by the distance of the key from the query, added to the scaled score, as in T5.
// (Raffel et al., arXiv 1910.10683, section 2.1.)
// tensors: bias, float32 (1, H, 1, N_q + N_k - 1): of the distances col - row from -(N_q - 1) on
struct Rule : AllKeys {
  static constexpr bool scores = true, has_gradient = true;
  View<float> bias;
  int N_q;
  __device__ Rule(const Arguments& a, int b, int h)
      : AllKeys(a, b, h), bias(a.tensor<float>(0, b, h)), N_q(a.N_q) {}
  __device__ float score(float x, int row, int col) const { return x + bias.at(0, col - row + N_q - 1); }
};
