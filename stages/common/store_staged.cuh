// Gradients leave by the copy engine, through little room. Introduced by: backward stage 29, hopper_tuned.
#pragma once
#include "order.cuh"
#include "store_panels.cuh"

// As store_panels(), times scale, through `staging`: it belongs to this warp alone and has room for so many
// panels of 16 rows. Their head is work.h. first_col is the start of a panel, too, if not all of a row's fit.
template <int room, int n_tiles>
__device__ __forceinline__ void store_staged(const CUtensorMap& map, ELEMENT* staging,
                                             float (&acc)[n_tiles][4], float scale, int row,
                                             const Handed& work, int first_col, int from_col) {
  constexpr int tiles = n_tiles < 8 * room ? n_tiles : 8 * room;         // at a time
  for_each(acc, [&](float& x, int, int) { x *= scale; });
  #pragma unroll
  for (int n = 0; n < n_tiles; n += tiles) {
    const int col = first_col + 8 * n;
    if (col >= from_col)
      store_panels(map, staging - col / panel * 16 * panel, reinterpret_cast<float(&)[tiles][4]>(acc[n]), 16,
                   0, row, work.h, work.b, col, col);
  }
}
