// Kernels with mistakes, for the simulator's reports. test_simulator.py finds a line by the comment
// "// HERE: name" at its end.
#include <assert.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdexcept>

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
__global__ void fill(int* out, int value) { out[blockIdx.x * blockDim.x + threadIdx.x] = value; }
extern "C" const char* run_fill(int* out, int value, int blocks, int threads) {
  fill<<<blocks, threads>>>(out, value);
  return result();
}

// -------------------------------------------------------------------------------------------------- launches
__global__ void dynamic_only() {}
extern "C" const char* run_configuration(int bx, int by, int bz, int gx, int gy, int gz, int bytes,
                                         int allowed) {
  if (allowed && cudaFuncSetAttribute(dynamic_only, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed))
    return result();
  dynamic_only<<<dim3(gx, gy, gz), dim3(bx, by, bz), bytes>>>();  // HERE: launch
  return result();
}
__global__ void large_static(float* out) {
  __shared__ float large[12289];
  large[threadIdx.x] = 1.f;
  *out = large[0];
}
extern "C" const char* run_large_static(float* out) {
  large_static<<<1, 32>>>(out);
  return result();
}
__global__ void static_and_dynamic(float* out) {
  __shared__ float fixed[10000];
  extern __shared__ float dynamic[];
  *out = fixed[0] = dynamic[0] = 1.f;
}
extern "C" const char* run_static_and_dynamic(float* out, int bytes, int allowed) {
  if (allowed) cudaFuncSetAttribute(static_and_dynamic, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed);
  static_and_dynamic<<<1, 1, bytes>>>(out);
  return result();
}
// What a block finds in its shared memory; then it leaves numbers there.
__global__ void initially(float* out, int n) {
  extern __shared__ float dynamic[];
  __shared__ float fixed[20][10];
  __shared__ double scalar;
  float* mine = out + blockIdx.x * (n + 201);
  for (int i = 0; i < n; i++) mine[i] = dynamic[i], dynamic[i] = 1.f;
  for (int i = 0; i < 200; i++) mine[n + i] = fixed[i / 10][i % 10], fixed[i / 10][i % 10] = 2.f;
  mine[n + 200] = float(scalar);
  scalar = 3.;
}
extern "C" const char* run_initially(float* out, int n, int blocks) {
  initially<<<blocks, 1, n * sizeof(float)>>>(out, n);
  return result();
}

// -------------------------------------------------------------------------------- threads that wait for ever
__global__ void divergent_barrier() {
  if (threadIdx.x % 40 < 3) __syncthreads();  // HERE: divergent barrier
  __syncwarp();  // HERE: warp that waits
}
__global__ void two_barriers() {       // 30 of 64 threads leave, and are not waited for
  if (threadIdx.x >= 34) return;
  if (threadIdx.x == 33) __syncwarp(0x3);  // HERE: the other lane
  if (threadIdx.x == 7) __syncthreads_count(1);  // HERE: barrier 2
  else __syncthreads();  // HERE: barrier 1
}
__global__ void different_operations(int* out) {
  const int lane = threadIdx.x % 32;
  if (lane < 7) out[lane] = __shfl_sync(0xffffffff, lane, 3);  // HERE: shuffle
  else out[lane] = __ballot_sync(0xffffffff, lane);  // HERE: ballot
}
__global__ void different_masks(int* out) {
  const int lane = threadIdx.x % 32;
  if (lane == 0) out[lane] = __shfl_xor_sync(0xffffffff, lane, 1);  // HERE: whole mask
  else if (lane == 1) out[lane] = __shfl_xor_sync(0x3, lane, 1);  // HERE: half mask
}
__global__ void returned_lane(int* out) {
  if (threadIdx.x == 35) return;
  out[threadIdx.x] = __shfl_down_sync(0xffffffff, int(threadIdx.x), 1, 8);  // HERE: returned lane
}
__global__ void not_in_mask(int* out) { out[threadIdx.x] = __any_sync(0xfffffffe, 1); }  // HERE: own mask
__global__ void reads_outside(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffff, int(threadIdx.x), 19);  // HERE: outside
}
__global__ void past_the_last(int* out) {
  out[threadIdx.x] = __shfl_down_sync(0xffffffff, 1, 4, 16);  // HERE: past
}
extern "C" const char* run_waiting(int which, int* out) {
  switch (which) {
    case 0: divergent_barrier<<<dim3(1, 2), 96>>>(); break;
    case 1: two_barriers<<<1, 64>>>(); break;
    case 2: different_operations<<<1, 32>>>(out); break;
    case 3: different_masks<<<1, 32>>>(out); break;
    case 4: returned_lane<<<1, 64>>>(out); break;
    case 5: not_in_mask<<<1, 32>>>(out); break;
    case 6: reads_outside<<<1, 32>>>(out); break;
    case 7: past_the_last<<<1, 40>>>(out); break;
  }
  return result();
}

// ----------------------------------------------------------------------------------------- threads that fail
__device__ __attribute__((noinline)) void large_local(int* out, int zero) {  // HERE: stack
  volatile char large[1 << 20];
  for (int i = zero; i < 1 << 20; i += 64) large[i] = 1;
  *out = large[zero];
}
__device__ int recurse(int x) { volatile int a[100] = {x}; return recurse(x + 1) + a[7]; }  // HERE: recursion
__global__ void fails(int which, int thread, int* out, int zero) {
  if (threadIdx.x != thread % 8 || threadIdx.y != thread / 8) return;
  if (which == 0) *(volatile int*)nullptr = 1;  // HERE: null
  if (which == 1) out[1ll << 45] = 1;  // HERE: far
  if (which == 2) atomicAdd((int*)nullptr + zero, 1);  // HERE: atomic
  if (which == 3) large_local(out, zero);
  if (which == 4) *out = recurse(zero);
  if (which == 5) *out = thread / zero;  // HERE: division
  if (which == 6) assert(zero == 1 && "a reason");  // HERE: assert
  if (which == 7) __trap();  // HERE: trap
  if (which == 8) throw std::runtime_error("thrown");
  if (which == 9) throw 3;
  if (which == 10) {
    extern __shared__ volatile char arena[];
    arena[240000 + zero] = 1;  // HERE: arena
  }
}
extern "C" const char* run_fails(int which, int thread, int* out) {
  fails<<<dim3(1, 3), dim3(8, 4)>>>(which, thread, out, 0);
  return result();
}
// A launch after one that failed does nothing until the error is read. Returns one bit a question.
extern "C" int run_sticky(int* out) {
  fails<<<1, 32>>>(7, 1, out, 0);
  const bool pending = cudaPeekAtLastError() != cudaSuccess && cudaPeekAtLastError() != cudaSuccess;
  fill<<<1, 1>>>(out, 5);
  const bool nothing_done = *out != 5;
  const bool read = cudaGetLastError() == cudaErrorLaunchFailure;
  const bool gone = cudaGetLastError() == cudaSuccess && cudaPeekAtLastError() == cudaSuccess;
  fill<<<1, 1>>>(out, 6);
  return pending | nothing_done << 1 | read << 2 | gone << 3 | (*out == 6) << 4;
}

// Out of any kernel. What follows runs on, but launches nothing.
extern "C" const char* run_host_assert(int* out) {
  assert(out == nullptr);  // HERE: host assert
  fill<<<1, 1>>>(out, 5);
  return result();
}

// The first block fails once the second one waits for it.
__global__ void fails_while_waited_for(int* flags) {
  if (blockIdx.x == 0) {
    while (!atomicAdd(&flags[0], 0)) {}
    assert(!"waited for");
    atomicExch(&flags[1], 1);
  } else {
    atomicExch(&flags[0], 1);
    while (!atomicAdd(&flags[1], 0)) {}
  }
}
extern "C" const char* run_fails_while_waited_for(int* flags) {
  fails_while_waited_for<<<2, 1>>>(flags);
  return result();
}

// -------------------------------------------------------------------------------------- loops without an end
__global__ void endless(int which, volatile int* x) {
  volatile float y = 1.f;
  while (true) {
    if (which == 0) *x = *x + 1;
    if (which == 1) __syncthreads();
    if (which == 2) __syncwarp();
    if (which == 3) y = expf(y) - logf(y);
    if (which == 4) atomicAdd((int*)x, 1);
    if (which == 5 && __shfl_sync(0xffffffff, *x, 0) == -1) break;
    if (which == 6) printf("%.0s", "nothing");
    if (which == 7 && blockDim.x == 0) return;   // no side effect: C++ would let the compiler drop the loop
  }
}
extern "C" const char* run_endless(int which, int* x, int blocks, int threads) {
  endless<<<blocks, threads>>>(which, x);
  return result();
}
