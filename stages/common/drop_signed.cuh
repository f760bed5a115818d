// Dropout of P^T that its sign remembers for dP^T. Introduced by: backward stage 29, hopper_tuned.
#pragma once
#include "drop_transposed.cuh"
#include "warpgroup_products.cuh"

// Of P_ij^T two operands A: without what is dropped, for dV; and all of it, what is dropped with a minus.
// P is never negative, so its sign is free: there drop_dS() finds it, without random words of its own.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_P(uint32_t (&kept_frag)[k_steps][4], uint32_t (&P_frag)[k_steps][4],
                                       const float (&PT)[n_tiles][4], const Mask& mask, int row, int col) {
  #pragma unroll
  for (int k = 0; k < k_steps; k++) {
    uint32_t dropped[4];
    to_A(P_frag[k], PT, k);
    find_dropped(dropped, words_of_lane_T(mask, row + 16 * k, col), col / 16 % 2, mask);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      kept_frag[k][e] = P_frag[k][e] & ~dropped[e];
      P_frag[k][e] |= dropped[e] & 0x80008000;
    }
  }
}

// dS^T = (keep * dP^T - D) P^T, of dP^T and of the operand that drop_P() made. keep is 0 or scale.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_dS(float (&dPT)[n_tiles][4], const uint32_t (&P_frag)[k_steps][4],
                                        float scale, const float* minus_D) {
  for_both(P_frag, dPT, [&](float P, float& dP, int, int c) {
    dP = fmaf(scale * fmaxf(P, 0.f), dP, fabsf(P) * minus_D[c]);
  });
}
