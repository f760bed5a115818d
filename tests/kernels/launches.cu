// What a launch and a __shared__ declaration may look like: test_translate.py runs this file.
#include <cuda_runtime.h>

#include "../../stages/common/launch.cuh"

// A string, a comment and a character that look like CUDA: kernel<<<1, 1>>>(x); __shared__ float a, b;
// asm("exit;");
static const char* const text = "kernel<<<1, 1>>>(x); \" // __shared__ float a, b; asm(\"exit;\")";
/* kernel<<<
   1, 1>>>(x); */
static const int thousands = 1'000 + 1'000'000;   // a quote that starts no character
static const char quote = '"', apostrophe = '\'';

static const char* result() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

__device__ void note(int* out, int value) {
  if (blockIdx.x + blockIdx.y + threadIdx.x == 0)
    *out = value + 100 * (gridDim.x + 10 * gridDim.y) + 10000 * blockDim.x;
}

__device__ int told;
__global__ void plain(int* out, int value) { note(out, value); }
__global__ void without_arguments() { told = 7 + 10000 * blockDim.x; }
__global__ void tell(int* out) { *out = told; }
template <int N, bool ADD> __global__ void with_template(int* out, int value) {
  note(out, ADD ? value + N : value - N);
}
template <class T, int N> struct Pair { T values[N]; };
template <class T> __global__ void with_type(int* out, T pair) {
  note(out, int(sizeof pair) + pair.values[1]);
}
namespace outer::inner {
__global__ void qualified(int* out, int value) { note(out, value); }
template <int N> __global__ void qualified_template(int* out) { note(out, N); }
}  // namespace outer::inner
static int sum(int a, int b) { return a + b; }

#define LAUNCH(kernel, ...) \
  kernel<<<1,               \
           32>>>(__VA_ARGS__)

extern "C" const char* launch_all(int* out, cudaStream_t stream) {
  const int n = 3, a = 1, b = 2;
  plain<<<2, 32>>>(out + 0, 1);
  plain<<<2, 32, 64>>>(out + 1, 2);
  plain<<<2, 32, 64 * sizeof(float), stream>>>(out + 2, 3);
  plain <<< dim3(2, 3), dim3(32, 1, 1), 0, stream >>> (out + 3, sum(4, (5)));
  with_template<64, true><<<1, 32>>>(out + 4, 10);
  with_template<(n > 2 ? 8 : 9), (1 > 2)><<<sum(1, 1), 32>>>(out + 5, 10);
  with_type<Pair<int, 3>><<<1, 32>>>(out + 6, Pair<int, 3>{{5, 6, 7}});
  outer::inner::qualified<<<1, 32>>>(out + 7, 8);
  ::outer::inner::qualified_template<9><<<1, 32>>>(out + 8);
  without_arguments<<<1, 64>>>();
  tell<<<1, 1>>>(out + 9);
  plain<<<
      dim3(2),   // blocks, >>>( and
      64         /* threads */
      >>>(
      out + 10,
      sum(1,
          2));
  if (a < b) with_template<1, false><<<1, 32>>>(out + 11, 5);        // the `<` before the name is no bracket
  for (int i = 0; i < n; i++) plain<<<1, 32>>>(out + 12 + i, i);
  LAUNCH(plain, out + 15, 16);
  if (a > b || b < a) plain<<<1, 32>>>(out, 99);
  else outer::inner::qualified_template<17><<<1, 32>>>(out + 16);
  plain<<<1, 32>>>(out + 17, text[0] == 'k' && quote != apostrophe ? thousands : 0);
  cudaLaunchKernelEx(EarlyLaunch(2, 32, 0, stream), with_template<2, true>, out + 18, sum(4, 5));
  return result();
}

// --------------------------------------------------------------------------------------------- shared memory
struct Point { float x; int tag; };
template <class T, int M, int N> struct Tile { T data[M][N]; };

template <int N> __device__ int* buffer() {      // every instance has an array of its own
  __shared__ int values[N];
  return values;
}

// Each array gets its own numbers; after the barrier all must still be there. errors: a counter an array.
template <class T, int M> __global__ void arrays(int* errors, int dynamic_count, int* alignments) {
  constexpr int N = 2 * M;
  __shared__ float one[33];
  __shared__ T two[M][N + 1];
  __shared__ int scalar;
  __shared__ __align__(16) char bytes[5];
  __shared__ alignas(128) int aligned[3];
  __align__(64) __shared__ int aligned_before[3];
  static __shared__ int with_static[3];
  __shared__ Point points[4];
  __shared__ Tile<T, M, 3> tile;
  __shared__ unsigned long long wide [ 2 ]
      [2];
  __shared__ int first[3]; __shared__ int second[3];
  extern __shared__ __align__(16) unsigned char dynamic[];
  int *small = buffer<3>(), *large = buffer<5>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < 33; i++) one[i] = 100 + i;
    for (int i = 0; i < M * (N + 1); i++) two[i / (N + 1)][i % (N + 1)] = T(200 + i);
    scalar = 300;
    for (int i = 0; i < 5; i++) bytes[i] = char(40 + i);
    for (int i = 0; i < 3; i++) aligned[i] = 500 + i, aligned_before[i] = 550 + i, with_static[i] = 580 + i;
    for (int i = 0; i < 4; i++) points[i] = {600.f + i, 610 + i};
    for (int i = 0; i < 3 * M; i++) tile.data[i / 3][i % 3] = T(700 + i);
    for (int i = 0; i < 4; i++) wide[i / 2][i % 2] = 800 + i;
    for (int i = 0; i < 3; i++) first[i] = 900 + i, second[i] = 1000 + i;
    for (int i = 0; i < dynamic_count; i++) dynamic[i] = (unsigned char)(i * 7);
    for (int i = 0; i < 3; i++) small[i] = 1100 + i;
    for (int i = 0; i < 5; i++) large[i] = 1200 + i;
  }
  __syncthreads();
  if (threadIdx.x == blockDim.x - 1) {
    for (int i = 0; i < 33; i++) errors[0] += one[i] != 100 + i;
    for (int i = 0; i < M * (N + 1); i++) errors[1] += two[i / (N + 1)][i % (N + 1)] != T(200 + i);
    errors[2] += scalar != 300;
    for (int i = 0; i < 5; i++) errors[3] += bytes[i] != char(40 + i);
    for (int i = 0; i < 3; i++) errors[4] += (aligned[i] != 500 + i) + (aligned_before[i] != 550 + i);
    for (int i = 0; i < 3; i++) errors[4] += with_static[i] != 580 + i;
    for (int i = 0; i < 4; i++) errors[5] += (points[i].x != 600.f + i) + (points[i].tag != 610 + i);
    for (int i = 0; i < 3 * M; i++) errors[6] += tile.data[i / 3][i % 3] != T(700 + i);
    for (int i = 0; i < 4; i++) errors[7] += wide[i / 2][i % 2] != 800ull + i;
    for (int i = 0; i < 3; i++) errors[8] += (first[i] != 900 + i) + (second[i] != 1000 + i);
    for (int i = 0; i < dynamic_count; i++) errors[9] += dynamic[i] != (unsigned char)(i * 7);
    for (int i = 0; i < 3; i++) errors[10] += small[i] != 1100 + i;
    for (int i = 0; i < 5; i++) errors[11] += large[i] != 1200 + i;
    errors[12] += sizeof(two) != M * (N + 1) * sizeof(T);
    alignments[0] = int((size_t)bytes % 16);
    alignments[1] = int((size_t)aligned % 128);
    alignments[2] = int((size_t)aligned_before % 64);
    alignments[3] = int((size_t)dynamic % 16);
  }
}

extern "C" const char* all_arrays(int* errors, int* alignments, int dynamic_count) {
  arrays<float, 4><<<1, 64, dynamic_count>>>(errors, dynamic_count, alignments);
  arrays<double, 7><<<1, 64, dynamic_count>>>(errors, dynamic_count, alignments);
  return result();
}

// Assembly is for the GPU; the twin after #else is for the CPU.
__global__ void lane(int* out) {
#ifdef __CUDACC__
  unsigned id;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
#else
  const unsigned id = threadIdx.x % 32;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
  asm volatile("membar.cta;" ::: "memory");
#endif
#if __CUDA_ARCH__ >= 700
  asm volatile("membar.cta;" ::: "memory");
#endif
  out[threadIdx.x] = int(id);
}
extern "C" const char* lanes(int* out) {
  lane<<<1, 40>>>(out);
  return result();
}
