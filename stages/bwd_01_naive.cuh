// Backward stage 1: naive
// idea:    the five matrix products, plainly; S, P, dP and dS, N x N, in HBM
// types:   fp32
// needs:   any GPU
// tiles:   Br=16 Bc=32
// limits:  Br * Bc <= 1024
// shared:  0
// workspace: P, dS
// hbm:     4 * B * (H * N_q * (d + 2 * d * Tc + N_k * (5 * d + 3 * Td + 10)) + 2 * d * H_kv * N_k)
//
// The forward pass is S = scale * Q K^T, P = softmax(S), O = P V. Given dO, the gradient of a loss by O, the
// chain rule leads back through these three steps (FlashAttention-1, appendix B.2):
//
//   O = P V            each O_ik is the sum of P_ij V_jk:     dV = P^T dO          (1)
//                                                             dP = dO V^T          (2)
//   P = softmax(S)     P_ij' changes with S_ij by P_ij' (1 if j = j', else 0) - P_ij P_ij', so
//                      dS_ij = P_ij (dP_ij - D_i), where D_i = sum_j' P_ij' dP_ij' is one number for a row
//   S = scale Q K^T                                           dQ = scale * dS K    (3)
//                                                             dK = scale * dS^T Q  (4)
//
// Four products, and the fifth is Q K^T itself: the forward pass did not keep S. 2.5 times the FLOPs of the
// forward pass with its two.
//
//   scores_kernel    S = scale * Q K^T, and dP = dO V^T      one thread per element
//   softmax_kernel   P = softmax(S), dS = P (dP - D)         one thread per row; P replaces S, dS replaces dP
//   dQ_kernel        dQ = scale * dS K                       one thread per element of dQ
//   dKV_kernel       dK = scale * dS^T Q, dV = P^T dO        one thread per element of dK and dV
//
// A key head that several query heads read (GQA) gets the sum of what comes from each: the loop over `h` in
// dKV_kernel. If the loss depends on L, too: L_i changes with S_ij by P_ij, so dS_ij gets P_ij dL_i more:
// dL_i is subtracted from D_i.
//
// HBM traffic without caches (hbm, above; exact for Bc = 32): for each row of Q and dO, their d numbers once
// per warp, that is Tc times, and all of K and V; of S, P, dP and dS, N x N numbers each, 10 are read or
// written for each pair of a query and a key, and 3 Td for dQ, dK and dV, once a warp; with them all of K, Q
// and dO.
//
// Bound by the L1 cache, like the forward stage of this name: it is busy 99 % of the time in scores_kernel,
// which takes three quarters of the whole (H200, B4 H12 N1024 d64 causal), as one load touches 32 rows of K
// or V. And the memory is two N x N
// matrices for each head: 8 bytes * B * H * N_q * N_k, 6 GiB at B4 H12 N4096.
#pragma once

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;   // here only the shape of a block: Br rows of threads by Bc

// S and dP (B, H, N_q, N_k). Blocks: Tr * Tc tiles, for each of B * H heads.
__global__ void scores_kernel(BwdParams p, float* S, float* dP) {
  const int Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc);
  const int j = blockIdx.x % Tc, i = blockIdx.x / Tc % Tr, bh = blockIdx.x / Tc / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const float* Q = p.Q.head(b, h);
  const float* K = p.K.head(b, h_kv);
  const float* V = p.V.head(b, h_kv);
  const float* dO = p.dO.head(b, h);

  const int row = i * Br + threadIdx.y, col = j * Bc + threadIdx.x;
  if (row >= p.N_q || col >= p.N_k) return;
  const bool visible = !CAUSAL || col <= row + p.diagonal;

  float s = 0.f, dp = 0.f;
  for (int k = 0; k < d; k++) {
    s += Q[row * p.Q.stride_n + k] * K[col * p.K.stride_n + k];
    dp += dO[row * p.dO.stride_n + k] * V[col * p.V.stride_n + k];           // 2
  }
  const int64_t at = ((int64_t)bh * p.N_q + row) * p.N_k + col;
  S[at] = visible ? p.scale * s : -INFINITY;
  dP[at] = dp;
}

// P = exp(S - m) / l as in the forward pass, then D = rowsum(P * dP) and dS = P * (dP - D), row by row
__global__ void softmax_kernel(BwdParams p, float* S, float* dP) {
  const int64_t row = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;   // of B * H * N_q
  if (row >= (int64_t)p.B * p.H * p.N_q) return;
  float* S_row = S + row * p.N_k;
  float* dP_row = dP + row * p.N_k;

  float m = -INFINITY, l = 0.f;
  for (int col = 0; col < p.N_k; col++) m = fmaxf(m, S_row[col]);
  const float shift = m == -INFINITY ? 0.f : m;   // a row that sees no key: -inf - -inf would be NaN
  for (int col = 0; col < p.N_k; col++) l += expf(S_row[col] - shift);

  // --- D, P and dS of the row
  float D = p.dL && l > 0.f ? -p.dL[row] : 0.f;   // no key seen: P is 0, but dL may be infinite
  for (int col = 0; col < p.N_k; col++) {
    const float P = l == 0.f ? 0.f : expf(S_row[col] - shift) / l;
    S_row[col] = P;
    D += P * dP_row[col];
  }
  for (int col = 0; col < p.N_k; col++) dP_row[col] = S_row[col] * (dP_row[col] - D);
  // ---
}

// dQ (B, H, N_q, d). The lanes of a warp hold neighbouring columns of K and dQ.
__global__ void dQ_kernel(BwdParams p, const float* dS) {
  const int Tr = ceil_div(p.N_q, Br), Td = ceil_div(d, Bc);
  const int c = blockIdx.x % Td, i = blockIdx.x / Td % Tr, bh = blockIdx.x / Td / Tr;
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const float* K = p.K.head(b, h_kv);
  float* dQ = p.dQ.head(b, h);

  const int row = i * Br + threadIdx.y, k = c * Bc + threadIdx.x;
  if (row >= p.N_q || k >= d) return;
  const float* dS_row = dS + ((int64_t)bh * p.N_q + row) * p.N_k;

  float dq = 0.f;
  for (int col = 0; col < p.N_k; col++) dq += dS_row[col] * K[col * p.K.stride_n + k];          // 3
  dQ[row * p.dQ.stride_n + k] = p.scale * dq;
}

// dK and dV (B, H_kv, N_k, d). A thread sums over the query heads that read its key head, and their rows.
__global__ void dKV_kernel(BwdParams p, const float* P, const float* dS) {
  const int rows_of_blocks = ceil_div(p.N_k, Br), Td = ceil_div(d, Bc);
  const int c = blockIdx.x % Td, j = blockIdx.x / Td % rows_of_blocks, bh = blockIdx.x / Td / rows_of_blocks;
  const int b = bh / p.H_kv, h_kv = bh % p.H_kv, group = p.H / p.H_kv;
  float* dK = p.dK.head(b, h_kv);
  float* dV = p.dV.head(b, h_kv);

  const int col = j * Br + threadIdx.y, k = c * Bc + threadIdx.x;
  if (col >= p.N_k || k >= d) return;

  // --- dK and dV of one key
  float dk = 0.f, dv = 0.f;
  for (int h = h_kv * group; h < (h_kv + 1) * group; h++) {
    const float* Q = p.Q.head(b, h);
    const float* dO = p.dO.head(b, h);
    const int64_t first_row = ((int64_t)b * p.H + h) * p.N_q;
    for (int row = 0; row < p.N_q; row++) {
      const int64_t at = (first_row + row) * p.N_k + col;
      dk += dS[at] * Q[row * p.Q.stride_n + k];                                              // 4
      dv += P[at] * dO[row * p.dO.stride_n + k];                                             // 1
    }
  }
  dK[col * p.dK.stride_n + k] = p.scale * dk;
  dV[col * p.dV.stride_n + k] = dv;
  // ---
}

size_t workspace_bytes(const BwdParams& p) {   // S, which becomes P, and dP, which becomes dS
  return 2 * sizeof(float) * p.B * p.H * p.N_q * p.N_k;
}

cudaError_t launch(const BwdParams& p, cudaStream_t stream) {
  float* S = static_cast<float*>(p.workspace);
  float* dP = S + (size_t)p.B * p.H * p.N_q * p.N_k;
  const int heads = p.B * p.H, Tr = ceil_div(p.N_q, Br), Tc = ceil_div(p.N_k, Bc), Td = ceil_div(d, Bc);
  const dim3 threads(Bc, Br);
  scores_kernel<<<heads * Tr * Tc, threads, 0, stream>>>(p, S, dP);
  softmax_kernel<<<ceil_div((int64_t)heads * p.N_q, 128), 128, 0, stream>>>(p, S, dP);
  dQ_kernel<<<heads * Tr * Td, threads, 0, stream>>>(p, dP);
  dKV_kernel<<<p.B * p.H_kv * ceil_div(p.N_k, Br) * Td, threads, 0, stream>>>(p, S, dP);
  return cudaGetLastError();
}
