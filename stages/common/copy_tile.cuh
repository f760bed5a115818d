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

// The same of rows that lie anywhere: row n starts at row_at(n). (Of a row past the end, row 0 is asked for,
// and not read.)
template <int threads, int columns = HEAD_DIM, class Index, class RowAt>
__device__ __forceinline__ void copy_rows(ELEMENT* tile, Index index, RowAt row_at, int first, int tile_rows,
                                          int N) {
  const int first_row = threadIdx.x / 8, first_col = threadIdx.x % 8 * 8;
  #pragma unroll
  for (int row = 0; row < tile_rows; row += threads / 8) {
    if (tile_rows % (threads / 8) != 0 && first_row + row >= tile_rows) break;
    const bool is_row = first + first_row + row < N;
    const ELEMENT* from = row_at(is_row ? first + first_row + row : 0) + first_col;
    #pragma unroll
    for (int col = 0; col < HEAD_DIM; col += 64) {
      ELEMENT* to = tile + index(first_row + row, first_col + col);
      cp_async_16(shared_address(to), from + col, is_row && first_col + col < columns ? 16 : 0);
    }
  }
}

// A cache may lie in pages: then K and V are tensors (pages, H_kv, PAGE_SIZE, d), and row n of a batch
// element is in page table[n / PAGE_SIZE].
struct Pages {
  const ELEMENT* head;                    // of page 0
  int64_t stride_page, stride_n;
  const int* table;
  __device__ const ELEMENT* operator()(int n) const {
    constexpr int size = PAGE_SIZE > 0 ? PAGE_SIZE : 1;
    return head + table[n / size] * stride_page + n % size * stride_n;
  }
};

// The rows of a head of K or V, as copy_tile() takes them
template <class Params>
__device__ __forceinline__ auto rows_of(const Tensor& x, const Params& p, int b, int h) {
  if constexpr (PAGE_SIZE == 0) return x.head(b, h);
  else return Pages{x.head(0, h), x.stride_b, x.stride_n, p.block_table + (int64_t)b * p.pages};
}

// Pages know the stride.
template <int threads, int columns = HEAD_DIM, class Index>
__device__ __forceinline__ void copy_tile(ELEMENT* tile, Index index, const Pages& matrix, int64_t,
                                          int first, int tile_rows, int N) {
  copy_rows<threads, columns>(tile, index, matrix, first, tile_rows, N);
}
