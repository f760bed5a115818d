// The order of tiles that a causal mask makes unequal, for late tickets. Introduced by: forward stage 39,
// late_ticket.
#pragma once
#include "own_rows.cuh"

// As Order, but the short tiles, too, come of some heads at a time: of the first half, then of the others.
// So L2 can hold what they read. With 192 rows a head has few tiles, and a third of them are short ones.
struct LateOrder : Order<short_tiles_last> {
  int half;                // of the heads

  LateOrder(bool all_keys, int heads, int tiles, int N_k, int row_bytes, int group)
      : Order(all_keys, heads, tiles, N_k, row_bytes, group), half(ceil_div(heads, 2)) {
    longer = tiles - tiles / (BLOCK_R > 128 ? 3 : 4), first = longer * heads;
  }

  __device__ __forceinline__ Work nth(int tiles, int heads, int n) const {
    if (!short_tiles_last) return dispatch_order(tiles, all_heads, heads_together, n);
    const bool is_short = n >= first;
    const Work work = dispatch_order(is_short ? tiles - longer : longer, all_heads,
                                     is_short ? half : heads_together, is_short ? n - first : n);
    return {work.tile + (is_short ? longer : 0), work.bh};
  }
};
