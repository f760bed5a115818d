// Products of tiles, fragment by fragment. Introduced by: backward stage 8, mma.
//
// The forward stages write out S = Q K^T and O += P V. The backward has five such products, with other
// operands transposed. A fragment of 16 x 16 elements is four matrices of 8 x 8. ldmatrix can transpose each
// of them, and lanes 0 to 7, 8 to 15, and so on say which of them goes to which register:
//
//   A, or B by ldmatrix.trans, as the tile lies: upper left, lower left, upper right, lower right
//   A by ldmatrix.trans, or B, transposed:       upper left, upper right, lower left, lower right
#pragma once
#include "address.cuh"
#include "mma.cuh"
#include "swizzle.cuh"

// An operand in shared memory: a swizzled tile from element (row, col) on, or its transpose. Where a lane
// points to in the first fragment is worked out once; `advance` finds the others from there. As columns of B,
// every `step`-th 16 columns of the tile are taken. `advance` needs 0s in col where it adds bits.
struct Operand {
  uint32_t address;
  int pitch, step, panel_stride;          // panel_stride: from 64 columns of a row to the next 64
  bool transposed;

  // The same in a tile that is so many elements further on: the other of two buffers
  __device__ Operand operator+(int elements) const {
    return {address + 2 * elements, pitch, step, panel_stride, transposed};
  }
};

__device__ __forceinline__ Operand as_it_lies(const ELEMENT* tile, int pitch, int row = 0, int col = 0,
                                              int step = 1) {
  const int lane = threadIdx.x % 32, to_row = row + lane % 16, to_col = col + lane / 16 * 8;
  return {shared_address(tile + swizzled(to_row, to_col, pitch)), pitch, step, 64, false};
}

__device__ __forceinline__ Operand transposed(const ELEMENT* tile, int pitch, int row = 0, int col = 0) {
  const int lane = threadIdx.x % 32, to_row = row + lane / 16 * 8 + lane % 8, to_col = col + lane / 8 % 2 * 8;
  return {shared_address(tile + swizzled(to_row, to_col, pitch)), pitch, 1, 64, true};
}

__device__ __forceinline__ void load_A(uint32_t (&A_frag)[4], const Operand& A, int row, int k) {
  if (A.transposed) ldmatrix_x4_trans(A_frag, advance(A.address, k, row, A.pitch, A.panel_stride));
  else ldmatrix_x4(A_frag, advance(A.address, row, k, A.pitch, A.panel_stride));
}

__device__ __forceinline__ void load_B(uint32_t (&B_frag)[4], const Operand& B, int k, int col) {
  if (B.transposed) ldmatrix_x4(B_frag, advance(B.address, col, k, B.pitch, B.panel_stride));
  else ldmatrix_x4_trans(B_frag, advance(B.address, k, B.step * col, B.pitch, B.panel_stride));
}

// acc += A B, where A has `depth` columns, and B is taken from its column first_col on. Of the loop over the
// columns of A, `unrolled` steps are unrolled.
template <int unrolled = 4, int strips, int n_tiles, class A_type>
__device__ __forceinline__ void multiply(float (&acc)[strips][n_tiles][4], int depth, const A_type& A,
                                         const Operand& B, int first_col = 0) {
  #pragma unroll unrolled
  for (int k = 0; k < depth; k += 16) {
    uint32_t A_frag[strips][4];
    #pragma unroll
    for (int s = 0; s < strips; s++) load_A(A_frag[s], A, 16 * s, k);
    #pragma unroll
    for (int n = 0; n < n_tiles / 2; n++) {
      uint32_t B_frag[4];
      load_B(B_frag, B, k, first_col + 16 * n);
      #pragma unroll
      for (int s = 0; s < strips; s++) mma_m16n16k16(acc[s][2 * n], acc[s][2 * n + 1], A_frag[s], B_frag);
    }
  }
}

// Hand the elements of two accumulators that are at the same place on together: f(x, y, row, col).
template <int strips, int n_tiles, class F>
__device__ __forceinline__ void for_both(float (&X)[strips][n_tiles][4], float (&Y)[strips][n_tiles][4],
                                         F f) {
  const int lane_row = threadIdx.x % 32 / 4, lane_col = threadIdx.x % 4 * 2;
  #pragma unroll
  for (int x = 0; x < 4 * strips * n_tiles; x++) {
    const int s = x / 4 / n_tiles, n = x / 4 % n_tiles, e = x % 4;
    f(X[s][n][e], Y[s][n][e], 16 * s + e / 2 * 8 + lane_row, 8 * n + e % 2 + lane_col);
  }
}
