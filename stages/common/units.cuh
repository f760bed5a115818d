// Tiles of K and V with all of their query heads. Introduced by: backward stage 41, exchanged_group.
#pragma once
#include "mask.cuh"
#include "order.cuh"

// A unit is a tile of K and V, and the query heads that read it: dK and dV are one sum over its steps, which
// are its heads' tiles of Q, one head after the other.
__host__ __device__ inline int units_of(const BwdParams& p) {
  return p.B * p.H_kv * ceil_div(p.N_k, BLOCK_C);
}

// The n-th unit: bh is the first one of its query heads, h the head of K and V
__device__ __forceinline__ Handed nth_unit(const BwdParams& p, int n) {
  const int Tc = ceil_div(p.N_k, BLOCK_C), bh_kv = n / Tc;
  return {{n % Tc, bh_kv * (p.H / p.H_kv)}, bh_kv / p.H_kv, bh_kv % p.H_kv};
}

// f(mask, tiles, bh) for each of its query heads
template <class F>
__device__ __forceinline__ void for_each_head(const BwdParams& p, int unit, F f) {
  const Handed its = nth_unit(p, unit);
  #pragma unroll 1                          // registers
  for (int bh = its.bh; bh < its.bh + p.H / p.H_kv; bh++) {
    const Mask mask(p, its.b, bh % p.H);
    f(mask, mask.query_tiles(its.tile), bh);
  }
}

// step(mask, tiles, t, bh) for each of its steps; n counts them
template <class Step>
__device__ __forceinline__ void for_each_step(const BwdParams& p, int unit, int& n, Step step) {
  for_each_head(p, unit, [&](const Mask& mask, const auto& tiles, int bh) {
    for (int t = tiles.first; t < tiles.end; t++, n++) step(mask, tiles, t, bh);
  });
}
