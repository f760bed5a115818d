// dK and dV from the parts that the query heads of a key head have made. Introduced by: backward stage 13,
// split_heads.
#pragma once
#include "dropout.cuh"
#include "gradients.cuh"
#include "launch.cuh"

// Parts of dK, `all` of them, then those of dV: each (`rows`, d), of so many rows of a head
struct Parts {
  float* parts;
  int all, rows;
  int2* of_tile = nullptr;                  // for each tile of so many rows the first and the last one; or
};                                          // all tiles have as many, in the order of heads

// Adds them up, in their order. It may start early, beside convert_dQ_kernel, which has waited for the kernel
// that makes the parts. As convert_dQ_kernel may still run, it is waited for at the end: who comes next finds
// all of it done. The first half of the blocks makes dK, the others dV.
__global__ void __launch_bounds__(256) reduce_heads_kernel(BwdParams p, Parts parts) {
  const int N = all_rows_of_K(p), half = gridDim.x / 2, blocks = ceil_div(N, block_rows);
  const int bh = blockIdx.x % half / blocks, is_dV = blockIdx.x / half;
  const int row = blockIdx.x % blocks * block_rows + threadIdx.x / row_threads;
  const int col = threadIdx.x % row_threads * 8;
  if (row >= N) return;
  if (col < (is_dV ? d_v : HEAD_DIM)) {
    const int tiles = ceil_div(N, parts.rows), tile = bh * tiles + row / parts.rows;
    const int each = parts.all / (p.B * p.H_kv * tiles);
    const int2 its = parts.of_tile ? parts.of_tile[tile] : make_int2(tile * each, (tile + 1) * each - 1);
    const int64_t numbers = (int64_t)parts.rows * HEAD_DIM, at = row % parts.rows * (int64_t)HEAD_DIM + col;
    const float* first = parts.parts + is_dV * parts.all * numbers + at;           // numbers: of a part
    float sum[8] = {};
    #pragma unroll 4                        // their loads overlap
    for (int n = its.x; n <= its.y; n++) {
      for (int e = 0; e < 8; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(first + n * numbers + e);
        sum[e] += x.x;
        sum[e + 1] += x.y;
        sum[e + 2] += x.z;
        sum[e + 3] += x.w;
      }
    }
    const Tensor out = is_dV ? p.dV : p.dK;
    store8(out.head(bh / p.H_kv, bh % p.H_kv), row * out.stride_n + col, sum,
           is_dV ? dropout_scale(p) : p.scale);
  }
  wait_for_previous_kernel();
}

inline void reduce_parts(const BwdParams& p, const Parts& parts, cudaStream_t stream, bool early = true) {
  const int blocks = 2 * p.B * p.H_kv * ceil_div(all_rows_of_K(p), block_rows);
  cudaLaunchKernelEx(EarlyLaunch(blocks, 256, 0, stream, early), reduce_heads_kernel, p, parts);
}

// Of `heads` heads in each batch element a part each; nothing to do if dK and dV have as many
inline void reduce_heads(const BwdParams& p, float* dKV_parts, int heads, cudaStream_t stream,
                         bool early = true) {
  if (heads > p.H_kv) reduce_parts(p, {dKV_parts, p.B * heads, all_rows_of_K(p)}, stream, early);
}

// Store this warp's 16 rows of an accumulator to a part of `rows` rows: rows from first_row on. The
// accumulator's columns are first_col and so on; those from from_col to end_col - 1 are stored.
template <int n_tiles>
__device__ __forceinline__ void store_part(float* part, const float (&acc)[n_tiles][4], int first_row,
                                           int rows, int first_col, int from_col, int end_col) {
  const int row = first_row + threadIdx.x % 32 / 4, lane_col = first_col + threadIdx.x % 4 * 2;
  #pragma unroll
  for (int n = 0; n < n_tiles; n++) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int k = lane_col + 8 * n;
      if (row + 8 * r < rows && k >= from_col && k < end_col)
        *reinterpret_cast<float2*>(part + int64_t(row + 8 * r) * HEAD_DIM + k) =
            make_float2(acc[n][2 * r], acc[n][2 * r + 1]);
    }
  }
}
