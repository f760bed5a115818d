// Instructions that C++ has no word for: a thin function around each. (PTX ISA, sections "Warp Level Matrix
// Instructions" and, for cp.async, "Data Movement".) ldmatrix, stmatrix and mma are executed by all lanes of
// a warp together.
//
// A register of 32 bits holds two neighbouring elements of 16 bits, the first one in its lower half. In what
// follows, row is lane / 4, from 0 to 7, and col is lane % 4 * 2.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifdef __CUDACC__

// The address as these instructions want it: of 32 bits, within shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* p) { return __cvta_generic_to_shared(p); }

// ldmatrix: 2 or 4 matrices of 8 x 8 elements of 16 bits from shared memory. Lane 8 * i + r says where row r
// of matrix i is: 16 bytes, at a multiple of 16. Register i then holds the elements (row, col) and
// (row, col + 1) of matrix i; with trans those of its transpose.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&to)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&to)[2], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1]) : "r"(row) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&to)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(row) : "memory");
}

// stmatrix (sm_90): the way back.
__device__ __forceinline__ void stmatrix_x2(uint32_t row, const uint32_t (&from)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               :: "r"(row), "r"(from[0]), "r"(from[1]) : "memory");
}

__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(uint32_t row, const uint32_t (&from)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :: "r"(row), "r"(from[0]), "r"(from[1]) : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}

// D += A B on tensor cores: A is 16 x 16 and B 16 x 8, of type T; D is 16 x 8, in float. A lane has
//   a[0], a[1]   A(row, col) and A(row + 8, col), each with the element to its right
//   a[2], a[3]   the same, 8 columns further on
//   b[0], b[1]   B(col, row) and B(col + 8, row), each with the element below it
//   d[0] to [3]  D(row, col), D(row, col + 1), and D(row + 8, col), D(row + 8, col + 1)
template <class T>
__device__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32_t (&a)[4],
                                                     const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4],
                                                            const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// set.lt.f16x2 compares both halves of a with those of b, as fp16 numbers: of the result all 16 bits of a
// half are set where that one of a is less, else none; with `flip` the other way round.
__device__ __forceinline__ uint32_t where_less(uint32_t a, uint32_t b, bool flip) {
  uint32_t mask;
  asm("{.reg .pred flip; setp.ne.u32 flip, %3, 0; set.lt.xor.u32.f16x2 %0, %1, %2, flip;}"
      : "=r"(mask) : "r"(a), "r"(b), "r"(uint32_t(flip)));
  return mask;
}

// What is there now, past the L1 cache. What others had done before they released it is seen after it.
__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Counts one more there. Who acquires that sees what this thread had done or waited for. (As __threadfence()
// and atomicAdd(), but the L1 cache keeps what it has.)
__device__ __forceinline__ void count_release(int* to) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(to) : "memory");
}

// cp.async (sm_80): start to copy 16 bytes from global to shared memory, past the registers and the L1 cache.
// The first `bytes` of them come from there, the rest become zeros. The copy may be made at any time until
// this thread has waited for it; for other threads a barrier must follow the wait.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(bytes) : "memory");
}

// The copies that this thread has started since the last commit are now a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all of this thread's groups but the last `groups_left` have been copied.
template <int groups_left> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(groups_left) : "memory");
}

// griddepcontrol (sm_90), for early launches (launch.cuh). The first one lets the next kernel's blocks start,
// once all blocks of this one have called it or have ended. The second one waits until the kernel before has
// ended, and all that it has written is there.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// x, written here to a register of its own: so it is worked out by now, as instructions like this one stay in
// order. And so accumulators begin: where two of them have the same value, the compiler would copy one to the
// other later, when products before it are under way (wgmma.cuh).
__device__ __forceinline__ float pinned(float x) {
  float y;
  asm volatile("mov.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pinned(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

#else
#include "sim/ptx.h"     // the same functions on a CPU, where a warp is 32 threads one after the other
#endif
