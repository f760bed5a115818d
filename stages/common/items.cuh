// Work of blocks that take one tile of K and V after the other. Introduced by: backward stage 27, persistent.
#pragma once
#include "gradients.cuh"
#include "launch.cuh"
#include "mask.cuh"
#include "order.cuh"

// An item is a tile of K and V and block_heads query heads that read it. Masked, tiles come in the order of
// their numbers (causal: those first that most rows see), of as many heads as L2 holds Q, dO and sums of dQ
// of. (Query heads of one item count as one: a block has them one after the other.) A block takes the item of
// its own number, and draws a ticket for the next one.
//
// At d=64 half of L2 is better (H100, causal, N=16384, three runs): two heads in the place of four 0.967 ->
// 0.974, 0.961 -> 0.971, 0.982 -> 0.988 of FlashAttention-3 in next_keys. At d=128 one in the place of
// two 1.035 -> 1.027 in hopper_tuned.
constexpr int parts_of_L2 = HEAD_DIM <= 64 ? 2 : 1;        // heads have one of them

struct Items {
  int tiles, block_heads, heads;       // heads: those of dispatch_order(), groups of block_heads
  int all, heads_together;             // (The producer's registers just suffice if it need not multiply.)

  Items(const BwdParams& p, int block_heads)
      : tiles(ceil_div(p.N_k, BLOCK_C)), block_heads(block_heads), heads(p.B * p.H / block_heads),
        all(tiles * heads),
        heads_together(!CAUSAL && Mask::all_keys ? 1 : heads_with_sums_in_L2(heads, parts_of_L2 * p.N_q)) {}

  int blocks() const { return min(all, multiprocessors()); }

  // The n-th, as the producer hands it over: bh is its first query head, h the head of K and V
  __device__ __forceinline__ Handed nth(const BwdParams& p, int n) const {
    return n < all ? handed(p, dispatch_order(tiles, heads, heads_together, n)) : Handed{{-1}};
  }

  // The item of this tile and head
  __device__ __forceinline__ Handed handed(const BwdParams& p, const Work& work) const {
    const int bh = work.bh * block_heads;
    return {{work.tile, bh}, bh / p.H, bh % p.H / (p.H / p.H_kv)};
  }
};

__device__ __forceinline__ int next_item(int* ticket) { return atomicAdd(ticket, 1); }

// What all lanes read there, after which one of them may give the place back. (The shuffles tell the compiler
// that it is the same in all of them.)
__device__ __forceinline__ Handed of_lane_0(const Handed* handed) {
  const Handed work = *handed;
  __syncwarp();
  return {{of_lane_0(work.tile), of_lane_0(work.bh)}, of_lane_0(work.b), of_lane_0(work.h)};
}

// As many query heads of a key head as leave six items for each multiprocessor; and a divisor of all
inline int heads_of_a_block(const BwdParams& p) {
  const int group = p.H / p.H_kv, items = p.B * p.H * ceil_div(p.N_k, BLOCK_C);   // of one head
  int heads = max(1, min(group, items / (6 * multiprocessors())));
  while (group % heads) heads--;
  return heads;
}
