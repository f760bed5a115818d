// Dropout of P^T that its sign remembers for dP^T. Introduced by: backward stage 29, hopper_tuned.
#pragma once
#include "drop_transposed.cuh"
#include "warpgroup_products.cuh"

// Of P_ij^T two operands A: without what is dropped, for dV; and all of it, what is dropped with a minus.
// P is never negative, so its sign is free: there drop_dP() finds it, without random words of its own.
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_P(uint32_t (&kept_frag)[k_steps][4], uint32_t (&P_frag)[k_steps][4],
                                       float (&PT)[n_tiles][4], const Mask& mask, int row, int col) {
  #pragma unroll
  for (int k = 0; k < k_steps; k += 2) {       // 32 queries: as many as share words
    auto& P_reg = reinterpret_cast<float (&)[4][4]>(PT[2 * k]);
    float kept[1][4][4];
    for_both(kept[0], P_reg, [](float& x, float& P, int, int) { x = P; });
    drop_transposed(kept, mask, row + 16 * k, col);
    for_both(kept[0], P_reg, [](float& x, float& P, int, int) { P = fmaf(2.f, x, -P); });    // P, or -P
    for (int n = 0; n < 2; n++) to_A(kept_frag[k + n], kept[0], n), to_A(P_frag[k + n], P_reg, n);
  }
}

// dP^T without what drop_P() dropped, times scale, minus D; and P^T again, from the operand that it made
template <int k_steps, int n_tiles>
__device__ __forceinline__ void drop_dP(float (&dPT)[n_tiles][4], float (&PT)[n_tiles][4],
                                        const uint32_t (&P_frag)[k_steps][4], float scale,
                                        const float* minus_D) {
  for_both(P_frag, dPT, [&](float P, float& dP, int, int c) {
    dP = fmaf(scale, P < 0.f ? 0.f : dP, minus_D[c]);
  });
  for_both(P_frag, PT, [](float P, float& x, int, int) { x = fabsf(P); });
}
