// Reads of what nothing has written: in shared, global and local memory.
#include <cuda_fp16.h>
#include <cuda_runtime.h>

//! uninitialised <<<1, 64>>>
__global__ void rows_not_filled(const float* x, float* out, unsigned* count) {
  __shared__ float tile[8][8];
  const int row = threadIdx.x / 8, k = threadIdx.x % 8;
  tile[row][k] = row < 5 ? x[threadIdx.x] : 0.f;
  //! buggy: if (row < 5) tile[row][k] = x[threadIdx.x];
  __syncthreads();
  float sum = 0.f;
  for (int r = 0; r < 8; r++) sum += tile[r][k];
  out[threadIdx.x] = sum;
}

//! uninitialised <<<1, 32>>>
__global__ void sums_not_set_to_zero(const float* x, float* out, unsigned* count) {
  __shared__ float sums[32];
  sums[threadIdx.x] = 0.f;
  //! buggy:
  for (int k = 0; k < 4; k++) sums[threadIdx.x] += x[k];
  out[threadIdx.x] = sums[threadIdx.x];
}

//! uninitialised <<<1, 64>>>
__global__ void atomic_not_set_to_zero(const float* x, float* out, unsigned* count) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  //! buggy:
  __syncthreads();
  atomicAdd(&sum, x[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = sum;
}

//! uninitialised <<<1, 64, 512>>>
__global__ void half_of_dynamic_memory(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  smem[threadIdx.x] = smem[threadIdx.x + 64] = x[threadIdx.x];
  //! buggy: smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = smem[127 - threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void one_element_of_a_tile(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  if (threadIdx.x < 32) tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: if (threadIdx.x < 31) tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  float sum = 0.f;
  for (int k = 0; k < 32; k++) sum += tile[k];
  out[threadIdx.x] = sum;
}

// A flag that is only ever set.
//! uninitialised <<<1, 64>>>
__global__ void flag_never_cleared(const float* x, float* out, unsigned* count) {
  __shared__ unsigned found;
  if (threadIdx.x == 0) found = 0;
  //! buggy:
  __syncthreads();
  if (x[threadIdx.x] > 1000.f) atomicExch(&found, 1u);
  __syncthreads();
  out[threadIdx.x] = found;
}

// The block that ran on this SM before has left its numbers.
//! uninitialised <<<300, 32>>>
__global__ void left_by_another_block(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  tile[threadIdx.x] = x[threadIdx.x];
  //! buggy: if (blockIdx.x == 0) tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = tile[31];
}

//! uninitialised <<<300, 32, 128>>>
__global__ void left_in_dynamic_memory(const float* x, float* out, unsigned* count) {
  extern __shared__ float smem[];
  smem[threadIdx.x] = x[threadIdx.x];
  //! buggy: if (blockIdx.x < 299) smem[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = smem[31];
}

// The cache of one block is of no use to the next.
//! uninitialised <<<2, 32>>>
__global__ void sum_over_blocks_in_shared(const float* x, float* out, unsigned* count) {
  __shared__ float sum[32];
  sum[threadIdx.x] = 0.f;
  //! buggy: if (blockIdx.x == 0) sum[threadIdx.x] = 0.f;
  sum[threadIdx.x] += x[threadIdx.x];
  out[blockIdx.x * 32 + threadIdx.x] = sum[threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void output_read_back(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = x[threadIdx.x];
  //! buggy: if (threadIdx.x < 31) out[threadIdx.x] = x[threadIdx.x];
  out[100 + threadIdx.x] = out[threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void output_added_to(const float* x, float* out, unsigned* count) {
  out[threadIdx.x] = x[threadIdx.x];
  //! buggy: out[threadIdx.x] += x[threadIdx.x];
}

//! uninitialised <<<4, 32>>>
__global__ void output_added_to_by_atomics(const float* x, float* out, unsigned* count) {
  atomicAdd(&count[blockIdx.x], unsigned(x[threadIdx.x]));
  //! buggy: atomicAdd(&out[threadIdx.x], x[threadIdx.x]);
}

//! uninitialised <<<1, 32>>>
__global__ void vector_of_the_output(const float* x, float* out, unsigned* count) {
  for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = x[k];
  //! buggy: if (threadIdx.x % 2) for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = x[k];
  const float4 four = reinterpret_cast<const float4*>(out)[threadIdx.x];
  out[200 + threadIdx.x] = four.x + four.w;
}

//! uninitialised <<<1, 32>>>
__global__ void half_of_a_vector(const float* x, float* out, unsigned* count) {
  for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = x[k];
  //! buggy: for (int k = 0; k < 2; k++) out[4 * threadIdx.x + k] = x[k];
  const float4 four = reinterpret_cast<const float4*>(out)[threadIdx.x];
  out[200 + threadIdx.x] = four.x + four.w;
}

//! uninitialised <<<1, 32>>>
__global__ void workspace_of_another_row(const float* x, float* out, unsigned* count) {
  float* workspace = out + 500;
  workspace[threadIdx.x] = x[threadIdx.x];
  out[threadIdx.x] = workspace[threadIdx.x];
  //! buggy: out[threadIdx.x] = workspace[threadIdx.x + 32];
}

//! uninitialised <<<1, 32>>>
__global__ void local_variable(const float* x, float* out, unsigned* count) {
  float sum = 0.f;
  //! buggy: float sum;
  for (int k = 0; k < 8; k++) sum += x[k + threadIdx.x];
  out[threadIdx.x] = sum;
}

//! uninitialised <<<1, 32>>>
__global__ void local_variable_in_a_branch(const float* x, float* out, unsigned* count) {
  float scale = 1.f;
  //! buggy: float scale;
  if (x[threadIdx.x] > 2.f) scale = 0.5f;
  out[threadIdx.x] = scale * x[threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void local_array(const float* x, float* out, unsigned* count) {
  float O_reg[4] = {0.f, 0.f, 0.f, 0.f};
  //! buggy: float O_reg[4];
  for (int k = 0; k < 16 + int(count[0]); k++) O_reg[k % 4] += x[k];
  out[threadIdx.x] = O_reg[threadIdx.x % 4];
}

//! uninitialised <<<1, 32>>>
__global__ void end_of_a_local_array(const float* x, float* out, unsigned* count) {
  float row[8];
  for (int k = 0; k < 8 + int(count[0]); k++) row[k] = x[k];
  //! buggy: for (int k = 0; k < 7 + int(count[0]); k++) row[k] = x[k];
  out[threadIdx.x] = row[threadIdx.x % 8];
}

// A whole struct is read, of which four bytes are padding: only the numbers must have been written.
struct Best { float value; long long index; };
//! uninitialised <<<1, 32>>>
__global__ void struct_with_padding(const float* x, float* out, unsigned* count) {
  __shared__ Best best[32];
  best[threadIdx.x].value = x[threadIdx.x];
  best[threadIdx.x].index = threadIdx.x;
  //! buggy:
  __syncthreads();
  const Best other = best[31 - threadIdx.x];
  out[threadIdx.x] = other.value + other.index;
}

//! uninitialised <<<1, 32>>>
__global__ void one_number_of_a_vector(const float* x, float* out, unsigned* count) {
  for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = x[k];
  //! buggy: for (int k = 0; k < 3; k++) out[4 * threadIdx.x + k] = x[k];
  const float4 four = reinterpret_cast<const float4*>(out)[threadIdx.x];
  out[200 + threadIdx.x] = four.x + four.w;
}

//! uninitialised <<<1, 32>>>
__global__ void local_variable_in_shared_memory(const float* x, float* out, unsigned* count) {
  __shared__ float tile[32];
  float value;
  if (threadIdx.x < 32) value = x[threadIdx.x];
  //! buggy: if (threadIdx.x < 31) value = x[threadIdx.x];
  tile[threadIdx.x] = -2.f * value;
  __syncthreads();
  out[threadIdx.x] = fmaxf(tile[31 - threadIdx.x], 0.f);
}

//! uninitialised <<<1, 32>>>
__global__ void local_variable_in_16_bits(const float* x, float* out, unsigned* count) {
  __shared__ __half tile[32];
  float sum[2];
  sum[0] = sum[1] = x[threadIdx.x];
  //! buggy: sum[0] = x[threadIdx.x];
  tile[threadIdx.x] = __float2half(sum[0] + sum[1]);
  __syncthreads();
  out[threadIdx.x] = __half2float(tile[31 - threadIdx.x]);
}

//! uninitialised <<<1, 32>>>
__global__ void local_variable_in_an_atomic(const float* x, float* out, unsigned* count) {
  __shared__ float total;
  float mine;
  mine = x[threadIdx.x];
  //! buggy: if (threadIdx.x) mine = x[threadIdx.x];
  if (threadIdx.x == 0) total = 0.f;
  __syncthreads();
  atomicAdd(&total, mine);
  __syncthreads();
  out[threadIdx.x] = total;
}

//! uninitialised <<<1, 32>>>
__global__ void local_vector(const float* x, float* out, unsigned* count) {
  float4 four;
  four.x = four.y = four.z = four.w = x[threadIdx.x];
  //! buggy: four.x = four.y = four.z = x[threadIdx.x];
  reinterpret_cast<float4*>(out)[threadIdx.x] = four;
}

//! uninitialised <<<1, 32>>>
__global__ void local_integer(const float* x, float* out, unsigned* count) {
  unsigned last;
  for (unsigned k = 0; k < 8; k++)
    if (x[k] > 6.f) last = k;
    //! buggy: if (x[k] > 7.f) last = k;
  if (threadIdx.x == 0) count[1] = last;
}

//! uninitialised <<<1, 32>>>
__global__ void local_integer_as_an_index(const float* x, float* out, unsigned* count) {
  int row;
  if (threadIdx.x < 32) row = threadIdx.x;
  //! buggy: if (threadIdx.x < 31) row = threadIdx.x;
  out[row] = x[threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void array_of_local_integers(const float* x, float* out, unsigned* count) {
  __shared__ long long order[32];
  long long keys[4];
  for (int k = 0; k < 4 + int(count[0]); k++) keys[k] = k;
  //! buggy: for (int k = 1; k < 4 + int(count[0]); k++) keys[k] = k;
  order[threadIdx.x] = keys[threadIdx.x % 4];
  __syncthreads();
  out[threadIdx.x] = order[31 - threadIdx.x];
}

//! uninitialised <<<1, 32>>>
__global__ void counter_not_set_to_zero(const float* x, float* out, unsigned* count) {
  int larger = 0, seen = 0;
  //! buggy: int larger, seen = 0;
  for (int k = 0; k < 32; k++) {
    if (x[k] > x[threadIdx.x]) larger++;
    seen += 1;
  }
  out[threadIdx.x] = float(larger) / seen;
}

//! uninitialised <<<1, 32>>>
__global__ void sum_of_integers(const float* x, float* out, unsigned* count) {
  long long sum;
  sum = 0;
  //! buggy:
  for (int k = 0; k < 8; k++) sum += int(x[k + threadIdx.x]);
  out[threadIdx.x] = sum % 7;
}

//! uninitialised <<<1, 32>>>
__global__ void integer_of_one_branch(const float* x, float* out, unsigned* count) {
  unsigned shift;
  if (x[threadIdx.x] > 2.f) shift = 1;
  else shift = 2;
  //! buggy:
  out[threadIdx.x] = 32u >> shift;
}

//! uninitialised <<<1, 32>>>
__global__ void bound_of_a_loop(const float* x, float* out, unsigned* count) {
  int keys, rows;
  keys = 4 + int(count[0]), rows = 2;
  //! buggy: rows = 2;
  float sum = 0.f;
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < keys; k++) sum += x[8 * r + k];
  out[threadIdx.x] = sum;
}

//! uninitialised <<<1, 32>>>
__global__ void flag_of_a_thread(const float* x, float* out, unsigned* count) {
  bool found;
  found = false;
  //! buggy:
  for (int k = 0; k < 32 && !found; k++) found = x[k] > x[threadIdx.x];
  out[threadIdx.x] = found ? 1.f : 0.f;
}

//! uninitialised <<<1, 32>>>
__global__ void index_that_is_computed_with(const float* x, float* out, unsigned* count) {
  int first;
  if (threadIdx.x % 8 == 0) first = threadIdx.x;
  const int last = __shfl_sync(0xffffffff, first, 0, 8) + 7;
  //! buggy: const int last = first + 7;
  out[threadIdx.x] = x[last];
}

// All that may be done to an integer without a value before it has one
__device__ void count_keys(const float* x, int& keys) { keys = int(x[0]); }
__device__ void count_rows(const float* x, int* rows) { *rows = int(x[1]); }
//! uninitialised <<<1, 32>>>
__global__ void integers_by_reference(const float* x, float* out, unsigned* count) {
  int keys, rows, warps, lanes, last, sum;
  count_keys(x, keys);
  count_rows(x, &rows);
  int& same = warps;
  same = keys + rows;
  auto set = [&](int n) { lanes = n; };
  set(sizeof(sum) * warps);
  for (last = 0, sum = 0; last < 4; last++, sum += last) continue;
  //! buggy: for (last = 0; last < 4; last++, sum += last) continue;
  switch (keys) {
    case 1:
      int late;
      late = sum;
      sum = late + 1;
      break;
    default:
      late = 2;
      sum = late;
  }
  out[threadIdx.x] = keys + rows + warps + lanes + last + sum;
}
