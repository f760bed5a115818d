// dQ_accum is cleared, and becomes dQ, while the consumers multiply. Introduced by: backward stage 36,
// idle_warps.
//
// dQ_i is a sum over the tiles j of K and V that it sees. A counter in HBM, one for each dQ_i, tells how far
// it is. It counts each quarter of the tile that has been cleared, and then each j whose part has been added.
// The producer waits for the quarters before it asks for Q_i. Warps that have nothing else to do clear some,
// and convert others of which all parts are there.
//
// Every wait ends. Blocks draw their items in order, and wait for quarters to be cleared alone; all of an
// item is counted before they wait for the next one's. Warps draw quarters in the same order. They clear one,
// and then wait to convert another that is `ahead` behind: so far that all is cleared, or about to be, that
// its items need, which are those of the heads that are together.
#pragma once
#include "drop_signed.cuh"
#include "staged_sums.cuh"

constexpr int quarter = BLOCK_R / 4;        // rows

// (B, H, Tr), behind two tickets: of items and of quarters
__device__ __forceinline__ int* counters_of(const Workspace& w) { return w.ticket + 2; }

// By the producer
__device__ __forceinline__ void wait_until_cleared(const int* counter) {
  while (load_acquire(counter) < 4) {}
  fence_proxy_async_global();               // what adds is the copy engine
}

// dQ of 16 rows, of sums that lie as registers do (gradients.cuh): eight lanes have two rows of a fragment.
__device__ __forceinline__ void convert_strip(const BwdParams& p, const float* sums, int bh, int first_row) {
  const int row = first_row + threadIdx.x % 8;
  ELEMENT* to = p.dQ.head(bh / p.H, bh % p.H) + row * p.dQ.stride_n;
  #pragma unroll 1                          // registers
  for (int col = threadIdx.x % 32 / 8 * 8; col < HEAD_DIM; col += 32) {
    float sum[2][8] = {};
    add_two_rows(sum, sums + 16 * (col + threadIdx.x % 8));
    if (row < p.N_q) store8(to, col, sum[0], scale_of_dS(p));
    if (row + 8 < p.N_q) store8(to + 8 * p.dQ.stride_n, col, sum[1], scale_of_dS(p));
  }
}

// The n-th quarter of all, in the order of items (items.cuh): of so many heads together
struct Quarter {
  int bh, tile, row;         // row: the first one
  int64_t sums;              // where they begin in dQ_accum

  __device__ __forceinline__ Quarter(const BwdParams& p, int together, int n) {
    const Work work = dispatch_order(ceil_div(p.N_q, BLOCK_R), p.B * p.H, together, n / 4);
    bh = work.bh, tile = work.tile;
    row = tile * BLOCK_R + n % 4 * quarter;
    sums = ((int64_t)bh * padded(p.N_q) + row) * HEAD_DIM;
  }

  // How many are added to its tile
  __device__ __forceinline__ int sums_of_tile(const BwdParams& p) const {
    const auto tiles = Mask(p, bh / p.H, bh % p.H).key_tiles(tile);
    return tiles.end - tiles.first;
  }

  __device__ __forceinline__ void clear(const Workspace& w) const {
    float4* to = reinterpret_cast<float4*>(w.dQ_accum + sums) + threadIdx.x % 32;
    #pragma unroll 4
    for (int k = 0; k < quarter * HEAD_DIM / 4; k += 32) to[k] = float4{};
    __syncwarp();
  }

  // When its tile's counter is there
  __device__ __forceinline__ void convert(const BwdParams& p, const Workspace& w, int complete) const {
    const int* counter = counters_of(w) + bh * ceil_div(p.N_q, BLOCK_R) + tile;
    while (threadIdx.x % 32 == 0 && load_acquire(counter) < complete) __nanosleep(1000);
    __syncwarp();
    for (int first = 0; first < quarter && row + first < p.N_q; first += 16)
      convert_strip(p, w.dQ_accum + sums + first * HEAD_DIM, bh, row + first);
  }
};

// A ticket is a quarter to clear, and another one to convert. By idle warps, and by consumers in the end.
__device__ __forceinline__ void clear_and_convert(const BwdParams& p, const Workspace& w,
                                                  const Items& items) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), all = 4 * Tr * p.B * p.H;
  const int together = items.heads_together * items.block_heads;
  const int ahead = 4 * Tr * max(together, int(gridDim.x / items.tiles + 1) * items.block_heads);
  #pragma unroll 1
  for (;;) {
    int n = 0;
    if (threadIdx.x % 32 == 0) n = next_item(w.ticket + 1);
    n = of_lane_0(n);
    if (n >= all + ahead) return;
    if (n < all) {
      const Quarter q(p, together, n);
      q.clear(w);
      if (threadIdx.x % 32 == 0) count_release(counters_of(w) + q.bh * Tr + q.tile);
    }
    if (n >= ahead) {
      const Quarter q(p, together, n - ahead);
      q.convert(p, w, 4 + q.sums_of_tile(p));
    }
  }
}

// What three warps beside the producer do. The first one adds, as add_sums(), and counts. A tile is in HBM
// about a microsecond after it has left. So it is counted after the next one of the item has. The last one is
// waited for: the next item may need zeros that come only when this tile has been converted.
template <int buffers, class K_ring>
__device__ __forceinline__ void add_clear_convert(const StagedSums<buffers>& sums, const BwdParams& p,
                                                  const Workspace& w, const Items& items,
                                                  const K_ring& K_smem, const Handed* handed) {
  if (warp_index() % 4 > 1) return clear_and_convert(p, w, items);
  unsigned n = 0;                           // tiles so far
  for_each_item(p, items, K_smem, handed, [&](const Mask& mask, const Handed& work, int first) {
    int* counters = counters_of(w) + first;
    const auto tiles = mask.query_tiles(work.tile);
    for (int t = tiles.first; t < tiles.end; t++, n++) {
      sums.add(n, first + tiles[t]);
      if (threadIdx.x % 32 == 0) bulk_wait<1>();
      if (threadIdx.x % 32 == 0 && t > tiles.first) count_release(counters + tiles[t - 1]);
    }
    if (threadIdx.x % 32 > 0 || tiles.first >= tiles.end) return;
    bulk_wait<0>();
    count_release(counters + tiles[tiles.end - 1]);
  });
}
