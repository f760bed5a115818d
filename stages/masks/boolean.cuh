// Mask: any, as a tensor of booleans: true where the query sees the key.
// tensors: bool (B, H, N_q, N_k)
struct Rule : AnyKeys {
  View<bool> seen;
  __device__ Rule(const Arguments& a, int b, int h) : seen(a.tensor<bool>(0, b, h)) {}
  __device__ bool sees(int row, int col) const { return seen.at(row, col); }
};
