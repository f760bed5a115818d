// The order of tiles that a causal mask makes unequal, for late tickets. Introduced by: forward stage 39,
// late_ticket.
#pragma once
#include "hopper.cuh"
#include "tile_order.cuh"

// As Order, but the short tiles, too, come of some heads at a time: of the first half, then of the others.
// So L2 can hold what they read. With 192 rows a head has few tiles, and a third of them are short ones.
template <bool short_last, int Br>
struct LateOrder : Order<short_last> {
  using Order<short_last>::heads_together, Order<short_last>::longer, Order<short_last>::first;
  using Order<short_last>::all_heads;
  int half;                // of the heads

  LateOrder(bool all_keys, int heads, int tiles, int N_k, int row_bytes, int group)
      : Order<short_last>(all_keys, heads, tiles, N_k, row_bytes, group), half(ceil_div(heads, 2)) {
    longer = tiles - tiles / (Br > 128 ? 3 : 4), first = longer * heads;
  }

  __device__ __forceinline__ Work nth(int tiles, int heads, int n) const {
    if (!short_last) return dispatch_order(tiles, all_heads, heads_together, n);
    const bool is_short = n >= first;
    const Work work = dispatch_order(is_short ? tiles - longer : longer, all_heads,
                                     is_short ? half : heads_together, is_short ? n - first : n);
    return {work.tile + (is_short ? longer : 0), work.bh};
  }
};

// By a warp: Q's n-th buffer is free again; if O has left through it, when the copy engine has read that.
template <bool O_apart, class Queries>
__device__ __forceinline__ void release_stored(const Queries& Q_smem, unsigned n) {
  if (!O_apart && threadIdx.x % 32 == 0) bulk_wait_read<0>();
  Q_smem.release(n);
}
