// Equal tiles of Q, shared out evenly. Introduced by: forward stage 32, stream_k.
#pragma once
#include "epilogue.cuh"
#include "order.cuh"
#include "tile16.cuh"

// Do all tiles take as many steps, Tc? Then a block knows its share. Else it asks for tile after tile.
constexpr bool evenly = Mask::all_keys;

struct Steps { int first, end; };                // some of a tile's
struct Part : Handed, Steps {};

// The n-th that this block has to do: steps of the tile of this number, in the order of all; `all` if
// nothing is left. In that order the first tiles, whole rounds, stay whole. What is left, a round or more,
// is `rest` tiles, whose steps are divided among the blocks. n = 0: this block's last steps of a tile; then
// its whole tiles, one of each round; then what else it has of the rest. Of three blocks and rest = 4:
//
//   tile      |      0      |      1      |      2      |      3      |
//   block     |        2         |        1         |        0        |
//
// No range is shorter than a tile. So a tile has two blocks at most. The one that has its last steps does
// them first of all, and leaves O and L. The one that has its first steps does them last of all, and starts
// from those. The block that it waits for runs: a launch has no more blocks than multiprocessors. (Where
// other work has some of these it need not. Then the wait ends if blocks start in the order of their
// numbers, which CUDA does not promise: the block has a lower one.)
__device__ __forceinline__ Steps share_of(int n, int all, int Tc, int& number) {
  const int blocks = gridDim.x, rounds = all / blocks - 1, rest = all - rounds * blocks;
  const bool whole = n > 0 && n <= rounds;
  const int from = (blocks - 1 - blockIdx.x) * rest;                     // in 1 / blocks of a tile
  const int tile = from / blocks + max(n - rounds, 0), start = whole ? from : tile * blocks;
  const Steps steps = {max(from - start, 0) * Tc / blocks, min(from + rest - start, blocks) * Tc / blocks};
  number = whole ? (n - 1) * blocks + blockIdx.x : steps.first < steps.end ? rounds * blocks + tile : all;
  return steps;
}

// What the producer hands over, the same in all lanes
__device__ __forceinline__ Part of_lane_0(const Part& handed) {
  const Part x = threadIdx.x % 32 == 0 ? handed : Part{};
  const Steps steps = {evenly ? of_lane_0(x.first) : 0, evenly ? of_lane_0(x.end) : 0};
  return {{{of_lane_0(x.tile), of_lane_0(x.bh)}, of_lane_0(x.b), of_lane_0(x.h)}, steps};
}

template <class Tiles>
__device__ __forceinline__ auto part_of(const Tiles& all, const Steps& steps) {
  if constexpr (!evenly) return all;
  else return PartOfTiles<Tiles>{all, steps.first, all.cut - steps.first, steps.end - steps.first};
}

// What this thread leaves, or its like in another block has left: a flag, then, each 2 Br floats further, its
// elements of O. (L is where it belongs.)
constexpr int floats_left = 2 * BLOCK_R * (1 + width / 2);               // of a block
__device__ __forceinline__ float* left_by(int block, void* workspace) {
  wait_for_previous_kernel();               // clear_kernel
  return static_cast<float*>(workspace) + block * floats_left + threadIdx.x;
}

template <int n_tiles>
__device__ __forceinline__ void leave(float (&O)[n_tiles][4], void* workspace) {
  float* left = left_by(blockIdx.x, workspace);
  for_each(O, [&](float& x, int, int) { *(left += 2 * BLOCK_R) = x; });
  __syncwarp();                             // one lane of four has stored L
  __threadfence();
  atomicExch(left_by(blockIdx.x, workspace), 1.f);
}

// m and l of this lane's two rows before the first step: of no key; of the sink alone; or of the steps that
// have been left. Their L is a logit, as a sink is. Returns whether there are any.
__device__ __forceinline__ bool start(float (&m)[2], float (&l)[2], const FwdParams& p, const Part& work,
                                      int warp_row) {
  const bool some_are_left = evenly && work.end < ceil_div(p.N_k, BLOCK_C);
  while (some_are_left && atomicAdd(left_by(blockIdx.x - 1, p.workspace), 0.f) == 0.f) {}
  if (some_are_left) __threadfence();
  for (int r = 0, row = warp_row + threadIdx.x % 32 / 4; r < 2; r++, row += 8) {
    m[r] = LOG2_E * (some_are_left && row < p.N_q ? p.L[(int64_t)work.bh * p.N_q + row]
                                                  : SINK ? p.sink[work.h] : -INFINITY);
    l[r] = (some_are_left || SINK) && threadIdx.x % 4 == 0;
  }
  if (some_are_left) __syncwarp();          // before one lane of four stores L anew
  return some_are_left;
}

// And O after that step, without it: times alpha. (dropout_scale() comes again, in the end.)
template <int n_tiles>
__device__ __forceinline__ void take_up(float (&O)[n_tiles][4], const float (&alpha)[2], const FwdParams& p) {
  const float keep = DROPOUT ? 1.f - p.dropout : 1.f, factor[] = {keep * alpha[0], keep * alpha[1]};
  const float* left = left_by(blockIdx.x - 1, p.workspace);
  for_each(O, [&](float& x, int, int) { x = *(left += 2 * BLOCK_R); });
  rescale(O, factor);
}
