// Accumulators that start from statistics, by a product. Introduced by: backward stage 37, augmented.
//
// S^T - L / c = K Q^T + 1 (-L / c)^T. The last term is a product, too: of a column of ones beside K, and one
// of statistics beside Q. -L / c is a sum of three parts (parts.cuh), -D one of two. So a tile of Q comes
// with five columns more; and beside K, or V, stand ones, or zeros:
//
//   columns     0  1  2  3  4
//   for S       1  1  1  0  0
//   for dP      0  0  0  1  1
#pragma once
#include "order.cuh"
#include "parts.cuh"
#include "ring_beside.cuh"
#include "seed.cuh"

// To wgmma parts are an operand B, MN-major, without a swizzle: 8 rows of Q make 16 bytes of each column, and
// those of all columns follow each other. It reads 16 columns: 8 from there on, then these again. What is no
// part is multiplied by 0: the next rows' parts, and zeros behind a tile's.
constexpr int parts_of_8 = 8 * all_parts, parts_of_tile = BLOCK_R * all_parts;
constexpr int parts_pitch = parts_of_tile + 64 - parts_of_8;      // from a tile to the next

struct WorkspaceOfParts : Workspace {
  Part* parts;                              // (B, H, Tr, parts_pitch)
};

// Parts of what prepare_kernel has written, a row a thread
__global__ void __launch_bounds__(256) split_kernel(WorkspaceOfParts w, int64_t rows) {
  start_next_kernel();
  wait_for_previous_kernel();
  const int64_t row = (int64_t)blockIdx.x * 256 + threadIdx.x, in_tile = row % BLOCK_R;
  if (row >= rows) return;
  Part *tile = w.parts + row / BLOCK_R * parts_pitch, *to = tile + in_tile / 8 * parts_of_8 + in_tile % 8;
  // L's are finite, as other rows multiply them by 0
  store_parts_of(to, fminf(fmaxf(w.L[row], -0x1p127f), 0x1p127f), 0, L_parts);
  store_parts_of(to, w.D[row], L_parts, all_parts);
  if (parts_of_tile + in_tile < parts_pitch) tile[parts_of_tile + in_tile] = Part(0.f);
}

// Where they are in shared memory, twice, by turns; then barriers. With dropout D is a number, as dS is not
// dP less D there; so are both if a mask changes scores. (Not last: memcheck takes what wgmma reads for 4096
// bytes from a multiple of 1024 on, also without a swizzle.)
struct Statistics {
  static constexpr int bytes = 20 * BLOCK_R + 160;            // at most: with dropout
  static_assert(4 * parts_pitch + 8 * DROPOUT * BLOCK_R <= bytes && 16 * BLOCK_R <= bytes, "two tiles'");
  static constexpr int room = (bytes + 20 * 8 + 1023) / 1024 * 1024;
  float *D_smem, *L_smem;
  Part* parts;
  uint32_t matrix;                          // the lower half of their descriptor

  __device__ Statistics(void* at)
      : D_smem(static_cast<float*>(at)), L_smem(D_smem + 2 * BLOCK_R),
        parts(reinterpret_cast<Part*>(DROPOUT ? L_smem : D_smem)),
        matrix(of_lane_0(shared_address(parts) >> 4)) {}

  __device__ __forceinline__ const float* D(int n) const { return D_smem + n % 2 * BLOCK_R; }
  __device__ __forceinline__ const float* L(int n) const { return L_smem + n % 2 * BLOCK_R; }
  __device__ __forceinline__ uint64_t* barriers() const {
    return reinterpret_cast<uint64_t*>(D_smem + bytes / sizeof(float));
  }
  __device__ __forceinline__ float* end() const { return D_smem + room / sizeof(float); }

  // What comes with a tile of Q, or of dO; row: its first one, of all heads'
  __device__ __forceinline__ Beside with_Q(const WorkspaceOfParts& w, int64_t row) const {
    if (Mask::scores) return {L_smem, w.L + row, int(sizeof(float)) * BLOCK_R};
    return {parts, w.parts + row / BLOCK_R * parts_pitch, int(sizeof(Part)) * parts_pitch};
  }
  __device__ __forceinline__ Beside with_dO(const WorkspaceOfParts& w, int64_t row) const {
    return {D_smem, w.D + row, Mask::scores || DROPOUT ? int(sizeof(float)) * BLOCK_R : 0};
  }

  // acc = the statistic of each column, whose parts are from `first` to end - 1. It is committed with the
  // product that is added. The ones are made anew each time: no registers for them in between. (If it did not
  // add to zeros, ptxas would serialise it: C7512.)
  template <int first, int end, int n_tiles>
  __device__ __forceinline__ void start(float (&acc)[n_tiles][4], int n) const {
    auto one_if = [](int column) { return column >= first && column < end ? 1.f : 0.f; };
    uint32_t ones = 0;                      // columns 2 i and 2 i + 1, of lane i of four
    #pragma unroll
    for (int i = 0; i < 3; i++)
      if (threadIdx.x % 4 == i) ones = pack<Part>(one_if(2 * i), one_if(2 * i + 1));
    ones = pinned(ones);
    const uint32_t A[4] = {ones, ones, pinned(0u), pinned(0u)};
    #pragma unroll
    for (auto& four : acc)
      for (float& x : four) x = pinned(0.f);
    wgmma_fence();
    wgmma<true, Part>(acc, A, uint64_t(2 * parts_of_8 >> 4) << 32 | matrix + n % 2 * (2 * parts_pitch / 16));
  }
};
