// Tiles of an (N, d) matrix in shared memory. Introduced by: forward stage 2, tiled.
#pragma once

// All threads of the block together copy rows [first, first + tile_rows) of `matrix` to `tile`. Neighbouring
// threads copy neighbouring elements of a row, so a warp reads whole cache lines. Rows from N on become
// zeros: the last tile, which may have fewer rows, then needs no special case. `pitch`: floats from one row
// of the tile to the next. `columns`: of the matrix, if fewer than d: the others become zeros, too.
template <int columns = HEAD_DIM>
__device__ __forceinline__ void load_tile(float* tile, int pitch, const float* matrix, int64_t stride_n,
                                          int first, int tile_rows, int N) {
  for (int t = threadIdx.x; t < tile_rows * HEAD_DIM; t += blockDim.x) {
    const int row = t / HEAD_DIM, k = t % HEAD_DIM;
    tile[row * pitch + k] = first + row < N && k < columns ? matrix[(first + row) * stride_n + k] : 0.f;
  }
}
