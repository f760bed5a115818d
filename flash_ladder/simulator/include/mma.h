// Stands in for NVIDIA's header: nvcuda::wmma, the portable way to tensor cores, for tiles of 16 x 16 x 16,
// fp16 or bf16, that are summed up in float.
//
// Which lane holds which element of a fragment is not specified. Here it is as in mma.m16n8k16
// (stages/common/ptx.cuh), twice beside each other; fragments are loaded as by ldmatrix.
#pragma once
#include <string>

#include "sim/ptx.h"

namespace nvcuda {
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int m, int n, int k, class T, class Layout = void> struct fragment {
  static_assert(m == 16 && n == 16 && k == 16, "the simulator knows 16 x 16 x 16 fragments only");
  static_assert(std::is_same<Use, accumulator>::value ? std::is_same<T, float>::value
                    : std::is_same<T, __half>::value || std::is_same<T, __nv_bfloat16>::value,
                "the simulator knows fragments of __half and __nv_bfloat16, and accumulators of float, only");
  enum { num_elements = 8, num_storage_elements = 8 };
  alignas(8) T x[num_elements];
};

template <class Use, class T, class Layout>
inline void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& f, T value) {
  for (T& x : f.x) x = value;
}

inline void check_tile(const char* name, const void* p, size_t row_bytes, const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(p) % 32 || row_bytes % 16)
    sim::sim_fail((std::string(name) + ": the tile must start at a multiple of 32 bytes, and its rows must "
                   "lie a multiple of 16 bytes apart").c_str(), file, line);
}

// The four registers are quarters of the tile, 8 x 8, in mma.m16n8k16's order: A's second one lies 8 rows (m)
// further on, its third one 8 columns (k); B's second one 8 rows (k), its third one 8 columns (n).
template <class Use, class T, class Layout>
SIM_ALWAYS_INLINE void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* p, unsigned ld,
                                        SIM_SITE) {
  check_tile("load_matrix_sync()", p, ld * sizeof(T), file, line);
  constexpr bool is_a = std::is_same<Use, matrix_a>::value;
  constexpr bool along_k = is_a == std::is_same<Layout, row_major>::value;   // do rows in memory go along k?
  const int lane = sim::sim_lane(), second = lane / 8 % 2 * 8, third = lane / 16 * 8;
  const int k = is_a ? third : second, m_or_n = is_a ? second : third;
  const T* row = p + ((along_k ? m_or_n : k) + lane % 8) * ld + (along_k ? k : m_or_n);
  uint32_t registers[4];
  sim::sim_load_matrices("load_matrix_sync()", registers, row, 4, !along_k, file, line);
  memcpy(f.x, registers, sizeof f.x);
}

// Where the lane's pair `i` of an accumulator is, in a tile by rows or by columns.
inline size_t place_of(int i, int& step, unsigned ld, layout_t layout) {
  const int lane = sim::sim_lane(), row = lane / 4 + i % 2 * 8, col = lane % 4 * 2 + i / 2 * 8;
  step = layout == mem_row_major ? 1 : int(ld);
  return layout == mem_row_major ? size_t(row) * ld + col : size_t(col) * ld + row;
}

SIM_ALWAYS_INLINE void load_matrix_sync(fragment<accumulator, 16, 16, 16, float>& f, const float* p,
                                        unsigned ld, layout_t layout, SIM_SITE) {
  check_tile("load_matrix_sync()", p, ld * sizeof(float), file, line);
  for (int i = 0; i < 4; i++) {
    int step;
    const float* from = p + place_of(i, step, ld, layout);
    if (step == 1) {
      const float2 both = *reinterpret_cast<const float2*>(from);
      f.x[2 * i] = both.x;
      f.x[2 * i + 1] = both.y;
    } else {
      f.x[2 * i] = from[0];
      f.x[2 * i + 1] = from[step];
    }
  }
  sim::sim_meet("load_matrix_sync()", file, line);
}

SIM_ALWAYS_INLINE void store_matrix_sync(float* p, const fragment<accumulator, 16, 16, 16, float>& f,
                                         unsigned ld, layout_t layout, SIM_SITE) {
  check_tile("store_matrix_sync()", p, ld * sizeof(float), file, line);
  for (int i = 0; i < 4; i++) {
    int step;
    float* to = p + place_of(i, step, ld, layout);
    if (step == 1) {
      *reinterpret_cast<float2*>(to) = *reinterpret_cast<const float2*>(f.x + 2 * i);
    } else {
      to[0] = f.x[2 * i];
      to[step] = f.x[2 * i + 1];
    }
  }
  sim::sim_meet("store_matrix_sync()", file, line);
}

template <class T, class A, class B>
inline void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
                     const fragment<matrix_a, 16, 16, 16, T, A>& a,
                     const fragment<matrix_b, 16, 16, 16, T, B>& b,
                     const fragment<accumulator, 16, 16, 16, float>& c, SIM_SITE) {
  uint32_t a_registers[4], b_registers[4];
  memcpy(a_registers, a.x, sizeof a.x);
  memcpy(b_registers, b.x, sizeof b.x);
  d = c;
  for (int half = 0; half < 2; half++)
    sim::sim_mma("mma_sync()", sim::MatrixTypeOf<T>::type, d.x + 4 * half, a_registers,
                 b_registers + 2 * half, file, line);
}

}  // namespace wmma
}  // namespace nvcuda
