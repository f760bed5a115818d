// Layouts of lanes and of transposed tiles that leave no bank conflict. Introduced by: forward stage 7,
// conflict_free.
#pragma once
#include "vector.cuh"

// A warp as 4 x 8 lanes, for a tile of S whose rows its 4 share and whose columns its 8 share:
//
//    lane_col8  0   1   2   3   4   5   6   7       Bits 1 and 4 of the lane are the row, the others the
//   lane_row4                                       column. Why not lane / 8 and lane % 8: an H200 serves
//          0    0   1   4   5   8   9  12  13       16 bytes a lane in four wavefronts, a quarter of the
//          1    2   3   6   7  10  11  14  15       lanes in each; but in two if every lane reads what
//          2   16  17  20  21  24  25  28  29       lane ^ 1 reads, or every lane what lane ^ 2 reads
//          3   18  19  22  23  26  27  30  31       (measured: results/h200/banks.json). Here lanes of a
//                                                   row are neighbours at distance 1, lanes of a column
// at distance 2: reads of both operands take two. (A wavefront: what shared memory serves in a cycle, 4 bytes
// of each of its 32 banks.)
__device__ __forceinline__ int lane_row4() { return (threadIdx.x >> 1 & 1) | (threadIdx.x >> 3 & 2); }
__device__ __forceinline__ int lane_col8() { return (threadIdx.x & 1) | (threadIdx.x >> 1 & 6); }

// The swizzle of row k of a transposed tile: column x is at x ^ swizzle_of(k). It changes every 4 rows, those
// of one float4.
__device__ __forceinline__ int swizzle_of(int k) { return k / 4 % 2 * 16; }

// Store 4 numbers of a row, from column 4 * k4 on, to a transposed tile, whose rows are `pitch` floats long,
// a multiple of 32. A warp stores 16 rows x 2 float4s at a time: 16 neighbouring floats for each of two k4.
// For odd k4 the halves of every 32 floats change places, and so these go to the other 16 banks.
__device__ __forceinline__ void store_transposed(float* tile, int pitch, int row, int k4, float4 x) {
  float* to = tile + 4 * k4 * pitch + (row ^ swizzle_of(4 * k4));
  to[0] = x.x;
  to[pitch] = x.y;
  to[2 * pitch] = x.z;
  to[3 * pitch] = x.w;
}

// As load_transposed4 (common/vector.cuh), without a bank conflict, and times `scale`.
template <int threads, int columns = HEAD_DIM>
__device__ __forceinline__ void load_swizzled4(float* tile, int pitch, const float* matrix, int64_t stride_n,
                                               int first, int tile_rows, int N, float scale = 1.f) {
  for (int n = 0; n * threads < tile_rows * columns / 4; n++) {
    const int2 pos = nth_float4<2, threads>(n, tile_rows);
    if (columns % 32 != 0 && 4 * pos.y >= columns) continue;
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (first + pos.x < N) x = load4(matrix + (first + pos.x) * stride_n + 4 * pos.y);
    x = make_float4(scale * x.x, scale * x.y, scale * x.z, scale * x.w);
    store_transposed(tile, pitch, pos.x, pos.y, x);
  }
}
