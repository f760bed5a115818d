// FlashAttention backward: what it computes, the ladder, and the one entry point. As with flash_fwd.cu, which
// has the notation, this is the file that is compiled, and the stage comes in as a macro:
//
//   nvcc -I. -DSTAGE_FILE='"stages/bwd_02_recompute.cuh"' -DELEMENT=float -DHEAD_DIM=64 \
//        -DMASK_FILE='"stages/masks/causal.cuh"' -DCAUSAL=1 -DNEGATIVE_SCALE=0 -DDETERMINISTIC=0 \
//        -DBLOCK_R=64 -DBLOCK_C=64 -arch=sm_80 -cubin -Xptxas -v flash_bwd.cu
//
// (MASK_FILE is that of the forward pass. DETERMINISTIC is 1 to ask a stage for the same bits in every run,
// if it can do both.)
//
// Given dO, the gradient of a loss with respect to O, it computes dQ, dK and dV, the gradients with respect
// to Q, K and V. For every batch element and query head (stages/bwd_01_naive.cuh derives it):
//
//   S = scale * Q K^T     P = exp(S - L)     dV = P^T dO     dP = dO V^T     D_i = sum_k dO_ik O_ik
//   dS = P * (dP - D), element by element     dQ = scale * dS K     dK = scale * dS^T Q
//
// Further notation:
//   dO, dQ        (B, H, N_q, d)      like Q and O
//   dK, dV        (B, H_kv, N_k, d)   like K and V: summed over the H / H_kv query heads that read them
//   D, dL         (B, H, N_q)         D as above. If the loss depends on L, too, dL is the gradient with
//                                     respect to L, and a stage subtracts it from D
//   dS, dP        (N_q, N_k)          of one head; dS is the gradient with respect to S, the scaled scores
// A row that sees no key gets and gives no gradient: its P is 0.
//
// The ladder. A stage grew from the one before it, if none is named here:
//   stages/bwd_01_naive.cuh                  the five matrix products, plainly; S, P, dP and dS, N x N, in
//                                            HBM
//   stages/bwd_02_recompute.cuh              FlashAttention-2: P from L, D = rowsum(dO * O); a K/V tile a
//                                            block; dQ by atomicAdd
//   stages/bwd_03_deterministic.cuh          dK and dV in one kernel, dQ in another: no atomics, the same
//                                            bits every run; 7 products, not 5
//   stages/bwd_04_register_tiles.cuh         (after recompute) a thread computes 4 x 8 pieces of all five
//                                            products by outer products; K and V transposed
//   stages/bwd_05_vectorized.cuh             four numbers at a time: from HBM, in shared memory, and the
//                                            atomics of dQ
//   stages/bwd_06_conflict_free.cuh          the lanes of a warp and the rows of tiles are arranged so that
//                                            no bank conflict is left
//   stages/bwd_07_fp32_tuned.cuh             what is left: 2^x, cut tiles apart, P out of registers, prefetch
//                                            of Q and dO, order of blocks
//   stages/bwd_08_mma.cuh                    (after recompute) the five products on tensor cores; P and dS
//                                            through shared memory
//   stages/bwd_09_transposed.cuh             S^T = K Q^T and dP^T = V dO^T: P^T and dS^T are operands A as
//                                            they lie in registers
//   stages/bwd_10_split_warps.cuh            half of the warps make dV, the others dK: twice the keys a warp
//   stages/bwd_11_cp_async.cuh               the next Q and dO under way: asynchronous copies into a second
//                                            buffer
//   stages/bwd_12_late_dq.cuh                dQ one tile late, under the exponentials; summed as the
//                                            registers lie
//   stages/bwd_13_split_heads.cuh            a block for each query head; dK and dV of a group added up in a
//                                            fixed order
//   stages/bwd_14_ordered_dq.cuh             deterministic on request: copies of dQ, added up in a fixed
//                                            order
//   stages/bwd_15_ampere_tuned.cuh           what is left: order of blocks, masked tiles apart, dK and dV by
//                                            16-byte stores, unrolling
//   stages/bwd_16_tma.cuh                    (after transposed) tiles by the copy engine, L and D, too:
//                                            tensor maps and mbarriers
//   stages/bwd_17_wgmma.cuh                  the five products by warpgroups, from shared memory; P^T and
//                                            dS^T from registers
//   stages/bwd_18_warp_specialized.cuh       a producer warp and consumer warpgroups, setmaxnreg, rings of Q
//                                            and dO
//   stages/bwd_19_tma_reduce.cuh             dQ leaves by the copy engine, which adds to HBM:
//                                            cp.reduce.async.bulk
//   stages/bwd_20_overlap.cuh                exponentials and dS under products, dK under dQ: nobody waits
//                                            for a product before it must
//   stages/bwd_21_seeded.cuh                 accumulators start from -L and -D, and so the products subtract
//                                            them
//   stages/bwd_22_dq_by_turns.cuh            one warpgroup makes all of dQ_i; the other ones go on, and make
//                                            the next
//   stages/bwd_23_consumer_roles.cuh         (after seeded) a warpgroup for each of dV, dK and dQ; P and dS
//                                            pass from one to the next through shared memory
//   stages/bwd_24_exchanged_ds.cuh           two blocks exchange dS: each adds half of the columns of dQ,
//                                            over the keys of both; clusters
//   stages/bwd_25_half_tiles.cuh             dO comes in half tiles, three in a ring: one of the next tile's
//                                            is there while dV reads this tile
//   stages/bwd_26_whole_group.cuh            (after dq_by_turns) as many query heads of a key head in a block
//                                            as leave blocks enough; dK, dV in parts if not all
//   stages/bwd_27_persistent.cuh             as many blocks as multiprocessors; the next tile's K, V, Q, dO
//                                            come while dK, dV are stored
//   stages/bwd_28_whole_tiles.cuh            whole tiles have a loop of their own, which never asks the mask
//   stages/bwd_29_hopper_tuned.cuh           what is left: early launches, TMA stores
//   stages/bwd_30_exchanged_tuned.cuh        (after half_tiles) what is left: TMA stores, a cluster for each
//                                            query head, order of blocks, early launches
//   stages/bwd_31_transposed_dq.cuh          (after hopper_tuned) dQ^T = K^T dS^T at d <= 64: one product by
//                                            turns, not two, and ahead of dK
//   stages/bwd_32_writer_warp.cuh            (after hopper_tuned) a warp beside the producer adds the sums of
//                                            dQ: consumers stage them, and go on
//   stages/bwd_33_semaphores.cuh             the same bits in each run: sums of dQ wait for each other, in
//                                            the order of keys, by semaphores
//   stages/bwd_34_exchanged_semaphores.cuh   (after exchanged_tuned) exchanged_tuned with the same bits in
//                                            each run: sums of dQ in the order of keys, by semaphores
//   stages/bwd_35_next_keys.cuh              (after transposed_dq) a second buffer for K and V each, in what
//                                            transposed_dq spares: the next ones come meanwhile
//   stages/bwd_36_idle_warps.cuh             (after writer_warp) idle warps clear the sums of dQ before they
//                                            are needed, and convert them as soon as they are there
//   stages/bwd_37_augmented.cuh              S and dP start from -L and -D by a product with five more
//                                            columns, not by loads from shared memory
//   stages/bwd_38_first_stores.cuh           a fixed order needs no zeros: the first part of dQ_i is stored,
//                                            and the last one has it converted
//   stages/bwd_39_packed.cuh                 (after hopper_tuned) packed sequences: a map with the rows in
//                                            two dimensions ends where a sequence does
//   stages/bwd_40_packed_semaphores.cuh      packed sequences with the same bits in each run: sums of dQ in
//                                            the order of keys, by semaphores
//   stages/bwd_41_exchanged_group.cuh        (after exchanged_tuned) a cluster has all query heads of a tile
//                                            of K and V, then the next tile
//   stages/bwd_42_exchanged_stream_k.cuh     stream-K: steps are divided evenly among clusters, wherever a
//                                            tile of K and V ends
// The lines at a stage's start, and the two functions that it defines, are those of a forward stage.
#include <cuda_runtime.h>
#include <math.h>

#include "stages/common/tensor.cuh"
#include "stages/common/mask_params.cuh"
#include "stages/common/sequences.cuh"

struct BwdParams {           // launch.py fills its twin, field for field
  Tensor Q, K, V, O, dO;     // of the forward pass, and the gradient by O
  Tensor dQ, dK, dV;         // to be written
  const float* L;            // of the forward pass; contiguous
  const float* dL;           // the gradient by L, contiguous; null if the loss does not depend on L
  void* workspace;           // workspace_bytes() of HBM
  int B, H, H_kv, N_q, N_k;
  int diagonal;              // used if CAUSAL
  float scale;
  MaskParams mask;           // what MASK_FILE takes
  const float* sink;         // these three as in the forward pass
  const uint64_t* seed;
  float dropout;
  float* dsink;              // (B, H, N_q), to be written: of each row its part of the sink's gradient
#if VARLEN                   // as in the forward pass
  const int* cu_seqlens_q;
  const int* cu_seqlens_k;
  int sequences, total_q, total_k;

  __device__ void skip_inputs(int rows, int keys) {
    Q.data += rows * Q.stride_n;
    O.data += rows * O.stride_n;
    dO.data += rows * dO.stride_n;
    L += rows;
    dL += dL ? rows : 0;
    K.data += keys * K.stride_n;
    V.data += keys * V.stride_n;
  }
  __device__ void skip_outputs(int rows, int keys) {
    dQ.data += rows * dQ.stride_n;
    dsink += rows;
    dK.data += keys * dK.stride_n;
    dV.data += keys * dV.stride_n;
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
extern "C" size_t flash_bwd_params_bytes() { return sizeof(BwdParams); }

extern "C" size_t flash_bwd_workspace_bytes(const BwdParams* p) {
  return workspace_bytes(*p) + list_bytes<Mask>(*p);
}

// Returns null, or what went wrong.
extern "C" const char* flash_bwd(const BwdParams* p, cudaStream_t stream) {
  cudaGetLastError();                                     // one that somebody left is not this call's
  BwdParams with_lists = *p;
  with_lists.mask.lists = reinterpret_cast<int*>(static_cast<char*>(p->workspace) + workspace_bytes(*p));
  launch_lists<Mask>(with_lists, /*for_Q_alone=*/false, stream);
  cudaError_t error = launch(with_lists, stream);
  if (error == cudaSuccess) error = cudaGetLastError();   // one that launch() did not look for
  const char* text = error == cudaSuccess ? nullptr : cudaGetErrorString(error);
  cudaGetLastError();                                     // one that launch() returned, but left pending
  return text;
}
