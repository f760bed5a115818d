// The softmax in two parts, of both rows of a lane: something may stand between. Introduced by: forward stage
// 27, early_wait.
#pragma once
#include "softmax.cuh"

template <int n_tiles>
__device__ __forceinline__ void maximum_step(float (&S)[n_tiles][4], float (&m)[2], float (&alpha)[2],
                                             float (&shift)[2], float c, bool cut, float slack) {
  #pragma unroll
  for (int r = 0; r < 2; r++) alpha[r] = row_maximum(S, r, m[r], shift[r], c, cut, slack);
}

template <int n_tiles>
__device__ __forceinline__ void exponentials(float (&S)[n_tiles][4], float (&l)[2], const float (&alpha)[2],
                                             float c, const float (&shift)[2]) {
  #pragma unroll
  for (int r = 0; r < 2; r++) row_exponentials(S, r, l[r], alpha[r], c, shift[r]);
}
