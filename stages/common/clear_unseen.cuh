// Zeros for what nobody sees, of a transposed accumulator, in tiles that the mask cuts. Introduced by:
// backward stage 28, whole_tiles.
#pragma once
#include "mask.cuh"
#include "warpgroup_products.cuh"

// Asks a mask that reads tensors for all elements of S^T that this lane has, before there are scores: what it
// loads comes while the tile of Q does. A bit for each, 1 if seen, in the order of for_each(); so 64 at most.
// Queries are those of tile tiles[t], from first_row on, keys those from first_key on. (A mask that is a
// range reads nothing: clear_unseen() asks it.)
template <int n_tiles, class Tiles>
__device__ __forceinline__ uint64_t seen_of(const Mask& mask, const Tiles& tiles, int t, int first_row,
                                            int first_key) {
  uint64_t seen = ~0ull;
  if (Mask::is_range || t < tiles.cut) return seen;
  first_row += threadIdx.x % 4 * 2, first_key += threadIdx.x % 32 / 4;
  #pragma unroll
  for (int e = 0; e < 4 * n_tiles; e++)
    if (!mask.sees(first_row + e / 4 * 8 + e % 2, first_key + e % 4 / 2 * 8)) seen &= ~(1ull << e);
  return seen;
}

// P^T = 0 where a query does not see a key of tile j. Nothing to do in a tile that the mask does not cut. One
// side of the mask after the other, as few tiles of a window are cut on both.
template <int n_tiles, class Tiles>
__device__ __forceinline__ void clear_unseen(float (&P_reg)[n_tiles][4], const Mask& mask, const Tiles& tiles,
                                             int t, int j, int first_row, int first_key, uint64_t seen) {
  #pragma unroll
  for (int side = 0; side < Mask::sides; side++) {
    if (!mask.cuts(tiles, t, j, side)) continue;
    int e = 0;
    for_each(P_reg, [&](float& P, int r, int col) {
      if (!(Mask::is_range ? mask.sees(first_row + col, first_key + r, side) : seen >> e++ & 1)) P = 0.f;
    });
  }
}

// step(t, cut) for each tile of Q that sees something of tile j; n counts them. First those that the mask
// cuts, then whole ones, then cut ones again: whole tiles have a loop of their own, which asks no mask.
template <class Tiles, class Step>
__device__ __forceinline__ void for_each_tile(const Mask& mask, const Tiles& tiles, int j, int& n,
                                              Step step) {
  int t = tiles.first;
  for (; t < tiles.end && mask.cuts(tiles, t, j); t++, n++) step(t, true);
  for (; t < tiles.end && !mask.cuts(tiles, t, j); t++, n++) step(t, false);
  for (; t < tiles.end; t++, n++) step(t, true);
}
