// Masks that change scores, in fewer registers. Introduced by: backward stage 28, whole_tiles.
#pragma once
#include "seed.cuh"

// change_scores() of 16 queries at a time, and their slopes rounded to an operand A, as P^T is: 32 registers
// fewer for 128 queries.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void change_scores(float (&S_reg)[n_tiles][4], uint32_t (&slope_frag)[k_steps][4],
                                              const Mask& mask, float scale, int first_row, int first_key,
                                              const float* L) {
  #pragma unroll
  for (int k = 0; k < k_steps; k++) {
    float slope[2][4];
    auto& S = reinterpret_cast<float (&)[2][4]>(S_reg[2 * k]);
    change_scores(S, slope, mask, scale, first_row + 16 * k, first_key, L + 16 * k);
    to_A(slope_frag[k], slope, 0);
  }
}

// dS^T is the gradient by what the mask has added, too: it is written, if that is wanted. (Asked once, not
// for each element: else ptxas serialises the products.) With dropout dS is over its scale (drop_signed.cuh).
template <int n_tiles>
__device__ __forceinline__ void keep_gradients(const Mask& mask, float (&dST)[n_tiles][4], int first_row,
                                               int first_key) {
  if (!Rule::has_gradient || !mask.gradient) return;
  for_each(dST, [&](float& dS, int r, int col) {
    mask.keep_gradient(DROPOUT ? mask.dropout.scale * dS : dS, first_row + col, first_key + r);
  });
}
