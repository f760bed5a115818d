// Parts of dK and dV, of a block that has several query heads. Introduced by: backward stage 26, whole_group.
#pragma once
#include "reduce_heads.cuh"

// dK and dV of a block that has block_heads query heads, bh the last one: to their parts in dKV_parts
template <int n_tiles>
__device__ __forceinline__ void store_parts(const BwdParams& p, float* dKV_parts, int bh, int block_heads,
                                            const float (&dK)[n_tiles][4], const float (&dV)[n_tiles][4],
                                            int first_row, int first_col, int from_col) {
  const int64_t numbers = (int64_t)all_rows_of_K(p) * HEAD_DIM;
  float* dK_part = dKV_parts + bh / block_heads * numbers;
  float* dV_part = dK_part + p.B * p.H / block_heads * numbers;
  store_part(dK_part, dK, first_row, p.N_k, first_col, from_col, HEAD_DIM);
  store_part(dV_part, dV, first_row, p.N_k, first_col, from_col, d_v);
}
