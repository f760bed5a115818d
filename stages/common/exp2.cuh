// Exponentials to the base 2. Introduced by: forward stage 9, fp32_tuned.
#pragma once

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;     // e^x = 2^(x log2(e)); ln(x) = ln(2) log2(x)

// 2^x in one instruction; expf would multiply by log2(e) first and take care of denormal results.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

// A mask's score(), of a score times log2(e), which it stays
template <class M>
__device__ __forceinline__ float score2(const M& mask, float x, int row, int col) {
  return M::scores ? LOG2_E * mask.score(LN_2 * x, row, col) : x;
}
