// The order of blocks. Introduced by: forward stage 9, fp32_tuned.
#pragma once

struct Work { int tile, bh; };    // of a block: a tile, and the head that it belongs to, of B * H

// A GPU starts blocks in the order of blockIdx.x, as multiprocessors become free. Here `heads_together` heads
// are next to each other in time, first all of their tiles 0, then all of their tiles 1, and so on; then come
// the next heads. With 1 that is head by head. With more,
// - tiles that take longest can be started first, if the caller counts them as tile 0: short ones fill the
//   gaps at the end;
// - and L2 holds K and V of few heads at a time, while all of their tiles of Q pass by.
// The grid has one dimension, tiles * heads blocks: the other two end at 65535. (A block that takes several
// tiles asks for the n-th of them all.)
__device__ __forceinline__ Work dispatch_order(int tiles, int heads, int heads_together,
                                               int n = blockIdx.x) {
  const int first = n / (tiles * heads_together) * heads_together;              // of these heads
  const int together = min(heads_together, heads - first);                      // the last ones may be fewer
  const int block = n - first * tiles;
  return {block / together, first + block % together};
}

// How many heads' K and V, of `row_bytes` a key each, fit in 20 MB: at least those that share one. (L2 has 50
// MB on an H100 and an H200, in two halves.)
__device__ __forceinline__ int heads_in_L2(int N_k, int row_bytes, int group) {
  return max(1, int(20000000 / (2 * (int64_t)N_k * row_bytes))) * group;
}
