// The swizzle of addresses. Introduced by: forward stage 15, saved_registers.
#pragma once
#include <stdint.h>

// The address of what is `row` rows below and `col` columns right of the element at address `from`, in a tile
// of swizzled(row, col, pitch) that starts at a multiple of 128 bytes. row: a multiple of 8, col: of 16;
// `from`: in the first 16 columns. panel: elements from 64 columns of a row to the next 64. For then
// - row % 8 stays the same, and so does the swizzle;
// - within 128 bytes (64 columns) `col` sets bits that the column of `from` does not have. So + is ^, and
//   (a ^ b) ^ c is (a ^ c) ^ b: the swizzle, which is in the address already, may come first.
__device__ __forceinline__ uint32_t advance(uint32_t from, int row, int col, int pitch, int panel = 64) {
  return (from ^ 2 * (col % 64)) + 2 * (row * pitch + col / 64 * panel);
}
