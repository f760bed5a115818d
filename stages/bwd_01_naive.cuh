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
// The forward pass is S = scale * Q K^T, P = softmax(S), O = P V. Given dO, the gradient of a loss with
// respect to O, the chain rule leads back through these three steps (FlashAttention-1, appendix B.2):
//
//   O = P V            each O_ik is the sum of P_ij V_jk:     dV = P^T dO          (1)
//                                                             dP = dO V^T          (2)
//   P = softmax(S)     the derivative of P_ij' by S_ij is P_ij' (1 if j = j', else 0) - P_ij P_ij', so
//                      dS_ij = P_ij (dP_ij - D_i), where D_i = sum_j' P_ij' dP_ij' is one number for a row
//   S = scale Q K^T                                           dQ = scale * dS K    (3)
//                                                             dK = scale * dS^T Q  (4)
//
// These are four products. The fifth is Q K^T itself, because the forward pass did not keep S. The forward
// pass has two, so the backward pass takes 2.5 times its FLOPs.
//
//   scores_kernel    S = scale * Q K^T, and dP = dO V^T      one thread per element
//   softmax_kernel   P = softmax(S), dS = P (dP - D)         one thread per row; P replaces S, dS replaces dP
//   dQ_kernel        dQ = scale * dS K                       one thread per element of dQ
//   dKV_kernel       dK = scale * dS^T Q, dV = P^T dO        one thread per element of dK and dV
//
// If several query heads read a key head (GQA), its gradient is the sum over them: the loop over `h` in
// dKV_kernel. If the loss depends on L as well, dS has another term: the derivative of L_i by S_ij is P_ij,
// so P_ij dL_i is added to dS_ij. That is the same as subtracting dL_i from D_i.
//
// HBM traffic without caches (hbm, above; exact for Bc = 32): each row of Q and dO is read once per warp,
// that is Tc times. All of K and V are read with each row of Q, then all of K again with each row of dS, and
// all of Q and dO with each column of P and dS. Of S, P, dP and dS, 10 numbers are read or written for each
// pair of a query and a key, and 3 Td more, once per warp, for dQ, dK and dV.
//
// Bound by the L1 cache, like the forward stage of this name: scores_kernel takes 73 % of the time, and keeps
// L1 busy 99 % of its own (H200, B4 H12 N1024 d64 causal), because one load touches 32 rows of K or V. Memory
// is the other limit: two N x N matrices for each head take 8 * B * H * N_q * N_k bytes, 6 GiB at B4 H12
// N4096.
#pragma once

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;   // here just the shape of a block: Br x Bc threads

// S and dP (B, H, N_q, N_k). One block per tile, Tr * Tc for each of B * H heads.
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
    dp += dO[row * p.dO.stride_n + k] * V[col * p.V.stride_n + k];         // (2)
  }
  const int64_t index = ((int64_t)bh * p.N_q + row) * p.N_k + col;
  S[index] = visible ? p.scale * s : -INFINITY;
  dP[index] = dp;
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
  float D_row = p.dL && l > 0.f ? -p.dL[row] : 0.f;   // no key seen: P is 0, but dL may be infinite
  for (int col = 0; col < p.N_k; col++) {
    const float P = l == 0.f ? 0.f : expf(S_row[col] - shift) / l;
    S_row[col] = P;
    D_row += P * dP_row[col];
  }
  for (int col = 0; col < p.N_k; col++) dP_row[col] = S_row[col] * (dP_row[col] - D_row);
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
  for (int col = 0; col < p.N_k; col++) dq += dS_row[col] * K[col * p.K.stride_n + k];        // (3)
  dQ[row * p.dQ.stride_n + k] = p.scale * dq;
}

// dK and dV (B, H_kv, N_k, d). A thread sums over the query heads that read its key head, and their rows.
__global__ void dKV_kernel(BwdParams p, const float* P, const float* dS) {
  const int key_tiles = ceil_div(p.N_k, Br), Td = ceil_div(d, Bc);
  const int c = blockIdx.x % Td, j = blockIdx.x / Td % key_tiles, bh = blockIdx.x / Td / key_tiles;
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
      const int64_t index = (first_row + row) * p.N_k + col;
      dk += dS[index] * Q[row * p.Q.stride_n + k];                                         // (4)
      dv += P[index] * dO[row * p.dO.stride_n + k];                                        // (1)
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
