// Zeros for what nobody sees, of a transposed accumulator. Introduced by: backward stage 27, hopper_tuned.
#pragma once
#include "mask.cuh"
#include "warpgroup_products.cuh"

// P^T = 0 where a query does not see a key, with queries of tile tiles[t] from first_row on, and keys of tile
// j from first_key on. Nothing to do in a tile that the mask does not cut. One side of the mask after the
// other, as few tiles of a window are cut on both.
template <int n_tiles, class Tiles>
__device__ __forceinline__ void clear_unseen(float (&P_reg)[n_tiles][4], const Mask& mask, const Tiles& tiles,
                                             int t, int j, int first_row, int first_key) {
  #pragma unroll
  for (int side = 0; side < Mask::sides; side++) {
    if (!mask.cuts(tiles, t, j, side)) continue;
    for_each(P_reg, [&](float& P, int r, int col) {
      if (!mask.sees(first_row + col, first_key + r, side)) P = 0.f;
    });
  }
}
