// Mask: softcap. A score x becomes cap * tanh(x / cap), which stays between -cap and cap.
// (Gemma 2, arXiv 2408.00118, section 2.)
// floats: cap
struct Rule : AllKeys {
  static constexpr bool scores = true;
  float cap, inverse;        // 1 / cap, as to divide each score would take some 16 instructions
  __device__ Rule(const Arguments& a, int b, int h)
      : AllKeys(a, b, h), cap(a.number(0)), inverse(1.f / cap) {}
  __device__ float score(float x, int row, int col) const { return cap * tanhf(x * inverse); }
  __device__ float slope(float x, int row, int col) const {
    const float t = tanhf(x * inverse);
    return 1.f - t * t;
  }
};
