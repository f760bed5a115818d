// dQ in a fixed order, without zeros before and a kernel after. Introduced by: backward stage 38,
// first_stores.
//
// In a fixed order it is known which sum of dQ_i comes first: it is stored, and nothing has to be there
// before (in_order.cuh). And a semaphore that has counted all of them says that dQ_i can be converted, as
// counters do in idle_warps.cuh.
//
// Every wait ends: those for turns, as blocks draw their items in order (in_order.cuh); and nobody waits for
// what has been converted.
#pragma once
#include "idle_warps.cuh"
#include "in_order.cuh"

// A ticket is a quarter to convert. By an idle warp, and by consumers in the end. What nobody adds to is 0.
__device__ __forceinline__ void convert_complete(const BwdParams& p, const Workspace& w, const Items& items) {
  const int all = 4 * p.B * p.H * ceil_div(p.N_q, BLOCK_R);
  #pragma unroll 1
  for (;;) {
    int n = 0;
    if (threadIdx.x % 32 == 0) n = next_item(w.ticket + 1);
    n = of_lane_0(n);
    if (n >= all) return;
    const Quarter q(p, 2 * items.heads_together * items.block_heads, n);
    const int complete = q.sums_of_tile(p);
    if (complete == 0) q.clear(w);
    q.convert(p, w, complete);
  }
}

// What three warps beside the producer do
template <int buffers, class K_ring>
__device__ __forceinline__ void add_and_convert(const StagedSums<buffers>& sums, const BwdParams& p,
                                                const Workspace& w, const Items& items, const K_ring& K_smem,
                                                const Handed* handed) {
  if (warp_index() % 4 == 3) return convert_complete(p, w, items);
  add_in_order<true>(sums, counters_of(w), p, items, K_smem, handed);
}
