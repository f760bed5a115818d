// The CPU's side of stages/common/hopper.cuh, and of wgmma(): the same functions, done by the run-time
// library. What each of them means is said there, and in wgmma.cuh.
#pragma once
#include "ptx.h"
#include "tensor_map.h"

namespace sim {
struct WgmmaShape {
  MatrixType type;
  int n;                       // columns of B and D
  bool A_mn_major, B_mn_major, accumulate;
};

extern "C" {
void sim_mbarrier_init(uint64_t* barrier, int arrivals, const char* file, int line);
void sim_mbarrier_arrive(const char* name, uint64_t* barrier, int bytes, const char* file, int line);
bool sim_mbarrier_test(uint64_t* barrier, int parity, const char* file, int line);
void sim_mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line);
void sim_fence_mbarrier_init();
void sim_fence_proxy_async();

void sim_tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, const int* corner, const char* file,
                  int line);
void sim_bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, const char* file, int line);
void sim_tma_store(const CUtensorMap* map, const void* from, const int* corner, const char* file, int line);
void sim_bulk_store(void* to, const void* from, int bytes, const char* file, int line);
void sim_bulk_add(float* to, const void* from, int bytes, const char* file, int line);
void sim_bulk_commit();
void sim_bulk_wait(int groups_left, bool read_only);
void sim_prefetch_map(const CUtensorMap* map, const char* file, int line);

void sim_wgmma(const WgmmaShape* shape, float* D, const uint32_t* A_registers, uint64_t A, uint64_t B,
               const char* file, int line);
void sim_wgmma_fence(const char* file, int line);
void sim_wgmma_commit(const char* file, int line);
void sim_wgmma_wait(int groups_left, const char* file, int line);

void sim_set_registers(const char* name, int registers, bool more, const char* file, int line);
void sim_named_barrier(const char* name, int id, int threads, bool waits, const char* file, int line);
}
}  // namespace sim

// -------------------------------------------------------------------------------- mbarriers
SIM_ALWAYS_INLINE void mbarrier_init(uint64_t* barrier, int arrivals, SIM_SITE) {
  sim::sim_mbarrier_init(barrier, arrivals, file, line);
}
inline void fence_mbarrier_init() { sim::sim_fence_mbarrier_init(); }
SIM_ALWAYS_INLINE void mbarrier_arrive(uint64_t* barrier, SIM_SITE) {
  sim::sim_mbarrier_arrive("mbarrier_arrive()", barrier, 0, file, line);
}
SIM_ALWAYS_INLINE void mbarrier_arrive_expect(uint64_t* barrier, int bytes, SIM_SITE) {
  sim::sim_mbarrier_arrive("mbarrier_arrive_expect()", barrier, bytes, file, line);
}
SIM_ALWAYS_INLINE bool mbarrier_test(uint64_t* barrier, int parity, SIM_SITE) {
  return sim::sim_mbarrier_test(barrier, parity, file, line);
}
SIM_ALWAYS_INLINE void mbarrier_wait(uint64_t* barrier, int parity, SIM_SITE) {
  sim::sim_mbarrier_wait(barrier, parity, file, line);
}

// -------------------------------------------------------------------------------- copies
SIM_ALWAYS_INLINE void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int col, int row,
                                int head, int batch, SIM_SITE) {
  const int corner[] = {col, row, head, batch};
  sim::sim_tma_load(to, &map, barrier, corner, file, line);
}
SIM_ALWAYS_INLINE void tma_load_once(void* to, const CUtensorMap& map, uint64_t* barrier, int col, int row,
                                     int head, int batch, SIM_SITE) {
  tma_load(to, map, barrier, col, row, head, batch, file, line);
}
SIM_ALWAYS_INLINE void bulk_load(void* to, const void* from, int bytes, uint64_t* barrier, SIM_SITE) {
  sim::sim_bulk_load(to, from, bytes, barrier, file, line);
}
SIM_ALWAYS_INLINE void tma_store(const CUtensorMap& map, const void* from, int col, int row, int head,
                                 int batch, SIM_SITE) {
  const int corner[] = {col, row, head, batch};
  sim::sim_tma_store(&map, from, corner, file, line);
}
SIM_ALWAYS_INLINE void bulk_store(void* to, const void* from, int bytes, SIM_SITE) {
  sim::sim_bulk_store(to, from, bytes, file, line);
}
SIM_ALWAYS_INLINE void bulk_add(float* to, const void* from, int bytes, SIM_SITE) {
  sim::sim_bulk_add(to, from, bytes, file, line);
}
inline void bulk_commit() { sim::sim_bulk_commit(); }
template <int groups_left> inline void bulk_wait() { sim::sim_bulk_wait(groups_left, false); }
template <int groups_left> inline void bulk_wait_read() { sim::sim_bulk_wait(groups_left, true); }
inline void prefetch_map(const CUtensorMap& map, SIM_SITE) { sim::sim_prefetch_map(&map, file, line); }
inline void fence_proxy_async() { sim::sim_fence_proxy_async(); }
inline void fence_proxy_async_global() {}      // nothing to do: a copy's global memory is that of the threads

// -------------------------------------------------------------------------------- products
#ifdef ELEMENT
template <bool A_mn_major = false, bool B_mn_major = false, int n_tiles>
SIM_ALWAYS_INLINE void wgmma(float (&D)[n_tiles][4], uint64_t A, uint64_t B, bool accumulate = true,
                             SIM_SITE) {
  static_assert(n_tiles <= 32, "a wgmma has at most 256 columns");
  const sim::WgmmaShape shape{sim::MatrixTypeOf<ELEMENT>::type, 8 * n_tiles, A_mn_major, B_mn_major,
                              accumulate};
  sim::sim_wgmma(&shape, &D[0][0], nullptr, A, B, file, line);
}
template <bool B_mn_major = false, class T = ELEMENT, int n_tiles>
SIM_ALWAYS_INLINE void wgmma(float (&D)[n_tiles][4], const uint32_t (&A)[4], uint64_t B,
                             bool accumulate = true, SIM_SITE) {
  static_assert(n_tiles <= 32, "a wgmma has at most 256 columns");
  const sim::WgmmaShape shape{sim::MatrixTypeOf<T>::type, 8 * n_tiles, false, B_mn_major, accumulate};
  sim::sim_wgmma(&shape, &D[0][0], A, 0, B, file, line);
}
#endif
inline void wgmma_fence(SIM_SITE) { sim::sim_wgmma_fence(file, line); }
inline void wgmma_commit(SIM_SITE) { sim::sim_wgmma_commit(file, line); }
template <int groups_left> inline void wgmma_wait(SIM_SITE) { sim::sim_wgmma_wait(groups_left, file, line); }

// -------------------------------------------------------------------------------- warpgroups
template <int registers> inline void setmaxnreg_inc(SIM_SITE) {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256,
                "setmaxnreg takes a multiple of 8, from 24 to 256");
  sim::sim_set_registers("setmaxnreg_inc()", registers, true, file, line);
}
template <int registers> inline void setmaxnreg_dec(SIM_SITE) {
  static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256,
                "setmaxnreg takes a multiple of 8, from 24 to 256");
  sim::sim_set_registers("setmaxnreg_dec()", registers, false, file, line);
}
inline void named_barrier_sync(int id, int threads, SIM_SITE) {
  sim::sim_named_barrier("named_barrier_sync()", id, threads, true, file, line);
}
inline void named_barrier_arrive(int id, int threads, SIM_SITE) {
  sim::sim_named_barrier("named_barrier_arrive()", id, threads, false, file, line);
}
