// The copy engine and mbarriers: waits, phases, bytes and fences.
#include <cuda_runtime.h>

#include "common/hopper.cuh"

constexpr int cols = 32, rows = 8;                      // of a box: 1024 bytes
constexpr int box_bytes = rows * cols * sizeof(float);

// `all` rows of 32 floats, in boxes of 8 rows, with the 128-byte swizzle
static CUtensorMap map_of(const float* x, int all = 16) {
  CUtensorMap map;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  const cuuint64_t sizes[] = {cols, cuuint64_t(all), 1, 1}, strides[] = {128, 16, 16};
  const cuuint32_t box[] = {cols, rows, 1, 1}, steps[] = {1, 1, 1, 1};
  reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, const_cast<float*>(x), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return map;
}

__device__ __forceinline__ void start(uint64_t* barrier, int arrivals = 1) {
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, arrivals);
    fence_mbarrier_init();
  }
  __syncthreads();
}

// ------------------------------------------------------------------------------------------------- loads
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void load_not_waited_for(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  //! buggy: __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

// The thread that asks waits; the others do not.
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void one_thread_waits(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  //! buggy: if (threadIdx.x == 0) mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

// Asks once whether the bytes have come.
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void test_without_a_loop(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  while (!mbarrier_test(&barrier, 0)) {}
  //! buggy: mbarrier_test(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

// Of a new barrier the phase of parity 1 counts as complete.
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void parity_of_the_phase_before(const __grid_constant__ CUtensorMap x, float* out,
                                           unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  //! buggy: mbarrier_wait(&barrier, 1);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void parity_that_does_not_flip(const __grid_constant__ CUtensorMap x, float* out,
                                          unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&barrier, box_bytes);
      tma_load(tile, x, &barrier, 0, 8 * i, 0, 0);
    }
    mbarrier_wait(&barrier, i % 2);
    //! buggy: mbarrier_wait(&barrier, 0);
    out[64 * i + threadIdx.x] = tile[threadIdx.x];
    __syncthreads();
  }
}

//! deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void parity_of_the_phase_after(const __grid_constant__ CUtensorMap x, float* out,
                                          unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  mbarrier_wait(&barrier, 0);
  //! buggy: mbarrier_wait(&barrier, 1);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void too_many_bytes(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    //! buggy: mbarrier_arrive_expect(&barrier, 2 * box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

// Who asks in a loop hangs as well.
//! deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void too_many_bytes_for_a_loop(const __grid_constant__ CUtensorMap x, float* out,
                                          unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    //! buggy: mbarrier_arrive_expect(&barrier, box_bytes + 16);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  while (!mbarrier_test(&barrier, 0)) {}
  out[threadIdx.x] = tile[threadIdx.x];
}

// The bytes of one of two boxes
//! error or race <<<1, 64>>> (map_of(x), out, count)
__global__ void too_few_bytes(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[2 * rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, 2 * box_bytes);
    //! buggy: mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
    tma_load(tile + rows * cols, x, &barrier, 0, 8, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[rows * cols + threadIdx.x];
}

// The bytes of what lies in the tensor: but those past its end count as well.
//! deadlock or error or race <<<1, 64>>> (map_of(x, 12), out, count)
__global__ void bytes_of_the_tensor_alone(const __grid_constant__ CUtensorMap x, float* out,
                                          unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    //! buggy: mbarrier_arrive_expect(&barrier, box_bytes / 2);
    tma_load(tile, x, &barrier, 0, 8, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race or error <<<1, 64>>> (map_of(x), out, count)
__global__ void no_bytes_announced(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    //! buggy: mbarrier_arrive(&barrier);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! copy or deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void load_that_nobody_needs(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[2 * rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x == 0 && i < 1) {
      //! buggy: if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&barrier, box_bytes);
      tma_load(tile + i * rows * cols, x, &barrier, 0, 8 * i, 0, 0);
    }
    if (i == 0) mbarrier_wait(&barrier, 0);
  }
  out[threadIdx.x] = tile[threadIdx.x];
}

//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void written_while_it_comes(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  //! buggy: tile[threadIdx.x] = 0.f;
  tile[threadIdx.x] = 0.f;
  //! buggy: mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! error <<<1, 64>>> (map_of(x), out, count)
__global__ void box_between_multiples(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols + 32];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
    //! buggy: tma_load(tile + 4, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! out of bounds <<<1, 64>>> (map_of(x), out, count)
__global__ void box_past_the_tile(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  //! buggy: __shared__ __align__(1024) float tile[rows * cols / 2];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! out of bounds <<<1, 64>>> (map_of(x, 40), out, count)
__global__ void map_larger_than_the_array(const __grid_constant__ CUtensorMap x, float* out,
                                          unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 16, 0, 0);
    //! buggy: tma_load(tile, x, &barrier, 0, 24, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

// -------------------------------------------------------------------------------- buffers that come back
//! race or deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void no_barrier_before_the_next_load(const __grid_constant__ CUtensorMap x, float* out,
                                                unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  start(&barrier);
  for (int i = 0; i < 2; i++) {
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&barrier, box_bytes);
      tma_load(tile, x, &barrier, 0, 8 * i, 0, 0);
    }
    mbarrier_wait(&barrier, i % 2);
    out[64 * i + threadIdx.x] = tile[threadIdx.x];
    __syncthreads();
    //! buggy:
  }
}

// A ring of one buffer: warp 1 copies, warp 0 reads and gives it back.
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void given_back_before_it_is_read(const __grid_constant__ CUtensorMap x, float* out,
                                             unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&empty, 32);
  start(&full);
  for (int i = 0; i < 3; i++) {
    if (t == 32) {
      mbarrier_wait(&empty, (i + 1) % 2);
      mbarrier_arrive_expect(&full, box_bytes);
      tma_load(tile, x, &full, 0, 8 * (i % 2), 0, 0);
    }
    if (t >= 32) continue;
    mbarrier_wait(&full, i % 2);
    out[32 * i + t] = tile[t];
    //! buggy: mbarrier_arrive(&empty);
    mbarrier_arrive(&empty);
    //! buggy: out[32 * i + t] = tile[t];
  }
}

// The first lane gives the buffer back for all of the warp, which may not have read yet.
//! race <<<1, 64>>> (map_of(x), out, count)
__global__ void given_back_by_one_lane(const __grid_constant__ CUtensorMap x, float* out, unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&empty, 1);
  start(&full);
  for (int i = 0; i < 3; i++) {
    if (t == 32) {
      mbarrier_wait(&empty, (i + 1) % 2);
      mbarrier_arrive_expect(&full, box_bytes);
      tma_load(tile, x, &full, 0, 8 * (i % 2), 0, 0);
    }
    if (t >= 32) continue;
    mbarrier_wait(&full, i % 2);
    out[32 * i + t] = tile[t];
    __syncwarp();
    //! buggy:
    if (t == 0) mbarrier_arrive(&empty);
  }
}

// Nobody reads the second tile. But who gives it back must know that it has come.
//! race or error or deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void given_back_before_it_has_come(const __grid_constant__ CUtensorMap x, float* out,
                                              unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&empty, 32);
  start(&full);
  for (int i = 0; i < 3; i++) {
    if (t == 32) {
      mbarrier_wait(&empty, (i + 1) % 2);
      mbarrier_arrive_expect(&full, box_bytes);
      tma_load(tile, x, &full, 0, 8 * (i % 2), 0, 0);
    }
    if (t >= 32) continue;
    mbarrier_wait(&full, i % 2);
    //! buggy: if (i != 1) mbarrier_wait(&full, i % 2);
    if (i != 1) out[32 * i + t] = tile[t];
    mbarrier_arrive(&empty);
  }
}

//! race or error or deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void producer_that_does_not_wait(const __grid_constant__ CUtensorMap x, float* out,
                                            unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&empty, 32);
  start(&full);
  for (int i = 0; i < 2; i++) {
    if (t == 32) {
      mbarrier_wait(&empty, (i + 1) % 2);
      //! buggy: mbarrier_wait(&empty, 1);
      mbarrier_arrive_expect(&full, box_bytes);
      tma_load(tile, x, &full, 0, 8 * i, 0, 0);
    }
    if (t >= 32) continue;
    mbarrier_wait(&full, i % 2);
    out[32 * i + t] = tile[t];
    mbarrier_arrive(&empty);
  }
}

//! deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void producer_waits_from_the_start(const __grid_constant__ CUtensorMap x, float* out,
                                              unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x;
  if (t == 0) mbarrier_init(&empty, 32);
  start(&full);
  for (int i = 0; i < 3; i++) {
    if (t == 32) {
      mbarrier_wait(&empty, (i + 1) % 2);
      //! buggy: mbarrier_wait(&empty, i % 2);
      mbarrier_arrive_expect(&full, box_bytes);
      tma_load(tile, x, &full, 0, 8 * (i % 2), 0, 0);
    }
    if (t >= 32) continue;
    mbarrier_wait(&full, i % 2);
    out[32 * i + t] = tile[t];
    mbarrier_arrive(&empty);
  }
}

// Of two buffers the wrong one is given back. The producer fills them in order, so it still comes after all
// reads. But if it is slow, a phase that it is to wait for is over before, and the next one, too.
//! error or deadlock <<<1, 64>>> (map_of(x), out, count)
__global__ void the_other_buffer_given_back(const __grid_constant__ CUtensorMap x, float* out,
                                            unsigned* count) {
  __shared__ __align__(1024) float tile[2][rows * cols];
  __shared__ uint64_t full[2];
  __shared__ uint64_t empty[2];
  const int t = threadIdx.x;
  if (t < 2) {
    mbarrier_init(full + t, 1);
    mbarrier_init(empty + t, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int i = 0; i < 4; i++) {
    if (t == 32) {
      mbarrier_wait(empty + i % 2, (i / 2 + 1) % 2);
      mbarrier_arrive_expect(full + i % 2, box_bytes);
      tma_load(tile[i % 2], x, full + i % 2, 0, 8 * (i % 2), 0, 0);
    }
    if (t > 0) continue;
    mbarrier_wait(full + i % 2, i / 2 % 2);
    out[i] = tile[i % 2][0];
    mbarrier_arrive(empty + i % 2);
    //! buggy: mbarrier_arrive(empty + (i + 1) % 2);
  }
}

// Each tile has a place of its own. But who writes them may be two phases ahead of who waits.
//! error <<<1, 64>>>
__global__ void phases_that_nobody_holds_up(const float* x, float* out, unsigned* count) {
  __shared__ float tile[4][32];
  __shared__ uint64_t full;
  __shared__ uint64_t taken;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) mbarrier_init(&taken, 32);
  start(&full, 32);
  for (int i = 0; i < 4; i++) {
    if (threadIdx.x >= 32) {
      tile[i][lane] = x[32 * i + lane];
      mbarrier_arrive(&full);
      mbarrier_wait(&taken, i % 2);
      //! buggy:
    } else {
      mbarrier_wait(&full, i % 2);
      out[32 * i + lane] = tile[i][31 - lane];
      mbarrier_arrive(&taken);
    }
  }
}

// ------------------------------------------------------------------------------------------- mbarriers
//! race or error <<<1, 64>>>
__global__ void used_before_it_is_initialised(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 32) mbarrier_init(&barrier, 64);
  __syncthreads();
  //! buggy:
  tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_arrive(&barrier);
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! error <<<1, 64>>>
__global__ void one_of_two_initialised(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barriers[2];
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) mbarrier_init(barriers + i, 64);
    //! buggy: for (int i = 0; i < 1; i++) mbarrier_init(barriers + i, 64);
  __syncthreads();
  tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_arrive(barriers + 1);
  mbarrier_wait(barriers + 1, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! error <<<1, 64>>> (map_of(x), out, count)
__global__ void initialised_without_a_fence(const __grid_constant__ CUtensorMap x, float* out,
                                            unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    //! buggy:
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect(&barrier, box_bytes);
    tma_load(tile, x, &barrier, 0, 0, 0, 0);
  }
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[threadIdx.x];
}

//! deadlock <<<1, 64>>>
__global__ void arrivals_of_more_threads(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barrier;
  start(&barrier, 64);
  //! buggy: start(&barrier, 65);
  tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_arrive(&barrier);
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// The phase is complete when half of the threads have written.
//! race <<<1, 64>>>
__global__ void arrivals_of_fewer_threads(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barrier;
  start(&barrier, 64);
  //! buggy: start(&barrier, 32);
  tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_arrive(&barrier);
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void arrival_before_the_write(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barrier;
  start(&barrier, 64);
  tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: mbarrier_arrive(&barrier);
  mbarrier_arrive(&barrier);
  //! buggy: tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_wait(&barrier, 0);
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

//! race <<<1, 64>>>
__global__ void arrival_without_a_wait(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  __shared__ uint64_t barrier;
  start(&barrier, 64);
  tile[threadIdx.x] = x[threadIdx.x];
  mbarrier_arrive(&barrier);
  mbarrier_wait(&barrier, 0);
  //! buggy:
  out[threadIdx.x] = tile[63 - threadIdx.x];
}

// ------------------------------------------------------------------------------------------------ stores
//! proxy fence <<<1, 64>>> (map_of(out), x, count)
__global__ void store_without_a_fence(const __grid_constant__ CUtensorMap out, const float* x,
                                      unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  //! buggy:
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

//! proxy fence <<<1, 64>>> (map_of(out), x, count)
__global__ void fence_before_the_writes(const __grid_constant__ CUtensorMap out, const float* x,
                                        unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  //! buggy: fence_proxy_async();
  fence_proxy_async();
  //! buggy: for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// What the one thread has written itself, its fence covers; not what the others write.
//! proxy fence <<<1, 64>>> (map_of(out), x, count)
__global__ void fence_by_one_thread(const __grid_constant__ CUtensorMap out, const float* x,
                                    unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  //! buggy: if (threadIdx.x == 0) fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

//! race <<<1, 64>>> (map_of(out), x, count)
__global__ void store_without_a_barrier(const __grid_constant__ CUtensorMap out, const float* x,
                                        unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  __syncthreads();
  //! buggy:
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

//! copy <<<1, 64>>> (map_of(out), x, count)
__global__ void store_not_waited_for(const __grid_constant__ CUtensorMap out, const float* x,
                                     unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
    //! buggy:
  }
}

//! copy <<<1, 64>>> (map_of(out), x, count)
__global__ void store_not_committed(const __grid_constant__ CUtensorMap out, const float* x,
                                    unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    //! buggy:
    bulk_wait_read<0>();
  }
}

//! race <<<1, 64>>> (map_of(out), x, count)
__global__ void source_written_too_early(const __grid_constant__ CUtensorMap out, const float* x,
                                         unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = 0; i < 2; i++) {
    for (int k = threadIdx.x; k < rows * cols; k += 64) tile[k] = x[i + k];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      tma_store(out, tile, 0, 8 * i, 0, 0);
      bulk_commit();
      bulk_wait_read<0>();
      //! buggy: if (i == 1) bulk_wait_read<0>();
    }
    __syncthreads();
  }
}

// Of two buffers the older one is to be free: one group may be left.
//! race <<<1, 64>>> (map_of(out), x, count)
__global__ void wait_for_one_store_less(const __grid_constant__ CUtensorMap out, const float* x,
                                        unsigned* count) {
  __shared__ __align__(1024) float tile[2][rows * cols];
  for (int i = 0; i < 4; i++) {
    for (int k = threadIdx.x; k < rows * cols; k += 64) tile[i % 2][k] = x[i + k];
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
      tma_store(out, tile[i % 2], 0, 8 * (i % 2), 0, 0);
      bulk_commit();
      if (i == 3) bulk_wait_read<0>();
      else bulk_wait_read<1>();
      //! buggy: else bulk_wait_read<2>();
      if (i % 2 == 1) bulk_wait<0>();
      //! buggy:
    }
    __syncthreads();
  }
}

// That the store has read shared memory does not say that it has written.
//! race <<<1, 64>>> (map_of(out), out, x)
__global__ void result_read_too_early(const __grid_constant__ CUtensorMap out_map, float* out,
                                      const float* x) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out_map, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait<0>();
    //! buggy: bulk_wait_read<0>();
    out[900] = out[0];
  }
}

//! race <<<2, 64>>> (map_of(out), x, count)
__global__ void two_blocks_store_one_box(const __grid_constant__ CUtensorMap out, const float* x,
                                         unsigned* count) {
  __shared__ __align__(1024) float tile[rows * cols];
  for (int i = threadIdx.x; i < rows * cols; i += 64) tile[i] = x[i];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(out, tile, 0, 8 * blockIdx.x, 0, 0);
    //! buggy: tma_store(out, tile, 0, 0, 0, 0);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// Sums are atomic; loads and stores beside them are not.
//! race <<<2, 64>>> (x, reinterpret_cast<float*>(count))
__global__ void sum_beside_a_store(const float* x, float* sum) {
  __shared__ __align__(16) float rows_of_x[8];
  if (threadIdx.x < 8) rows_of_x[threadIdx.x] = x[threadIdx.x];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_add(sum, rows_of_x, 8 * sizeof(float));
    bulk_commit();
    bulk_wait_read<0>();
  }
  if (threadIdx.x == 32) atomicAdd(sum, 1.f);
  //! buggy: if (threadIdx.x == 32) sum[0] += 1.f;
}

//! error <<<1, 64>>> (x, reinterpret_cast<float*>(count))
__global__ void sum_of_5_floats(const float* x, float* sum) {
  __shared__ __align__(16) float rows_of_x[8];
  if (threadIdx.x < 8) rows_of_x[threadIdx.x] = x[threadIdx.x];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_add(sum, rows_of_x, 8 * sizeof(float));
    //! buggy: bulk_add(sum, rows_of_x, 5 * sizeof(float));
    bulk_commit();
    bulk_wait_read<0>();
  }
}
