// The copy engine, mbarriers, products of a warpgroup and named barriers: what PTX promises, one small kernel
// each. test_hopper.py runs this file in the simulator and on a GPU, with ELEMENT and HEAD_DIM defined.
#include <cuda_runtime.h>
#include <stdint.h>

#define CAUSAL 1
#define SINK 0
#define DROPOUT 0
#define NEGATIVE_SCALE 0
#include "../../stages/common/launch.cuh"
#include "../../stages/common/tensor.cuh"
#include "../../stages/common/late_ticket.cuh"
#include "../../stages/common/tma.cuh"
#include "../../stages/common/wgmma.cuh"

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class K> static void allow(K kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// ------------------------------------------------------------------------------------------ the copy engine
// Any map of four dimensions. sizes, box: innermost first; strides in bytes; swizzle: 0, 32, 64 or 128 bytes.
static CUresult any_map(CUtensorMap& map, void* x, CUtensorMapDataType type, const int* sizes,
                        const int* strides, const int* box, int swizzle) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaFree(nullptr);                        // the driver wants a context
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  cuuint64_t all_sizes[4], all_strides[3];
  cuuint32_t all_box[4], steps[] = {1, 1, 1, 1};
  for (int i = 0; i < 4; i++) {
    all_sizes[i] = cuuint64_t(sizes[i]);
    all_box[i] = cuuint32_t(box[i]);
    if (i < 3) all_strides[i] = cuuint64_t(strides[i]);
  }
  const auto mode = swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                    : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                    : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                    : CU_TENSOR_MAP_SWIZZLE_NONE;
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, type, 4, x, all_sizes, all_strides, all_box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, mode,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

struct Corner { int col, row, head, batch; };

// A box as it lies in shared memory
template <bool once>
__global__ void load_box(const __grid_constant__ CUtensorMap map, Corner c, int bytes, int offset,
                         uint32_t* out) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    prefetch_map(map);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, bytes);
    if (once) tma_load_once(smem + offset, map, &barrier, c.col, c.row, c.head, c.batch);
    else tma_load(smem + offset, map, &barrier, c.col, c.row, c.head, c.batch);
  }
  mbarrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x)
    out[i] = *reinterpret_cast<const uint32_t*>(smem + offset + 4 * i);
}
template <bool once> static const char* run(void* x, int four_bytes, const int* sizes, const int* strides,
                                            const int* box, int swizzle, Corner at, int bytes, int offset,
                                            uint32_t* out) {
  CUtensorMap map;
  const auto type = four_bytes ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (any_map(map, x, type, sizes, strides, box, swizzle) != CUDA_SUCCESS)
    return cudaGetErrorString(cudaErrorInvalidValue);
  allow(load_box<once>, 100000);
  load_box<once><<<1, 64, bytes + offset>>>(map, at, bytes, offset, out);
  return result();
}
extern "C" const char* run_load_box(void* x, int four_bytes, const int* sizes, const int* strides,
                                    const int* box, int swizzle, int col, int row, int head, int batch,
                                    int bytes, int offset, uint32_t* out) {
  return run<false>(x, four_bytes, sizes, strides, box, swizzle, {col, row, head, batch}, bytes, offset, out);
}
extern "C" const char* run_load_box_once(void* x, int four_bytes, const int* sizes, const int* strides,
                                         const int* box, int swizzle, int col, int row, int head, int batch,
                                         int bytes, int offset, uint32_t* out) {
  return run<true>(x, four_bytes, sizes, strides, box, swizzle, {col, row, head, batch}, bytes, offset, out);
}

// Shared memory as it is, to a box; `right`: with the fence and the wait
template <bool right> __global__ void store_box(const __grid_constant__ CUtensorMap map, Corner c, int bytes,
                                                const uint32_t* x) {
  extern __shared__ __align__(1024) char smem[];
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x)
    *reinterpret_cast<uint32_t*>(smem + 4 * i) = x[i];
  if (right) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(map, smem, c.col, c.row, c.head, c.batch);
    bulk_commit();
    if (right) bulk_wait<0>();
  }
}
extern "C" const char* run_store_box(void* out, int four_bytes, const int* sizes, const int* strides,
                                     const int* box, int swizzle, int col, int row, int head, int batch,
                                     int bytes, const uint32_t* x, int right) {
  CUtensorMap map;
  const auto type = four_bytes ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (any_map(map, out, type, sizes, strides, box, swizzle) != CUDA_SUCCESS)
    return cudaGetErrorString(cudaErrorInvalidValue);
  const Corner corner{col, row, head, batch};
  if (right) store_box<true><<<1, 64, bytes>>>(map, corner, bytes, x);
  else store_box<false><<<1, 64, bytes>>>(map, corner, bytes, x);
  return result();
}

// n floats as they lie, in two copies that count at one barrier
__global__ void load_floats(const float* x, float* out, int n) {
  extern __shared__ __align__(16) float x_smem[];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(&barrier, n * int(sizeof(float)));
    bulk_load(x_smem, x, 16, &barrier);
    bulk_load(x_smem + 4, x + 4, n * int(sizeof(float)) - 16, &barrier);
  }
  __syncthreads();
  mbarrier_wait(&barrier, 0);
  for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = x_smem[i];
}
extern "C" const char* run_load_floats(const float* x, float* out, int n) {
  load_floats<<<1, 64, n * sizeof(float)>>>(x, out, n);
  return result();
}

// Each block adds its n floats to the same ones, two groups of stores after each other from one buffer.
__global__ void add_up(const float* x, float* sum, int n) {
  extern __shared__ __align__(16) float rows_smem[];
  for (int half = 0; half < 2; half++) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) rows_smem[i] = x[(2 * blockIdx.x + half) * n + i];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_add(sum, rows_smem, n * int(sizeof(float)));
      bulk_commit();
      bulk_wait_read<0>();
    }
    __syncthreads();
  }
}
extern "C" const char* run_add_up(const float* x, float* sum, int n, int blocks) {
  add_up<<<blocks, 64, n * sizeof(float)>>>(x, sum, n);
  return result();
}

// Each block adds its n floats to the same ones when it is its turn, as a semaphore says: the first one or
// the last one first. first_stores: the first one stores them.
__global__ void add_in_turn(const float* x, float* sum, int* semaphore, int n, int last_first,
                            int first_stores) {
  extern __shared__ __align__(16) float row_smem[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) row_smem[i] = x[blockIdx.x * n + i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x > 0) return;
  const int turn = last_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  while (load_acquire(semaphore) < turn) {}
  if (first_stores && turn == 0) bulk_store(sum, row_smem, n * int(sizeof(float)));
  else bulk_add(sum, row_smem, n * int(sizeof(float)));
  bulk_commit();
  bulk_wait<0>();
  count_release(semaphore);
}
extern "C" const char* run_add_in_turn(const float* x, float* sum, int* semaphore, int n, int blocks,
                                       int last_first, int first_stores) {
  add_in_turn<<<blocks, 64, n * sizeof(float)>>>(x, sum, semaphore, n, last_first, first_stores);
  return result();
}

// The engine reads and adds to what the kernel before writes, which may still run; `fixed`: after its end
__global__ void set(const float* x, float* out) { out[threadIdx.x] = x[threadIdx.x]; }
__global__ void double_early(float* out, int fixed) {
  __shared__ __align__(16) float x_smem[32];
  __shared__ uint64_t barrier;
  mbarrier_init(&barrier, 1);
  fence_mbarrier_init();
  if (fixed) wait_for_previous_kernel();
  mbarrier_arrive_expect(&barrier, sizeof x_smem);
  bulk_load(x_smem, out, sizeof x_smem, &barrier);
  mbarrier_wait(&barrier, 0);
  bulk_add(out, x_smem, sizeof x_smem);
  bulk_commit();
  bulk_wait<0>();
}
extern "C" const char* run_double_early(const float* x, float* out, int fixed) {
  set<<<1, 32>>>(x, out);
  cudaLaunchKernelEx(EarlyLaunch(1, 1, 0, nullptr), double_early, out, fixed);
  return result();
}

// -------------------------------------------------------------------------------------------- mbarriers
// A barrier of the block, round after round: each thread reads what its neighbour wrote in the last one. Half
// of the threads wait, the others ask again and again.
__global__ void rounds(const int* x, int* out, int count) {
  __shared__ int numbers[2][96];
  __shared__ uint64_t barrier;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&barrier, 96);
  __syncthreads();
  int mine = x[t];
  for (int i = 0; i < count; i++) {
    numbers[i % 2][t] = mine + i;
    mbarrier_arrive(&barrier);
    if (t % 2) mbarrier_wait(&barrier, i % 2);
    else
      while (!mbarrier_test(&barrier, i % 2)) {}
    mine = numbers[i % 2][(t + 1) % 96];
  }
  out[t] = mine;
}
extern "C" const char* run_rounds(const int* x, int* out, int count) {
  rounds<<<1, 96>>>(x, out, count);
  return result();
}

// A new barrier counts as if a phase of parity 1 were complete; each phase waits for its arrivals and bytes.
__global__ void parities(int* out) {
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 2);
    int n = 0;
    for (int i = 0; i < 5; i++) {
      out[n++] = mbarrier_test(&barrier, 0);
      out[n++] = mbarrier_test(&barrier, 1);
      mbarrier_arrive(&barrier);
    }
  }
}
extern "C" const char* run_parities(int* out) {
  parities<<<1, 32>>>(out);
  return result();
}

// ------------------------------------------------------------------------------------------------ wgmma
struct Layout { int offset, leading, stride, mode; };

__device__ uint64_t any_descriptor(const void* smem, Layout l) {
  return uint64_t((shared_address(smem) + l.offset) >> 4) | uint64_t(l.leading >> 4) << 16 |
         uint64_t(l.stride >> 4) << 32 | uint64_t(l.mode) << 62;
}

// One product: shared memory as it is, D and A in registers by thread
template <int n_tiles, bool A_registers, bool A_mn_major, bool B_mn_major>
__global__ void multiply(const uint32_t* image, int bytes, Layout A, Layout B, const uint32_t* a, float* d,
                         int accumulate) {
  extern __shared__ __align__(1024) char smem[];
  for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x)
    *reinterpret_cast<uint32_t*>(smem + 4 * i) = image[i];
  fence_proxy_async();
  __syncthreads();
  float D[n_tiles][4];
  uint32_t fragment[4];
  for (int i = 0; i < 4; i++) fragment[i] = a[4 * threadIdx.x + i];
  for (int n = 0; n < n_tiles; n++)
    for (int e = 0; e < 4; e++) D[n][e] = d[(threadIdx.x * n_tiles + n) * 4 + e];
  wgmma_fence();
  if constexpr (A_registers)
    wgmma<B_mn_major>(D, fragment, any_descriptor(smem, B), accumulate);
  else
    wgmma<A_mn_major, B_mn_major>(D, any_descriptor(smem, A), any_descriptor(smem, B), accumulate);
  wgmma_commit();
  wgmma_wait<0>();
  for (int n = 0; n < n_tiles; n++)
    for (int e = 0; e < 4; e++) d[(threadIdx.x * n_tiles + n) * 4 + e] = D[n][e];
}

template <int n_tiles, bool A_registers, bool A_mn_major>
static const char* run_multiply(const uint32_t* image, int bytes, Layout A, Layout B, int B_mn_major,
                                const uint32_t* a, float* d, int accumulate) {
  const auto kernel = B_mn_major ? multiply<n_tiles, A_registers, A_mn_major, true>
                                 : multiply<n_tiles, A_registers, A_mn_major, false>;
  allow(kernel, 100000);
  kernel<<<1, 128, bytes>>>(image, bytes, A, B, a, d, accumulate);
  return result();
}
template <int n_tiles>
static const char* run_multiply(int A_registers, int A_mn_major, const uint32_t* image, int bytes, Layout A,
                                Layout B, int B_mn_major, const uint32_t* a, float* d, int accumulate) {
  const auto run = A_registers  ? run_multiply<n_tiles, true, false>
                   : A_mn_major ? run_multiply<n_tiles, false, true>
                                : run_multiply<n_tiles, false, false>;
  return run(image, bytes, A, B, B_mn_major, a, d, accumulate);
}
extern "C" const char* run_multiply(int n_tiles, int A_registers, int A_mn_major, int B_mn_major,
                                    const uint32_t* image, int bytes, const int* A, const int* B,
                                    const uint32_t* a, float* d, int accumulate) {
  const Layout layout_A{A[0], A[1], A[2], A[3]}, layout_B{B[0], B[1], B[2], B[3]};
  switch (n_tiles) {
#define WIDTH(n)                                                                                   \
    case n: return run_multiply<n>(A_registers, A_mn_major, image, bytes, layout_A, layout_B,      \
                                   B_mn_major, a, d, accumulate);
    WIDTH(2) WIDTH(8) WIDTH(10) WIDTH(16) WIDTH(32)
  }
  return "no such width";
}

// ------------------------------------------------------------------------- all of it together
// C = A B^T for A (64 rows), B (128 rows) of `cols` columns each, a panel of 64 columns a step, by a ring of
// two stages. Warpgroup 0 copies, warpgroup 1 multiplies, one product behind: as it waits, the next one is
// under way.
constexpr int stages = 2;
__global__ void __launch_bounds__(256, 1)
ring(const __grid_constant__ CUtensorMap A_map, const __grid_constant__ CUtensorMap B_map, float* C,
     int steps) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ uint64_t full[stages];
  __shared__ uint64_t empty[stages];
  ELEMENT* const A_smem = reinterpret_cast<ELEMENT*>(smem);
  ELEMENT* const B_smem = A_smem + stages * 64 * panel;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; s++) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0)
      for (int i = 0; i < steps; i++) {
        const int s = i % stages;
        mbarrier_wait(&empty[s], i / stages % 2 ^ 1);
        mbarrier_arrive_expect(&full[s], (64 + 128) * panel * sizeof(ELEMENT));
        tma_load(A_smem + s * 64 * panel, A_map, &full[s], i * panel, 0, 0, 0);
        tma_load(B_smem + s * 128 * panel, B_map, &full[s], i * panel, 0, 0, 0);
      }
    return;
  }
  setmaxnreg_inc<240>();
  const int t = threadIdx.x % 128;
  float D[16][4] = {};
  for (int i = 0; i < steps; i++) {
    const int s = i % stages;
    mbarrier_wait(&full[s], i / stages % 2);
    const uint32_t A = matrix_at(A_smem + s * 64 * panel), B = matrix_at(B_smem + s * 128 * panel);
    wgmma_fence();
    for (int k = 0; k < panel / 16; k++) wgmma(D, K_major(A, k, 64), K_major(B, k, 128));
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && t == 0) mbarrier_arrive(&empty[(i - 1) % stages]);
  }
  wgmma_wait<0>();
  for (int n = 0; n < 16; n++)
    for (int e = 0; e < 4; e++)
      C[(t / 32 * 16 + t % 32 / 4 + e / 2 * 8) * 128 + 8 * n + t % 4 * 2 + e % 2] = D[n][e];
}
extern "C" const char* run_ring(ELEMENT* A, ELEMENT* B, float* C, int cols) {
  CUtensorMap A_map, B_map;
  Tensor a{}, b{};
  a.data = A;
  b.data = B;
  a.stride_n = b.stride_n = cols;
  cudaError_t error = make_tensor_map(A_map, a, 1, 1, 64, cols, 64);
  if (error == cudaSuccess) error = make_tensor_map(B_map, b, 1, 1, 128, cols, 128);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  allow(ring, 100000);
  ring<<<1, 256, stages * (64 + 128) * panel * sizeof(ELEMENT)>>>(A_map, B_map, C,
                                                                   (cols + panel - 1) / panel);
  return result();
}

// ---------------------------------------------------------------------------------- named barriers
// Two halves of the block by turns: each adds to a number that the other has left. The second one only
// arrives at the barrier that frees the first one for the last round, and does not wait there.
__global__ void turns(int* out, int count) {
  __shared__ int number;
  const int half = threadIdx.x / 64;
  if (threadIdx.x == 0) number = 1;
  for (int i = 0; i < count; i++) {
    if (half == 0) {
      if (i) named_barrier_sync(2, 128);
      if (threadIdx.x == 0) number = 2 * number;
      named_barrier_arrive(1, 128);
    } else {
      named_barrier_sync(1, 128);
      if (threadIdx.x == 64) number += 3;
      if (i + 1 < count) named_barrier_arrive(2, 128);
    }
  }
  if (threadIdx.x == 64) *out = number;
}
extern "C" const char* run_turns(int* out, int count) {
  turns<<<1, 128>>>(out, count);
  return result();
}

// --------------------------------------------------------------------------------------- the order of tiles
// The n-th (tile, head) of all
template <class Order> __global__ void drawn(Order order, int* out, int tiles, int heads) {
  for (int n = threadIdx.x; n < tiles * heads; n += blockDim.x) {
    const Work work = order.nth(tiles, heads, n);
    out[2 * n] = work.tile;
    out[2 * n + 1] = work.bh;
  }
}
template <class Order> void draw(int* out, int tiles, int heads, int N_k, int group) {
  drawn<Order><<<1, 64>>>(Order(false, heads, tiles, N_k, 512, group), out, tiles, heads);
}
// kind: Order's without short tiles last, and with; late_ticket's with 128 rows, with 192
extern "C" const char* run_drawn(int* out, int tiles, int heads, int N_k, int group, int kind) {
  if (kind == 0) draw<Order<false>>(out, tiles, heads, N_k, group);
  if (kind == 1) draw<Order<true>>(out, tiles, heads, N_k, group);
  if (kind == 2) draw<LateOrder<true, 128>>(out, tiles, heads, N_k, group);
  if (kind == 3) draw<LateOrder<true, 192>>(out, tiles, heads, N_k, group);
  return result();
}
