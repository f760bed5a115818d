// Steps of units, shared out evenly among clusters of two blocks. Introduced by: backward stage 42,
// exchanged_stream_k.
#pragma once
#include "cluster.cuh"
#include "reduce_heads.cuh"
#include "units.cuh"

// All units (units.cuh) lie one after the other, and each cluster has as many steps of them in a row. K and V
// have to come before a unit's first one: that counts as so many steps.
constexpr int steps_of_K = 2;

// Of a unit; 0 past the last one
__device__ __forceinline__ int steps_of(const BwdParams& p, int unit) {
  int steps = steps_of_K;
  for_each_head(p, min(unit, units_of(p) - 1), [&](const Mask&, const auto& tiles, int) {
    steps += max(tiles.end - tiles.first, 0);
  });
  return unit < units_of(p) ? steps : 0;
}

// Which steps a cluster has, and how far it is
struct Share {
  int unit, before, left;    // the unit at hand; its steps that are another cluster's; those left to this one
  bool some, starts, ends;   // has this cluster any of its steps? the first? once they are taken, the last?

  // By a whole warp. Each lane counts the steps of as many units: all lanes make a mask at once.
  __device__ explicit Share(const BwdParams& p) {
    const int each = ceil_div(units_of(p), 32), lane = threadIdx.x % 32, first = lane * each;
    int steps = 0, so_far;                  // so_far: with those of the lanes before
    for (int n = 0; n < each; n++) steps += steps_of(p, first + n);
    so_far = steps;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int others = __shfl_up_sync(0xffffffff, so_far, distance);
      so_far += lane >= distance ? others : 0;
    }
    const int all = __shfl_sync(0xffffffff, so_far, 31), share = ceil_div(all, gridDim.x / 2);
    const int from = blockIdx.x / 2 * share;                 // this cluster's first step. Its unit finds the
    const int finder = __popc(__ballot_sync(0xffffffff, so_far <= from)) % 32;   // lane that has counted it.
    unit = first, before = from - (so_far - steps), left = max(min(share, all - from), 0);
    for (int n = 0; n < each; n++) {
      const int its = steps_of(p, first + n);
      if (unit == first + n && before >= its) unit++, before -= its;
    }
    // By of_lane_0() the compiler knows that loops are the same in all lanes. Without it, with dropout at
    // d=256, a thread spills 390 bytes, not 120: 106 us, not 88 (H200; B=2 H=8 H_kv=1 N=1024, causal).
    unit = of_lane_0(__shfl_sync(0xffffffff, unit, finder));
    before = of_lane_0(__shfl_sync(0xffffffff, before, finder));
    left = of_lane_0(left);
    begin();
  }

  __device__ __forceinline__ void next() {
    unit++, before = 0;
    begin();
  }

 private:
  // A unit that it has no more of than some of the steps for K and V is the next cluster's.
  __device__ __forceinline__ void begin() {
    const int for_K = max(steps_of_K - before, 0);
    some = left > 0 && left >= for_K, starts = for_K > 0, ends = true;
    before = max(before - steps_of_K, 0), left -= for_K;
  }
};

// step(mask, tiles, t, bh) for each of the unit's steps that this cluster has; n counts them
template <class Step>
__device__ __forceinline__ void for_each_step(const BwdParams& p, Share& share, int& n, Step step) {
  for_each_head(p, share.unit, [&](const Mask& mask, const auto& tiles, int bh) {
    const int steps = max(tiles.end - tiles.first, 0), skipped = min(share.before, steps);
    const int first = tiles.first + skipped, end = first + min(steps - skipped, share.left);
    share.before -= skipped, share.left -= end - first, share.ends &= end == tiles.first + steps;
    for (int t = first; t < end; t++, n++) step(mask, tiles, t, bh);
  });
}

// dK and dV of a unit are the sums of its parts: each cluster that has steps of it leaves one of each. A part
// begins with each next unit and with each next cluster: so both numbers' sum is its own.
__device__ __forceinline__ float* part_of(const Share& share, const Parts& parts, int is_dV) {
  const int part = share.unit + blockIdx.x / 2;
  const bool notes = cluster_rank() == 0 && threadIdx.x == 0;
  if (notes && share.starts) parts.of_tile[share.unit].x = part;
  if (notes && share.ends) parts.of_tile[share.unit].y = part;
  return parts.parts + (is_dV * parts.all + part) * int64_t(BLOCK_C * HEAD_DIM);
}
