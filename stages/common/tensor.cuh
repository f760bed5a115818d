// A tensor of shape (B, heads, N, d or d_v) as a kernel sees it. Introduced by: forward stage 1, naive.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// What few calls ask for: the JIT defines it for them. (So plain nvcc needs no flags for it.)
#ifndef HEAD_DIM_V
#define HEAD_DIM_V HEAD_DIM
#endif
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef SINK
#define SINK 0
#endif
#ifndef KV_CACHE             // K and V are a cache: how many keys a batch element has, the GPU alone knows
#define KV_CACHE 0
#endif
#ifndef PAGE_SIZE            // above 0: and it lies in pages of so many rows
#define PAGE_SIZE 0
#endif

struct Tensor {
  ELEMENT* data;
  int64_t stride_b, stride_h, stride_n;   // in elements; the last dimension is contiguous

  // The (N, d) matrix of one head; its row n starts at n * stride_n. In 64 bits: B * H * N * d can pass 2^31.
  __device__ ELEMENT* head(int b, int h) const { return data + b * stride_b + h * stride_h; }
};

__host__ __device__ inline int ceil_div(int64_t a, int b) { return int((a + b - 1) / b); }
