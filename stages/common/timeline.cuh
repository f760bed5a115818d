// Marks: what a warp does, and when. For `bench.py --timeline` alone: it has flash_fwd.cu or flash_bwd.cu
// include timeline_fwd.cuh or timeline_bwd.cuh, and so this file, before the stage (-DTIMELINE_FILE). Then
// what the stage calls by the names there and below leaves marks, and does what it does otherwise. Without
// the flag nothing here is compiled, and no stage knows of it.
//
// A mark is where the stage stands (the line of the call), what it begins or ends there, and the time by
// %globaltimer. A warp keeps its marks in the order of its program. In the simulator there is no time: the
// order is enough (flash_ladder/bench/steps.py).
//
// While a product is under way a warp leaves no mark, as nobody knows what a look at the clock does to it,
// unless TIMELINE_IN_FLIGHT is 1. ptxas waits for no product more in either case.
#pragma once
#include "ring.cuh"
#include "store_panels.cuh"
#include "turns.cuh"
#include "wgmma.cuh"

#ifndef TIMELINE_IN_FLIGHT
#define TIMELINE_IN_FLIGHT 0
#endif

namespace timeline {

// bench/marks.py has the same numbers, kinds and struct.
constexpr unsigned blocks = 32;
constexpr int warps = 16, most_marks = 1024;         // that are kept: of the first blocks, and warps
constexpr unsigned most_steps = 4096;      // steps of a ring are told apart

enum Kind : uint8_t {        //                                                    amount
  WAIT,                      // begin, end     for bytes of a tile                 begin: step of the ring
  EMPTY,                     // begin, end     for one of a ring's buffers         begin: step, buffers
  COPY,                      // point          copies are asked for; ends EMPTY    bytes / 16
  RELEASE,                   // point          a buffer is given back              step
  TURN,                      // begin, end     for this warpgroup's turn
  END_TURN,                  // point          the next one's turn begins
  PRODUCT,                   // point          a group of wgmma is issued          of 64 x 16 x 16
  FINISH,                    // begin, end     for groups of wgmma                 groups that are left
  MAXIMUM, EXPONENTIAL,      // begin, end     parts of the softmax                columns of the tile
  SOFTMAX,                   // begin, end     both
  STORE,                     // begin, end     O, dK, dV                           columns of 2 bytes
  BARRIER,                   // point          the block's barrier is passed
  ELEMENTS,                  // begin, end     of an accumulator: as the line says columns
  MEETING,                   // begin, end     at a named barrier                  its number
                             // point: a warp arrives there, and goes on
  MBARRIER,                  // begin, end     for one that is of no ring          begin: place, parity
  ARRIVE,                    // point          at such a one                       place
  BULK_WAIT,                 // begin, end     for copies from shared memory       groups that are left
  BULK_ADD                   // point          such a copy is asked for            bytes / 16
};
enum Side : uint8_t { BEGIN, END, POINT };

struct Mark {
  uint32_t nanoseconds;                    // the time's lower half
  uint32_t what;             // line, 3 * kind + side, amount: 10, 6 and 16 bits; 0: no mark
};
// One place more, for all other blocks: marks cost each block the same, and what they cost is measured.
struct Marks {
  Mark of_warps[blocks + 1][warps][most_marks];
  uint32_t multiprocessors[blocks + 1];
};
__device__ Marks marks;

// How many marks each warp has left. The last bit but the sign: a product of its warpgroup is under way
__device__ __forceinline__ unsigned* states() {
  __shared__ unsigned states[warps];
  return states;
}
constexpr unsigned in_flight = 1u << 30;

// By one thread, before a barrier of the block
__device__ __forceinline__ void begin() {
  for (int warp = 0; warp < warps; warp++) states()[warp] = 0;
#ifdef __CUDACC__
  uint32_t multiprocessor;
  asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  marks.multiprocessors[min(blockIdx.x, blocks)] = multiprocessor;
#endif
}

__device__ __forceinline__ void set_in_flight(bool flies) {
  unsigned& state = states()[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) state = flies ? state | in_flight : state & ~in_flight;
}

// By one lane: the first of its warp
__device__ __forceinline__ void mark(Kind kind, Side side, int line, unsigned amount = 0) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 > 0 || warp >= warps) return;
  const unsigned state = states()[warp], n = state & ~in_flight;
  if (n >= most_marks || (!TIMELINE_IN_FLIGHT && (state & in_flight))) return;
  uint32_t now = 0;
#ifdef __CUDACC__
  asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(now) :: "memory");
#endif
  const uint32_t what = uint32_t(line) << 22 | (3 * kind + side) << 16 | amount;
  marks.of_warps[min(blockIdx.x, blocks)][warp][n] = {now, what};
  states()[warp] = state + 1;
}

// -------------------------------------------------------------------------------- what a stage calls
struct Step {                // and the line that asks for it
  unsigned step;
  int line;
  __device__ Step(unsigned step, int line = __builtin_LINE()) : step(step), line(line) {}
};

// Of a ring, or one that grew from it
template <class Unmarked_, int buffers>
struct MarkedRing : Unmarked_ {
  using Unmarked = Unmarked_;
  using Unmarked::Unmarked;

  __device__ __forceinline__ void init(int warps) const {
    Unmarked::init(warps);
    if (threadIdx.x == 0) begin();
  }
  __device__ __forceinline__ void wait_until_empty(unsigned step, int line = __builtin_LINE()) const {
    mark(EMPTY, BEGIN, line, step % most_steps | buffers * most_steps);
    Unmarked::wait_until_empty(step);
    mark(EMPTY, END, line);
  }
  template <class... Where> __device__ void fill(const CUtensorMap& map, Step of, Where... where) const {
    mark(EMPTY, BEGIN, of.line, of.step % most_steps | buffers * most_steps);
    Unmarked::fill(map, of.step, where...);
    mark(COPY, POINT, of.line, Unmarked::bytes / 16);
  }
  __device__ __forceinline__ void wait_until_full(unsigned step, int line = __builtin_LINE()) const {
    mark(WAIT, BEGIN, line, step % most_steps);
    Unmarked::wait_until_full(step);
    mark(WAIT, END, line);
  }
  __device__ __forceinline__ void release(unsigned step, int line = __builtin_LINE()) const {
    mark(RELEASE, POINT, line, step % most_steps);
    Unmarked::release(step);
  }
  __device__ __forceinline__ void pass(unsigned step, int line = __builtin_LINE()) const {
    wait_until_full(step, line);
    __syncwarp();
    release(step, line);
  }
};

template <int buffers, int... shape>
struct Ring : MarkedRing<::Ring<buffers, shape...>, buffers> {
  using MarkedRing<::Ring<buffers, shape...>, buffers>::MarkedRing;
};

template <int warpgroups>
struct Turns : ::Turns<warpgroups> {
  using Unmarked = ::Turns<warpgroups>;

  __device__ __forceinline__ explicit Turns(int warpgroup, int line = __builtin_LINE())
      : Unmarked(warpgroup) {
    if (warpgroups > 1 && warpgroup == warpgroups - 1) mark(END_TURN, POINT, line);
  }
  __device__ __forceinline__ void wait(int line = __builtin_LINE()) const {
    if (warpgroups > 1) mark(TURN, BEGIN, line);
    Unmarked::wait();
    if (warpgroups > 1) mark(TURN, END, line);
  }
  __device__ __forceinline__ void end(int line = __builtin_LINE()) const {
    if (warpgroups > 1) mark(END_TURN, POINT, line);
    Unmarked::end();
  }
  __device__ __forceinline__ void skip(int line = __builtin_LINE()) const {
    wait(line);
    end(line);
  }
};

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  ::mbarrier_init(barrier, arrivals);
  begin();
}

__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, int bytes,
                                                       int line = __builtin_LINE()) {
  ::mbarrier_arrive_expect(barrier, bytes);
  mark(COPY, POINT, line, bytes / 16);
}

// Where it is in shared memory: 15 bits
__device__ __forceinline__ unsigned place(const uint64_t* barrier) { return shared_address(barrier) / 8; }

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, int parity, int line = __builtin_LINE()) {
  mark(MBARRIER, BEGIN, line, place(barrier) | parity << 15);
  ::mbarrier_wait(barrier, parity);
  mark(MBARRIER, END, line);
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, int line = __builtin_LINE()) {
  mark(ARRIVE, POINT, line, place(barrier));
  ::mbarrier_arrive(barrier);
}

__device__ __forceinline__ void block_barrier(int line = __builtin_LINE()) {
  __syncthreads();
  mark(BARRIER, POINT, line);
}

template <int k_steps, int n_tiles>
__device__ __forceinline__ void wgmma_QK(float (&S)[n_tiles][4], uint32_t Q, int Q_rows, uint32_t K,
                                         bool accumulate = false, int K_rows = 8 * n_tiles,
                                         int line = __builtin_LINE()) {
  mark(PRODUCT, POINT, line, k_steps * n_tiles / 2);
  ::wgmma_QK<k_steps>(S, Q, Q_rows, K, accumulate, K_rows);
  set_in_flight(true);
}

template <int n_tiles, int k_steps>
__device__ __forceinline__ void wgmma_PV(float (&O)[n_tiles][4], const uint32_t (&P)[k_steps][4], uint32_t V,
                                         int line = __builtin_LINE()) {
  mark(PRODUCT, POINT, line, k_steps * n_tiles / 2);
  ::wgmma_PV(O, P, V);
  set_in_flight(true);
}

template <int groups_left> __device__ __forceinline__ void wgmma_wait(int line = __builtin_LINE()) {
  mark(FINISH, BEGIN, line, groups_left);
  ::wgmma_wait<groups_left>();
  if (groups_left == 0) set_in_flight(false);
  mark(FINISH, END, line, groups_left);
}

template <int n_tiles>
__device__ __forceinline__ void store_panels(const CUtensorMap& map, ELEMENT* tile,
                                             const float (&acc)[n_tiles][4], int tile_rows, int tile_row,
                                             int row, int head, int batch, int first_col = 0,
                                             int from_col = 0, int line = __builtin_LINE()) {
  mark(STORE, BEGIN, line, 8 * n_tiles);
  ::store_panels(map, tile, acc, tile_rows, tile_row, row, head, batch, first_col, from_col);
  mark(STORE, END, line, 8 * n_tiles);
}

}  // namespace timeline

// -------------------------------------------------------------------------------- for Python
extern "C" size_t flash_timeline_bytes() { return sizeof(timeline::marks); }

// Both return null, or what went wrong.
extern "C" const char* flash_timeline_clear() {
#ifdef __CUDACC__
  void* marks = nullptr;
  cudaError_t error = cudaGetSymbolAddress(&marks, timeline::marks);
  if (error == cudaSuccess) error = cudaMemset(marks, 0, sizeof(timeline::marks));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  return memset(&timeline::marks, 0, sizeof(timeline::marks)), nullptr;
#endif
}

extern "C" const char* flash_timeline_read(void* to) {
#ifdef __CUDACC__
  const cudaError_t error = cudaMemcpyFromSymbol(to, timeline::marks, sizeof(timeline::marks));
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  return memcpy(to, &timeline::marks, sizeof(timeline::marks)), nullptr;
#endif
}

#define Ring timeline::Ring
#define Turns timeline::Turns
#define mbarrier_init timeline::mbarrier_init
#define mbarrier_arrive_expect timeline::mbarrier_arrive_expect
#define mbarrier_wait timeline::mbarrier_wait
#define mbarrier_arrive timeline::mbarrier_arrive
#define __syncthreads timeline::block_barrier
#define wgmma_QK timeline::wgmma_QK
#define wgmma_PV timeline::wgmma_PV
#define wgmma_wait timeline::wgmma_wait
#define store_panels timeline::store_panels
