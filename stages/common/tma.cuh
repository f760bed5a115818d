// The copy engine, TMA: one thread asks for a box of a tensor, the hardware works out the addresses, and an
// mbarrier counts the bytes that have come. Introduced by: forward stage 19, tma. (PTX ISA, section "Data
// Movement and Conversion Instructions: Bulk copy"; CUDA driver API, section "Tensor Map Object Management".)
//
// A tensor map says where a tensor lies, how large it is, and how large the boxes are. Here a tensor is
// (B, heads, N, d), in any strides, and a box has `rows` rows of 64 columns of one head:
//
//   coordinates   col, row, head, batch      from the innermost dimension on
//   box           64 x rows x 1 x 1          64 elements are 128 bytes
//   past the end of a dimension              zeros when loaded; not written when stored
//
// In shared memory the rows of a box lie 128 bytes apart, and the 16-byte chunks of a row change places:
// chunk c of row r is at c ^ r % 8. This is the XOR of common/swizzle.cuh with a pitch of 64. (The hardware
// makes it from address bits: 4 to 6 by 7 to 9. So boxes must start at multiples of 1024 bytes.) A tile of d
// columns takes ceil(d / 64) boxes, one after the other: panels.
#pragma once
#include "hopper.cuh"
#include "tensor.cuh"

constexpr int panel = 64, panels = (HEAD_DIM + panel - 1) / panel;     // columns of a box; boxes of a tile

// Where the element (row, col) of a tile of tile_rows rows is
__device__ __forceinline__ int panel_index(int row, int col, int tile_rows) {
  // --- an index in panels
  return col / panel * tile_rows * panel + row * panel + (col % panel ^ row % 8 * 8);
  // ---
}

// The map of a tensor of `columns` columns. It holds the tensor's address, so each call makes its own. The
// driver's function is asked for by name (CUDA 12.5 or later): nothing is linked to libcuda. A dimension of
// one has any stride, which the driver might refuse: then it gets one that it takes. With packed sequences it
// has the rows in two dimensions: packed.cuh. For a miss L2 fetches 128 bytes, a box's row: with 256 a decode
// step took up to 1.06 times as long (split_kv_wgmma).
inline cudaError_t make_tensor_map(CUtensorMap& map, Tensor x, int B, int H, int N, int columns, int rows) {
#if VARLEN
  rows_twice(x, B, N, rows);
#endif
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  auto bytes = [](int64_t stride, int size) { return cuuint64_t(size > 1 ? sizeof(ELEMENT) * stride : 16); };
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(N), cuuint64_t(H), cuuint64_t(B)};
  const cuuint64_t strides[] = {bytes(x.stride_n, N), bytes(x.stride_h, H), bytes(x.stride_b, B)};
  const cuuint32_t box[] = {panel, cuuint32_t(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  auto make = [&] { return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, x.data, sizes, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE); };
  CUresult result = make();
  // A thread for which the runtime has done nothing yet, as autograd's may be, has no context: cudaFree()
  // makes one. (At each call it would not do: it may not be called while a graph is captured.)
  if (result == CUDA_ERROR_INVALID_CONTEXT && cudaFree(nullptr) == cudaSuccess) result = make();
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Ask for a whole tile: rows [row, row + tile_rows) of a head, columns from 0 on. By one thread, which has
// told the barrier of sizeof(ELEMENT) * tile_rows * panel * panels bytes.
__device__ __forceinline__ void load_panels(ELEMENT* tile, const CUtensorMap& map, uint64_t* barrier,
                                            int tile_rows, int row, int head, int batch) {
  #pragma unroll
  for (int n = 0; n < panels; n++)
    tma_load(tile + n * tile_rows * panel, map, barrier, n * panel, row, head, batch);
}
