// Dropout of P^T that its sign remembers for dP^T. Introduced by: backward stage 29, hopper_tuned.
#pragma once
#include "drop_transposed.cuh"
#include "order.cuh"
#include "warpgroup_products.cuh"

// Of P_ij^T two operands A: without what is dropped, for dV; and all of it, what is dropped with a minus.
// P is never negative, so its sign is free: there drop_dS() finds it, without random words of its own.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_P(uint32_t (&kept_frag)[k_steps][4], uint32_t (&P_frag)[k_steps][4],
                                       const float (&PT)[n_tiles][4], const Mask& mask, int row, int col) {
  uint4 words;                            // of 64 queries
  #pragma unroll
  for (int k = 0; k < k_steps; k++) {
    uint32_t dropped[4];
    to_A(P_frag[k], PT, k);
    if (k % 4 == 0) words = words_of_lane_T(mask, row + 16 * k, col);
    // (by of_lane_0() it spills 164 bytes at d=64, else 380)
    find_dropped(dropped, Dropout::words_of_rows(words, k), of_lane_0(col / 16), mask);
    #pragma unroll
    for (int e = 0; e < 4; e++) {
      kept_frag[k][e] = P_frag[k][e] & ~dropped[e];
      P_frag[k][e] |= dropped[e] & 0x80008000;
    }
  }
}

// dS^T = (keep * dP^T - D) P^T over scale, of dP^T and of the operand that drop_P() made. keep is 0 or scale;
// minus_D is -D over scale. What is made of dS is multiplied by scale_of_dS() in the end.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_dS(float (&dPT)[n_tiles][4], const uint32_t (&P_frag)[k_steps][4],
                                        const float* minus_D) {
  for_both(P_frag, dPT, [&](float P, float& dP, int, int c) {
    dP = fmaf(fmaxf(P, 0.f), dP, fabsf(P) * minus_D[c]);
  });
}

__host__ __device__ inline float scale_of_dS(const BwdParams& p) { return p.scale * dropout_scale(p); }

inline BwdParams with_scale_of_dS(BwdParams p) {
  p.scale = scale_of_dS(p);
  return p;
}
