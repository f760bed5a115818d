// Dropout of a tile whose lanes share the random words. Introduced by: forward stage 7, conflict_free.
#pragma once
#include "conflict_free.cuh"
#include "mask.cuh"

// Times keep, for P of a warp. A lane has `rows` x `cols` elements, in squares of 4 x 4 that are 16 rows or
// 32 columns apart, the first one of query `row` and key `col`. A call of keep(row, col) makes sixteen
// numbers and uses one, as the others of the group are in the square 16 rows apart, and other lanes': those
// that differ in the bits 2 to 4 of their number (common/conflict_free.cuh). These eight lanes have their 16
// groups in common. So each makes two of them, and asks the others for theirs.
template <int rows, int cols>
__device__ __forceinline__ void drop(float (&P)[rows][cols], const Mask& mask, int row, int col) {
  static_assert(rows <= 8, "of a group of sixteen elements a lane has one or two");
  const int lane = threadIdx.x % 32, n = lane / 4;     // n: which of the eight, and which element of a group
  #pragma unroll
  for (int c = 0; c < cols; c += 4) {
    const int group_row = row + n / 2, group_col = col + 8 * c + n % 2 * 2;
    const uint32_t kept = mask.dropout.kept(group_row, group_col)
                        | mask.dropout.kept(group_row, group_col + 1) << 16;
    #pragma unroll
    for (int k = 0; k < 8; k++) {                      // from the k-th lane: for two elements of a square
      const uint32_t bits = __shfl_sync(0xffffffff, kept, 4 * k + lane % 4) >> row / 16 % 2 * 8 + n;
      #pragma unroll
      for (int r = 0; r < rows; r += 4) {              // from square to square: two rows of a group, 8 bits
        P[r + k / 2][c + k % 2 * 2] *= bits >> 2 * r & 1 ? mask.dropout.scale : 0.f;
        P[r + k / 2][c + k % 2 * 2 + 1] *= bits >> 2 * r & 0x10000 ? mask.dropout.scale : 0.f;
      }
    }
  }
}
