// Nothing in vain: tickets, and rows behind the last one. Introduced by: forward stage 37, own_rows.
#pragma once
#include "own_range.cuh"
#include "tile_order.cuh"

// The last tile of Q may end before a warpgroup's rows. (If it may with tiles of 128 rows, with other masks,
// or with what short_tiles_last leaves out, ptxas serialises the products: C7511.)
constexpr bool rows_may_end = short_tiles_last && BLOCK_R > 128;

// By the producer, which has asked for its n-th tile of Q: the number of the next one, of `all`
__device__ __forceinline__ int draw_ticket(int n, int all, void* asked_for) {
  if (n == 0) wait_for_previous_kernel();   // clear_kernel
  return all > gridDim.x ? gridDim.x + atomicAdd(static_cast<int*>(asked_for), 1) : all;
}

// What the producer hands over, the same in all lanes
__device__ __forceinline__ Handed of_lane_0(const Handed& handed) {
  const Handed work = threadIdx.x % 32 == 0 ? handed : Handed{};
  return {{of_lane_0(work.tile), of_lane_0(work.bh)}, of_lane_0(work.b), of_lane_0(work.h)};
}

// A warpgroup without a row in last tiles passes by this one, if it is one, and those that follow: n-th, from
// `step` on. Returns the next one that has rows for it, or what says that there is none.
template <class Wait, class Whose, class Queries, class Keys, class Values>
__device__ __forceinline__ Handed pass_last_tiles(Handed work, unsigned& n, unsigned& step,
                                                  const FwdParams& p, const Wait& wait_for_Q,
                                                  const Whose& turns, const Queries& Q_smem,
                                                  const Keys& K_smem, const Values& V_smem) {
  for (; work.tile == 0; work = wait_for_Q(++n)) {
    const int i = ceil_div(p.N_q, BLOCK_R) - 1;
    const unsigned end = step + max(Mask(p, work.b, work.h).key_tiles(i).end, 1);
    pass_by(turns, K_smem, V_smem, step, end);
    step = end;
    Q_smem.release(n);
  }
  return work;
}
