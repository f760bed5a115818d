// The tiles of keys that a warpgroup needs. Introduced by: forward stage 35, own_ranges.
#pragma once
#include "mask.cuh"

// Of a mask with two sides, in the order of keys, not whole ones first: so what some of the rows need none of
// stands at the ends. S_ij is whole from t = whole to t = cut - 1.
struct TilesInOrder {
  int whole, cut, end, first_j;
  __device__ int operator[](int t) const { return first_j + t; }
};

template <class Tiles>
__device__ __forceinline__ Tiles in_order(const Tiles& tiles) { return tiles; }
__device__ __forceinline__ TilesInOrder in_order(const WholeFirst& tiles) {
  const int whole = tiles.whole_j - tiles.first_j;
  return {whole, whole + tiles.cut, tiles.end, tiles.first_j};
}

template <class Tiles>
__device__ __forceinline__ bool is_cut(const Tiles& tiles, int t) { return t >= tiles.cut; }
__device__ __forceinline__ bool is_cut(const TilesInOrder& tiles, int t) {
  return t < tiles.whole || t >= tiles.cut;
}

// Of the first `end` tiles that a block needs, those that a warpgroup needs, whose 64 rows begin at `row`:
// one at least. Of the last one perhaps no more than the first `some` columns.
struct OwnRange {
  int first, end;
  bool some_are_enough;
};
template <int some, bool several, class Tiles>
__device__ __forceinline__ OwnRange own_range(const Mask& mask, const Tiles& tiles, int end, int row) {
  const auto needed = mask.needed<some, several>(tiles, end, row + 63);
  return {0, needed.tiles, needed.some_are_enough};
}
// (With a window the last one is never halved: ptxas would have too few registers, and serialise: C7511.)
template <int some, bool several>
__device__ __forceinline__ OwnRange own_range(const Mask& mask, const TilesInOrder& tiles, int end, int row) {
  const int before = tiles.first_j * BLOCK_C;                  // keys that no row of the block needs
  const int first_key = min(mask.rule.first_key(row), mask.N_k) - before;
  const int end_key = min(mask.rule.end_key(row + 63), mask.N_k) - before;
  const int own_end = min(max(ceil_div(end_key, BLOCK_C), 1), end);
  return {min(max(first_key, 0) / BLOCK_C, own_end - 1), own_end, false};
}

// A warpgroup passes by the tiles of these steps, and its turns at them.
template <class Whose, class Keys, class Values>
__device__ __forceinline__ void pass_by(const Whose& turns, const Keys& K_smem, const Values& V_smem,
                                        unsigned step, unsigned end) {
  for (; step < end; step++) turns.skip(), K_smem.pass(step), V_smem.pass(step);
}
