// Sums of dQ^T, and how they become dQ. Introduced by: backward stage 31, transposed_dq.
//
// Its tiles of dQ_accum have dims as rows and the tile's queries as columns, and lie as registers do: of each
// fragment of 16 dims x 8 queries, four numbers of a lane are next to each other, dims lane / 4 and
// lane / 4 + 8 of queries 2 (lane % 4) and the next one. So 16 dims of all queries of the tile are one piece
// of HBM. d has to be a multiple of 16.
#pragma once
#include "gradients.cuh"
#include "hopper.cuh"

// Others may have this warp's room for sums once they have met it at the barrier: its own have left.
__device__ __forceinline__ void arrive_when_sums_left(int barrier, int threads) {
  if (threadIdx.x % 32 == 0) bulk_wait_read<0>();
  __syncwarp();
  named_barrier_arrive(barrier, threads);
}

// dQ = scale * dQ_accum^T, the sum of its copies. A block has a tile, a thread 16 dims of two queries.
__global__ void __launch_bounds__(256) convert_dQT_kernel(BwdParams p, const float* dQ_accum, int dQ_copies) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), bh = blockIdx.x / Tr, first_row = blockIdx.x % Tr * BLOCK_R;
  const int fragment = threadIdx.x / 16, dim = threadIdx.x / 4 % 4 * 16, lane = threadIdx.x % 4;
  const int row = first_row + 8 * fragment + 2 * lane, N = padded(p.N_q);
  if (row >= p.N_q || row >= first_row + BLOCK_R || dim >= HEAD_DIM) return;
  wait_for_previous_kernel();               // it may have started early
  start_next_kernel();                      // now: reduce_heads_kernel needs no more than that one's sums
  float sum[4][8] = {};                     // of either query, and from dim + 8 on
  for (int copy = 0; copy < dQ_copies; copy++) {
    const float* from = dQ_accum + ((copy * (int64_t)p.B * p.H + bh) * N + first_row) * HEAD_DIM +
                        dim * BLOCK_R + 128 * fragment + 4 * lane;
    for (int e = 0; e < 8; e++) {
      const float4 x = *reinterpret_cast<const float4*>(from + 16 * e);
      sum[0][e] += x.x;
      sum[1][e] += x.y;
      sum[2][e] += x.z;
      sum[3][e] += x.w;
    }
  }
  for (int n = 0; n < 4; n++) {
    if (row + n % 2 < p.N_q)
      store8(p.dQ.head(bh / p.H, bh % p.H), (row + n % 2) * p.dQ.stride_n + dim + n / 2 * 8, sum[n], p.scale);
  }
}
