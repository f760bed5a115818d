// Dropout of a tile whose lanes share the random words. Introduced by: forward stage 7, conflict_free.
#pragma once
#include "conflict_free.cuh"
#include "mask.cuh"

// Times keep, for P of a warp. A lane has `rows` x `cols` elements, in squares of 4 x 4 that are 16 rows or
// 32 columns apart, the first one of query `row` and key `col`. (If they are two in a direction, the first
// one is in the first half of 32 rows, or 64 columns.) A call of keep_two(row, col) makes the words of a
// group and uses one, as most elements of the group are other lanes': those that differ in the bits 2 to 4 of
// their number (common/conflict_free.cuh). These eight lanes have eight groups in common. So each makes those
// of one, and asks the others for theirs.
template <int rows, int cols>
__device__ __forceinline__ void drop(float (&P)[rows][cols], const Mask& mask, int row, int col) {
  static_assert(rows <= 8 && cols <= 8, "the squares of a lane are in the same groups");
  const int lane = threadIdx.x % 32, n = lane / 4;     // n: which of the eight
  const int bit = row / 8 % 2 * 8 + col / 8 % 4 * 2;   // of the lane's first element in a group
  const uint4 words = mask.dropout.words(row + n / 2, col + n % 2 * 2);
  #pragma unroll
  for (int r = 0; r < rows; r += 4) {
    #pragma unroll
    for (int c = 0; c < cols; c += 4) {
      const uint32_t kept = mask.dropout.kept(words, (row + 4 * r) / 16, (col + 8 * c) / 32 % 4);
      #pragma unroll
      for (int k = 0; k < 8; k++) {                    // from the k-th lane: two elements of a square
        const uint32_t bits = __shfl_sync(0xffffffff, kept, 4 * k + lane % 4) >> bit;
        P[r + k / 2][c + k % 2 * 2] *= bits & 1 ? mask.dropout.scale : 0.f;
        P[r + k / 2][c + k % 2 * 2 + 1] *= bits & 2 ? mask.dropout.scale : 0.f;
      }
    }
  }
}
