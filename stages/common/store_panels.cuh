// A tile leaves by the copy engine. Introduced by: forward stage 29, hopper_tuned.
#pragma once
#include "mma.cuh"
#include "tma.cuh"

// Store this warp's 16 rows of an accumulator, rounded: rows [row, row + 16) of a head, as far as there are
// any. They go through rows [tile_row, tile_row + 16) of `tile`, which has tile_rows rows in panels. The
// accumulator's columns are first_col and so on; those before from_col, the start of a panel, stay. Lane 0
// commits the copies, and has to wait for them in the end.
template <int n_tiles>
__device__ __forceinline__ void store_panels(
    const CUtensorMap& map, ELEMENT* tile, const float (&acc)[n_tiles][4], int tile_rows, int tile_row,
    int row, int head, int batch, int first_col = 0, int from_col = 0) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) bulk_wait_read<0>();       // the last ones have left these rows
  __syncwarp();
  #pragma unroll
  for (int k = 0; k < n_tiles / 2; k++) {
    if (first_col + 16 * k < from_col) continue;
    uint32_t fragment[4];                   // as an operand A, so as stmatrix has it, too
    to_A(fragment, acc, k);
    const int col = first_col + 16 * k + lane / 16 * 8;
    stmatrix_x4(shared_address(tile + panel_index(tile_row + lane % 16, col, tile_rows)), fragment);
  }
  fence_proxy_async();
  __syncwarp();
  if (lane > 0) return;
  for (int n = from_col / panel; n < panels && n * panel < first_col + 8 * n_tiles; n++)
    tma_store(map, tile + (n * tile_rows + tile_row) * panel, n * panel, row, head, batch);
  bulk_commit();
}
