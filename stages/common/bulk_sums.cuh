// Sums in float that leave by the copy engine. Introduced by: backward stage 19, tma_reduce.
#pragma once
#include "hopper.cuh"

// Add this warp's 16 rows of an accumulator to a tile of dQ_accum, which lies as registers do
// (gradients.cuh): fragments of 16 x 8, four numbers of a lane next to each other. So 16 rows are one piece
// of HBM, and so are some of their fragments. `row`: the first row in the tile; col: the accumulator's first
// column. The engine adds columns from first_col to d - 1.
//
// They go through `staging`, which has room for `staged` fragments and belongs to this warp alone. Lane 0
// commits the copies, and has to wait for the last ones.
template <int staged, int n_tiles>
__device__ __forceinline__ void bulk_add_fragments(float* dQ, float* staging, const float (&acc)[n_tiles][4],
                                                   int row, int col, int first_col,
                                                   bool has_room = false) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int first = 0; first < n_tiles; first += staged) {
    // --- through staging, to HBM
    if (lane == 0 && !has_room) bulk_wait_read<0>();     // the last ones have left
    __syncwarp();
    #pragma unroll
    for (int n = first; n < first + staged && n < n_tiles; n++)
      reinterpret_cast<float4*>(staging)[32 * (n - first) + lane] =
          make_float4(acc[n][0], acc[n][1], acc[n][2], acc[n][3]);
    fence_proxy_async();
    __syncwarp();
    const int from = max(col + 8 * first, first_col), to = min(col + 8 * (first + staged), HEAD_DIM);
    if (lane == 0 && from < to) {
      bulk_add(dQ + row * HEAD_DIM + 16 * from, staging + 16 * (from - col - 8 * first), 64 * (to - from));
      bulk_commit();
    }
    // ---
  }
}
