// FlashAttention forward: the notation, the ladder, and the one entry point. This is the file that is
// compiled; the stage to compile comes in as a macro, and so do its compile-time constants:
//
//   nvcc -I. -DSTAGE_FILE='"stages/fwd_04_flash2.cuh"' -DELEMENT=float -DHEAD_DIM=64 \
//        -DMASK_FILE='"stages/masks/causal.cuh"' -DCAUSAL=1 -DNEGATIVE_SCALE=0 \
//        -DBLOCK_R=64 -DBLOCK_C=64 -arch=sm_80 -cubin -Xptxas -v flash_fwd.cu
//
// (ELEMENT is __half or __nv_bfloat16 for the stages in 16 bits. NEGATIVE_SCALE is 1 for a scale below 0.
// MASK_FILE says which scores count: one of stages/masks, or your own. See stages/common/rule.cuh. Where a
// call asks for it, there are also DROPOUT=1, SINK=1, and HEAD_DIM_V, the columns of V and O, if fewer;
// VARLEN=1 for packed sequences; and of K and V that are a cache, KV_CACHE=1, and, if that is in pages,
// PAGE_SIZE.)
// flash.py passes them, builds on first use and calls flash_fwd(). Nothing here needs PyTorch's headers: a
// build takes a second.
//
// What is computed, for every batch element b and query head h (softmax along each row):
//
//   S = scale * Q K^T      P = softmax(S)      O = P V      L_i = log(sum_j exp(S_ij))
//
// Notation (that of the papers):
//   Q, O      (B, H, N_q, d)      one row per query
//   K, V      (B, H_kv, N_k, d)   one row per key; query head h reads h / (H / H_kv) (GQA; MQA: H_kv = 1)
//   L         (B, H, N_q)         log-sum-exp of a row of S: all that the backward pass needs to make P again
//   S, P      (N_q, N_k)          scores and probabilities of one head
//   Br, Bc    rows of a tile of Q (and O), rows of a tile of K and V; a tile of S is Br x Bc
//   Tr, Tc    the number of such tiles: ceil(N_q / Br), ceil(N_k / Bc)
//   i, j      the tile of Q, the tile of K and V: Q_i, K_j, V_j, S_ij, P_ij, O_i
//   m, l      of a row, over the keys so far: the maximum of S, and the sum of e^(S - m)
//   X_smem    X in shared memory; X_reg: in registers; otherwise in HBM
//   d, d_v    columns of Q and K; of V and O, mostly the same
// Causal: the query of row q sees the key of row k if k <= q + diagonal.
// A row that sees no key: O = 0, L = -inf.
//
// The ladder. Each stage is a file of its own, and keeps the names, order and layout of the one that it grew
// from, the one before it if none is named here (its header's line `after:`):
//   stages/fwd_01_naive.cuh              three kernels; S and P, N x N, in HBM
//   stages/fwd_02_tiled.cuh              the same three kernels, through tiles in shared memory
//   stages/fwd_03_online_softmax.cuh     FlashAttention-1, Algorithm 1: one kernel, K/V outer loop; m, l, O
//                                        updated in HBM
//   stages/fwd_04_flash2.cuh             FlashAttention-2: Q tile a block, K/V inner loop; O, m, l in
//                                        registers; L written once
//   stages/fwd_05_register_tiles.cuh     a thread computes an 8 x 8 piece of S and of O: an outer product a
//                                        step, operands transposed
//   stages/fwd_06_vectorized.cuh         float4: four numbers an instruction, from HBM, from and to shared
//                                        memory, and to O
//   stages/fwd_07_conflict_free.cuh      a layout of lanes and an XOR layout of the transposed tiles that
//                                        leave no bank conflict
//   stages/fwd_08_prefetch.cuh           the next tile of K is on its way, in registers, while this one is
//                                        multiplied
//   stages/fwd_09_fp32_tuned.cuh         what is left: exp2, masked tiles apart, heavy tiles first,
//                                        occupancy, tiles by size of the call
//   stages/fwd_10_wmma.cuh               (after flash2) tensor cores by the portable API; S, P and O through
//                                        shared memory
//   stages/fwd_11_mma.cuh                mma.sync and ldmatrix: S and P never leave registers
//   stages/fwd_12_swizzle.cuh            the XOR swizzle: no bank conflicts
//   stages/fwd_13_cp_async.cuh           asynchronous copies into a second buffer: the next tile comes while
//                                        this one is multiplied
//   stages/fwd_14_exp2.cuh               fewer instructions a score: 2^x with the scale folded in, the mask
//                                        only in tiles that it cuts
//   stages/fwd_15_saved_registers.cuh    addresses worked out once, Q's fragments held or not, l in shared
//                                        memory: room for more rows
//   stages/fwd_16_wide_warps.cuh         32 rows a warp: a fragment of K or V serves two products
//   stages/fwd_17_ampere_tuned.cuh       what is left: order of blocks, tile sizes, one buffer at d > 128, O
//                                        by 16-byte stores
//   stages/fwd_18_split_kv.cuh           decoding: query heads of a key head in one tile, which reads K and V
//                                        once; keys split over blocks
//   stages/fwd_19_tma.cuh                (after exp2) whole tiles by the copy engine: tensor maps and
//                                        mbarriers instead of cp.async
//   stages/fwd_20_wgmma.cuh              a warpgroup multiplies from shared memory, asynchronously
//   stages/fwd_21_warp_specialized.cuh   a producer warp and consumer warpgroups, setmaxnreg, a ring of
//                                        buffers
//   stages/fwd_22_overlap.cuh            FlashAttention-3: P V of a tile under the softmax of the next one
//   stages/fwd_23_lazy_rescale.cuh       O is rescaled only when the factor would exceed 2^8
//   stages/fwd_24_pingpong.cuh           one warpgroup's softmax under the other's products
//   stages/fwd_25_persistent.cuh         as many blocks as multiprocessors, the longest tile first, the
//                                        epilogue under the next tile
//   stages/fwd_26_seamless.cuh           the next tile's first product under this one's last: no seam between
//                                        tiles of Q
//   stages/fwd_27_early_wait.cuh         P V is waited for before the exponentials: rounding and rescaling
//                                        run between them
//   stages/fwd_28_cut_diagonal.cuh       on the diagonal a warpgroup multiplies half a tile, or none, if its
//                                        own rows see no more
//   stages/fwd_29_hopper_tuned.cuh       what is left: O by TMA stores, wide tiles for long rows
//   stages/fwd_30_multicast.cuh          a cluster of two blocks shares K and V: each asks for half of a
//                                        tile, for both
//   stages/fwd_31_multicast_tuned.cuh    a ticket for the next tile of Q, from one block of the cluster to
//                                        the other
//   stages/fwd_32_stream_k.cuh           (after hopper_tuned) stream-K: the last round and a bit is divided
//                                        by steps of keys: all blocks end together
//   stages/fwd_33_packed.cuh             (after hopper_tuned) packed sequences: a map with the rows in two
//                                        dimensions ends where a sequence does
//   stages/fwd_34_short_last.cuh         (after hopper_tuned) causal: the last quarter of each head's tiles,
//                                        the short ones, come last, so few heads go together
//   stages/fwd_35_own_ranges.cuh         a window: each warpgroup asks for its own range of tiles, at both
//                                        ends
//   stages/fwd_36_split_kv_wgmma.cuh     (after warp_specialized) decoding with many packed rows: split_kv's
//                                        packing and ranges, with a producer and warpgroups
//   stages/fwd_37_own_rows.cuh           (after short_last) nothing in vain: no products for rows behind the
//                                        last one, no tickets where tiles are equal
//   stages/fwd_38_lazy_maximum.cuh       lanes ask each other for a row's maximum only if a score is far
//                                        above m
//   stages/fwd_39_late_ticket.cuh        from tile to tile: tickets drawn late, and with 192 rows, too, Q in
//                                        two buffers
//   stages/fwd_40_row_by_row.cuh         a lane's second row is searched for its maximum under the
//                                        exponentials of the first
// A stage starts with lines for flash_ladder/registry.py: the stage that it grew from (after); at the end of
// a branch, the architecture from which on calls take it (default), perhaps only some calls; what it knows
// of dropout, sinks and the like (takes), and what it refuses that others take (refuses); tile sizes and
// conditions on them (tiles, limits); into how many ranges it splits the keys (splits); in bytes the shared
// memory of a block (shared) and the HBM traffic of a call without a mask, if nothing is cached (hbm).
// It defines two functions:
//   cudaError_t launch(const FwdParams&, cudaStream_t)
//   size_t workspace_bytes(const FwdParams&)     scratch memory that it needs in HBM
// What stands between a comment that begins with --- and the next `// ---` is what an exercise asks for
// (tutorials/exercises).
//
// Papers: FlashAttention-1: Dao, Fu, Ermon, Rudra, Re, arXiv 2205.14135.
//         FlashAttention-2: Dao, arXiv 2307.08691.
//         FlashAttention-3: Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao, arXiv 2407.08608.
//         Online softmax: Milakov, Gimelshein, arXiv 1805.02867.
#include <cuda_runtime.h>
#include <math.h>

#include "stages/common/tensor.cuh"
#include "stages/common/mask_params.cuh"
#include "stages/common/sequences.cuh"

struct FwdParams {           // launch.py fills its twin, field for field
  Tensor Q, K, V, O;
  float* L;                  // contiguous
  void* workspace;           // workspace_bytes() of HBM
  int B, H, H_kv, N_q, N_k;
  int diagonal;              // used if CAUSAL
  float scale;
  MaskParams mask;           // what MASK_FILE takes
  const float* sink;         // (H,), a logit in the denominator of each row; used if SINK
  const uint64_t* seed;      // of dropout: a number in HBM, as a CUDA graph may draw it anew; used if DROPOUT
  float dropout;             // with this probability an element of P becomes 0
  const int* seqlens_k;      // (B,), of the N_k keys those that a batch element has; used if KV_CACHE
  const int* block_table;    // (B, pages), where pages of K and V are: tensors (pages, H_kv, PAGE_SIZE, d)
  int pages;                 // N_k / PAGE_SIZE
  int splits;                // ranges of keys, as the stage's header has it, or the call
#if VARLEN                   // packed sequences: stages/common/sequences.cuh
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int sequences, total_q, total_k;

  __device__ void skip_inputs(int rows, int keys) {
    Q.data += rows * Q.stride_n;
    K.data += keys * K.stride_n;
    V.data += keys * V.stride_n;
  }
  __device__ void skip_outputs(int rows, int keys) {
    O.data += rows * O.stride_n;
    L += rows;
  }
#endif
};

[[maybe_unused]] constexpr int d_v = HEAD_DIM_V;     // columns of V and O, dV and dO: d, or fewer

#ifdef TIMELINE_FILE        // marks for bench.py --timeline
#include TIMELINE_FILE
#endif
#include STAGE_FILE
#include "stages/common/mask.cuh"        // if the stage has not: its lists of tiles

// launch.py compares: the twins must not drift.
extern "C" size_t flash_fwd_params_bytes() { return sizeof(FwdParams); }

extern "C" size_t flash_fwd_workspace_bytes(const FwdParams* p) {
  return workspace_bytes(*p) + list_bytes<Mask>(*p);
}

// Returns null, or what went wrong.
extern "C" const char* flash_fwd(const FwdParams* p, cudaStream_t stream) {
  cudaGetLastError();                                     // one that somebody left is not this call's
  FwdParams with_lists = *p;
  with_lists.mask.lists = reinterpret_cast<int*>(static_cast<char*>(p->workspace) + workspace_bytes(*p));
  launch_lists<Mask>(with_lists, /*for_Q_alone=*/true, stream);
  cudaError_t error = launch(with_lists, stream);
  if (error == cudaSuccess) error = cudaGetLastError();   // one that launch() did not look for
  const char* text = error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  cudaGetLastError();                                     // one that launch() returned, but left pending
  return text;
}
