// Marks of a backward stage (timeline.cuh): what it does with elements of accumulators, products by mma.sync
// and dQ = dS K, meetings of warpgroups, and copies that add to HBM.
#pragma once
#include "clear_unseen.cuh"
#include "cluster.cuh"
#include "gradients.cuh"
#include "pairs.cuh"
#include "product.cuh"
#include "ring_beside.cuh"
#include "ring_parts.cuh"
#include "ring_rows.cuh"
#include "seed.cuh"
#include "store_halves.cuh"
#include "store_parts.cuh"
#include "store_staged.cuh"
#include "strips.cuh"
#include "warpgroup_products.cuh"
#include "timeline.cuh"
// After it, as waits and arrivals in there leave marks, too
#include "hand_over.cuh"

namespace timeline {

// A tile that comes with a number for each row: found by the type of its ring
template <int buffers, int... shape>
__device__ __forceinline__ void fill(const Ring<buffers, shape...>& ring, const CUtensorMap& map,
                                     unsigned step, int row, int head, int batch, float* floats,
                                     const float* from, int line = __builtin_LINE()) {
  constexpr int rows[] = {shape...};        // the first one
  mark(EMPTY, BEGIN, line, step % most_steps | buffers * most_steps);
  const typename Ring<buffers, shape...>::Unmarked& unmarked = ring;
  ::fill(unmarked, map, step, row, head, batch, floats, from);
  mark(COPY, POINT, line, (ring.bytes + sizeof(float) * rows[0]) / 16);
}

// Or with something else
template <int buffers, int... shape>
__device__ __forceinline__ void fill(const Ring<buffers, shape...>& ring, const CUtensorMap& map,
                                     unsigned step, int row, int head, int batch, const Beside& beside,
                                     int line = __builtin_LINE()) {
  mark(EMPTY, BEGIN, line, step % most_steps | buffers * most_steps);
  const typename Ring<buffers, shape...>::Unmarked& unmarked = ring;
  ::fill(unmarked, map, step, row, head, batch, beside);
  mark(COPY, POINT, line, (ring.bytes + beside.bytes) / 16);
}

template <int buffers, int... shape>
struct PartRing : MarkedRing<::PartRing<buffers, shape...>, buffers> {
  using MarkedRing<::PartRing<buffers, shape...>, buffers>::MarkedRing;
};

// -------------------------------------------------------------------------------- elements
// What the stage does with them is in its text, which marks.py reads: P, dS, the way to memory. The amount is
// columns: of 16 rows a lane has 2 bytes of registers a column, or 1 if they are rounded.
template <class Accumulator, class F>
__device__ __forceinline__ void for_each(Accumulator& acc, F f, int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::for_each(acc, f);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

template <class Accumulator, class F>
__device__ __forceinline__ void for_each_two(Accumulator& acc, F f, int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::for_each_two(acc, f);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

template <class Accumulator, class F>
__device__ __forceinline__ void for_each_pair(const Accumulator& acc, F f, int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::for_each_pair(acc, f);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

template <class X, class Accumulator, class F>
__device__ __forceinline__ void for_both(X& x, Accumulator& acc, F f, int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::for_both(x, acc, f);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

template <class Fragments, class Accumulator, class F>
__device__ __forceinline__ void round_to_A(Fragments& A, const Accumulator& acc, F f,
                                           int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(A));
  ::round_to_A(A, acc, f);
  mark(ELEMENTS, END, line, sizeof(A));
}

template <class Fragments>
__device__ __forceinline__ void store_fragments(ELEMENT* tile, const Fragments& A, int tile_rows, int row,
                                                int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(A));
  ::store_fragments(tile, A, tile_rows, row);
  mark(ELEMENTS, END, line, sizeof(A));
}

template <int n_tiles>
__device__ __forceinline__ void seed(float (&acc)[n_tiles][4], const float* row,
                                     int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::seed(acc, row);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

// In a tile that the mask does not cut there is nothing to mark.
template <class Accumulator, class Tiles>
__device__ __forceinline__ void clear_unseen(Accumulator& acc, const Mask& mask, const Tiles& tiles, int t,
                                             int j, int first_row, int first_key, uint64_t seen,
                                             int line = __builtin_LINE()) {
  const bool cut = mask.cuts(tiles, t, j);
  if (cut) mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::clear_unseen(acc, mask, tiles, t, j, first_row, first_key, seen);
  if (cut) mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

// By instructions that add four numbers, or one
template <class Accumulator>
__device__ __forceinline__ void add_fragments(float* dQ, const Accumulator& acc, int row, int col, int step,
                                              int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(acc) / 2);
  ::add_fragments(dQ, acc, row, col, step);
  mark(ELEMENTS, END, line, sizeof(acc) / 2);
}

// Of floats
template <int n_tiles>
__device__ __forceinline__ void store_part(float* part, const float (&acc)[n_tiles][4], int first_row,
                                           int rows, int first_col, int from_col, int end_col,
                                           int line = __builtin_LINE()) {
  mark(STORE, BEGIN, line, 16 * n_tiles);
  ::store_part(part, acc, first_row, rows, first_col, from_col, end_col);
  mark(STORE, END, line, 16 * n_tiles);
}

template <class Accumulator>
__device__ __forceinline__ void store_parts(const BwdParams& p, float* dKV_parts, int bh, int block_heads,
                                            const Accumulator& dK, const Accumulator& dV, int first_row,
                                            int first_col, int from_col, int line = __builtin_LINE()) {
  mark(STORE, BEGIN, line, 2 * sizeof(dK));
  ::store_parts(p, dKV_parts, bh, block_heads, dK, dV, first_row, first_col, from_col);
  mark(STORE, END, line, 2 * sizeof(dK));
}

template <int room, int n_tiles>
__device__ __forceinline__ void store_staged(const CUtensorMap& map, ELEMENT* staging,
                                             float (&acc)[n_tiles][4], float scale, int row,
                                             const Handed& work, int first_col, int from_col,
                                             int line = __builtin_LINE()) {
  mark(STORE, BEGIN, line, 8 * n_tiles);
  ::store_staged<room>(map, staging, acc, scale, row, work, first_col, from_col);
  mark(STORE, END, line, 8 * n_tiles);
}

template <class Fragments>
__device__ __forceinline__ void hand_over(uint4* to, const Fragments& A, int line = __builtin_LINE()) {
  mark(ELEMENTS, BEGIN, line, sizeof(A));
  ::hand_over(to, A);
  mark(ELEMENTS, END, line, sizeof(A));
}

template <class Accumulator, class... Where>
__device__ __forceinline__ void store_halves(const CUtensorMap& map, ELEMENT* tile, Accumulator& first,
                                             Accumulator& second, Step second_col, Where... where) {
  mark(ELEMENTS, BEGIN, second_col.line, sizeof(first));
  ::store_halves(map, tile, first, second, second_col.step, where...);
  mark(ELEMENTS, END, second_col.line, sizeof(first));
}

// -------------------------------------------------------------------------------- products
// By mma.sync: the warp goes on when they are done. The amount is that of four warps.
template <int unrolled = 4, int strips, int n_tiles, class A_type>
__device__ __forceinline__ void multiply(float (&acc)[strips][n_tiles][4], int depth, const A_type& A,
                                         const Operand& B, int first_col = 0, int line = __builtin_LINE()) {
  mark(PRODUCT, POINT, line, strips * n_tiles * depth / 32);
  ::multiply<unrolled>(acc, depth, A, B, first_col);
  mark(FINISH, END, line);
}

template <int k_steps, int n_tiles>
__device__ __forceinline__ void wgmma_dQ(float (&dQ)[n_tiles][4], uint32_t dST, uint32_t K,
                                         int line = __builtin_LINE()) {
  mark(PRODUCT, POINT, line, k_steps * n_tiles / 2);
  ::wgmma_dQ<k_steps>(dQ, dST, K);
  set_in_flight(true);
}

template <int n_tiles, int k_steps>
__device__ __forceinline__ void wgmma_dQ_registers(float (&dQ)[n_tiles][4], const uint32_t (&dS)[k_steps][4],
                                                   uint32_t K, bool accumulate = false,
                                                   int line = __builtin_LINE()) {
  mark(PRODUCT, POINT, line, k_steps * n_tiles / 2);
  ::wgmma_dQ_registers(dQ, dS, K, accumulate);
  set_in_flight(true);
}

// -------------------------------------------------------------------------------- warpgroups, copies
// The other block does what this one does at the same time: so its arrivals are not marked.
__device__ __forceinline__ void mbarrier_wait_for_blocks(uint64_t* barrier, int parity,
                                                         int line = __builtin_LINE()) {
  mark(MBARRIER, BEGIN, line, place(barrier) | parity << 15);
  ::mbarrier_wait_for_blocks(barrier, parity);
  mark(MBARRIER, END, line);
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads, int line = __builtin_LINE()) {
  mark(MEETING, BEGIN, line, id);
  ::named_barrier_sync(id, threads);
  mark(MEETING, END, line, id);
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads, int line = __builtin_LINE()) {
  mark(MEETING, POINT, line, id);
  ::named_barrier_arrive(id, threads);
}

// These stand in a function that the stage calls (bulk_sums.cuh), whose lines are not the stage's: so line 0.
__device__ __forceinline__ void bulk_add(float* to, const void* from, int bytes) {
  ::bulk_add(to, from, bytes);
  mark(BULK_ADD, POINT, 0, bytes / 16);
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  ::bulk_store(to, from, bytes);
  mark(BULK_ADD, POINT, 0, bytes / 16);
}

template <int groups_left> __device__ __forceinline__ void bulk_wait_read() {
  mark(BULK_WAIT, BEGIN, 0, groups_left);
  ::bulk_wait_read<groups_left>();
  mark(BULK_WAIT, END, 0, groups_left);
}

template <int groups_left> __device__ __forceinline__ void bulk_wait() {
  mark(BULK_WAIT, BEGIN, 0, groups_left);
  ::bulk_wait<groups_left>();
  mark(BULK_WAIT, END, 0, groups_left);
}

}  // namespace timeline

#define PartRing timeline::PartRing
#define for_each timeline::for_each
#define for_each_two timeline::for_each_two
#define for_each_pair timeline::for_each_pair
#define for_both timeline::for_both
#define round_to_A timeline::round_to_A
#define store_fragments timeline::store_fragments
#define seed timeline::seed
#define clear_unseen timeline::clear_unseen
#define store_part timeline::store_part
#define store_parts timeline::store_parts
#define store_staged timeline::store_staged
#define multiply timeline::multiply
#define wgmma_dQ timeline::wgmma_dQ
#define wgmma_dQ_registers timeline::wgmma_dQ_registers
#define mbarrier_wait_for_blocks timeline::mbarrier_wait_for_blocks
#define add_fragments timeline::add_fragments
#define hand_over timeline::hand_over
#define store_halves timeline::store_halves
#define named_barrier_sync timeline::named_barrier_sync
#define named_barrier_arrive timeline::named_barrier_arrive
#define bulk_add timeline::bulk_add
#define bulk_store timeline::bulk_store
#define bulk_wait_read timeline::bulk_wait_read
#define bulk_wait timeline::bulk_wait
