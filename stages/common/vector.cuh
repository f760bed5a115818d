// Four numbers at a time, and products of small matrices in registers. Introduced by: forward stage 5,
// vectorized.
#pragma once

// A warp as 4 x 8 lanes, for a tile of S whose rows its 4 share and whose columns its 8 share:
//
//         lane8  0   1   2   3   4   5   6   7       Bits 1 and 4 of the lane are the row, the others the
//   lane4  0     0   1   4   5   8   9  12  13       column. Why not lane / 8 and lane % 8: an H200 serves
//          1     2   3   6   7  10  11  14  15       16 bytes a lane in four wavefronts, a quarter of the
//          2    16  17  20  21  24  25  28  29       lanes in each; but in two if every lane reads what
//          3    18  19  22  23  26  27  30  31       lane ^ 1 reads, or every lane what lane ^ 2 reads
//                                                    (measured: results/h200/banks.json). Here lanes of a
// row are neighbours at distance 1, lanes of a column at distance 2: reads of both operands take two. (A
// wavefront: what shared memory serves in a cycle, 4 bytes of each of its 32 banks.)
__device__ __forceinline__ int lane4() { return (threadIdx.x >> 1 & 1) | (threadIdx.x >> 3 & 2); }
__device__ __forceinline__ int lane8() { return (threadIdx.x & 1) | (threadIdx.x >> 1 & 6); }

// One instruction for 16 bytes, at a multiple of 16
__device__ __forceinline__ float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ void store4(float* to, float x, float y, float z, float w) {
  *reinterpret_cast<float4*>(to) = make_float4(x, y, z, w);
}

// n numbers of a row of a tile, four by four, from columns `first`, first + step, first + 2 * step, ...
// `swap`: how columns of this row have changed places, against bank conflicts: column x is at x ^ swap.
template <int n>
__device__ __forceinline__ void load(float (&to)[n], const float* row, int first, int step, int swap = 0) {
  #pragma unroll
  for (int x = 0; x < n; x += 4) {
    const float4 four = load4(row + ((first + x / 4 * step) ^ swap));
    to[x] = four.x;
    to[x + 1] = four.y;
    to[x + 2] = four.z;
    to[x + 3] = four.w;
  }
}

// C += a b^T, the sum over k of a matrix product for one k: R + C numbers for R * C multiplications.
//
// The order is a snake: down a column of C, then up the next, so that each multiplication has a factor in
// common with the one before. For on an H200 the registers seem to be the bottleneck, not the multipliers:
// times agree with a model in which a cycle delivers one even-numbered and one odd-numbered register, while
// a * b + c has three operands. Full speed then needs one of them left over from the instruction before, and
// the other two even and odd. (The compiler has the last word on order and numbers.) Hence by_rows, the same
// along the rows of C: for an `a` whose numbers come each from a float4 along k, and so are all in even or
// all in odd registers, a number of a should stay from one multiplication to the next, and b's change.
template <bool by_rows = false, int R, int C>
__device__ __forceinline__ void add_outer_product(float (&c)[R][C], const float (&a)[R],
                                                  const float (&b)[C]) {
  constexpr int outer = by_rows ? R : C, inner = by_rows ? C : R;
  #pragma unroll
  for (int x = 0; x < outer; x++) {
    #pragma unroll
    for (int n = 0; n < inner; n++) {
      const int y = x % 2 ? inner - 1 - n : n;
      const int row = by_rows ? x : y, col = by_rows ? y : x;
      c[row][col] += a[row] * b[col];
    }
  }
}

// The `swap` for row k of a transposed tile: it changes every 4 rows, those of one float4.
__device__ __forceinline__ int swap_of(int k) { return k / 4 % 2 * 16; }

// Store 4 numbers of a row, from column 4 * k4 on, to a transposed tile, whose rows are `pitch` floats long,
// a multiple of 32. A warp stores 16 rows x 2 float4s at a time: 16 neighbouring floats for each of two k4.
// For odd k4 the halves of every 32 floats change places (load: swap = 16): these go to the other 16 banks.
__device__ __forceinline__ void store_transposed(float* tile, int pitch, int row, int k4, float4 x) {
  float* to = tile + 4 * k4 * pitch + (row ^ swap_of(4 * k4));
  to[0] = x.x;
  to[pitch] = x.y;
  to[2 * pitch] = x.z;
  to[3 * pitch] = x.w;
}

// 2^x in one instruction; expf would multiply by log2(e) first and take care of denormal results.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
