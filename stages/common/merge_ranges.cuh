// Keys split into ranges: what each has of a row, merged. Introduced by: forward stage 18, split_kv.
#pragma once
#include "launch.cuh"
#include "softmax.cuh"
#include "tensor.cuh"
#include "warp.cuh"

// What a range of keys has of a row (of all B * H * N_q): L, and four floats on O
__device__ __forceinline__ float* part(const FwdParams& p, int split, int64_t row) {
  return static_cast<float*>(p.workspace) + ((int64_t)split * p.B * p.H * p.N_q + row) * (4 + d_v);
}

inline size_t bytes_of_parts(const FwdParams& p) {
  return p.splits == 1 ? 0 : sizeof(float) * p.splits * p.B * p.H * p.N_q * (4 + d_v);
}

struct alignas(16) Four { float x[4]; };

// A row's threads: one for four columns, in whole warps; how many may share these
constexpr int merge_threads = (d_v + 127) / 128 * 32, most_shares = 512 / merge_threads;

// Of a row, over the ranges s: L = log(sum_s e^L_s), O = sum_s e^(L_s - L) O_s. A thread has four columns. If
// there are many ranges, `shares` neighbours have the same columns, and divide the ranges. It is the online
// softmax, once more: so O_s need not wait for the greatest of all L_s.
__global__ void __launch_bounds__(512, 1) merge_kernel(FwdParams p) {
  const int row = blockIdx.x * blockDim.y + threadIdx.y, bh = row / p.N_q, query = row % p.N_q;
  if (row >= p.B * p.H * p.N_q) return;
  const int shares = blockDim.x / merge_threads, share = threadIdx.x % shares, col = threadIdx.x / shares * 4;
  wait_for_previous_kernel();
  start_next_kernel();                      // now: its blocks find all multiprocessors free
  float m = -INFINITY, l = 0.f, O[4] = {};
  // --- the ranges, merged
  auto weight = [](float L_s, float m) { return m == -INFINITY ? 0.f : fast_exp2(LOG2_E * (L_s - m)); };
  for (int first = col < d_v ? share : p.splits; first < p.splits; first += 4 * shares) {
    float L[4], m_new = m;
    Four O_s[4];
    #pragma unroll                          // four: their loads overlap, also those of the last range
    for (int n = 0; n < 4; n++) {
      const int s = first + n * shares;
      const float* L_s = part(p, min(s, p.splits - 1), row);
      L[n] = s < p.splits ? *L_s : -INFINITY;
      O_s[n] = *reinterpret_cast<const Four*>(L_s + 4 + col);
      m_new = fmaxf(m_new, L[n]);
    }
    const float alpha = weight(m, m_new);
    m = m_new;
    l *= alpha;
    for (int c = 0; c < 4; c++) O[c] *= alpha;
    #pragma unroll
    for (int n = 0; n < 4; n++) {
      const float factor = weight(L[n], m);
      l += factor;
      for (int c = 0; c < 4; c++) O[c] += factor * O_s[n].x[c];
    }
  }
  const float m_row = warp_max(m, shares), alpha = weight(m, m_row);
  l = warp_sum(alpha * l, shares);
  #pragma unroll
  for (int c = 0; c < 4; c++) {
    O[c] = warp_sum(alpha * O[c], shares);
    if (share == 0 && col < d_v)
      p.O.head(bh / p.H, bh % p.H)[query * p.O.stride_n + col + c] = ELEMENT(l == 0.f ? 0.f : O[c] / l);
  }
  if (threadIdx.x == 0) p.L[row] = m_row + logf(l);
  // ---
}

inline void merge_ranges(const FwdParams& p, cudaStream_t stream) {
  int shares = 1;
  while (4 * shares < p.splits && shares < most_shares) shares *= 2;
  const dim3 row_threads(shares * merge_threads, max(256 / (shares * merge_threads), 1));    // times rows
  const EarlyLaunch merge(ceil_div(p.B * p.H * p.N_q, row_threads.y), row_threads, 0, stream);
  cudaLaunchKernelEx(merge, merge_kernel, p);
}
