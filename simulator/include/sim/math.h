// CUDA's arithmetic where the C library lacks it. The fast intrinsics are computed at full precision: a GPU's __expf is less
// exact than this one (two units in the last place and more for large arguments).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

using std::max;
using std::min;
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }

inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.f), 1.f); }   // NaN becomes 0, as on a GPU

namespace sim {
template <class To, class From> inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace sim
inline int __float_as_int(float x) { return sim::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return sim::bits<unsigned>(x); }
inline float __int_as_float(int x) { return sim::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return sim::bits<float>(x); }

inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
template <class T> inline T __ldg(const T* p) { return *p; }
