// Tiles in shared memory that a producer fills and consumers give back, one after the other, in a circle.
// Introduced by: forward stage 21, warp_specialized.
#pragma once
#include "tma.cuh"

// `buffers` tiles of `rows` rows of d columns, in panels. The tile of step s is in buffer s % buffers; its
// mbarriers are in phase s / buffers:
//
//   full     the bytes of the tile have come                       1 arrival, and the bytes
//   empty    all warps of the consumers are done with the tile     an arrival a warp
//
// The producer waits for the phase of `empty` before, s / buffers - 1. For the first tiles that counts as
// complete.
template <int buffers, int rows>
struct Ring {
  static constexpr int elements = rows * panel * panels, bytes = sizeof(ELEMENT) * elements;     // of a tile
  ELEMENT* tiles;
  uint64_t *full, *empty;

  __device__ Ring(ELEMENT* tiles, uint64_t* barriers)
      : tiles(tiles), full(barriers), empty(barriers + buffers) {}

  // By the block, before a barrier
  __device__ __forceinline__ void init(int warps) const {
    if (threadIdx.x > 0) return;
    for (int n = 0; n < buffers; n++) {
      mbarrier_init(full + n, 1);
      mbarrier_init(empty + n, warps);
    }
    fence_mbarrier_init();
  }

  // The producer's: wait for the buffer; and ask for the tile that begins at `row`
  __device__ __forceinline__ void wait_until_empty(unsigned step) const {
    mbarrier_wait(empty + step % buffers, step / buffers % 2 ^ 1);
  }
  __device__ void fill(const CUtensorMap& map, unsigned step, int row, int head, int batch) const {
    wait_until_empty(step);
    mbarrier_arrive_expect(full + step % buffers, bytes);
    load_panels(tiles + step % buffers * elements, map, full + step % buffers, rows, row, head, batch);
  }

  // The consumers'
  __device__ __forceinline__ void wait_until_full(unsigned step) const {
    mbarrier_wait(full + step % buffers, step / buffers % 2);
  }
  __device__ __forceinline__ void release(unsigned step) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + step % buffers);
  }
  // A tile that this warp does not need. (All lanes have seen it come: else it may be gone, and another one
  // there, before a lane has looked, which then waits for ever.)
  __device__ __forceinline__ void pass(unsigned step) const {
    wait_until_full(step), __syncwarp();
    release(step);
  }
  // How much further the tile is than the first buffer, in units of 16 bytes: for descriptors (wgmma.cuh)
  __device__ __forceinline__ uint32_t offset(unsigned step) const { return step % buffers * (bytes / 16); }
};
