// Two accumulators of neighbouring columns leave by the copy engine. Introduced by: backward stage 30,
// exchanged_tuned.
#pragma once
#include "store_panels.cuh"

// Store this warp's 16 rows, times scale and rounded: columns from 0 on are in `first`, those from
// second_col on, where a panel begins, in `second`; what both have is that of `first`. They go through rows
// [row, row + 16) of `tile`, of tile_rows rows in panels, to rows [first_row + row, ...) of a head. Waits
// until they are in HBM.
template <int n_tiles>
__device__ __forceinline__ void store_halves(const CUtensorMap& map, ELEMENT* tile,
                                             float (&first)[n_tiles][4], float (&second)[n_tiles][4],
                                             int second_col, float scale, int tile_rows, int row,
                                             int first_row, int head, int batch) {
  for_each(first, [&](float& x, int, int) { x *= scale; });
  for_each(second, [&](float& x, int, int) { x *= scale; });
  store_panels(map, tile, first, tile_rows, row, first_row + row, head, batch);
  store_panels(map, tile, second, tile_rows, row, first_row + row, head, batch, second_col, 8 * n_tiles);
  if (threadIdx.x % 32 == 0) bulk_wait<0>();
}
