// What a whole warp does with matrices: ldmatrix, stmatrix and products on tensor cores. Which lane holds
// which element is said in stages/common/ptx.cuh. Each lane leaves its registers; the last one to come does
// the work of all.
#include "checker.h"

#include <cstring>

#include "../include/sim/ptx.h"

namespace sim {

static void whole_warp_together(const char* name, void* operands, Site site, void (*f)(WarpOperation&)) {
  const Worker& w = *worker;
  if (w.fibers.size() - size_t(w.current->warp) * WARP_SIZE < WARP_SIZE)
    fail(std::string(name) + " needs 32 lanes; the block's last warp has fewer", site);
  together(~0u, name, operands, site, f, Orders::NOTHING, Needs::ALL_LANES);
}

extern "C" void sim_meet(const char* name, const char* file, int line) {
  whole_warp_together(name, nullptr, {file, line}, nullptr);
}

// -------------------------------------------------------------------------------- ldmatrix, stmatrix
// Matrices of 8 x 8 elements of 2 bytes; lane 8 * i + r has the address of row r of matrix i.
struct Matrices {
  uint32_t* registers;
  char* row;
  const void* pc;
  int count;
  bool transposed;

  bool has_row(int lane) const { return lane < 8 * count; }
};

static void check_row(const Matrices& m, Kind kind, const char* name, Site site) {
  if (!m.has_row(worker->current->lane)) return;
  if (reinterpret_cast<uintptr_t>(m.row) % 16)
    fail(std::string(name) + ": a row must start at a multiple of 16 bytes", site);
  if (worker->launch->checked) observe(m.row, 16, kind, m.pc, Asks::BOTH);
}

// f(lane, half of its register, row, column) for each element of a matrix. Lane l has two neighbours of row
// l / 4, from column 2 * (l % 4) on; transposed: of column l / 4.
template <class F> static void each_element(bool transposed, F f) {
  for (int lane = 0; lane < WARP_SIZE; lane++)
    for (int half = 0; half < 2; half++) {
      const int across = lane % 4 * 2 + half, down = lane / 4;
      if (transposed) f(lane, half, across, down);
      else f(lane, half, down, across);
    }
}

extern "C" void sim_load_matrices(const char* name, uint32_t* to, const void* row, int count, bool transposed,
                                  const char* file, int line) {
  Matrices mine{to, static_cast<char*>(const_cast<void*>(row)), __builtin_return_address(0), count,
                transposed};
  check_row(mine, Kind::READ, name, {file, line});
  whole_warp_together(name, &mine, {file, line}, [](WarpOperation& op) {
    const auto lanes = reinterpret_cast<Matrices* const*>(op.operands);
    const bool checked = worker->launch->checked;
    for (int i = 0; i < lanes[0]->count; i++)
      each_element(lanes[0]->transposed, [&](int lane, int half, int row, int column) {
        const Matrices& owner = *lanes[8 * i + row];
        const char* element = owner.row + 2 * column;
        memcpy(reinterpret_cast<char*>(lanes[lane]->registers + i) + 2 * half, element, 2);
        if (checked) observe_for_lane(lane, element, 2, owner.pc);
      });
  });
}

extern "C" void sim_store_matrices(const char* name, const uint32_t* from, void* row, int count,
                                   bool transposed, const char* file, int line) {
  Matrices mine{const_cast<uint32_t*>(from), static_cast<char*>(row), __builtin_return_address(0), count,
                transposed};
  check_row(mine, Kind::WRITE, name, {file, line});
  whole_warp_together(name, &mine, {file, line}, [](WarpOperation& op) {
    const auto lanes = reinterpret_cast<Matrices* const*>(op.operands);
    for (int i = 0; i < lanes[0]->count; i++)
      each_element(lanes[0]->transposed, [&](int lane, int half, int row, int column) {
        memcpy(lanes[8 * i + row]->row + 2 * column,
               reinterpret_cast<char*>(lanes[lane]->registers + i) + 2 * half, 2);
      });
  });
}

// -------------------------------------------------------------------------------- products
struct Product {
  MatrixType type;
  float* d;
  const uint32_t *a, *b;
};

template <class Format> static void widen(uint32_t two, float& first, float& second) {
  first = Format::widen(uint16_t(two));
  second = Format::widen(uint16_t(two >> 16));
}

// D += A B: 16 x 8 += 16 x 16 times 16 x 8. (On a GPU the sum's order and rounding are not specified.)
template <class Format> static void multiply(Product* const* lanes) {
  float A[16][16], B[16][8], D[16][8];
  for (int lane = 0; lane < WARP_SIZE; lane++) {
    const Product& p = *lanes[lane];
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 4; i++) {
      float* two = &A[group + i % 2 * 8][pair + i / 2 * 8];
      widen<Format>(p.a[i], two[0], two[1]);
    }
    for (int i = 0; i < 2; i++)
      widen<Format>(p.b[i], B[pair + 8 * i][group], B[pair + 8 * i + 1][group]);
    for (int i = 0; i < 4; i++) D[group + i / 2 * 8][pair + i % 2] = p.d[i];
  }
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 8; n++) D[m][n] += A[m][k] * B[k][n];
  for (int lane = 0; lane < WARP_SIZE; lane++)
    for (int i = 0; i < 4; i++) lanes[lane]->d[i] = D[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}

extern "C" void sim_mma(const char* name, MatrixType type, float* d, const uint32_t* a, const uint32_t* b,
                        const char* file, int line) {
  Product mine{type, d, a, b};
  whole_warp_together(name, &mine, {file, line}, [](WarpOperation& op) {
    const auto lanes = reinterpret_cast<Product* const*>(op.operands);
    if (lanes[0]->type == MatrixType::HALF) multiply<Half>(lanes);
    else multiply<Bfloat16>(lanes);
  });
}

}  // namespace sim
