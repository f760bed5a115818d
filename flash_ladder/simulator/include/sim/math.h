// CUDA's arithmetic where the C library lacks it. The fast intrinsics are computed at full precision: a
// GPU's __expf is less exact than this one (two units in the last place and more for large arguments).
#pragma once
#include <cmath>
#include <cstring>

// CUDA's overloads, and no more: what is ambiguous for nvcc, such as an int and a float, is so here.
#define SIM_MIN_MAX(Result, A, B)                                                     \
  inline Result min(A a, B b) { const Result x = a, y = b; return y < x ? y : x; }  \
  inline Result max(A a, B b) { const Result x = a, y = b; return x < y ? y : x; }
#define SIM_MIN_MAX_INTEGER(T)                        \
  SIM_MIN_MAX(T, T, T)                                \
  SIM_MIN_MAX(unsigned T, unsigned T, unsigned T)     \
  SIM_MIN_MAX(unsigned T, unsigned T, T)              \
  SIM_MIN_MAX(unsigned T, T, unsigned T)
SIM_MIN_MAX_INTEGER(int)
SIM_MIN_MAX_INTEGER(long)
SIM_MIN_MAX_INTEGER(long long)
#undef SIM_MIN_MAX_INTEGER
#undef SIM_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }      // of a NaN and a number: the number
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(a, b); }
inline double max(float a, double b) { return fmax(a, b); }
inline double min(double a, float b) { return fmin(a, b); }
inline double max(double a, float b) { return fmax(a, b); }

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
// Byte i is one of eight, those of x and then those of y: its number is in bits 4 i to 4 i + 2 of s
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= unsigned(both >> (s >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}
template <class T> inline T __ldg(const T* p) { return *p; }
