// Tiles of an (N, d) matrix of 16-bit elements in shared memory. Introduced by: forward stage 10, wmma.
#pragma once

constexpr int width = (HEAD_DIM + 15) / 16 * 16;   // d, rounded up to whole 16 x 16 fragments: the rest are 0

// Copy rows [first, first + tile_rows) of `matrix` to `tile`, by all threads of the block together, 8
// elements (16 bytes) at a time. Rows from N on and columns from d on become zeros. Element (row, col) goes
// to tile[index(row, col)]: the stage's function.
template <int threads, class Index>
__device__ __forceinline__ void load_tile(ELEMENT* tile, Index index, const ELEMENT* matrix, int64_t stride_n,
                                          int first, int tile_rows, int N) {
  #pragma unroll (width > 128 ? 2 : 4)             // as many loads at a time as there are registers for
  for (int t = threadIdx.x; t < tile_rows * (width / 8); t += threads) {
    const int row = t / (width / 8), col = t % (width / 8) * 8;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (first + row < N && col < HEAD_DIM)
      x = *reinterpret_cast<const uint4*>(matrix + (first + row) * stride_n + col);
    *reinterpret_cast<uint4*>(tile + index(row, col)) = x;
  }
}
