// Products of a warpgroup: D += A B, 64 x n += 64 x 16 times 16 x n, asynchronously, B and mostly A from
// shared memory. (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": of the layouts "Shared Memory
// Matrix Layout", "Strides" and "Matrix Descriptor Format", of D and of A in registers "Register Fragments
// for wgmma.mma_async.m64nNk16".)
#include <cstring>
#include <memory>

#include "checker.h"
#include "engines.h"

namespace sim {

constexpr int M = 64, K = 16, MOST_N = 256;
constexpr int CHUNK_LENGTH = 8;              // elements: 16 bytes, which stay together in every layout

// -------------------------------------------------------------------------------- where operands lie
struct Descriptor {
  size_t start, leading, stride;
  int pitch;                                 // bytes of a row of the swizzle's pattern; 0: no swizzle

  explicit Descriptor(uint64_t d) {
    auto field = [&](int bit) { return size_t(d >> bit & 0x3fff) << 4; };
    start = field(0);
    leading = field(16);
    stride = field(32);
    static const int pitches[] = {0, 128, 64, 32};
    pitch = pitches[d >> 62];
  }

  // The chunk with element (mn, k). K-major: of elements (mn, k) to (mn, k + 7); MN-major: to (mn + 7, k).
  //
  // With a swizzle the pattern is 8 rows of `pitch` bytes: rows of mn, or, MN-major, of k. `stride` leads to
  // the next 8 rows, `leading`, when MN-major, to the next `pitch` bytes of a row. Without a swizzle 8 chunks
  // make a matrix of 8 x 8, 128 bytes; K-major: `leading` to the next one in k, `stride` in mn; MN-major the
  // other way round.
  size_t chunk(bool mn_major, int mn, int k) const {
    const int along = mn_major ? mn : k, across = mn_major ? k : mn;
    if (!pitch)
      return start + across % 8 * 16 + (mn_major ? across / 8 * leading + along / 8 * stride
                                                 : across / 8 * stride + along / 8 * leading);
    const int row_elements = pitch / 2;
    const size_t panel = mn_major ? along / row_elements * leading : along / row_elements * size_t(pitch);
    const size_t offset = start + panel + across / 8 * stride + across % 8 * pitch + along % row_elements * 2;
    return offset ^ (offset / 128 % (pitch / 16) * 16);
  }
};

static void check_descriptor(uint64_t d, const char* operand, Site site) {
  constexpr uint64_t UNUSED = 0x3ff1c000c000c000;     // bits 14-15, 30-31, 46-48 and 52-61
  const std::string whose = std::string("wgmma(): the descriptor of ") + operand;
  if (d & UNUSED) fail(whose + " has bits set that mean nothing", site);
  if (d >> 49 & 7)
    fail(whose + " has a base offset: a swizzle's pattern that starts elsewhere than at its own multiple is "
         "not simulated", site);
}

// f(chunk's offset, mn, k) for all of a matrix of `rows` x 16, mn from `first` on
template <class F> static void each_chunk(uint64_t d, bool mn_major, int first, int rows, F f) {
  const Descriptor descriptor(d);
  for (int mn = first; mn < first + rows; mn += mn_major ? CHUNK_LENGTH : 1)
    for (int k = 0; k < K; k += mn_major ? 1 : CHUNK_LENGTH) f(descriptor.chunk(mn_major, mn, k), mn, k);
}

void each_operand_chunk(uint64_t descriptor, bool mn_major, int first, int rows,
                        const std::function<void(size_t)>& f) {
  each_chunk(descriptor, mn_major, first, rows, [&](size_t offset, int, int) { f(offset); });
}

static void check_chunks(uint64_t d, bool mn_major, int rows, const char* operand, Site site) {
  check_descriptor(d, operand, site);
  const size_t end = worker->launch->checked ? ARENA_BYTES : SHARED_MEMORY_PER_BLOCK;
  each_chunk(d, mn_major, 0, rows, [&](size_t offset, int, int) {
    if (offset + 16 > end)
      fail(std::string("wgmma(): a part of ") + operand + " lies outside of shared memory", site);
  });
}

// -------------------------------------------------------------------------------- the products
struct Factors {
  float A[M][K], B[K][MOST_N], D[M][MOST_N];
};

template <class Format, class F>
static void widen_chunks(const Worker& w, uint64_t d, bool mn_major, int rows, F element) {
  each_chunk(d, mn_major, 0, rows, [&](size_t offset, int mn, int k) {
    uint16_t chunk[CHUNK_LENGTH];
    memcpy(chunk, w.shared + offset, sizeof chunk);
    for (int i = 0; i < CHUNK_LENGTH; i++)
      (mn_major ? element(mn + i, k) : element(mn, k + i)) = Format::widen(chunk[i]);
  });
}

// f(element of the thread's D, element of the matrix)
template <class F> static void each_of_D(const Wgmma& p, Factors& m, F f) {
  for (int thread = 0; thread < WARPGROUP_SIZE; thread++) {
    const int row = thread / 32 * 16 + thread % 32 / 4, col = thread % 4 * 2;
    for (int n = 0; n < p.shape.n / 8; n++)
      for (int e = 0; e < 4; e++) f(p.D[thread][4 * n + e], m.D[row + e / 2 * 8][8 * n + col + e % 2]);
  }
}

template <class Format> static void load_operands(const Worker& w, const Wgmma& p, Factors& m) {
  if (p.A_in_registers)
    for (int thread = 0; thread < WARPGROUP_SIZE; thread++)
      for (int i = 0; i < 4; i++) {
        float* two = &m.A[thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8][thread % 4 * 2 + i / 2 * 8];
        two[0] = Format::widen(uint16_t(p.A_registers[thread][i]));
        two[1] = Format::widen(uint16_t(p.A_registers[thread][i] >> 16));
      }
  else
    widen_chunks<Format>(w, p.A, p.shape.A_mn_major, M,
                         [&](int row, int k) -> float& { return m.A[row][k]; });
  widen_chunks<Format>(w, p.B, p.shape.B_mn_major, p.shape.n,
                       [&](int col, int k) -> float& { return m.B[k][col]; });
}

#if defined(__x86_64__) && defined(__linux__)
__attribute__((target_clones("avx2", "default"), optimize("O3")))
#endif
static void multiply(Factors& m, int columns) {
  for (int row = 0; row < M; row++)
    for (int k = 0; k < K; k++) {
      const float a = m.A[row][k];
      for (int n = 0; n < columns; n++) m.D[row][n] += a * m.B[k][n];
    }
}

// The first `count` products that are not done. Those that follow each other on the same D keep it.
static void do_products(Worker& w, Warpgroup& g, size_t count) {
  static thread_local std::unique_ptr<Factors> matrices;
  if (!matrices) matrices = std::make_unique<Factors>();
  Factors& m = *matrices;
  const Wgmma* before = nullptr;
  for (Wgmma& p : g.products) {
    if (p.done || !count) continue;
    count--;
    const bool same_D = before && before->D[0] == p.D[0] && before->shape.n == p.shape.n;
    if (!same_D) {
      if (before) each_of_D(*before, m, [](float& of_thread, float& x) { of_thread = x; });
      each_of_D(p, m, [](float& of_thread, float& x) { x = of_thread; });
    }
    if (!p.shape.accumulate) memset(m.D, 0, sizeof m.D);
    if (p.shape.type == MatrixType::HALF) load_operands<Half>(w, p, m);
    else load_operands<Bfloat16>(w, p, m);
    multiply(m, p.shape.n);
    p.done = true;
    before = &p;
  }
  if (before) each_of_D(*before, m, [](float& of_thread, float& x) { of_thread = x; });
}

// At random times, in their order
static void multiply_some_of(Worker& w, Warpgroup& g) {
  size_t left = 0;
  for (const Wgmma& p : g.products) left += !p.done;
  if (left) do_products(w, g, next_random(w.copy_random) % (left + 1));
}

void multiply_some(Worker& w) {
  for (Warpgroup& g : w.engines->warpgroups) multiply_some_of(w, g);
}

// -------------------------------------------------------------------------------- what threads ask for
namespace {
struct Operands {
  const WgmmaShape* shape;
  float* D;
  const uint32_t* A_registers;
  uint64_t A, B;
  Site site;
  const void* pc;

  bool same(const Operands& o) const {
    const WgmmaShape &x = *shape, &y = *o.shape;
    return x.type == y.type && x.n == y.n && x.A_mn_major == y.A_mn_major && x.B_mn_major == y.B_mn_major &&
           x.accumulate == y.accumulate && A == o.A && B == o.B && !A_registers == !o.A_registers;
  }
};
}  // namespace

static void start_product(Worker& w, Warpgroup& g) {
  const auto all = reinterpret_cast<Operands* const*>(g.operands);
  const Operands& first = *all[0];
  Wgmma& p = g.products.emplace_back();
  p.shape = *first.shape;
  p.A_in_registers = first.A_registers;
  p.A = first.A;
  p.B = first.B;
  p.group = g.groups;
  p.site = first.site;
  p.pc = first.pc;
  p.done = false;
  for (int i = 0; i < WARPGROUP_SIZE; i++) {
    if (!all[i]->same(first))
      fail("wgmma(): the threads of a warpgroup do not ask for the same product: thread " +
               std::to_string(i) + " of it has another descriptor, shape or scale than thread 0" +
               at(first.site), all[i]->site);
    p.D[i] = all[i]->D;
    if (p.A_in_registers) memcpy(p.A_registers[i], all[i]->A_registers, sizeof p.A_registers[i]);
  }
  if (!p.A_in_registers) check_chunks(p.A, p.shape.A_mn_major, M, "A", p.site);
  check_chunks(p.B, p.shape.B_mn_major, p.shape.n, "B", p.site);
  if (w.launch->checked) {
    const uint32_t* A_registers[WARPGROUP_SIZE];
    for (int i = 0; i < WARPGROUP_SIZE; i++) A_registers[i] = all[i]->A_registers;
    product_started(w, g, p, A_registers);
  }
  if (w.copies_land == CopiesLand::EARLY) do_products(w, g, 1);
  if (w.copies_land == CopiesLand::RANDOM) multiply_some_of(w, g);
}

extern "C" void sim_wgmma(const WgmmaShape* shape, float* D, const uint32_t* A_registers, uint64_t A,
                          uint64_t B, const char* file, int line) {
  Operands mine{shape, D, A_registers, A, B, {file, line}, __builtin_return_address(0)};
  warpgroup_together("wgmma()", &mine, mine.site, start_product);
}

extern "C" void sim_wgmma_fence(const char* file, int line) {
  if (worker->launch->checked) fence_registers(*worker->current);
  warpgroup_together("wgmma_fence()", nullptr, {file, line}, nullptr);
}

extern "C" void sim_wgmma_commit(const char* file, int line) {
  warpgroup_together("wgmma_commit()", nullptr, {file, line}, [](Worker&, Warpgroup& g) { g.groups++; });
}

// Until at most the last `groups_left` groups are under way.
extern "C" void sim_wgmma_wait(int groups_left, const char* file, int line) {
  warpgroup_together("wgmma_wait()", &groups_left, {file, line}, [](Worker& w, Warpgroup& g) {
    const int left = *static_cast<int*>(g.operands[0]);
    size_t waited_for = 0, to_do = 0;
    for (const Wgmma& p : g.products)
      if (p.group + left < g.groups) {
        waited_for++;
        to_do += !p.done;
      }
    do_products(w, g, to_do);
    g.products.erase(g.products.begin(), g.products.begin() + ptrdiff_t(waited_for));
    if (w.launch->checked) products_waited_for(w, g, g.groups - left);
  });
}

}  // namespace sim
