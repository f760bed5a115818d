// Tiles of 16-bit elements that come asynchronously. Introduced by: forward stage 13, cp_async.
#pragma once
#include "ptx.cuh"

// Start to copy rows [first, first + tile_rows) of `matrix` to `tile`, by all threads of the block together:
// 8 of them take 128 bytes of a row. Rows from N on and columns from d on become zeros (and are not read).
// Rows of the tile are whole 128 bytes; element (row, col) goes to tile[index(row, col)].
// `columns`: of the matrix, if fewer than d.
template <int threads, int columns = HEAD_DIM, class Index>
__device__ __forceinline__ void copy_tile(ELEMENT* tile, Index index, const ELEMENT* matrix, int64_t stride_n,
                                          int first, int tile_rows, int N) {
  const int first_row = threadIdx.x / 8, first_col = threadIdx.x % 8 * 8;
  const ELEMENT* from = matrix + (first + first_row) * stride_n + first_col;
  #pragma unroll
  for (int row = 0; row < tile_rows; row += threads / 8) {
    if (tile_rows % (threads / 8) != 0 && first_row + row >= tile_rows) break;
    #pragma unroll
    for (int col = 0; col < HEAD_DIM; col += 64) {
      const bool is_column = columns % 64 == 0 ? col < columns : first_col + col < columns;
      const bool inside = first + first_row + row < N && is_column;
      ELEMENT* to = tile + index(first_row + row, first_col + col);
      cp_async_16(shared_address(to), from + col, inside ? 16 : 0);
    }
    from += threads / 8 * stride_n;
  }
}
