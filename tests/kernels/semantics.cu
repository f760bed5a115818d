// What CUDA promises to kernels, one small kernel each. test_simulator.py runs this file in the simulator and
// on a GPU.
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
__device__ int thread_of_grid() {      // blocks and threads in order, x fastest
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  return block * (blockDim.x * blockDim.y * blockDim.z) + thread;
}

// -------------------------------------------------------------------------------------------------- who am I
__global__ void indices(int* out) {
  const unsigned all[12] = {threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z,
                            blockDim.x,  blockDim.y,  blockDim.z,  gridDim.x,  gridDim.y,  gridDim.z};
  for (int i = 0; i < 12; i++) out[thread_of_grid() * 12 + i] = int(all[i]);
}
extern "C" const char* run_indices(int* out, int bx, int by, int bz, int gx, int gy, int gz) {
  indices<<<dim3(gx, gy, gz), dim3(bx, by, bz)>>>(out);
  return result();
}

// Block 0 goes on when block 1 has come. met: 1 in time, 2 too late.
__global__ void meet(int* flag, int* met) {
  if (blockIdx.x == 1) {
    atomicExch(flag, 1);
  } else {
    int tries = 0;
    while (atomicAdd(flag, 0) == 0 && tries < 100000000) tries++;
    *met = tries < 100000000 ? 1 : 2;
  }
}
extern "C" const char* run_meet(int* flag, int* met) {
  meet<<<2, 1>>>(flag, met);
  return result();
}

// -------------------------------------------------------------------------------------------------- barriers
__global__ void barrier_predicates(const int* predicate, int* out) {
  const int i = thread_of_grid(), p = predicate[i];
  out[i * 3 + 0] = __syncthreads_count(p);
  out[i * 3 + 1] = __syncthreads_or(p) != 0;
  out[i * 3 + 2] = __syncthreads_and(p) != 0;
}
extern "C" const char* run_barrier_predicates(const int* predicate, int* out, int blocks, int threads) {
  barrier_predicates<<<blocks, threads>>>(predicate, out);
  return result();
}

// The sum of each block's numbers, by a tree in shared memory. Without BARRIER a thread may add what is not
// there yet.
template <bool BARRIER> __global__ void reduce(const float* in, float* out) {
  extern __shared__ float partial[];
  const int t = threadIdx.x;
  partial[t] = in[blockIdx.x * blockDim.x + t];
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half) partial[t] += partial[t + half];
    if (BARRIER) __syncthreads();
    else __syncwarp();
  }
  if (t == 0) out[blockIdx.x] = partial[0];
}
extern "C" const char* run_reduce(const float* in, float* out, int blocks, int threads, int with_barrier) {
  if (with_barrier) reduce<true><<<blocks, threads, threads * sizeof(float)>>>(in, out);
  else reduce<false><<<blocks, threads, threads * sizeof(float)>>>(in, out);
  return result();
}

// Each lane reads what its right neighbour in the warp wrote, again and again: two __syncwarp a round.
__global__ void rotate_warps(const int* in, int* out, int rounds) {
  __shared__ volatile int values[128];
  const int t = threadIdx.x, right = t / 32 * 32 + (t + 1) % 32;
  values[t] = in[blockIdx.x * blockDim.x + t];
  for (int round = 0; round < rounds; round++) {
    __syncwarp();
    const int mine = values[right];
    __syncwarp();
    values[t] = mine;
  }
  out[blockIdx.x * blockDim.x + t] = values[t];
}
extern "C" const char* run_rotate_warps(const int* in, int* out, int rounds) {
  rotate_warps<<<3, 128>>>(in, out, rounds);
  return result();
}

// ---------------------------------------------------------------------------------------- shuffles and votes
template <class T>
__global__ void shuffles(const T* in, const int* sources, T* out, int width, int distance) {
  const int t = threadIdx.x, n = blockDim.x;
  out[0 * n + t] = __shfl_sync(0xffffffffu, in[t], sources[t], width);
  out[1 * n + t] = __shfl_up_sync(0xffffffffu, in[t], distance, width);
  out[2 * n + t] = __shfl_down_sync(0xffffffffu, in[t], distance, width);
  out[3 * n + t] = __shfl_xor_sync(0xffffffffu, in[t], distance, width);
}
extern "C" const char* run_shuffles_float(const float* in, const int* sources, float* out, int threads,
                                          int width, int distance) {
  shuffles<float><<<1, threads>>>(in, sources, out, width, distance);
  return result();
}
extern "C" const char* run_shuffles_int(const int* in, const int* sources, int* out, int threads, int width,
                                        int distance) {
  shuffles<int><<<1, threads>>>(in, sources, out, width, distance);
  return result();
}
extern "C" const char* run_shuffles_double(const double* in, const int* sources, double* out, int threads,
                                           int width, int distance) {
  shuffles<double><<<1, threads>>>(in, sources, out, width, distance);
  return result();
}

__global__ void votes(const int* predicate, unsigned mask, unsigned* out) {
  const int t = threadIdx.x, lane = t % 32;
  if (!(mask >> lane & 1)) return;
  out[t * 3 + 0] = __ballot_sync(mask, predicate[t]);
  out[t * 3 + 1] = __any_sync(mask, predicate[t]) != 0;
  out[t * 3 + 2] = __all_sync(mask, predicate[t]) != 0;
}
extern "C" const char* run_votes(const int* predicate, unsigned mask, unsigned* out, int threads) {
  votes<<<1, threads>>>(predicate, mask, out);
  return result();
}

// Of 96 threads, a warp leaves first, then all lanes of another but 8: barriers, votes and shuffles go on
// without them.
__global__ void exits(int* out) {
  __shared__ int tile[64];
  const int t = threadIdx.x;
  if (t >= 64) return;
  tile[t] = 10 * t;
  __syncthreads();
  const int other = tile[63 - t];
  if (t >= 40) return;
  const unsigned seen = __ballot_sync(0xffffffffu, t % 2);
  const int neighbour = __shfl_xor_sync(0xffffffffu, t, 1);
  out[4 * t + 0] = other;
  out[4 * t + 1] = __syncthreads_count(t < 35);
  out[4 * t + 2] = int(seen);
  out[4 * t + 3] = neighbour;
}
extern "C" const char* run_exits(int* out) {
  exits<<<1, 96>>>(out);
  return result();
}

// The halves of a warp work apart, and not equally long; then all lanes meet. Likewise groups of four lanes.
__global__ void halves(const int* in, int* out) {
  const int t = threadIdx.x, lane = t % 32;
  int x = in[t];
  if (lane < 16) {
    for (int distance = 8; distance > 0; distance /= 2) x += __shfl_xor_sync(0x0000ffffu, x, distance);
  } else {
    x = max(x, __shfl_xor_sync(0xffff0000u, x, 1));
    __syncwarp(0xffff0000u);
  }
  out[t] = x;
  out[blockDim.x + t] = __shfl_sync(0xffffffffu, x, 31 - lane);
  const unsigned four = 0xfu << lane / 4 * 4;
  for (int round = 0; round <= lane / 4; round++) x += __shfl_xor_sync(four, x, 1 + round % 3);
  out[2 * blockDim.x + t] = __shfl_down_sync(0xffffffffu, x, 1);
}
extern "C" const char* run_halves(const int* in, int* out) {
  halves<<<1, 64>>>(in, out);
  return result();
}

// --------------------------------------------------------------------------------------------------- atomics
struct Totals {
  float f;
  int i, smallest, largest, cas;
  unsigned u, u_smallest, u_largest;
  unsigned long long ull;
  double d;
};
__global__ void atomics(const int* in, Totals* totals, int* tickets, int* exchanged, int* cell,
                        float* float_cell) {
  const int t = thread_of_grid(), x = in[t];
  atomicAdd(&totals->f, float(x));
  tickets[t] = atomicAdd(&totals->i, 1);
  atomicAdd(&totals->u, unsigned(x));
  atomicAdd(&totals->ull, (unsigned long long)(x) << 33);
  atomicAdd(&totals->d, 0.25 * x);
  atomicMin(&totals->smallest, x);
  atomicMax(&totals->largest, x);
  atomicMin(&totals->u_smallest, unsigned(x));
  atomicMax(&totals->u_largest, unsigned(x));
  exchanged[t] = atomicExch(cell, t);
  atomicExch(float_cell, float(t) + 0.5f);
  int seen = totals->cas, expected;           // add x by compare-and-swap
  do {
    expected = seen;
    seen = atomicCAS(&totals->cas, expected, expected + x);
  } while (seen != expected);
}
extern "C" const char* run_atomics(const int* in, Totals* totals, int* tickets, int* exchanged, int* cell,
                                   float* float_cell, int blocks, int threads) {
  atomics<<<blocks, threads>>>(in, totals, tickets, exchanged, cell, float_cell);
  return result();
}

// Counts of the values 0 to 9, and the maximum of each block.
__global__ void histogram(const int* in, int n, int* out) {
  __shared__ int counts[10];
  __shared__ int largest;
  if (threadIdx.x < 10) counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) largest = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    atomicAdd(&counts[in[blockIdx.x * n + i]], 1);
    atomicMax(&largest, in[blockIdx.x * n + i] * 1000 + i);
  }
  __syncthreads();
  if (threadIdx.x < 10) out[blockIdx.x * 11 + threadIdx.x] = counts[threadIdx.x];
  if (threadIdx.x == 10) out[blockIdx.x * 11 + 10] = largest;
}
extern "C" const char* run_histogram(const int* in, int n, int* out, int blocks) {
  histogram<<<blocks, 64>>>(in, n, out);
  return result();
}

// counters[1] is 3 * counters[0], if nobody comes between.
__global__ void locked(int* lock, volatile int* counters) {
  bool done = false;
  while (!done) {
    if (atomicCAS(lock, 0, 1) == 0) {
      counters[0] = counters[0] + 1;
      counters[1] = counters[1] + 3;
      __threadfence();
      atomicExch(lock, 0);
      done = true;
    }
  }
}
extern "C" const char* run_locked(int* lock, int* counters, int blocks, int threads) {
  locked<<<blocks, threads>>>(lock, counters);
  return result();
}

// Blocks take turns, by their numbers or backwards, and note who started when. state: started, ended, 0.
__global__ void turns(int* state, int* started_as, volatile unsigned* chain, int backwards) {
  if (threadIdx.x == 0) {
    started_as[blockIdx.x] = atomicAdd(&state[0], 1);
    const int turn = backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    while (atomicAdd(&state[1], 0) != turn) {}
    __threadfence();
  }
  __syncthreads();
  chain[threadIdx.x] = 3 * chain[threadIdx.x] + blockIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&state[1], 1);
}
extern "C" const char* run_turns(int* state, int* started_as, unsigned* chain, int blocks, int threads,
                                 int backwards) {
  turns<<<blocks, threads>>>(state, started_as, chain, backwards);
  return result();
}

// --------------------------------------------------------------------------------------------- shared memory
// n dynamic floats and 7 * 11 static ones, reversed.
__global__ void fill_shared(float* out, int n) {
  __shared__ float fixed[7][11];
  extern __shared__ float dynamic[];
  for (int i = threadIdx.x; i < 77; i += blockDim.x) fixed[i / 11][i % 11] = -1.f - i;
  for (int i = threadIdx.x; i < n; i += blockDim.x) dynamic[i] = i + 1000.f * blockIdx.x;
  __syncthreads();
  float* mine = out + blockIdx.x * (n + 77);
  for (int i = threadIdx.x; i < n; i += blockDim.x) mine[i] = dynamic[n - 1 - i];
  for (int i = threadIdx.x; i < 77; i += blockDim.x) mine[n + i] = fixed[6 - i / 11][10 - i % 11];
}
extern "C" const char* run_fill_shared(float* out, int n, int blocks, int allowed_bytes) {
  if (allowed_bytes)
    cudaFuncSetAttribute(fill_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed_bytes);
  fill_shared<<<blocks, 96, n * sizeof(float)>>>(out, n);
  return result();
}

// -------------------------------------------------------------------------------------- types and arithmetic
__global__ void vectors(const float* in, float* out, int* layout) {
  const float4 a = reinterpret_cast<const float4*>(in)[threadIdx.x];
  const float2 b = reinterpret_cast<const float2*>(in)[threadIdx.x];
  const int4 c = make_int4(int(a.w), int(a.z), int(a.y), int(a.x));
  reinterpret_cast<float4*>(out)[3 * threadIdx.x + 0] = make_float4(a.w, a.x, a.y, a.z);
  reinterpret_cast<float4*>(out)[3 * threadIdx.x + 1] = {float(c.x), float(c.y), float(c.z), float(c.w)};
  reinterpret_cast<float2*>(out)[6 * threadIdx.x + 4] = make_float2(b.y, b.x);
  reinterpret_cast<float2*>(out)[6 * threadIdx.x + 5] = make_float2(0.f, 1.f);
  if (threadIdx.x == 0) {
    const size_t sizes[] = {sizeof(float2), sizeof(float3), sizeof(float4), sizeof(int2), sizeof(int4),
                            sizeof(uint2), sizeof(uint4), alignof(float2), alignof(float3), alignof(float4),
                            alignof(int2), alignof(int4), alignof(uint2), alignof(uint4)};
    for (int i = 0; i < 14; i++) layout[i] = int(sizes[i]);
  }
}
extern "C" const char* run_vectors(const float* in, float* out, int* layout, int threads) {
  vectors<<<1, threads>>>(in, out, layout);
  return result();
}

__global__ void float_intrinsics(const float* x, const float* y, float* out, int n) {
  const int t = threadIdx.x;
  const float a = x[t], b = y[t];
  const float values[] = {
      __expf(a), __exp10f(a), __logf(b), __log2f(b), __powf(b, a), __sinf(a), __cosf(a), __fdividef(a, b),
      rsqrtf(b), __fadd_rn(a, b), __fsub_rn(a, b), __fmul_rn(a, b), __fdiv_rn(a, b), __fmaf_rn(a, b, a),
      __frcp_rn(b), __fsqrt_rn(b), __frsqrt_rn(b), __saturatef(a), min(a, b), max(a, b), min(a, NAN),
      max(NAN, b), fmaxf(a, b), exp2f(a), __int2float_rn(int(a * 1000)), __saturatef(NAN)};
  for (int i = 0; i < 26; i++) out[i * n + t] = values[i];
}
__global__ void int_intrinsics(const int* x, const float* y, int* out, int n) {
  const int t = threadIdx.x, a = x[t];
  const float b = y[t];
  const int finite = a & 0x7f7fffff;             // the bits of a finite float
  const int values[] = {__popc(a), __clz(a), __ffs(a), int(__brev(a)), __float_as_int(b),
                        int(__float_as_uint(b)), __float_as_int(__int_as_float(finite)),
                        int(__float_as_uint(__uint_as_float(finite))),
                        __float2int_rn(b), __float2int_rd(b), __float2int_ru(b), __float2int_rz(b),
                        min(a, 16777217), max(a, 16777217), int(max(a, 16777217u)), int(min(a, 16777217u)),
                        int(min((long long)a, 1ll << 40)), __ldg(x + t), int(__byte_perm(a, ~a, 0x3276)),
                        int(__byte_perm(a, ~a, 0x0145))};
  for (int i = 0; i < 20; i++) out[i * n + t] = values[i];
}
extern "C" const char* run_float_intrinsics(const float* x, const float* y, float* out, int n) {
  float_intrinsics<<<1, n>>>(x, y, out, n);
  return result();
}
extern "C" const char* run_int_intrinsics(const int* x, const float* y, int* out, int n) {
  int_intrinsics<<<1, n>>>(x, y, out, n);
  return result();
}

__global__ void print(float x) {
  if (threadIdx.x == 5) printf("block %d, thread %d: %.3f %s\n", blockIdx.x, threadIdx.x, x * 2, "text");
}
extern "C" const char* run_print(float x) {
  print<<<2, 8>>>(x);
  return result();
}
