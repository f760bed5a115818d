// A ring that a cluster of two blocks fills together. Introduced by: forward stage 30, multicast.
#pragma once
#include "cluster.cuh"
#include "ring.cuh"

// As Ring (ring.cuh), but both blocks get the same tiles, in the same order, and each asks for half of the
// rows of each tile: the copy engine reads it once, and writes it to both.
//
//   block 0 asks for rows 0 to rows / 2 - 1   --->  block 0, block 1
//   block 1 asks for the other ones           --->  block 0, block 1
//
//   full     the bytes of the whole tile have come, as the producers of both blocks have asked for them.
//            They may come before this block's own producer says how many they are: its arrival is missing
//   empty    all warps of both blocks are done with the tile     2 arrivals a warp
template <int buffers, int rows>
struct MulticastRing : Ring<buffers, rows> {
  using One = Ring<buffers, rows>;      // of one block
  using One::One;

  // By the block, before a cluster_sync(): as many warps are consumers in both blocks
  __device__ __forceinline__ void init(int warps) const { One::init(2 * warps); }

  // The producers': the map's box has rows / 2 rows
  __device__ void fill(const CUtensorMap& map, unsigned step, int row, int head, int batch) const {
    const int buffer = step % buffers, first = cluster_rank() * (rows / 2);
    this->wait_until_empty(step);
    mbarrier_arrive_expect(this->full + buffer, this->bytes);
    #pragma unroll
    for (int n = 0; n < panels; n++)
      tma_load_multicast(this->tiles + buffer * this->elements + (n * rows + first) * panel, map,
                         this->full + buffer, n * panel, row + first, head, batch, 3);
  }

  // The consumers': one lane for each block
  __device__ __forceinline__ void release(unsigned step) const {
    const int lane = threadIdx.x % 32;
    if (lane < 2) mbarrier_arrive_as_reader(this->empty + step % buffers, lane);
  }
  __device__ __forceinline__ void pass(unsigned step) const {
    this->wait_until_full(step);
    __syncwarp();
    release(step);
  }
};
