// The swizzle of addresses. Introduced by: forward stage 14, saved_registers.
#pragma once
#include <stdint.h>

// The address of what is `row` rows below and `col` columns right of the element at address `from`, in a tile
// of swizzled(row, col, pitch) that starts at a multiple of 1024 bytes... 
__device__ __forceinline__ uint32_t advance(uint32_t from, int row, int col, int pitch) {
  return (from ^ 2 * (col % 64)) + 2 * (row * pitch + col / 64 * 64);
}
