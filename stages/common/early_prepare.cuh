// prepare_kernel beside the kernel that lists tiles. Introduced by: backward stage 19, tma_reduce.
#pragma once
#include "launch.cuh"
#include "prepare.cuh"

// Launches it, for so many rows of all heads, and copies of dQ_accum. A kernel that lists tiles may still run
// beside it (tile_lists.cuh), and is waited for at its end: who comes next finds the lists, too.
// (The backward of block_causal, B=2 H=8 H_kv=1 N=1024 d=256, on an H200: 117 -> 114 us, with this and blocks
// of their own for dV in reduce_heads.cuh.)
inline void prepare(const BwdParams& p, const Workspace& w, int64_t rows, int copies, cudaStream_t stream) {
  const EarlyLaunch early(ceil_div(rows, block_rows), 256, 0, stream, !Mask::is_range);
  cudaLaunchKernelEx(early, prepare_kernel, p, w, copies);
}
