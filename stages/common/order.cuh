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

// How many heads to take together of `heads`: as many whose K and V, of `row_bytes` a key each, fit in 20 MB,
// but `least` at least, so that there are enough tiles to be shared out; and a multiple of those that share K
// and V. (L2 has 50 MB on an H100 and an H200, in two halves.) A few more if the last ones would be fewer.
__host__ __device__ inline int heads_in_L2(int heads, int N_k, int row_bytes, int group, int least = 16) {
  const int most = max(least, max(1, int(20000000 / (2 * (int64_t)N_k * row_bytes))) * group);
  return ceil_div(heads, max(1, heads / most));
}

// Work that a producer hands over to consumers, with the head in its batch element: they divide nothing.
// tile is -1 if none is left. Introduced by: forward stage 29, hopper_tuned.
struct alignas(16) Handed : Work { int b, h; };

__device__ __forceinline__ int of_lane_0(int x) { return __shfl_sync(0xffffffff, x, 0); }
