// A ring of tiles that nobody reads again. Introduced by: forward stage 36, split_kv_wgmma.
#pragma once
#include "ring.cuh"

// As Ring; but of what has come, L2 gives the places away first.
template <int buffers, int rows>
struct RingOnce : Ring<buffers, rows> {
  using Base = Ring<buffers, rows>;
  using Base::Base;

  __device__ void fill(const CUtensorMap& map, unsigned step, int row, int head, int batch) const {
    uint64_t* full = this->full + step % buffers;
    this->wait_until_empty(step);
    mbarrier_arrive_expect(full, this->bytes);
    ELEMENT* tile = this->tiles + step % buffers * this->elements;
    #pragma unroll
    for (int n = 0; n < panels; n++)
      tma_load_once(tile + n * rows * panel, map, full, n * panel, row, head, batch);
  }
};
