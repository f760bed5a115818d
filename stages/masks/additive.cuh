// Mask: a bias, added to the scaled score. Where it is -1e30 or
// less, as -infinity is, the query does not see the key. (NaN is seen.)
// tensors: bias, of q's type (B, H, N_q, N_k)
struct Rule : AnyKeys {
  static constexpr bool scores = true, has_gradient = true;
  View<ELEMENT> bias;
  __device__ Rule(const Arguments& a, int b, int h) : bias(a.tensor<ELEMENT>(0, b, h)) {}
  __device__ bool sees(int row, int col) const { return !(float(bias.at(row, col)) <= -1e30f); }
  __device__ float score(float x, int row, int col) const { return x + float(bias.at(row, col)); }
};
