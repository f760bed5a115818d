// A ring whose tiles come with something beside them. Introduced by: backward stage 37, augmented.
#pragma once
#include "ring.cuh"

struct Beside {
  void* to;                  // in shared memory: a place for each buffer, bytes apart
  const void* from;
  int bytes;                 // 0: nothing
};

// As Ring::fill(), and what is beside, which counts at the same mbarrier
template <int buffers, int rows>
__device__ __forceinline__ void fill(const Ring<buffers, rows>& ring, const CUtensorMap& map, unsigned step,
                                     int row, int head, int batch, const Beside& beside) {
  uint64_t* full = ring.full + step % buffers;
  ring.wait_until_empty(step);
  mbarrier_arrive_expect(full, ring.bytes + beside.bytes);
  load_panels(ring.tiles + step % buffers * ring.elements, map, full, rows, row, head, batch);
  if (beside.bytes)
    bulk_load(static_cast<char*>(beside.to) + step % buffers * beside.bytes, beside.from, beside.bytes, full);
}
