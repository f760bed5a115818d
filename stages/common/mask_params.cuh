// What a call hands to its mask. Introduced by: forward stage 4, flash2.
#pragma once
#include <stdint.h>

struct MaskTensor {          // up to four dimensions: batch, head, row, column
  const void* data;
  int64_t stride_b, stride_h, stride_row, stride_col;     // in elements; 0 where it is broadcast
};

struct MaskParams {          // which ones a mask takes, its file says
  MaskTensor tensors[4];
  int ints[8];
  float floats[4];
  int diagonals;             // bit n: ints[n] is to be N_k - N_q more; used if KV_CACHE
  int B, H;                  // 1: the tensors are the same for all batch elements, or heads
  int* lists;                // in the workspace: tile_lists.cuh
  float* gradient;           // (B, H, N_q, N_k), zeros at first: by the scores; null if nobody asks
};
