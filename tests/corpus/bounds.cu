// Accesses past the end and before the start: of shared, global and local arrays.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

//! out of bounds <<<1, 64>>>
__global__ void shared_past_the_end(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: tile[threadIdx.x + 1] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x) out[threadIdx.x] = tile[threadIdx.x];
}

//! out of bounds <<<1, 64>>>
__global__ void shared_before_the_start(const float* x, float* out, unsigned* count) {
  __shared__ float tile[64];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = threadIdx.x > 0 ? tile[threadIdx.x - 1] : 0.f;
  //! buggy: out[threadIdx.x] = tile[int(threadIdx.x) - 1];
}

// Into the array that is declared next, which is there: only the name is wrong.
//! out of bounds <<<1, 32>>>
__global__ void shared_into_the_next_array(const float* x, float* out, unsigned* count) {
  __shared__ float a[32];
  __shared__ float b[32];
  const int t = threadIdx.x;
  a[t] = b[t] = x[t];
  __syncthreads();
  for (int k = 0; k < 32; k++) a[t] += b[k];
  //! buggy: for (int k = 0; k <= 32; k++) b[t] += a[k];
  out[t] = a[t] + b[t];
}

//! out of bounds <<<1, 32>>>
__global__ void a_row_too_many(const float* x, float* out, unsigned* count) {
  __shared__ float tile[8][33];
  for (int row = 0; row < 8; row++) tile[row][threadIdx.x] = x[threadIdx.x];
  //! buggy: for (int row = 0; row <= 8; row++) tile[row][threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = tile[7][threadIdx.x];
}

//! out of bounds <<<1, 32>>>
__global__ void a_row_before_the_first(const float* x, float* out, unsigned* count) {
  __shared__ float tile[8][33];
  for (int row = 7; row >= 0; row--) tile[row][threadIdx.x] = x[threadIdx.x];
  //! buggy: for (int row = 7; row >= -1; row--) tile[row][threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = tile[7][threadIdx.x];
}

//! out of bounds <<<1, 64, 256>>>
__global__ void dynamic_past_the_end(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  smem[threadIdx.x] = x[threadIdx.x];
  //! buggy: smem[threadIdx.x + 1] = x[threadIdx.x];
  out[threadIdx.x] = x[threadIdx.x];
}

//! out of bounds <<<1, 64, 256>>>
__global__ void dynamic_before_the_start(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = threadIdx.x > 0 ? smem[threadIdx.x - 1] : 0.f;
  //! buggy: out[threadIdx.x] = smem[int(threadIdx.x) - 1];
}

// Two arrays cut from the dynamic part by hand; the second one starts an array too late.
//! out of bounds <<<1, 64, 512>>>
__global__ void dynamic_cut_too_large(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  float* K_smem = smem;
  float* V_smem = K_smem + 64;
  //! buggy: float* V_smem = K_smem + 65;
  K_smem[threadIdx.x] = V_smem[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = K_smem[threadIdx.x] + V_smem[threadIdx.x];
}

// What lies behind K is V: it is there, and initialised.
//! out of bounds <<<1, 32, 512>>>
__global__ void dynamic_into_the_next_part(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  float* K_smem = smem;
  float* V_smem = K_smem + 64;
  for (int k = threadIdx.x; k < 64; k += 32) K_smem[k] = V_smem[k] = x[k];
  __syncthreads();
  float sum = V_smem[threadIdx.x];
  for (int k = 0; k < 64; k++) sum += K_smem[k];
  //! buggy: for (int k = 0; k <= 64; k++) sum += K_smem[k];
  out[threadIdx.x] = sum;
}

// K has two buffers.
//! out of bounds <<<1, 32, 384>>>
__global__ void dynamic_third_of_two_buffers(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  float* K_smem = smem;
  float* V_smem = K_smem + 64;
  V_smem[threadIdx.x] = 0.f;
  for (int i = 0; i < 4; i++) {
    K_smem[i % 2 * 32 + threadIdx.x] = x[threadIdx.x];
    //! buggy: K_smem[i % 3 * 32 + threadIdx.x] = x[threadIdx.x];
  }
  out[threadIdx.x] = V_smem[threadIdx.x];
}

//! out of bounds <<<1, 32, 256>>>
__global__ void dynamic_into_the_part_before(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  float* L_smem = smem;
  float* D_smem = L_smem + 32;
  float* x_smem = D_smem + 32;
  L_smem[threadIdx.x] = D_smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = threadIdx.x > 0 ? D_smem[threadIdx.x - 1] : 0.f;
  //! buggy: out[threadIdx.x] = D_smem[int(threadIdx.x) - 1];
  if (out[threadIdx.x] == 9.f) *x_smem = 0.f;
}

// The parts are of two types.
//! out of bounds <<<1, 32, 256>>>
__global__ void dynamic_into_another_type(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  short* K_smem = reinterpret_cast<short*>(smem);
  float* L_smem = reinterpret_cast<float*>(K_smem + 64);
  for (int k = threadIdx.x; k < 64; k += 32) K_smem[k] = short(x[k]);
  L_smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = L_smem[threadIdx.x];
  for (int k = threadIdx.x; k < 64; k += 32) sum += K_smem[k];
  //! buggy: for (int k = threadIdx.x; k < 96; k += 32) sum += K_smem[k];
  out[threadIdx.x] = sum;
}

//! out of bounds <<<32, 32>>>
__global__ void global_write_past_the_end(const float* x, float* out, unsigned* count) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i < 1000) out[i] = x[0];
  //! buggy: if (i <= 1000) out[i] = x[0];
}

//! out of bounds <<<32, 32>>>
__global__ void global_read_past_the_end(const float* x, float* out, unsigned* count) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i < 999) out[i] = x[i + 1];
  //! buggy: if (i < 1000) out[i] = x[i + 1];
}

//! out of bounds <<<1, 32>>>
__global__ void global_read_before_the_start(const float* x, float* out, unsigned* count) {
  const int i = threadIdx.x;
  out[i] = i > 0 ? x[i - 1] : 0.f;
  //! buggy: out[i] = i >= 0 ? x[i - 1] : 0.f;
}

//! out of bounds <<<1, 32>>>
__global__ void global_write_before_the_start(const float* x, float* out, unsigned* count) {
  const int i = threadIdx.x;
  out[31 - i] = x[i];
  //! buggy: out[30 - i] = x[i];
}

//! out of bounds <<<1, 32>>>
__global__ void atomic_past_the_end(const float* x, float* out, unsigned* count) {
  if (threadIdx.x < 8) atomicAdd(&count[threadIdx.x], 1u);
  //! buggy: if (threadIdx.x <= 8) atomicAdd(&count[threadIdx.x], 1u);
}

// Whole tiles, where the last one is ragged.
//! out of bounds <<<1, 32>>>
__global__ void rows_past_the_end(const float* x, float* out, unsigned* count) {
  for (int j = 0; j < 32; j++) {
    const int i = 32 * j + threadIdx.x;
    if (i < 1000) out[i] = x[i];
    //! buggy: out[i] = x[0];
  }
}

// Two of the four numbers are the array's.
//! out of bounds <<<1, 32>>>
__global__ void vector_past_the_end_of_shared(const float* x, float* out, unsigned* count) {
  __shared__ __align__(16) float tile[126];
  for (int k = threadIdx.x; k < 126; k += 32) tile[k] = x[k];
  __syncthreads();
  float4 four = make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < 31) four = reinterpret_cast<const float4*>(tile)[threadIdx.x];
  //! buggy: if (threadIdx.x < 32) four = reinterpret_cast<const float4*>(tile)[threadIdx.x];
  out[threadIdx.x] = four.x + four.y;
}

//! out of bounds <<<1, 256>>>
__global__ void vector_past_the_end_of_global(const float* x, float* out, unsigned* count) {
  const int i = threadIdx.x;
  if (i < 250) reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(x)[i];
  //! buggy: if (i <= 250) reinterpret_cast<float4*>(out)[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

//! out of bounds <<<1, 32>>>
__global__ void null_pointer(const float* x, float* out, unsigned* count) {
  float* p = threadIdx.x < 32 ? out : nullptr;
  //! buggy: float* p = threadIdx.x < 31 ? out : nullptr;
  p[threadIdx.x] = 1.f;
}

// 70,000 rows of 50,000 numbers: the index needs 64 bits.
//! out of bounds <<<1, 32>>>
__global__ void index_that_overflows(const float* x, float* out, unsigned* count) {
  const int row = 70000 + threadIdx.x, pitch = 50000 + int(count[0]);
  const long long first = (long long)row * pitch;
  //! buggy: const long long first = row * pitch;
  out[first < 0 ? first : threadIdx.x] = 1.f;
}

//! out of bounds <<<1, 32>>>
__global__ void local_past_the_end(const float* x, float* out, unsigned* count) {
  float row[8];
  for (int k = 0; k < 8; k++) row[k] = x[k];
  float sum = 0.f;
  for (int k = 0; k < 8 + int(count[0]); k++) sum += row[k];
  //! buggy: for (int k = 0; k <= 8 + int(count[0]); k++) sum += row[k];
  out[threadIdx.x] = sum;
}

//! out of bounds <<<1, 32>>>
__global__ void local_before_the_start(const float* x, float* out, unsigned* count) {
  float row[8];
  for (int k = 0; k < 8; k++) row[k] = x[k];
  float sum = 0.f;
  for (int k = 7; k >= int(count[0]); k--) sum += row[k];
  //! buggy: for (int k = 7; k >= int(count[0]) - 1; k--) sum += row[k];
  out[threadIdx.x] = sum;
}

//! out of bounds <<<1, 32>>>
__global__ void local_write_past_the_end(const float* x, float* out, unsigned* count) {
  float row[8];
  const int last = 7 + int(count[0]);
  //! buggy: const int last = 8 + int(count[0]);
  for (int k = 0; k <= last; k++) row[k] = x[k];
  out[threadIdx.x] = row[last] + row[threadIdx.x % 8];
}

//! out of bounds <<<1, 32>>>
__global__ void local_row_too_many(const float* x, float* out, unsigned* count) {
  float O_reg[4][4];
  for (int k = 0; k < 16; k++) O_reg[k / 4][k % 4] = x[k];
  float sum = 0.f;
  for (int r = 0; r < 4 + int(count[0]); r++) sum += O_reg[r][threadIdx.x % 4];
  //! buggy: for (int r = 0; r <= 4 + int(count[0]); r++) sum += O_reg[r][threadIdx.x % 4];
  out[threadIdx.x] = sum;
}

__device__ const float TABLE[4] = {1.f, 2.f, 4.f, 8.f};
//! out of bounds <<<1, 32>>>
__global__ void constant_past_the_end(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = TABLE[threadIdx.x % 4];
  //! buggy: out[threadIdx.x] = TABLE[threadIdx.x % 5];
}

// Rows of shared memory lie one after the other: an index may run through all of them, and not further.
//! out of bounds <<<1, 33>>>
__global__ void rows_as_one(const float* x, float* out, unsigned* count) {
  __shared__ float tile[8][33];
  const int rows = 8;
  //! buggy: const int rows = 9;
  for (int row = 0; row < rows; row++) tile[0][33 * row + threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = tile[7][threadIdx.x];
}

struct Fragment { float x[4]; };
//! out of bounds <<<1, 32>>>
__global__ void member_past_the_end(const float* x, float* out, unsigned* count) {
  Fragment a = {}, b = {};
  const int last = 3 + int(count[0]);
  //! buggy: const int last = 4 + int(count[0]);
  for (int k = 0; k <= last; k++) a.x[k] = b.x[3 - k % 4] = x[k];
  out[threadIdx.x] = a.x[threadIdx.x % 4] + b.x[threadIdx.x % 4];
}

// A reference to the element past the end, which nothing need access
__device__ void scale(float& x, float by) {
  if (by != 1.f) x *= by;
}
__device__ float sum_of(const float (&row)[4]) { return row[0] + row[1] + row[2] + row[3]; }

//! out of bounds <<<1, 32>>>
__global__ void reference_past_the_end(const float* x, float* out, unsigned* count) {
  float O_reg[4];
  for (int k = 0; k < 4; k++) O_reg[k] = x[k];
  for (int k = 0; k < 4 + int(count[0]); k++) scale(O_reg[k], x[0]);
  //! buggy: for (int k = 0; k < 5 + int(count[0]); k++) scale(O_reg[k], x[0]);
  out[threadIdx.x] = O_reg[threadIdx.x % 4];
}

//! out of bounds <<<1, 32>>>
__global__ void reference_before_the_start(const float* x, float* out, unsigned* count) {
  float O_reg[4];
  for (int k = 0; k < 4; k++) O_reg[k] = x[k];
  for (int k = 3 + int(count[0]); k >= 0; k--) scale(O_reg[k], x[0]);
  //! buggy: for (int k = 3 + int(count[0]); k >= -1; k--) scale(O_reg[k], x[0]);
  out[threadIdx.x] = O_reg[threadIdx.x % 4];
}

//! out of bounds <<<1, 32>>>
__global__ void row_past_the_end(const float* x, float* out, unsigned* count) {
  float S_reg[2][4] = {{x[0], x[1], x[2], x[3]}, {x[4], x[5], x[6], x[7]}};
  float sum = 0.f;
  for (int r = 0; r < 2 + int(count[0]); r++) sum += sum_of(S_reg[r]);
  //! buggy: for (int r = 0; r < 3 + int(count[0]); r++) sum += sum_of(S_reg[r]);
  out[threadIdx.x] = sum;
}

//! out of bounds <<<1, 32>>>
__global__ void halves_past_the_end(const float* x, float* out, unsigned* count) {
  __half dO[4], O[4];
  for (int k = 0; k < 4; k++) dO[k] = O[k] = __float2half(x[k]);
  float sum = 0.f;
  for (int k = 0; k < 4 + int(count[0]); k++) sum += float(dO[k]) * float(O[k]);
  //! buggy: for (int k = 0; k < 5 + int(count[0]); k++) sum += float(dO[k]) * float(O[k]);
  out[threadIdx.x] = sum;
}

//! out of bounds <<<1, 32>>>
__global__ void named_reference_past_the_end(const float* x, float* out, unsigned* count) {
  float m[2] = {x[0], x[1]};
  const int last = 1 + int(count[0]);
  //! buggy: const int last = 2 + int(count[0]);
  float& m_last = m[last];
  scale(m_last, x[0]);
  out[threadIdx.x] = m[0] + m[1];
}

// The end of an array may be pointed to, and a table's rows are arrays, too.
__device__ const float TABLE_2D[2][2] = {{1.f, 2.f}, {3.f, 4.f}};
//! out of bounds <<<1, 32>>>
__global__ void pointer_to_the_end(const float* x, float* out, unsigned* count) {
  float row[4] = {x[0], x[1], x[2], x[3]}, sum = 0.f;
  const int n = 4 + int(count[0]);
  for (const float *p = row, *end = &row[n]; p != end; p++) sum += *p * TABLE_2D[p - row & 1][1];
  //! buggy: for (const float *p = row, *end = &row[n]; p != end; p++) sum += *p * TABLE_2D[p - row & 2][1];
  out[threadIdx.x] = sum;
}
