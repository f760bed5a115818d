// Sums in float that leave by the copy engine. Introduced by: backward stage 19, tma_reduce.
#pragma once
#include "hopper.cuh"

// Add this warp's strips of an accumulator to a tile of dQ_accum, which lies as registers do (gradients.cuh):
// fragments of 16 x 8, four numbers of a lane next to each other. So the 16 rows of a strip are one piece of
// HBM, and so are some of their fragments. `row`: the first strip's first row in the tile; that of the next
// one is 64 further on. col: the accumulator's first column. The engine adds columns from first_col on, as
// far as the tile goes: to d - 1. `transposed`: it is a tile of dQ^T, whose rows are the d dims and whose
// columns are the queries.
//
// They go through `staging`, which has room for `staged` fragments of each strip and belongs to this warp
// alone. Lane 0 commits the copies, and has to wait for the last ones.
template <int staged, bool transposed = false, int strips, int n_tiles>
__device__ __forceinline__ void bulk_add_fragments(float* dQ, float* staging,
                                                   const float (&acc)[strips][n_tiles][4], int row, int col,
                                                   int first_col) {
  constexpr int columns = transposed ? BLOCK_R : HEAD_DIM;               // of the tile
  const int lane = threadIdx.x % 32;
  if (transposed && row >= HEAD_DIM) return;
  #pragma unroll
  for (int first = 0; first < n_tiles; first += staged) {
    // --- through staging, to HBM
    if (lane == 0) bulk_wait_read<0>();     // the last ones have left
    __syncwarp();
    #pragma unroll
    for (int s = 0; s < strips; s++) {
      #pragma unroll
      for (int n = first; n < first + staged && n < n_tiles; n++)
        reinterpret_cast<float4*>(staging)[32 * (s * staged + n - first) + lane] =
            make_float4(acc[s][n][0], acc[s][n][1], acc[s][n][2], acc[s][n][3]);
    }
    fence_proxy_async();
    __syncwarp();
    const int from = max(col + 8 * first, first_col), to = min(col + 8 * (first + staged), columns);
    if (lane == 0 && from < to) {
      #pragma unroll
      for (int s = 0; s < strips; s++)
        bulk_add(dQ + (row + 64 * s) * columns + 16 * from,
                 staging + 128 * s * staged + 16 * (from - col - 8 * first), 64 * (to - from));
      bulk_commit();
    }
    // ---
  }
}
