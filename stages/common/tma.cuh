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
#include "mbarrier.cuh"
#include "tensor.cuh"
#include <cuda.h>

constexpr int panel = 64;                  // columns of a box
constexpr int panels = (HEAD_DIM + panel - 1) / panel;

// Where the element (row, col) of a tile of tile_rows rows is
__device__ __forceinline__ int panel_index(int row, int col, int tile_rows) {
  return col / panel * tile_rows * panel + row * panel + (col % panel ^ row % 8 * 8);
}

// The map of a tensor of `columns` columns. It holds the tensor's address, so each call makes its own. The
// driver's function is asked for by name: nothing is linked to libcuda.
inline cudaError_t make_tensor_map(CUtensorMap& map, const Tensor& x, int B, int heads, int N, int columns,
                                   int box_rows) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  auto bytes = [](int64_t stride, int size) { return cuuint64_t(size > 1 ? sizeof(ELEMENT) * stride : 16); };
  const cuuint64_t sizes[] = {cuuint64_t(columns), cuuint64_t(N), cuuint64_t(heads), cuuint64_t(B)};
  const cuuint64_t strides[] = {bytes(x.stride_n, N), bytes(x.stride_h, heads), bytes(x.stride_b, B)};
  const cuuint32_t box[] = {panel, cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, x.data, sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#ifdef __CUDACC__

// Ask for a box. It comes at any time; then its bytes (all of the box, zeros too) count at the barrier.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, uint64_t* barrier, int col,
                                         int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(shared_address(to)), "l"(&map), "r"(shared_address(barrier)), "r"(col), "r"(row),
                  "r"(head), "r"(batch) : "memory");
}

// Store a box. The copy reads shared memory until this thread has waited for it: bulk_commit(), bulk_wait().
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int col, int row,
                                          int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
               :: "l"(&map), "r"(shared_address(from)), "r"(col), "r"(row), "r"(head), "r"(batch) : "memory");
}

// Add so many bytes of floats, a multiple of 16, to those in global memory: copies of the same kind.
__device__ __forceinline__ void bulk_add(float* to, const void* from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :: "l"(to), "r"(shared_address(from)), "r"(bytes) : "memory");
}

// The stores that this thread has started since the last commit are now a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all of this thread's groups but the last `groups_left` are done: written, or, with _read, read.
template <int groups_left> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" :: "n"(groups_left) : "memory");
}

template <int groups_left> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(groups_left) : "memory");
}

// Fetch the map into its cache, before the first copy needs it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
}

// The copy engine and wgmma reach shared memory on another path than loads and stores. What this thread has
// written is seen there after this fence (and what others have: after theirs and a barrier).
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#else
#include "sim/hopper.h"
#endif

// Ask for a whole tile: rows [row, row + tile_rows) of a head, columns from 0 on. By one thread, which has
// told the barrier of sizeof(ELEMENT) * tile_rows * panel * panels bytes.
__device__ __forceinline__ void load_panels(ELEMENT* tile, const CUtensorMap& map, uint64_t* barrier,
                                            int tile_rows, int row, int head, int batch) {
  #pragma unroll
  for (int n = 0; n < panels; n++)
    tma_load(tile + n * tile_rows * panel, map, barrier, n * panel, row, head, batch);
}
