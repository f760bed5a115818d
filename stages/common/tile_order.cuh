// The order of tiles that a causal mask makes unequal. Introduced by: forward stage 31, multicast_tuned.
#pragma once
#include "order.cuh"

// The last quarter of each head's tiles, the short ones, come when all others are taken, of all heads. So few
// heads together are enough: else the last few alone would be no work for all multiprocessors, from their
// longest tiles on. The CPU works out what it can, as a producer has few registers; for the same reason
// nth() takes all_heads, which comes with the launch, not `heads`. Without short_last it is dispatch_order().
template <bool short_last>
struct Order {
  int heads_together, longer, first, all_heads;  // longer: tiles of a head that come first, `first` in all

  Order(bool all_keys, int heads, int tiles, int N_k, int row_bytes, int group)
      : heads_together(all_keys ? 1 : heads_in_L2(heads, N_k, row_bytes, group, short_last ? 4 : 16)),
        longer(tiles - tiles / 4), first(longer * heads), all_heads(heads) {}

  __device__ __forceinline__ Work nth(int tiles, int heads, int n) const {
    if (!short_last) return dispatch_order(tiles, heads, heads_together, n);
    if (n < first) return dispatch_order(longer, all_heads, heads_together, n);
    return {longer + (n - first) / all_heads, (n - first) % all_heads};  // not `heads`: C7511
  }
};

// (Not with a sink, dropout or a negative scale: then ptxas has too few registers, and serialises: C7511.)
constexpr bool short_tiles_last = CAUSAL && !SINK && !DROPOUT && !NEGATIVE_SCALE;
