// Four numbers at a time. Introduced by: forward stage 6, vectorized.
#pragma once

// One instruction for 16 bytes, at a multiple of 16
__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }


__device__ __forceinline__ void store4(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
}

// n numbers of a row of a tile, four by four, from columns `first`, first + step, first + 2 * step, ...
// Column x is at x ^ swizzle: 0 until conflict_free, which has its columns change places.
template <int n>
__device__ __forceinline__ void load(float (&to)[n], const float* row, int first, int step, int swizzle = 0) {
  #pragma unroll
  for (int x = 0; x < n; x += 4) {
    const float4 four = load4(row + ((first + x / 4 * step) ^ swizzle));
    to[x] = four.x;
    to[x + 1] = four.y;
    to[x + 2] = four.z;
    to[x + 3] = four.w;
  }
}

// The n-th float4 of this lane. x: its row; y: which float4 of the row. A warp takes 32 / cols rows x cols
// float4s of the tile at a time, and `height` warps would fill its height. `high` warps stand below each
// other, `wide` side by side, and together they go down the tile first. What depends on n is kept apart from
// what depends on the thread: so the compiler can put it into constants.
template <int cols, int threads>
__device__ __forceinline__ int2 nth_float4(int n, int tile_rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int height = tile_rows * cols / 32, high = min(threads / 32, height), wide = threads / 32 / high;
  return make_int2((n % (height / high) * high + warp % high) * (32 / cols) + lane / cols,
                   (n / (height / high) * wide + warp / high) * cols + lane % cols);
}

// As load_tile (common/tile.cuh), 16 bytes at a time. Rows of the tile are `pitch` floats long, a multiple of
// 32: the columns that the matrix does not have become zeros, too.
template <int threads, int columns = HEAD_DIM>
__device__ __forceinline__ void load_tile4(float* tile, int pitch, const float* matrix, int64_t stride_n,
                                           int first, int tile_rows, int N) {
  #pragma unroll
  for (int n = 0; n < tile_rows * pitch / 4 / threads; n++) {
    const int2 pos = nth_float4<8, threads>(n, tile_rows);
    const bool inside = first + pos.x < N && (pitch == columns || 4 * pos.y < columns);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (inside) x = load4(matrix + (first + pos.x) * stride_n + 4 * pos.y);
    store4(tile + pos.x * pitch + 4 * pos.y, x.x, x.y, x.z, x.w);
  }
}

// As load_transposed (common/transposed.cuh), 16 bytes of HBM at a time.
template <int threads, int columns = HEAD_DIM>
__device__ __forceinline__ void load_transposed4(float* tile, int pitch, const float* matrix,
                                                 int64_t stride_n, int first, int tile_rows, int N) {
  #pragma unroll 4
  for (int n = 0; n < tile_rows * ((columns + 31) / 32) * 8 / threads; n++) {
    const int2 pos = nth_float4<8, threads>(n, tile_rows);
    if (columns % 32 != 0 && 4 * pos.y >= columns) continue;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (first + pos.x < N) x = load4(matrix + (first + pos.x) * stride_n + 4 * pos.y);
    tile[4 * pos.y * pitch + pos.x] = x.x;
    tile[(4 * pos.y + 1) * pitch + pos.x] = x.y;
    tile[(4 * pos.y + 2) * pitch + pos.x] = x.z;
    tile[(4 * pos.y + 3) * pitch + pos.x] = x.w;
  }
}
