// Forward stage 10: wmma
// idea:    tensor cores by the portable API; S, P and O through shared memory
// types:   fp16, bf16
// needs:   sm_70; bf16: sm_80
// after:   flash2
// tiles:   Br=64 Bc=64; d > 64: Br=64 Bc=32
// limits:  Br % 16 == 0; Br <= 128; Bc % 16 == 0; Bc <= 128
// shared:  (6 * Br + 4 * Bc) * ((d + 15) // 16 * 16 + 8) + 4 * Br * (Bc + 8)
// hbm:     4 * B * H * (Tr * N_k * d + N_q * (d + 1))
// predicted: 3x at d=64 and d=128: tensor cores multiply; but S, P and O go through shared memory
// measured: 5.75x at d=64 causal, 5.48x full, 4.65x at d=128 causal, 5.35x full (H200, bf16 beside flash2 in
//          fp32, N=4096; make readme)
//
// The algorithm is flash2's, FlashAttention-2's Algorithm 1. What changes is who multiplies: tensor cores,
// which compute C += A B for whole matrices, here of 16 x 16, in a few instructions. A and B have 16 bits a
// number, C is float. So Q, K, V and O are now of 16 bits (ELEMENT: __half or __nv_bfloat16), half the bytes.
// S, m, l and the sums in O stay float. P is rounded to 16 bits, as it is a factor of the second product; l
// is the sum of what it was before.
//
// The API is nvcuda::wmma (CUDA C++ Programming Guide, "Warp Matrix Functions"), the same on all GPUs that
// have tensor cores (for bf16 these must be of sm_80 at least). A `fragment` is a matrix spread over the
// registers of a warp, whose 32 lanes load it, multiply and store together. A warp has 16 rows of the tile of
// Q:
//
//       S_ij = Q_i K_j^T                              O_i += P~_ij V_j
//       for each 16 columns of Q_i:                   for each 16 columns of O_i:
//
//                   K_j^T                                                    V_j
//                   +---+---+---+---+                                        +---+
//                   | B | B | B | B |                                        | B |
//                   +---+---+---+---+                                        | B |
//       Q_i         S_ij                              P~_ij                  | B |
//       +---+       +---+---+---+---+                 +---+---+---+---+      | B |
//       | A |       | C | C | C | C |                 | A | A | A | A |      +---+
//       +---+       +---+---+---+---+                 +---+---+---+---+      | C |  O_i
//                                                                            +---+
//
// Which lane holds which element of a fragment is not specified. But softmax works on rows; so S goes through
// shared memory: a warp stores it there as a matrix, and reads it back with 2 lanes a row, each of which has
// half of the keys. m and l are then one number a lane, and a maximum takes one shuffle. P goes the same way
// back, in the place of S, to become fragments of the other kind.
//
// And O cannot stay in registers, as it did in flash2: its row r is to be multiplied by e^(m - m_new) of row
// r, and nobody knows which registers that is. So O is in shared memory, too, in float; each tile of keys
// loads it, adds P~ V_j and stores it, and where m has grown its rows are multiplied there before that. The
// next stage, mma, has instructions whose layout is documented, and needs none of this.
//
// No bank conflicts for d = 64, 128, 256 (for some other d, load_tile has a few). load_matrix_sync reads 8
// rows of 16 bytes of Q, K, V or P at a time: they fall into different banks if rows are an odd multiple of
// 16 bytes apart; hence 8 elements of padding. For S and O these are 8 floats: then 4 rows of 32 bytes, which
// half of a warp reads or writes at a time, fill all banks once. (Strictly, this depends on the layout, too.)
//
//   - Q, K and V go from HBM to shared memory 8 elements at a time: 16 bytes, an instruction.
//   - There, d is rounded up to a multiple of 16, with zeros.
//
// HBM traffic without caches (hbm, above): the same numbers as in flash2, of 2 bytes each; those of L have 4.
//
// CUDA 12 compiles this for sm_70 and later, CUDA 13 for sm_75 and later: it has given up sm_70.
//
// Changed from flash2: the types, both products, and with them where S, P and O live and who works on a row;
// load_tile, which is in common/tile16.cuh and asks tile_index() where an element goes. (And a thread may
// have all the registers it wants: shared memory is the limit to the blocks.)
//
// Bound by shared memory, which S, P and O go through: it is busy 60 % of the time, the tensor cores 13 %
// (H200, bf16, B4 H12 N1024 d64 causal).
#pragma once
#include <mma.h>

#include "common/launch.cuh"
#include "common/mask.cuh"
#include "common/tile16.cuh"
#include "common/vector.cuh"
using namespace nvcuda;

constexpr int d = HEAD_DIM;
constexpr int Br = BLOCK_R, Bc = BLOCK_C;
constexpr int warps = Br / 16, threads = 32 * warps;
constexpr int pitch = width + 8;          // from a row of Q, K, V to the next, in elements; of O: in floats
constexpr int S_pitch = Bc + 8;           // the same for P, in elements, and for S, in floats
constexpr int cols = Bc / 2;              // columns of S per lane

using FragmentA = wmma::fragment<wmma::matrix_a, 16, 16, 16, ELEMENT, wmma::row_major>;    // Q, P
using FragmentKT = wmma::fragment<wmma::matrix_b, 16, 16, 16, ELEMENT, wmma::col_major>;   // K^T: rows of K
using FragmentV = wmma::fragment<wmma::matrix_b, 16, 16, 16, ELEMENT, wmma::row_major>;
using FragmentC = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;                    // S, O

// Where the element (row, col) of a tile is
__device__ __forceinline__ int tile_index(int row, int col) { return row * pitch + col; }

// Four neighbouring numbers as ELEMENTs: one instruction for 8 bytes, at a multiple of 8
__device__ __forceinline__ void store4(ELEMENT* to, float x, float y, float z, float w) {
  __align__(8) ELEMENT four[4] = {ELEMENT(x), ELEMENT(y), ELEMENT(z), ELEMENT(w)};
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<uint2*>(four);
}

// One block per tile of Q. Line numbers are those of Algorithm 1.
__global__ void __launch_bounds__(threads, 1) forward_kernel(FwdParams p) {
  const int Tr = ceil_div(p.N_q, Br);                                    // lines 1, 2
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;                   // line 3
  const int b = bh / p.H, h = bh % p.H, h_kv = h / (p.H / p.H_kv);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = i * Br + 16 * warp;     // the first row of this warp's 16
  // A row has two lanes, which take four columns in turn; first_col is where this lane's first four start.
  const int row = warp_row + lane / 2, first_col = lane % 2 * 4;
  const Mask mask(p, b, h);
  const auto tiles = mask.key_tiles(i);
  const ELEMENT* K = p.K.head(b, h_kv);
  const ELEMENT* V = p.V.head(b, h_kv);
  ELEMENT* O = p.O.head(b, h);

  extern __shared__ __align__(128) ELEMENT smem[];
  ELEMENT* Q_smem = smem;                   // Br x d, rows `pitch` apart
  ELEMENT* K_smem = Q_smem + Br * pitch;    // Bc x d, the same
  ELEMENT* V_smem = K_smem + Bc * pitch;    // the same
  float* O_smem = reinterpret_cast<float*>(V_smem + Bc * pitch);    // Br x d, the same
  float* S_smem = O_smem + Br * pitch;      // Br x Bc, rows `S_pitch` apart
  load_tile<threads>(Q_smem, tile_index, p.Q.head(b, h), p.Q.stride_n, i * Br, Br, p.N_q); // line 4

  // This warp's 16 rows; P takes the place of S.
  const ELEMENT* Q_warp = Q_smem + 16 * warp * pitch;
  float* O_warp = O_smem + 16 * warp * pitch;
  float* S_warp = S_smem + 16 * warp * S_pitch;
  ELEMENT* P_warp = reinterpret_cast<ELEMENT*>(S_warp);
  // Where this lane's first four columns start
  float* O_row = O_warp + lane / 2 * pitch + first_col;
  float* S_row = S_warp + lane / 2 * S_pitch + first_col;
  ELEMENT* P_row = P_warp + lane / 2 * S_pitch + first_col;

  for (int k = 0; k < width; k += 8) store4(O_row + k, 0.f, 0.f, 0.f, 0.f); // line 5
  float m = -INFINITY, l = 0.f;           // l: the sum over this lane's columns

  for (int t = 0; t < tiles.end; t++) {                                  // line 6
    const int j = tiles[t];
    __syncthreads();                      // all are done with the last tiles, which are now overwritten
    load_tile<threads>(K_smem, tile_index, K, p.K.stride_n, j * Bc, Bc, p.N_k);            // line 7
    load_tile<threads>(V_smem, tile_index, V, p.V.stride_n, j * Bc, Bc, p.N_k);
    __syncthreads();                      // nobody reads before everybody has written

    FragmentC S_frag[Bc / 16];                                           // line 8: S_ij = Q_i K_j^T
    for (int n = 0; n < Bc / 16; n++) wmma::fill_fragment(S_frag[n], 0.f);
    for (int k = 0; k < width / 16; k++) {
      FragmentA Q_frag;
      wmma::load_matrix_sync(Q_frag, Q_warp + 16 * k, pitch);
      for (int n = 0; n < Bc / 16; n++) {
        FragmentKT K_frag;
        wmma::load_matrix_sync(K_frag, K_smem + 16 * n * pitch + 16 * k, pitch);
        wmma::mma_sync(S_frag[n], Q_frag, K_frag, S_frag[n]);
      }
    }
    for (int n = 0; n < Bc / 16; n++)
      wmma::store_matrix_sync(S_warp + 16 * n, S_frag[n], S_pitch, wmma::mem_row_major);
    __syncwarp();                         // a lane reads what others have stored

    float S_reg[cols], m_new = m;                                        // line 9
    load(S_reg, S_row, 0, 8);
    __syncwarp();                         // all have read S: P may overwrite it
    for (int c = 0; c < cols; c++) {
      const int col = j * Bc + first_col + c / 4 * 8 + c % 4;
      S_reg[c] = mask.sees(row, col) ? mask.score(p.scale * S_reg[c], row, col) : -INFINITY;
      m_new = fmaxf(m_new, S_reg[c]);
    }
    m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, 1));
    const float shift = m_new == -INFINITY ? 0.f : m_new;                // no key: -inf - -inf is NaN
    const float alpha = expf(m - shift);
    l *= alpha;
    m = m_new;
    for (int c = 0; c < cols; c++) {
      S_reg[c] = expf(S_reg[c] - shift);                                 // P
      l += S_reg[c];
    }
    for (int c = 0; c < cols; c += 4)
      store4(P_row + 2 * c, S_reg[c], S_reg[c + 1], S_reg[c + 2], S_reg[c + 3]);
    if (alpha != 1.f) {
      for (int k = 0; k < width; k += 8) {                               // line 10: e^(m - m_new) O
        const float4 x = load4(O_row + k);
        store4(O_row + k, alpha * x.x, alpha * x.y, alpha * x.z, alpha * x.w);
      }
    }
    __syncwarp();                         // a warp reads only the rows of P and O that it wrote itself

    FragmentA P_frag[Bc / 16];                                           // line 10: + P~_ij V_j
    for (int k = 0; k < Bc / 16; k++) wmma::load_matrix_sync(P_frag[k], P_warp + 16 * k, S_pitch);
    for (int n = 0; n < width / 16; n++) {
      FragmentC O_frag;
      wmma::load_matrix_sync(O_frag, O_warp + 16 * n, pitch, wmma::mem_row_major);
      for (int k = 0; k < Bc / 16; k++) {
        FragmentV V_frag;
        wmma::load_matrix_sync(V_frag, V_smem + 16 * k * pitch + 16 * n, pitch);
        wmma::mma_sync(O_frag, P_frag[k], V_frag, O_frag);
      }
      wmma::store_matrix_sync(O_warp + 16 * n, O_frag, pitch, wmma::mem_row_major);
    }
  }                                                                      // line 11
  __syncwarp();                           // a lane reads what others have stored

  l += __shfl_xor_sync(0xffffffff, l, 1);
  if (row >= p.N_q) return;
  const float inv_l = l == 0.f ? 0.f : 1.f / l;
  for (int k = 0; k < d; k += 8) {                                       // lines 12, 14
    const float4 x = load4(O_row + k);
    store4(O + row * p.O.stride_n + first_col + k, inv_l * x.x, inv_l * x.y, inv_l * x.z, inv_l * x.w);
  }
  if (lane % 2 == 0)                                                     // lines 13, 15
    p.L[(int64_t)bh * p.N_q + row] = l == 0.f ? -INFINITY : m + logf(l);
}

size_t workspace_bytes(const FwdParams&) { return 0; }

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  const size_t bytes = sizeof(ELEMENT) * (Br + 2 * Bc) * pitch + sizeof(float) * Br * (pitch + S_pitch);
  allow_shared_memory(forward_kernel, bytes);
  forward_kernel<<<p.B * p.H * ceil_div(p.N_q, Br), threads, bytes, stream>>>(p);
  return cudaGetLastError();
}
