// Query heads that share a key head, packed into rows of one tile. Introduced by: forward stage 18, split_kv.
#pragma once
#include "merge_ranges.cuh"
#include "mma.cuh"

// Of a key head, row r is query r / G of head r % G: G neighbours are its heads, of one query.
struct PackedRows {
  int b, h_kv, G, rows;      // G: query heads of a key head; rows: of all of them

  __device__ PackedRows(const FwdParams& p, int bh)      // the bh-th key head
      : b(bh / p.H_kv), h_kv(bh % p.H_kv), G(p.H / p.H_kv), rows(p.N_q * G) {}

  __device__ __forceinline__ int head_of(int row) const { return h_kv * G + row % G; }
  __device__ __forceinline__ ELEMENT* at(const Tensor& x, int row) const {
    return x.head(b, head_of(row)) + row / G * x.stride_n;
  }
  // Its number among all B * H * N_q rows
  __device__ __forceinline__ int64_t of_all(const FwdParams& p, int row) const {
    return ((int64_t)b * p.H + head_of(row)) * p.N_q + row / G;
  }

  // Line 5 for the row that is `lane / 4` below `row`. The sink belongs to the first range.
  __device__ __forceinline__ void start(const FwdParams& p, int split, float& m, float& l, int row) const {
    const int lane = threadIdx.x % 32;
    m = SINK && split == 0 ? LOG2_E * p.sink[head_of(row + lane / 4)] : -INFINITY;
    l = SINK && split == 0 && lane % 4 == 0 ? 1.f : 0.f;
  }

  // Lines 12 to 15 of Algorithm 1 for a warp's 16 rows, from packed row `first` on. m and l are those of this
  // lane's two rows; l is the sum over its columns. If there are several ranges of keys, it is a part.
  template <int n_tiles>
  __device__ __forceinline__ void store(const FwdParams& p, int split, const float (&O)[n_tiles][4],
                                        const float* m, const float* l, int first) const {
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = first + lane / 4 + 8 * r;
      const float sum = quad_sum(l[r]);
      const float inv_l = sum == 0.f ? 0.f : __fdividef(1.f, sum);       // 1 or more: the fast one will do
      if (row >= rows) continue;
      const int64_t number = of_all(p, row);
      float* L = p.splits == 1 ? p.L + number : part(p, split, number);
      if (lane % 4 == 0) *L = sum == 0.f ? -INFINITY : LN_2 * (m[r] + log2f(sum));
      ELEMENT* to = at(p.O, row);
      #pragma unroll
      for (int n = 0; n < n_tiles; n++) {
        const int col = 8 * n + lane % 4 * 2;
        const float2 x = {inv_l * O[n][2 * r], inv_l * O[n][2 * r + 1]};
        if (col >= d_v) break;
        if (p.splits > 1) *reinterpret_cast<float2*>(L + 4 + col) = x;
        else *reinterpret_cast<uint32_t*>(to + col) = pack<ELEMENT>(x.x, x.y);
      }
    }
  }
};
