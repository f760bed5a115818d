// Forward stage 1: naive
// idea:    three kernels; S and P, N x N, in HBM
// types:   fp32
// needs:   any GPU
// tiles:   Br=16 Bc=32
// limits:  Br * Bc <= 1024
// shared:  0
// workspace: S, P
// hbm:     4 * B * H * N_q * (Tc * d + N_k * (2 * d * min(Bc, 32) // 32 + Td + 5) + d + 1)
//
// Attention as the formula has it: one kernel for each of its three steps (Algorithm 0 of the
// FlashAttention-1 paper).
//
//   scores_kernel    S = scale * Q K^T     one thread per element of S
//   softmax_kernel   P = softmax(S)        one thread per row; P overwrites S
//   output_kernel    O = P V               one thread per element of O
//
// Every intermediate result goes to memory and comes back: S is written, read three times and overwritten by
// P, and P is read again. No kernel reuses anything on purpose. What reuse there is, the caches find.
//
// HBM traffic without caches (hbm, above): each row of Q is read once per warp, that is Tc times. All of K
// and V are read for each row of Q, or for every second row if Bc is 16, because a warp then has two rows. S
// is written, read three times and overwritten. P is read once per warp, Td = ceil(d / Bc) times. O and L are
// written.
//
// Bound by the L1 cache: scores_kernel takes 82 % of the time, and keeps L1 busy 99 % of its own (H200, B4
// H12 N1024 d64 causal). The lanes of a warp hold neighbouring keys, so one load of K[k] touches 32 rows of
// K. That is 32 sectors of 32 bytes, one after the other, for 32 numbers; and each number serves a single
// multiplication. softmax_kernel has the same fault, because its lanes hold neighbouring rows of S. Memory is
// the other limit: S takes 4 * B * H * N_q * N_k bytes, 3 GiB at B4 H12 N4096.
#pragma once

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;   // here just the shape of a block: Br x Bc threads

// S (B, H, N_q, N_k). One block per tile of S, Tr * Tc for each of B * H heads. The grid has one dimension,
// because the other two end at 65,535 blocks.
__global__ void scores_kernel(FwdParams p, float* S) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, bh = blockIdx.x / Tc / Tr;
  // --- the score of one query and one key
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const float* Q = p.Q.head(b, h);
  const float* K = p.K.head(b, h_kv);

  const int row = i * Br + threadIdx.y, col = j * Bc + threadIdx.x;
  if (row >= p.N_q || col >= p.N_k) return;
  const bool visible = !CAUSAL || col <= row + p.diagonal;

  float s = 0.f;
  for (int k = 0; k < d; k++) s += Q[row * p.Q.stride_n + k] * K[col * p.K.stride_n + k];
  S[((int64_t)bh * p.N_q + row) * p.N_k + col] = visible ? p.scale * s : -INFINITY;
  // ---
}

// P = exp(S - m) / l, row by row. exp overflows above 88, so the maximum m is subtracted; it cancels in the
// quotient.
__global__ void softmax_kernel(FwdParams p, float* S) {
  const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;   // of B * H * N_q
  if (row >= (int64_t)p.B * p.H * p.N_q) return;
  float* S_row = S + row * p.N_k;

  // --- m, l, P and L of the row
  float m = -INFINITY, l = 0.f;
  for (int col = 0; col < p.N_k; col++) m = fmaxf(m, S_row[col]);
  const float shift = m == -INFINITY ? 0.f : m;   // a row that sees no key: -inf - -inf would be NaN
  for (int col = 0; col < p.N_k; col++) l += expf(S_row[col] - shift);

  for (int col = 0; col < p.N_k; col++) S_row[col] = l == 0.f ? 0.f : expf(S_row[col] - shift) / l;
  p.L[row] = l == 0.f ? -INFINITY : m + logf(l);
  // ---
}

// O = P V. The lanes of a warp hold neighbouring columns of V and O, so a load of V is one cache line.
__global__ void output_kernel(FwdParams p, const float* P) {
  const int Tr = ceil_div(p.N_q, Br), Td = ceil_div(d, Bc);
  const int c = blockIdx.x % Td, i = blockIdx.x / Td % Tr, bh = blockIdx.x / Td / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const float* V = p.V.head(b, h_kv);
  float* O = p.O.head(b, h);

  const int row = i * Br + threadIdx.y, k = c * Bc + threadIdx.x;
  if (row >= p.N_q || k >= d) return;
  const float* P_row = P + ((int64_t)bh * p.N_q + row) * p.N_k;

  float o = 0.f;
  for (int col = 0; col < p.N_k; col++) o += P_row[col] * V[col * p.V.stride_n + k];
  O[row * p.O.stride_n + k] = o;
}

size_t workspace_bytes(const FwdParams& p) { return sizeof(float) * p.B * p.H * p.N_q * p.N_k; }   // S, P

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  float* S = static_cast<float*>(p.workspace);
  const int heads = p.B * p.H, Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc), Td = ceil_div(d, Bc);
  const dim3 threads(Bc, Br);
  scores_kernel<<<heads * Tr * Tc, threads, 0, stream>>>(p, S);
  softmax_kernel<<<ceil_div((int64_t)heads * p.N_q, 128), 128, 0, stream>>>(p, S);
  output_kernel<<<heads * Tr * Td, threads, 0, stream>>>(p, S);
  return cudaGetLastError();
}
