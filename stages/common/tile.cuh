// Tiles of an (N, d) matrix in shared memory. Introduced by: forward stage 2, tiled.
#pragma once

// Copy rows [first, first + tile_rows) of `matrix` to `tile`, by all threads of the block together.
// Neighbouring threads take neighbouring elements of a row: a warp reads whole cache lines. Rows from N on
// become zeros, so that the ragged last tile needs no case of its own later. `pitch`: the distance between two
// rows of the tile, in floats.
__device__ __forceinline__ void load_tile(float* tile, int pitch, const float* matrix, int64_t stride_n,
                                          int first, int tile_rows, int N) {
  for (int t = threadIdx.x; t < tile_rows * HEAD_DIM; t += blockDim.x) {
    const int row = t / HEAD_DIM, k = t % HEAD_DIM;
    tile[row * pitch + k] = first + row < N ? matrix[(first + row) * stride_n + k] : 0.f;
  }
}
