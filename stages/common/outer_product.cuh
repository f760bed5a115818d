// Products of small matrices in registers. Introduced by: forward stage 5, register_tiles.
#pragma once

// C += a b^T, the sum over k of a matrix product for one k: R + C numbers for R * C multiplications.
//
// The order is a snake: down a column of C, then up the next, so that each multiplication has a factor in
// common with the one before. On an H200 that gained 4 to 6 % with 8 x 8 numbers. The compiler has the last
// word on the order. by_rows: along the rows of C, the same way. Which is faster was measured stage by stage.
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
