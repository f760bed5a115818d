// D = rowsum(dO * O). Introduced by: backward stage 2, recompute, whose header says why.
#pragma once
#include "warp.cuh"

constexpr int D_warps = 8;                // per block: one per row

// With clear_dQ the rows of dQ are set to 0, for kernels that add to them. (cudaMemset would not do, because
// dQ may have gaps between its rows.) Line numbers are those of FlashAttention-2's Algorithm 2.
__global__ void __launch_bounds__(32 * D_warps) D_kernel(BwdParams p, float* D, bool clear_dQ) {
  const int64_t index = (int64_t)blockIdx.x * D_warps + threadIdx.x / 32; // of B * H * N_q
  const int lane = threadIdx.x % 32;
  if (index >= (int64_t)p.B * p.H * p.N_q) return;   // whole warps: the shuffles of the others stay complete
  const int row = index % p.N_q, h = index / p.N_q % p.H, b = index / p.N_q / p.H;
  const ELEMENT* O = p.O.head(b, h) + row * p.O.stride_n;
  const ELEMENT* dO = p.dO.head(b, h) + row * p.dO.stride_n;
  ELEMENT* dQ = p.dQ.head(b, h) + row * p.dQ.stride_n;

  float sum = 0.f;
  for (int k = lane; k < HEAD_DIM; k += 32) {
    if (k < d_v) sum += float(dO[k]) * float(O[k]);                      // line 4
    if (clear_dQ) dQ[k] = 0.f;                                           // line 3
  }
  sum = warp_sum(sum);
  if (lane > 0) return;
  if (p.dL) sum -= p.dL[index];           // the derivative of L_i by S_ij is P_ij, too
  if (SINK) p.dsink[index] = -expf(p.sink[h] - p.L[index]) * sum;        // as dS = P (dP - D), with dP = 0
  D[index] = p.L[index] == -INFINITY ? 0.f : sum;   // no key seen: P is 0, but dL may be infinite
}

void launch_D_kernel(const BwdParams& p, float* D, bool clear_dQ, cudaStream_t stream) {
  const int64_t all_rows = (int64_t)p.B * p.H * p.N_q;
  D_kernel<<<ceil_div(all_rows, D_warps), 32 * D_warps, 0, stream>>>(p, D, clear_dQ);
}
