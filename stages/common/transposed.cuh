// Tiles of an (N, d) matrix in shared memory, transposed. Introduced by: forward stage 5, register_tiles.
#pragma once

// As load_tile (common/tile.cuh), but element (row, k) of the tile goes to tile[k * pitch + row].
// `columns`: of the matrix.
template <int columns = HEAD_DIM>
__device__ __forceinline__ void load_transposed(float* tile, int pitch, const float* matrix, int64_t stride_n,
                                                int first, int tile_rows, int N) {
  for (int t = threadIdx.x; t < tile_rows * columns; t += blockDim.x) {
    const int row = t / columns, k = t % columns;
    tile[k * pitch + row] = first + row < N ? matrix[(first + row) * stride_n + k] : 0.f;
  }
}
