// 16-bit numbers: __half (5 bits of exponent, 10 of mantissa) and __nv_bfloat16 (8 and 7), with CUDA's names.
// Arithmetic is done in float and rounded to nearest even. For + - * / and roots that gives the same bits as
// rounding once, as a float has more than twice the digits (Figueroa 1995). Else: round_to_odd.
#pragma once
#include "device.h"
#include "math.h"

namespace sim {

// This one, as on a GPU. The checker is told of a value that it would not know by that any more.
SIM_ALWAYS_INLINE uint16_t not_a_number([[maybe_unused]] uint32_t x) {
#ifdef SIM_CHECKED
  if ((x & 0x7fffffffu) == POISON) sim_poison_rounded();
#endif
  return 0x7fff;
}

struct Half {
  static float widen(uint16_t h) {
    uint32_t x = (h & 0x7fffu) << 13;
    x = bits<uint32_t>(bits<float>(x) * 0x1p112f);            // the exponent's bias; subnormals become normal
    if ((h & 0x7c00u) == 0x7c00u) x |= 0x7f800000u;          // infinity or NaN
    return bits<float>(x | (h & 0x8000u) << 16);
  }
  static uint16_t round(float f) {
    uint32_t x = bits<uint32_t>(f);
    const uint32_t sign = x >> 16 & 0x8000u;
    x &= 0x7fffffffu;
    if (x > 0x7f800000u) return not_a_number(x);
    if (x >= 0x47800000u) return uint16_t(sign | 0x7c00u);    // 2^16 and more: infinity
    if (x < 0x38800000u)   // below 2^-14, subnormal: 0.5 has 2^-24 as the last of its digits
      return uint16_t(sign | (bits<uint32_t>(bits<float>(x) + 0.5f) - 0x3f000000u));
    return uint16_t(sign | (x + 0xc8000fffu + (x >> 13 & 1u)) >> 13);
  }
};

struct Bfloat16 {
  static float widen(uint16_t b) { return bits<float>(uint32_t(b) << 16); }
  static uint16_t round(float f) {
    const uint32_t x = bits<uint32_t>(f);
    if ((x & 0x7fffffffu) > 0x7f800000u) return not_a_number(x);
    return uint16_t((x + 0x7fffu + (x >> 16 & 1u)) >> 16);
  }
};

// What is cut off sets the last bit: so a float that is rounded once more gives what rounding x once gives.
inline float round_to_odd(double x) {
  float f = float(x);
  if (double(f) == x || x != x) return f;
  if (fabs(double(f)) > fabs(x)) f = nextafterf(f, 0.f);
  return bits<float>(bits<uint32_t>(f) | 1u);
}

template <class Format> struct Number {
  uint16_t raw;

  Number() = default;
  Number(float x) : raw(Format::round(x)) {}
  template <class T, class = std::enable_if_t<std::is_arithmetic<T>::value>>
  Number(T x) : Number(round_to_odd(double(x))) {}
  operator float() const { return Format::widen(raw); }

  friend Number operator+(Number a, Number b) { return float(a) + float(b); }
  friend Number operator-(Number a, Number b) { return float(a) - float(b); }
  friend Number operator*(Number a, Number b) { return float(a) * float(b); }
  friend Number operator/(Number a, Number b) { return float(a) / float(b); }
  friend Number operator-(Number a) { return -float(a); }
  Number& operator+=(Number b) { return *this = *this + b; }
  Number& operator-=(Number b) { return *this = *this - b; }
  Number& operator*=(Number b) { return *this = *this * b; }
  Number& operator/=(Number b) { return *this = *this / b; }
  friend bool operator==(Number a, Number b) { return float(a) == float(b); }
  friend bool operator!=(Number a, Number b) { return float(a) != float(b); }
  friend bool operator<(Number a, Number b) { return float(a) < float(b); }
  friend bool operator>(Number a, Number b) { return float(a) > float(b); }
  friend bool operator<=(Number a, Number b) { return float(a) <= float(b); }
  friend bool operator>=(Number a, Number b) { return float(a) >= float(b); }
};

template <class Format> struct alignas(4) Pair {
  Number<Format> x, y;

  Pair() = default;
  Pair(Number<Format> x, Number<Format> y) : x(x), y(y) {}
  friend Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  friend Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
  friend Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
  friend Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
};

}  // namespace sim

using __half = sim::Number<sim::Half>;
using __half2 = sim::Pair<sim::Half>;
using half = __half;
using half2 = __half2;
using __nv_bfloat16 = sim::Number<sim::Bfloat16>;
using __nv_bfloat162 = sim::Pair<sim::Bfloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// -------------------------------------------------------------------------------- conversions
inline __half __float2half(float x) { return x; }
inline __half __float2half_rn(float x) { return x; }
inline float __half2float(__half x) { return x; }
inline __half2 __float2half2_rn(float x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 v) { return {v.x, v.y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half __low2half(__half2 v) { return v.x; }
inline __half __high2half(__half2 v) { return v.y; }
inline unsigned short __half_as_ushort(__half x) { return x.raw; }
inline __half __ushort_as_half(unsigned short x) { return sim::bits<__half>(x); }

inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {x, x}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {v.x, v.y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 v) { return v.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 v) { return v.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.raw; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return sim::bits<__nv_bfloat16>(x); }

template <class F> float __low2float(sim::Pair<F> v) { return v.x; }
template <class F> float __high2float(sim::Pair<F> v) { return v.y; }

// -------------------------------------------------------------------------------- arithmetic, of both types
template <class F> sim::Number<F> __hadd(sim::Number<F> a, sim::Number<F> b) { return a + b; }
template <class F> sim::Number<F> __hsub(sim::Number<F> a, sim::Number<F> b) { return a - b; }
template <class F> sim::Number<F> __hmul(sim::Number<F> a, sim::Number<F> b) { return a * b; }
template <class F> sim::Number<F> __hdiv(sim::Number<F> a, sim::Number<F> b) { return a / b; }
template <class F> sim::Number<F> __hneg(sim::Number<F> a) { return -a; }
template <class F> sim::Number<F> __habs(sim::Number<F> a) { return fabsf(a); }

// Rounded once. The product is exact in double, the sum may not be: then it is made odd, that is, of the two
// neighbours the one whose last digit is 1, which is on the same side of every tie between 16-bit numbers.
template <class F> sim::Number<F> __hfma(sim::Number<F> a, sim::Number<F> b, sim::Number<F> c) {
  const double product = double(float(a)) * double(float(b)), addend = float(c), sum = product + addend;
  const double without = sum - product, error = (product - (sum - without)) + (addend - without);
  const bool inexact = error < 0 || error > 0, even = sim::bits<uint64_t>(sum) % 2 == 0;
  return inexact && even ? nextafter(sum, error > 0 ? INFINITY : -INFINITY) : sum;
}

template <class F> sim::Number<F> __hmax(sim::Number<F> a, sim::Number<F> b) { return fmaxf(a, b); }
template <class F> sim::Number<F> __hmin(sim::Number<F> a, sim::Number<F> b) { return fminf(a, b); }
template <class F> bool __hisnan(sim::Number<F> a) { return a != a; }
template <class F> sim::Number<F> hexp(sim::Number<F> a) { return expf(a); }
template <class F> sim::Number<F> hexp2(sim::Number<F> a) { return exp2f(a); }
template <class F> sim::Number<F> hlog(sim::Number<F> a) { return logf(a); }
template <class F> sim::Number<F> hlog2(sim::Number<F> a) { return log2f(a); }
template <class F> sim::Number<F> hsqrt(sim::Number<F> a) { return sqrtf(a); }
template <class F> sim::Number<F> hrsqrt(sim::Number<F> a) { return 1.f / sqrtf(a); }
template <class F> sim::Number<F> hrcp(sim::Number<F> a) { return 1.f / float(a); }

template <class F> sim::Pair<F> __hadd2(sim::Pair<F> a, sim::Pair<F> b) { return a + b; }
template <class F> sim::Pair<F> __hsub2(sim::Pair<F> a, sim::Pair<F> b) { return a - b; }
template <class F> sim::Pair<F> __hmul2(sim::Pair<F> a, sim::Pair<F> b) { return a * b; }
template <class F> sim::Pair<F> __h2div(sim::Pair<F> a, sim::Pair<F> b) { return a / b; }
template <class F> sim::Pair<F> __hfma2(sim::Pair<F> a, sim::Pair<F> b, sim::Pair<F> c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
template <class F> sim::Pair<F> __hmax2(sim::Pair<F> a, sim::Pair<F> b) {
  return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
template <class F> sim::Pair<F> __hmin2(sim::Pair<F> a, sim::Pair<F> b) {
  return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
template <class F> sim::Pair<F> h2exp2(sim::Pair<F> a) { return {hexp2(a.x), hexp2(a.y)}; }
