// A ring whose tiles come with a number for each row. Introduced by: backward stage 18, warp_specialized.
#pragma once
#include "ring.cuh"

// As Ring::fill(), and of each row a float, those from `from` on. They go to `floats`, a buffer behind the
// other, and count at the same mbarrier.
template <int buffers, int rows>
__device__ __forceinline__ void fill(const Ring<buffers, rows>& ring, const CUtensorMap& map, unsigned step,
                                     int row, int head, int batch, float* floats, const float* from) {
  uint64_t* full = ring.full + step % buffers;
  ring.wait_until_empty(step);
  mbarrier_arrive_expect(full, ring.bytes + sizeof(float) * rows);
  load_panels(ring.tiles + step % buffers * ring.elements, map, full, rows, row, head, batch);
  bulk_load(floats + step % buffers * rows, from, sizeof(float) * rows, full);
}
