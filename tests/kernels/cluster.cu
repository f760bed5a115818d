// Clusters: what PTX promises, one small kernel each. test_cluster.py runs this file in the simulator and on
// a GPU.
#include <cuda_runtime.h>
#include <stdint.h>

#define ELEMENT __half
#define HEAD_DIM 64
#include "../../stages/common/cluster.cuh"
#include "../../stages/common/tickets.cuh"
#include "../../stages/common/tma.cuh"

static const char* result(cudaError_t error) {
  const cudaError_t last = cudaGetLastError();
  if (error == cudaSuccess) error = last;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

struct Config {
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};

  Config(dim3 grid, dim3 block, dim3 cluster, size_t bytes = 0) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster.x;
    attribute.val.clusterDim.y = cluster.y;
    attribute.val.clusterDim.z = cluster.z;
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
};

// Each block's rank, and the sum of what the threads of its cluster have: by reading all blocks' memory.
__global__ void sums(const int* x, int* ranks, int* out, int size) {
  __shared__ int numbers[64];
  const int block = blockIdx.x + gridDim.x * blockIdx.y, t = threadIdx.x;
  numbers[t] = x[64 * block + t];
  if (t == 0) ranks[block] = cluster_rank();
  cluster_sync();
  int sum = 0;
  for (int rank = 0; rank < size; rank++) sum += in_block(numbers, rank)[63 - t];
  out[64 * block + t] = sum;
  cluster_sync();
}
extern "C" const char* run_sums(const int* x, int* ranks, int* out, int grid_x, int grid_y, int x_size,
                                int y_size) {
  Config c(dim3(grid_x, grid_y), 64, dim3(x_size, y_size, 1));
  return result(cudaLaunchKernelEx(&c.config, sums, x, ranks, out, x_size * y_size));
}

// Of each number a block of two makes twice the other one's, `count` times: written there, with the barrier
// in two parts.
__global__ void exchange(const int* x, int* out, int count) {
  __shared__ int numbers[2][32];
  const int t = threadIdx.x, rank = cluster_rank();
  int mine = x[32 * rank + t];
  cluster_sync();                     // the other block has begun
  for (int i = 0; i < count; i++) {
    in_block(numbers[i % 2], 1 - rank)[t] = 2 * mine;
    cluster_arrive();
    cluster_wait();
    mine = numbers[i % 2][t];
  }
  out[32 * rank + t] = mine;
  cluster_sync();
}
extern "C" const char* run_exchange(const int* x, int* out, int count) {
  Config c(2, 32, 2);
  return result(cudaLaunchKernelEx(&c.config, exchange, x, out, count));
}

// A ring of two stages that two blocks fill together: each loads half of the rows of a tile for both. Block b
// sums what it has of tile t times t + b + 1. A stage is filled again when both blocks have given it back.
constexpr int rows = 16, stages = 2;
__global__ void multicast(const __grid_constant__ CUtensorMap map, float* out, int tiles) {
  __shared__ __align__(1024) __half tile[stages][rows * panel];
  __shared__ uint64_t full[stages];
  __shared__ uint64_t empty[stages];
  const int t = threadIdx.x, rank = cluster_rank();
  if (t == 0) {
    for (int s = 0; s < stages; s++) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, 2);
    }
    fence_mbarrier_init();
  }
  cluster_sync();
  if (t == 64)
    for (int i = 0; i < tiles; i++) {
      const int s = i % stages;
      mbarrier_wait(empty + s, (i / stages + 1) % 2);
      mbarrier_arrive_expect(full + s, sizeof tile[0]);
      tma_load_multicast(tile[s] + rank * rows / 2 * panel, map, full + s, 0, rows * i + rank * rows / 2, 0,
                         0, 3);
    }
  if (t < 64) {
    float sum = 0.f;
    for (int i = 0; i < tiles; i++) {
      const int s = i % stages;
      mbarrier_wait(full + s, i / stages % 2);
      for (int row = 0; row < rows; row++)
        sum += __half2float(tile[s][panel_index(row, t, rows)]) * float(i + rank + 1);
      named_barrier_sync(1, 64);
      if (t < 2) mbarrier_arrive_in_block(empty + s, t);
    }
    out[64 * rank + t] = sum;
  }
  cluster_sync();
}
extern "C" const char* run_multicast(__half* x, float* out, int tiles) {
  CUtensorMap map;
  Tensor tensor{};
  tensor.data = x;
  tensor.stride_n = panel;
  const cudaError_t error = make_tensor_map(map, tensor, 1, 1, rows * tiles, panel, rows / 2);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  Config c(2, 96, 2);
  return result(cudaLaunchKernelEx(&c.config, multicast, map, out, tiles));
}

// Clusters of two blocks share `all` pieces of work: first their own number, then by ticket. Each block
// counts what it has had.
__global__ void draw(int* counter, int* out, int all) {
  __shared__ uint64_t barriers[3];
  const Tickets tickets(barriers);
  cluster_sync();
  const int clusters = gridDim.x / 2;
  if (threadIdx.x == 0)
    for (int n = 0, next = blockIdx.x / 2; next < all; n++) {
      out[cluster_rank() * all + next] += 1;
      next = clusters + tickets.next(n, counter);
    }
  cluster_sync();
}
extern "C" const char* run_draw(int* counter, int* out, int clusters, int all) {
  Config c(2 * clusters, 32, 2);
  return result(cudaLaunchKernelEx(&c.config, draw, counter, out, all));
}

// Round after round each block sends its tile to the other one, a warp a quarter of it, and adds what has
// come to what it sends next.
__global__ void send(const int* x, int* out, int count) {
  __shared__ __align__(16) int mine[128];
  __shared__ __align__(16) int others[128];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  const int t = threadIdx.x, rank = cluster_rank(), first = t / 32 * 32;
  if (t == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&empty, 128);
    fence_mbarrier_init();
  }
  cluster_sync();
  int number = x[128 * rank + t];
  for (int i = 0; i < count; i++) {
    mbarrier_wait_for_blocks(&empty, (i + 1) % 2);
    mine[t] = number;
    fence_proxy_async();
    __syncwarp();
    if (t % 32 == 0) bulk_send(others + first, mine + first, 32 * sizeof(int), &full, 1 - rank);
    if (t == 0) mbarrier_arrive_expect(&full, sizeof others);
    mbarrier_wait(&full, i % 2);
    number += others[t];
    mbarrier_arrive_in_block(&empty, 1 - rank);
  }
  out[128 * rank + t] = number;
  cluster_sync();
}
extern "C" const char* run_send(const int* x, int* out, int count) {
  Config c(2, 128, 2);
  return result(cudaLaunchKernelEx(&c.config, send, x, out, count));
}

// Mistakes
__global__ void mistake(int number, int* out) {
  __shared__ __align__(16) int x[32];
  __shared__ uint64_t barrier;
  x[threadIdx.x] = number;
  if (threadIdx.x == 0) mbarrier_init(&barrier, 1);
  cluster_sync();
  const int rank = cluster_rank();
  if (number == 0) out[0] = *in_block(x, 2);  // HERE: 0
  if (number == 1) out[0] = *in_block(out, 0);  // HERE: 1
  if (number == 2) cluster_wait();  // HERE: 2
  if (number == 3 && rank == 1) mbarrier_wait(&barrier, 0);  // HERE: 3
  if (number == 4 && rank == 1) return;
  if (number == 4) {
    for (int i = 0; i < 5; i++) __nanosleep(1);
    mbarrier_arrive_in_block(&barrier, 1);  // HERE: 4
  }
  if (number == 7) bulk_send(x + 1, x, 16, &barrier, 1 - rank);  // HERE: 7
  if (number == 8) bulk_send(x, x, 20, &barrier, 1 - rank);  // HERE: 8
  if (number == 9) bulk_send(x, x, 16, &barrier, 2);  // HERE: 9
  if (number == 10 && rank == 0) bulk_send(x, x, 16, &barrier + 1, 1 - rank);  // HERE: 10
  if (number == 11) bulk_send(x, out, 16, &barrier, 1 - rank);  // HERE: 11
  cluster_sync();
}
extern "C" const char* run_mistake(int number, int* out) {
  if (number == 5) {
    Config c(3, 32, 2);
    return result(cudaLaunchKernelEx(&c.config, mistake, number, out));
  }
  if (number == 6) {
    mistake<<<1, 32>>>(number, out);
    return result(cudaSuccess);
  }
  Config c(2, 32, 2);
  return result(cudaLaunchKernelEx(&c.config, mistake, number, out));
}
