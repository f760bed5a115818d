// dK and dV from the parts that the query heads of a key head have made. Introduced by: backward stage 13,
// split_heads.
#pragma once
#include "dropout.cuh"
#include "gradients.cuh"
#include "launch.cuh"

// dKV_parts: dK, then dV, each (B, H, N_k, d). Sums over the query heads of a key head, in their order. It
// may start early, beside convert_dQ_kernel, which has waited for the kernel that makes the parts. As
// convert_dQ_kernel may still run, it is waited for at the end: who comes next finds all of it done. The
// first half of the blocks makes dK, the others dV.
__global__ void __launch_bounds__(256) reduce_heads_kernel(BwdParams p, const float* dKV_parts) {
  const int half = gridDim.x / 2, blocks = ceil_div(all_rows_of_K(p), block_rows);
  const int bh = blockIdx.x % half / blocks, b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  const int row = blockIdx.x % blocks * block_rows + threadIdx.x / row_threads;
  const int col = threadIdx.x % row_threads * 8;
  if (row >= all_rows_of_K(p)) return;
  auto add_up = [&](const float* parts, const Tensor& out, float scale, int columns) {
    if (col >= columns) return;
    float sum[8] = {};
    #pragma unroll 4                        // their loads overlap
    for (int h = 0; h < group; h++) {
      const float* from = parts + (((int64_t)bh * group + h) * all_rows_of_K(p) + row) * HEAD_DIM + col;
      for (int e = 0; e < 8; e += 4) {
        const float4 x = *reinterpret_cast<const float4*>(from + e);
        sum[e] += x.x;
        sum[e + 1] += x.y;
        sum[e + 2] += x.z;
        sum[e + 3] += x.w;
      }
    }
    store8(out.head(b, h_kv), row * out.stride_n + col, sum, scale);
  };
  if (blockIdx.x / half == 0) add_up(dKV_parts, p.dK, p.scale, HEAD_DIM);
  else add_up(dKV_parts + (int64_t)p.B * p.H * all_rows_of_K(p) * HEAD_DIM, p.dV, dropout_scale(p), d_v);
  wait_for_previous_kernel();
}

// Launches it, for parts of `heads` heads in each batch element; none if dK and dV have as many
inline void reduce_heads(BwdParams p, const float* dKV_parts, int heads, cudaStream_t stream,
                         bool early = true) {
  p.H = heads;
  const int blocks = 2 * p.B * p.H_kv * ceil_div(all_rows_of_K(p), block_rows);
  if (heads > p.H_kv)
    cudaLaunchKernelEx(EarlyLaunch(blocks, 256, 0, stream, early), reduce_heads_kernel, p, dKV_parts);
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
