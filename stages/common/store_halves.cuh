// Two accumulators of neighbouring columns leave by the copy engine. Introduced by: backward stage 27,
// exchanged_tuned.
#pragma once
#include "warpgroup_products.cuh"

// Store this warp's 16 rows, times scale and rounded: columns from 0 on are in `first`, those from
// second_col on, where a panel begins, in `second`. They go through rows [row, row + 16) of `tile`, of
// tile_rows rows in panels, to rows [first_row + row, ...) of a head. Waits until they are in HBM.
template <int n_tiles>
__device__ __forceinline__ void store_halves(const CUtensorMap& map, ELEMENT* tile,
                                             float (&first)[n_tiles][4], float (&second)[n_tiles][4],
                                             int second_col, float scale, int tile_rows, int row,
                                             int first_row, int head, int batch) {
  uint32_t rounded[n_tiles / 2][4];
  for_each(first, [&](float& x, int, int) { x *= scale; });
  to_A(rounded, first);
  store_fragments(tile, rounded, tile_rows, row);
  for_each(second, [&](float& x, int, int) { x *= scale; });
  to_A(rounded, second);
  store_fragments(tile + second_col * tile_rows, rounded, tile_rows, row);
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 > 0) return;
  #pragma unroll
  for (int n = 0; n < panels; n++)
    tma_store(map, tile + (n * tile_rows + row) * panel, n * panel, first_row + row, head, batch);
  bulk_commit();
  bulk_wait<0>();
}
