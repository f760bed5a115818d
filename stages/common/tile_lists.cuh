// Lists of the tiles that count, for masks that are no ranges (rule.cuh).
// Introduced by: forward stage 4, flash2.
//
// They are made before the stage's own kernel. If the rule has no kind(), each element of a tile is asked for
// once, as long as that can tell anything: some 1 / d of the work on a tile. It cannot disagree with sees().
#pragma once

// A list is two numbers, how many of its tiles are whole and how many it has in all, and room for all that
// there can be. First come the lists of the tiles of Q, then those of the tiles of K and V.
__host__ __device__ inline int64_t numbers_of_lists(int N_q, int N_k) {
  const int Tr = ceil_div(N_q, BLOCK_R), Tc = ceil_div(N_k, BLOCK_C);
  return (int64_t)Tr * (Tc + 2) + (int64_t)Tc * (Tr + 2);
}

// What S_ij is, found by a warp. In a list of tiles of Q, rows past the end are not seen, and cut it. In one
// of tiles of K and V they do not matter, as nobody stores them.
template <class M>
__device__ TileKind kind_of(const M& mask, int i, int j, bool rows_past_the_end_cut) {
  constexpr unsigned all = 0xffffffff;
  const int lane = threadIdx.x % 32;
  const int end_row = min((i + 1) * BLOCK_R, mask.N_q), end_col = min((j + 1) * BLOCK_C, mask.N_k);
  const bool rows_inside = !rows_past_the_end_cut || end_row == (i + 1) * BLOCK_R;
  const bool inside = rows_inside && end_col == (j + 1) * BLOCK_C;
  const TileKind kind = mask.rule.kind({i * BLOCK_R, end_row, j * BLOCK_C, end_col});
  if (kind != ASK) return kind == WHOLE && !inside ? CUT : kind;
  bool some = false, every = inside;
  for (int row = i * BLOCK_R; row < end_row && (every || !some); row += 4) {    // 4: their loads overlap
    bool sees_some = false, sees_every = true;
    #pragma unroll
    for (int r = row; r < row + 4; r++) {
      for (int col = j * BLOCK_C + lane; col < (j + 1) * BLOCK_C; col += 32) {
        const bool sees = mask.sees(r, col);
        sees_some |= sees;
        sees_every &= sees || r >= end_row;
      }
    }
    some |= __any_sync(all, sees_some);
    every &= __all_sync(all, sees_every);
  }
  return !some ? SKIPPED : every ? WHOLE : CUT;
}

// A block makes one list: of a tile of Q; then, for the backward pass, of a tile of K and V.
constexpr int list_threads = 1024;

template <class M, class Params>
__global__ void __launch_bounds__(list_threads) list_kernel(Params p, int lists) {
  const int Tr = ceil_div(p.N_q, BLOCK_R), Tc = ceil_div(p.N_k, BLOCK_C);
  const int list_of = blockIdx.x % lists, head = blockIdx.x / lists;
  const bool of_Q = list_of < Tr;
  const int b = head / p.mask.H, h = head % p.mask.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  start_next_kernel();                      // one that waits for this one, before it ends
  const M mask(p, b, h);
  const int tiles = of_Q ? Tc : Tr, fixed = of_Q ? list_of : list_of - Tr;
  int* list = p.mask.lists + head * numbers_of_lists(p.N_q, p.N_k);
  list += of_Q ? (int64_t)fixed * (Tc + 2) : (int64_t)Tr * (Tc + 2) + (int64_t)fixed * (Tr + 2);

  __shared__ int kinds[32];
  int whole = 0, cut = 0;                   // so far; the same in all lanes
  for (int first = 0; first < tiles; first += 32) {
    const int tile = first + warp;
    if (tile < tiles) {
      const TileKind kind = kind_of(mask, of_Q ? fixed : tile, of_Q ? tile : fixed, !of_Q);
      if (lane == 0) kinds[warp] = kind;
    }
    __syncthreads();
    if (warp == 0) {                        // in the order of their numbers: the same sum every time
      const int kind = first + lane < tiles ? kinds[lane] : SKIPPED;
      const unsigned are_whole = __ballot_sync(0xffffffff, kind == WHOLE);
      const unsigned are_cut = __ballot_sync(0xffffffff, kind == CUT), before = (1u << lane) - 1;
      if (kind == WHOLE) list[2 + whole + __popc(are_whole & before)] = first + lane;
      if (kind == CUT) list[1 + tiles - cut - __popc(are_cut & before)] = first + lane;
      whole += __popc(are_whole);
      cut += __popc(are_cut);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    list[0] = whole;
    list[1] = whole + cut;
    if (whole + cut == 0) list[1 + tiles] = 0;          // tiles[0], which may be loaded all the same
  }
}

// In bytes
template <class M, class Params>
size_t list_bytes(const Params& p) {
  if (M::is_range) return 0;
  return sizeof(int) * p.mask.B * p.mask.H * numbers_of_lists(p.N_q, p.N_k);
}

// for_Q_alone: no lists of tiles of K and V
template <class M, class Params>
void launch_lists(const Params& p, bool for_Q_alone, cudaStream_t stream) {
  if constexpr (!M::is_range) {
    const int lists = ceil_div(p.N_q, BLOCK_R) + (for_Q_alone ? 0 : ceil_div(p.N_k, BLOCK_C));
    list_kernel<M, Params><<<p.mask.B * p.mask.H * lists, list_threads, 0, stream>>>(p, lists);
  }
}
