// The XOR swizzle of a tile of 16-bit elements. Introduced by: forward stage 12, swizzle, which draws it.
#pragma once

// Where element (row, col) is, in a tile whose rows are `pitch` elements apart, a multiple of 64: the chunks
// of 8 elements (16 bytes) in each 128 bytes change places, in a way that differs in 8 neighbouring rows.
__device__ __forceinline__ int swizzled(int row, int col, int pitch) {
  // --- its index
  return row * pitch + (col ^ row % 8 * 8);
  // ---
}
