// Which scores count. Introduced by: forward stage 4, flash2. The rule itself is another file, MASK_FILE: one
// of stages/masks, or your own (rule.cuh says what such a file defines).
#ifndef STAGES_COMMON_MASK     // not #pragma once: a copy of this file may stand in a stage, as in exercises
#define STAGES_COMMON_MASK
#include "dropout.cuh"
#include "rule.cuh"
#include "tile_lists.cuh"
#include MASK_FILE

// The tiles that something is seen of, in a row or a column of tiles of S: tiles[t], for t from `first` to
// end - 1. Of tiles of K and V, S_ij is whole before t = cut. Mostly they are just the tiles t:
struct TileRange {
  int first, cut, end;
  __device__ int operator[](int t) const { return t; }
};

// Of a mask whose rows do not begin at key 0: whole tiles first, then those before them, then those after.
struct WholeFirst {
  int cut, end;
  int first_j, whole_j;      // where tiles begin, and whole ones
  static constexpr int first = 0;
  __device__ int operator[](int t) const {
    if (t < cut) return whole_j + t;
    return t < whole_j - first_j + cut ? first_j + t - cut : first_j + t;
  }
};

// Of any other mask: as tile_lists.cuh has listed them. Whole ones stand at the list's front, in their order,
// the others at its back, in reverse.
struct TileList {
  int cut, end;
  const int* front;
  const int* back;
  static constexpr int first = 0;
  __device__ int operator[](int t) const { return t < cut ? front[t] : back[cut - t]; }
};

// The part-th of `parts` ranges of such tiles, of one length. If it is empty, [0] is some tile of all.
template <class Tiles>
struct PartOfTiles {
  Tiles all;
  int first, cut, end;       // tile t of it is all[first + t]
  __device__ int operator[](int t) const { return all[first + t]; }
};

template <class Tiles>
__device__ PartOfTiles<Tiles> part_of(const Tiles& all, int part, int parts) {
  const int first = (int64_t)all.end * part / parts, end = (int64_t)all.end * (part + 1) / parts;
  return {all, first, min(all.cut, end) - first, end - first};
}

// Made once a block. Asked in two places: which tiles there are (S_ij is skipped, cut or whole), and within a
// tile that it cuts, element by element.
struct Mask {
  static constexpr bool is_range = Rule::is_range, scores = Rule::scores, all_keys = Rule::all_keys;
  static constexpr int sides = is_range && !Rule::from_0 ? 2 : 1;  // 2: a row's keys do not begin at 0
  static_assert(!KV_CACHE || is_range, "with a cache a mask must be a KeyRange: no list has its lengths");
  int N_q, N_k;
  Rule rule;
  Dropout dropout;
  const int* lists;          // of this batch element and head
  float* gradient;           // likewise

  template <class Params>
  __device__ Mask(const Params& p, int b, int h)
      : N_q(p.N_q), N_k(p.N_k), rule(Arguments{p.mask, p.N_q, p.N_k}, b, h), dropout(p, b, h) {
    const int head = (p.mask.B > 1 ? b : 0) * p.mask.H + (p.mask.H > 1 ? h : 0);
    lists = p.mask.lists + head * numbers_of_lists(N_q, N_k);
    gradient = p.mask.gradient + (p.mask.gradient ? ((int64_t)b * p.H + h) * N_q * N_k : 0);
  }

  // Does the query of `row` see the key of `col`? Rows and keys past the end are not there.
  // (A rule that reads tensors reads the last ones in their place: without a branch, loads overlap.)
  __device__ bool sees(int row, int col) const {
    if (Rule::is_range) return row < N_q && col < N_k && sees_by(rule, row, col);
    return sees_by(rule, min(row, N_q - 1), min(col, N_k - 1)) & (row < N_q) & (col < N_k);
  }

  // Does it see the key of col + c, of a mask with one side? Any row may be asked for, where nobody uses
  // what is past the end. c is apart, as it is a constant where a loop is unrolled: then an element takes one
  // comparison, with a constant.
  __device__ bool sees_key(int row, int col, int c) const {
    if (!Rule::is_range) return sees(row, col + c);
    return c < min(N_k, rule.end_key(row)) - col;
  }

  // Of one with two sides: which of the keys col + 8 n + c does it see, for n < n_tiles and c = 0, 1? Bit
  // 2 n + c says so. (That takes fewer instructions than two comparisons for each.)
  template <int n_tiles>
  __device__ unsigned seen_keys(int row, int col) const {
    const unsigned before_end = bits_before<n_tiles>(min(N_k, rule.end_key(row)) - col);
    return before_end & ~bits_before<n_tiles>(rule.first_key(row) - col);
  }

  // Do these rows see all of the keys from `col` to col + keys - 1? Of one with two sides.
  __device__ bool sees_all(int row, int last_row, int col, int keys) const {
    return rule.first_key(last_row) <= col && col + keys <= min(N_k, rule.end_key(row));
  }

  // In the backward pass, by one side: side 0, the keys from a row's end on, or 1, those before its first.
  // Rows past the end are not asked for.
  __device__ bool sees(int row, int col, int side) const {
    if (sides == 1) return sees(row, col);
    return side == 0 ? col < min(N_k, rule.end_key(row)) : col >= rule.first_key(row);
  }

  // A score of the query of `row` and the key of `col`, which is x, scaled; and the derivative by x
  __device__ float score(float x, int row, int col) const {
    return scores ? rule.score(x, min(row, N_q - 1), min(col, N_k - 1)) : x;
  }
  __device__ float slope(float x, int row, int col) const {
    return scores ? rule.slope(x, min(row, N_q - 1), min(col, N_k - 1)) : 1.f;
  }

  // dS, the gradient by a score, taken back through score(). By what the mask has added it is the same: it is
  // written to `gradient`, if that is wanted.
  __device__ float through_score(float dS, float x, int row, int col) const {
    keep_gradient(dS, row, col);
    return dS * slope(x, row, col);
  }
  __device__ void keep_gradient(float dS, int row, int col) const {
    if (Rule::has_gradient && gradient && row < N_q && col < N_k)
      gradient[(int64_t)row * N_k + col] = dS;
  }

  // Dropout of P and dP: what to multiply an element by. 1 if a call asks for none.
  __device__ float keep(int row, int col) const { return dropout.keep(row, col); }
  __device__ float2 keep_two(int row, int col) const { return dropout.keep_two(row, col); }

  // The tiles of K and V that tile i of Q sees something of: whole ones come first
  __device__ auto key_tiles(int i) const {
    if constexpr (!Rule::is_range) {
      const int Tc = ceil_div(N_k, BLOCK_C);
      const int* list = lists + (int64_t)i * (Tc + 2);
      return TileList{list[0], list[1], list + 2, list + 1 + Tc};
    } else {
      // The last row sees the most keys. From there on S_ij is skipped. The first row sees the fewest: before
      // that one S_ij is whole.
      const int row = i * BLOCK_R, end_row = row + BLOCK_R;
      const int cut_j = seen_by(row) / BLOCK_C, end_j = ceil_div(seen_by(end_row - 1), BLOCK_C);
      if constexpr (Rule::from_0) {
        return TileRange{0, cut_j, end_j};
      } else {
        const int first_j = unseen_by(row) / BLOCK_C;
        const int whole_j = ceil_div(unseen_by(end_row - 1), BLOCK_C);
        const bool has_whole = cut_j > whole_j;
        const int whole = has_whole ? cut_j - whole_j : 0;
        return WholeFirst{whole, max(end_j - first_j, 0), first_j, has_whole ? whole_j : end_j};
      }
    }
  }

  // How much of the first `end` tiles of K and V that a tile of Q needs do its rows up to this one need: so
  // many tiles, at most one less, if not `several`; and of the last one perhaps no more than its first `some`
  // columns. Asked by stages whose warpgroups have 64 rows each (cut_diagonal); answered for masks whose last
  // tiles stand in order.
  struct Needed {
    int tiles;
    bool some_are_enough;
  };
  template <int some, bool several = false, class Tiles>
  __device__ Needed needed(const Tiles& tiles, int end, int row) const {
    if constexpr (BLOCK_R <= 64 || !Rule::is_range || sides == 2 && several || Rule::all_keys) {
      return {end, false};
    } else {
      const int before = tiles[end - 1] - (end - 1);               // tiles that no row of Q's tile needs
      const int keys = min(rule.end_key(row) - before * BLOCK_C, end * BLOCK_C);
      const int of_rows = several ? max(ceil_div(keys, BLOCK_C), 1)
                                  : end - (end > 1 && keys <= (end - 1) * BLOCK_C);
      // Without the minimum, or without sides == 1, ptxas serialises wgmma.
      return {of_rows, sides == 1 && some < BLOCK_C && of_rows > 1 && keys <= (of_rows - 1) * BLOCK_C + some};
    }
  }

  // The tiles of Q that see something of tile j of K and V
  __device__ auto query_tiles(int j) const {
    const int Tr = ceil_div(N_q, BLOCK_R), Tc = ceil_div(N_k, BLOCK_C);
    if constexpr (!Rule::is_range) {
      const int* list = lists + (int64_t)Tr * (Tc + 2) + (int64_t)j * (Tr + 2);
      return TileList{list[0], list[1], list + 2, list + 1 + Tr};
    } else if constexpr (Rule::from_0) {
      return TileRange{max(rule.first_row(j * BLOCK_C), 0) / BLOCK_R, 0, Tr};
    } else if constexpr (Rule::has_rows) {
      const int first_row = rule.first_row(j * BLOCK_C), end_col = (j + 1) * BLOCK_C;
      const int end_row = min(end_col > N_k ? N_q : rule.end_row(end_col - 1), N_q);   // as key_tiles()
      return TileRange{max(first_row, 0) / BLOCK_R, 0, ceil_div(max(end_row, 0), BLOCK_R)};
    } else {
      const int first_i = first_tile(Tr, [&](int i) { return seen_by((i + 1) * BLOCK_R - 1) > j * BLOCK_C; });
      const int end_i = first_tile(Tr, [&](int i) { return unseen_by(i * BLOCK_R) >= (j + 1) * BLOCK_C; });
      return TileRange{first_i, 0, end_i};
    }
  }

  // Does S_ij have an element that does not count, with i = tiles[t] of query_tiles(j)? (By key_tiles(i).cut,
  // the backward at d=64 took 1 % longer: H200.)
  template <class Tiles>
  __device__ bool cuts(const Tiles& tiles, int t, int j) const {
    if (!Rule::is_range) return t >= tiles.cut;
    const int row = t * BLOCK_R, end_row = row + BLOCK_R, col = j * BLOCK_C, end_col = col + BLOCK_C;
    return end_row > N_q || end_col > N_k || end_col > rule.end_key(row) ||
           (!Rule::from_0 && col < rule.first_key(end_row - 1));
  }

  // The same by one side of two. (Asked for both first, a window's backward at d=128 spills 96 bytes a
  // thread, else 240.)
  template <class Tiles>
  __device__ bool cuts(const Tiles& tiles, int t, int j, int side) const {
    if (sides == 1 || !cuts(tiles, t, j)) return cuts(tiles, t, j);
    if (side == 0) return min(N_k, rule.end_key(t * BLOCK_R)) < (j + 1) * BLOCK_C;
    return rule.first_key((t + 1) * BLOCK_R - 1) > j * BLOCK_C;
  }

 private:
  // --- how many keys a row sees
  // those before rule.end_key(row), but for the first ones
  __device__ int seen_by(int row) const { return max(min(N_k, rule.end_key(row)), 0); }
  // ---
  // These are the first ones.
  __device__ int unseen_by(int row) const { return min(max(rule.first_key(row), 0), N_k); }

  // A word with a bit for each of the elements 8 n + c of a row, c = 0 or 1, that are before `end`
  template <int n_tiles>
  __device__ static unsigned bits_before(int end) {
    static_assert(n_tiles <= 16, "a word has 32 bits");
    const unsigned inside = min(max(end, 0), 8 * n_tiles), bits = (inside + 7) / 8 + (inside + 6) / 8;
    return bits < 32 ? (1u << bits) - 1 : 0xffffffff;
  }

  // The first tile of Q that `holds`, where those after it do, too: by binary search
  template <class F>
  __device__ static int first_tile(int Tr, F holds) {
    int low = 0, high = Tr;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (holds(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }
};
#endif
