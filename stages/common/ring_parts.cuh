// A ring of parts of tiles: some of the columns. Introduced by: backward stage 25, half_tiles.
#pragma once
#include "ring.cuh"

// As Ring (ring.cuh), but a step's tile has so many columns, from first_col on.
template <int buffers, int rows, int columns>
struct PartRing : Ring<buffers, rows> {
  static constexpr int elements = rows * columns, bytes = sizeof(ELEMENT) * elements;
  using Whole = Ring<buffers, rows>;
  using Whole::Whole;

  // floats: of each row one, too, those from `from` on; null: none
  __device__ void fill(const CUtensorMap& map, unsigned step, int row, int head, int batch, int first_col,
                       float* floats = nullptr, const float* from = nullptr) const {
    uint64_t* full = this->full + step % buffers;
    const int more_bytes = floats ? sizeof(float) * rows : 0;
    this->wait_until_empty(step);
    mbarrier_arrive_expect(full, bytes + more_bytes);
    #pragma unroll
    for (int col = 0; col < columns; col += panel)
      tma_load(this->tiles + step % buffers * elements + col * rows, map, full, first_col + col, row, head,
               batch);
    if (floats) bulk_load(floats, from, more_bytes, full);
  }
  __device__ __forceinline__ uint32_t offset(unsigned step) const { return step % buffers * (bytes / 16); }
};
