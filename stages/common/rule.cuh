// A mask is a file of stages/masks, or one of your own, that defines a struct Rule. Introduced by: forward
// stage 4, flash2.
//
// It is one of three kinds, by what it inherits. They differ in how the tiles that count are found.
#pragma once
#include <limits.h>

#include "mask_params.cuh"

// A tensor of one batch element and head
template <class T>
struct View {
  const T* data;
  int64_t stride_row, stride_col;
  __device__ T at(int row, int col) const { return data[row * stride_row + col * stride_col]; }
};

// What a rule is made of, once a block. Of `a & b`, b's arguments come after a's.
struct Arguments {
  const MaskParams& p;
  int N_q, N_k;
  int tensors_before = 0, ints_before = 0, floats_before = 0;

  __device__ int integer(int n) const {
    const bool from_last = KV_CACHE && p.diagonals >> (ints_before + n) & 1;
    return p.ints[ints_before + n] + (from_last ? N_k - N_q : 0);
  }
  __device__ float number(int n) const { return p.floats[floats_before + n]; }

  template <class T>
  __device__ View<T> tensor(int n, int b, int h) const {
    const MaskTensor& x = p.tensors[tensors_before + n];
    return {static_cast<const T*>(x.data) + b * x.stride_b + h * x.stride_h, x.stride_row, x.stride_col};
  }

  __device__ Arguments after(int tensors, int ints, int floats) const {
    return {p, N_q, N_k, tensors_before + tensors, ints_before + ints, floats_before + floats};
  }
};

// What S_ij is. ASK: nobody knows before each of its elements has been asked for.
enum TileKind { SKIPPED, CUT, WHOLE, ASK };

struct Tile { int row, end_row, col, end_col; };      // up to, but not including, the ends

// sees(row, col): does the query of `row` see the key of `col`? Which tiles are skipped and which are cut is
// found by asking for each of their elements, before the stage's kernel runs: tile_lists.cuh.
struct AnyKeys {
  static constexpr bool is_range = false, from_0 = false, all_keys = false, has_rows = false;
  // It may know that only keys from first_key(row) to end_key(row) - 1 are worth asking for: see KeyRange.
  __device__ int first_key(int row) const { return 0; }
  __device__ int end_key(int row) const { return INT_MAX; }
  __device__ int first_row(int col) const { return 0; }
  __device__ int end_row(int col) const { return INT_MAX; }

  // What a tile is, if it can tell sooner. All lanes of a warp call it together.
  __device__ TileKind kind(const Tile& tile) const { return ASK; }

  // A rule that changes scores says scores = true and defines score() and slope().
  static constexpr bool scores = false, has_gradient = false;
  // A score, scaled; and the derivative of that by x
  __device__ float score(float x, int row, int col) const { return x; }
  __device__ float slope(float x, int row, int col) const { return 1.f; }
};

// Each row sees the keys from first_key(row) up to, but not including, end_key(row); neither gets smaller
// from a row to the next. So tiles are found by looking at a tile's first and last row. Any row may be asked
// for, and any number may come out, below 0 or past the last key, too.
//
// Which rows see a key is searched for, unless it has_rows: then first_row(col) is the first one, and
// end_row(col) the one after the last.
struct KeyRange : AnyKeys {
  static constexpr bool is_range = true;
  __device__ bool sees(int row, int col) const { return true; }
};

// A KeyRange whose first_key is always 0. It has first_row(col), the first row that sees a key; so do all
// later ones.
struct KeysFrom0 : KeyRange {
  static constexpr bool from_0 = true, has_rows = true;
};

// All of them; for masks that change scores alone, too
struct AllKeys : KeysFrom0 {
  static constexpr bool all_keys = true;
  int N_k;
  __device__ AllKeys(const Arguments& a, int b, int h) : N_k(a.N_k) {}
  __device__ int end_key(int row) const { return N_k; }
  __device__ int first_row(int col) const { return 0; }
};

template <class R>
__device__ bool sees_by(const R& rule, int row, int col) {
  if (!R::is_range) return rule.sees(row, col);
  return (R::from_0 || col >= rule.first_key(row)) && col < rule.end_key(row);
}

// As kind() of a rule, whatever it is
template <class R>
__device__ TileKind kind_by(const R& rule, const Tile& tile) {
  if (!R::is_range) return rule.kind(tile);
  const int last_row = tile.end_row - 1;
  if (tile.col >= rule.end_key(last_row) || tile.end_col <= rule.first_key(tile.row)) return SKIPPED;
  return tile.end_col <= rule.end_key(tile.row) && tile.col >= rule.first_key(last_row) ? WHOLE : CUT;
}

// The least and the greatest of ids[first * stride] to ids[(end - 1) * stride], found by a warp
template <class T>
struct Extent { T least, greatest; };

template <class T>
__device__ Extent<T> extent_of(const T* ids, int64_t stride, int first, int end) {
  Extent<T> found = {ids[first * stride], ids[first * stride]};
  for (int n = first + threadIdx.x % 32; n < end; n += 32) {
    found.least = min(found.least, ids[n * stride]);
    found.greatest = max(found.greatest, ids[n * stride]);
  }
  for (int distance = 1; distance < 32; distance *= 2) {
    found.least = min(found.least, __shfl_xor_sync(0xffffffff, found.least, distance));
    found.greatest = max(found.greatest, __shfl_xor_sync(0xffffffff, found.greatest, distance));
  }
  return found;
}

// a & b: of a pair that both see. (&, not &&: no branch between their loads.) Scores go through a, then
// through b. `tensors`, `ints` and `floats` are how many a takes. (flash_ladder writes a file with a Rule of
// this kind.)
template <class A, class B, int tensors, int ints, int floats>
struct And {
  static constexpr bool is_range = A::is_range && B::is_range, from_0 = A::from_0 && B::from_0;
  static constexpr bool all_keys = A::all_keys && B::all_keys, has_rows = A::has_rows && B::has_rows;
  static constexpr bool scores = A::scores || B::scores, has_gradient = A::has_gradient || B::has_gradient;
  A a;
  B b;

  __device__ And(const Arguments& arguments, int batch, int head)
      : a(arguments, batch, head), b(arguments.after(tensors, ints, floats), batch, head) {}

  __device__ bool sees(int row, int col) const { return sees_by(a, row, col) & sees_by(b, row, col); }
  __device__ TileKind kind(const Tile& tile) const {
    const TileKind by_a = kind_by(a, tile), by_b = kind_by(b, tile);
    if (by_a == SKIPPED || by_b == SKIPPED) return SKIPPED;
    return by_a == ASK || by_b == ASK ? ASK : by_a == WHOLE && by_b == WHOLE ? WHOLE : CUT;
  }
  __device__ int end_key(int row) const { return min(a.end_key(row), b.end_key(row)); }
  __device__ int first_row(int col) const { return max(a.first_row(col), b.first_row(col)); }
  __device__ int end_row(int col) const { return min(a.end_row(col), b.end_row(col)); }
  __device__ int first_key(int row) const { return max(a.first_key(row), b.first_key(row)); }

  __device__ float score(float x, int row, int col) const { return b.score(a.score(x, row, col), row, col); }
  __device__ float slope(float x, int row, int col) const {
    return a.slope(x, row, col) * b.slope(a.score(x, row, col), row, col);
  }
};

// a | b: of a pair that one of them sees. Neither changes scores.
template <class A, class B, int tensors, int ints, int floats>
struct Or : AnyKeys {
  A a;
  B b;

  __device__ Or(const Arguments& arguments, int batch, int head)
      : a(arguments, batch, head), b(arguments.after(tensors, ints, floats), batch, head) {}

  __device__ bool sees(int row, int col) const { return sees_by(a, row, col) | sees_by(b, row, col); }
  __device__ TileKind kind(const Tile& tile) const {
    const TileKind by_a = kind_by(a, tile), by_b = kind_by(b, tile);
    if (by_a == WHOLE || by_b == WHOLE) return WHOLE;
    return by_a == ASK || by_b == ASK ? ASK : by_a == SKIPPED && by_b == SKIPPED ? SKIPPED : CUT;
  }
};
