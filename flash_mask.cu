// What a mask says of a matrix of scores: which pairs of a query and a key count, and which tiles a stage's
// kernel visits. flash_ladder/tiles.py compiles and calls it, as others do flash_fwd.cu.
#include <cuda_runtime.h>
#include <math.h>

#include "stages/common/tensor.cuh"
#include "stages/common/mask.cuh"

struct MaskQuery {           // tiles.py fills its twin, field for field
  bool* seen;                // (B, H, N_q, N_k)
  uint8_t* kinds;            // (B, H, Tr, Tc), of TileKind; 0 at first
  void* workspace;           // flash_mask_workspace_bytes() of HBM
  int B, H, N_q, N_k;
  MaskParams mask;
};

// One block per tile of Q.
__global__ void __launch_bounds__(128) mask_kernel(MaskQuery p) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), Tc = ceil_div(p.N_k, BLOCK_C);
  const int i = blockIdx.x % Tr, bh = blockIdx.x / Tr;
  const Mask mask(p, bh / p.H, bh % p.H);
  const auto tiles = mask.key_tiles(i);
  for (int t = threadIdx.x; t < tiles.end; t += blockDim.x)
    p.kinds[((int64_t)bh * Tr + i) * Tc + tiles[t]] = t < tiles.cut ? WHOLE : CUT;
  for (int row = i * BLOCK_R; row < min((i + 1) * BLOCK_R, p.N_q); row++) {
    for (int col = threadIdx.x; col < p.N_k; col += blockDim.x)
      p.seen[((int64_t)bh * p.N_q + row) * p.N_k + col] = mask.sees(row, col);
  }
}

// tiles.py compares: the twins must not drift.
extern "C" size_t flash_mask_params_bytes() { return sizeof(MaskQuery); }

extern "C" size_t flash_mask_workspace_bytes(const MaskQuery* p) { return list_bytes<Mask>(*p); }

// Returns null, or what went wrong.
extern "C" const char* flash_mask(const MaskQuery* p, cudaStream_t stream) {
  cudaGetLastError();
  MaskQuery with_lists = *p;
  with_lists.mask.lists = static_cast<int*>(p->workspace);
  launch_lists<Mask>(with_lists, /*for_Q_alone=*/true, stream);
  mask_kernel<<<p->B * p->H * ceil_div(p->N_q, BLOCK_R), 128, 0, stream>>>(with_lists);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
