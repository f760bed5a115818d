// The CPU's side of stages/common/ptx.cuh: the same functions, done by the run-time library. What each of
// them means is said there.
#pragma once
#include "half.h"

namespace sim {
enum class MatrixType { HALF, BFLOAT16 };

extern "C" {
void* sim_shared_pointer(const char* name, uint32_t address, size_t bytes, const char* file, int line);
void sim_load_matrices(const char* name, uint32_t* to, const void* row, int count, bool transposed,
                       const char* file, int line);
void sim_store_matrices(const char* name, const uint32_t* from, void* row, int count, bool transposed,
                        const char* file, int line);
void sim_mma(const char* name, MatrixType type, float* d, const uint32_t* a, const uint32_t* b,
             const char* file, int line);
void sim_meet(const char* name, const char* file, int line);
void sim_copy_async(void* to, const void* from, size_t bytes, size_t valid, const char* file, int line);
void sim_commit_copies();
void sim_wait_for_copies(int groups_left);
}

template <class T> struct MatrixTypeOf;
template <> struct MatrixTypeOf<__half> { static constexpr MatrixType type = MatrixType::HALF; };
template <> struct MatrixTypeOf<__nv_bfloat16> { static constexpr MatrixType type = MatrixType::BFLOAT16; };
}  // namespace sim

inline uint32_t shared_address(const void* p, SIM_SITE) { return sim::sim_shared_address(p, file, line); }

// Inlined always, so that the checker sees the kernel's line as the caller.
#define SIM_LDMATRIX(function, text, count, transposed)                                            \
  SIM_ALWAYS_INLINE void function(uint32_t (&to)[count], uint32_t row, SIM_SITE) {                 \
    sim::sim_load_matrices(text, to, sim::sim_shared_pointer(text, row, 16, file, line), count,    \
                           transposed, file, line);                                                \
  }
#define SIM_STMATRIX(function, text, count, transposed)                                            \
  SIM_ALWAYS_INLINE void function(uint32_t row, const uint32_t (&from)[count], SIM_SITE) {         \
    sim::sim_store_matrices(text, from, sim::sim_shared_pointer(text, row, 16, file, line), count, \
                            transposed, file, line);                                               \
  }
SIM_LDMATRIX(ldmatrix_x2, "ldmatrix.x2", 2, false)
SIM_LDMATRIX(ldmatrix_x4, "ldmatrix.x4", 4, false)
SIM_LDMATRIX(ldmatrix_x2_trans, "ldmatrix.x2.trans", 2, true)
SIM_LDMATRIX(ldmatrix_x4_trans, "ldmatrix.x4.trans", 4, true)
SIM_STMATRIX(stmatrix_x2, "stmatrix.x2", 2, false)
SIM_STMATRIX(stmatrix_x4, "stmatrix.x4", 4, false)
SIM_STMATRIX(stmatrix_x2_trans, "stmatrix.x2.trans", 2, true)
SIM_STMATRIX(stmatrix_x4_trans, "stmatrix.x4.trans", 4, true)
#undef SIM_LDMATRIX
#undef SIM_STMATRIX

template <class T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIM_SITE) {
  sim::sim_mma("mma.m16n8k16", sim::MatrixTypeOf<T>::type, d, a, b, file, line);
}

inline uint32_t where_less(uint32_t a, uint32_t b, bool flip) {
  const __half2 A = sim::bits<__half2>(a), B = sim::bits<__half2>(b);
  return ((A.x < B.x) != flip ? 0xffffu : 0u) | ((A.y < B.y) != flip ? 0xffff0000u : 0u);
}

inline int load_acquire(const int* from) {
  const int x = atomicAdd(const_cast<int*>(from), 0);
  __threadfence();
  return x;
}
inline void count_release(int* to) {
  __threadfence();
  atomicAdd(to, 1);
}
SIM_ALWAYS_INLINE void cp_async_16(uint32_t to, const void* from, int bytes = 16, SIM_SITE) {
  sim::sim_copy_async(sim::sim_shared_pointer("cp.async", to, 16, file, line), from, 16, bytes, file, line);
}
inline float pinned(float x) { return x; }
inline uint32_t pinned(uint32_t x) { return x; }
inline void start_next_kernel() { sim::sim_start_next_kernel(); }
inline void wait_for_previous_kernel() { sim::sim_wait_for_previous_kernel(); }

inline void cp_async_commit() { sim::sim_commit_copies(); }
template <int groups_left> inline void cp_async_wait() { sim::sim_wait_for_copies(groups_left); }
