// The device's side of CUDA that is not arithmetic: who am I, shared memory, barriers, warps, atomics.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <typeinfo>

#include "vector_types.h"

// Real variables, restored whenever another thread goes on: gdb can print them and use them in conditions.
#ifdef __APPLE__
#define SIM_THREAD_LOCAL __thread
#else
#define SIM_THREAD_LOCAL __attribute__((tls_model("initial-exec"))) __thread
#endif
extern SIM_THREAD_LOCAL uint3 threadIdx, blockIdx;
extern SIM_THREAD_LOCAL dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// Default arguments that tell where in the source a call stands.
#define SIM_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// Of what calls the run-time library: so the checker sees the kernel's line as the caller.
#define SIM_ALWAYS_INLINE inline __attribute__((always_inline))

namespace sim {
enum class AtomicOp { ADD, MIN, MAX, EXCHANGE, COMPARE_EXCHANGE };
enum class ScalarType { FLOAT, DOUBLE, INT32, UINT32, INT64, UINT64 };
enum class Scope { BLOCK, DEVICE };   // of a fence

struct SharedShape {
  size_t element_bytes;
  int dimensions;
  size_t extents[4];
};

extern "C" {
void* sim_shared_dynamic(const char* name, const char* declared_at, size_t element_bytes);
void* sim_shared_static(const void* identity, const char* name, const char* declared_at, size_t bytes,
                        size_t alignment, const SharedShape* shape);
uint32_t sim_shared_address(const void* p, const char* file, int line);
void sim_name_shared(const char* name, const volatile void* start, size_t element_bytes);
void sim_threadfence(Scope scope);
void sim_start_next_kernel();
void sim_wait_for_previous_kernel();
void sim_syncthreads(const char* file, int line);
int sim_syncthreads_count(int predicate, const char* name, const char* file, int line);
int sim_lane();
void sim_syncwarp(unsigned mask, const char* file, int line);
uint64_t sim_shuffle(const char* name, unsigned mask, uint64_t value, int source, const char* file, int line);
unsigned sim_vote(const char* name, unsigned mask, int predicate, const char* file, int line);
void sim_atomic(AtomicOp op, ScalarType type, void* address, void* value, const void* compare);
void sim_yield();
void sim_check_interrupt();
void sim_poison_rounded();
void sim_unwritten(const char* name, const char* file, int line);
void sim_index_outside(int64_t index, const char* array, const char* type, const char* file, int line);
void sim_index_outside_of_part(int64_t index, const char* part, const char* next, const char* file, int line);
void sim_assert_failed(const char* condition, const char* file, int line);
[[noreturn]] void sim_fail(const char* message, const char* file, int line);
}
}  // namespace sim

// -------------------------------------------------------------------------------- shared memory
namespace sim {
// __shared__ T a[m][n]; becomes a reference into the block's shared memory. Every declaration has a type T of
// its own, and in a template every instance: so `identity` tells the arrays apart.
template <class T> inline T& shared_static(const char* name, const char* declared_at) {
  static const char identity = 0;
  using A = decltype(T::array);
  static_assert(std::rank<A>::value <= 4, "__shared__ arrays have at most 4 dimensions in the simulator");
  static const SharedShape shape{
      sizeof(std::remove_all_extents_t<A>),
      std::rank<A>::value,
      {std::extent<A, 0>::value, std::extent<A, 1>::value, std::extent<A, 2>::value,
       std::extent<A, 3>::value}};
  return *static_cast<T*>(sim_shared_static(&identity, name, declared_at, sizeof(A), alignof(T), &shape));
}
// extern __shared__ T a[]; becomes a pointer to its dynamic part.
template <class T> inline T* shared_dynamic(const char* name, const char* declared_at) {
  return static_cast<T*>(sim_shared_dynamic(name, declared_at, sizeof(T)));
}
}  // namespace sim
inline size_t __cvta_generic_to_shared(const void* p, SIM_SITE) {
  return sim::sim_shared_address(p, file, line);
}
// The translator puts this after the declaration of a pointer X_smem: the checker then calls what it points
// to by that name.
#ifdef SIM_CHECKED
namespace sim {
template <class T> constexpr auto bytes_of(T*) -> decltype(sizeof(T)) { return sizeof(T); }
constexpr size_t bytes_of(...) { return 1; }   // void, or a type that is not defined yet
template <class T> constexpr void name_shared(const char* name, T* start) {
  if (!__builtin_is_constant_evaluated()) sim_name_shared(name, start, bytes_of(start));
}
}  // namespace sim
#define SIM_NAME_SHARED(pointer) sim::name_shared(#pointer, pointer);
#else
#define SIM_NAME_SHARED(pointer)
#endif

// -------------------------------------------------------------------------------- local variables
// What the translator adds (local_variables.py); it is there in checked builds alone.
//
// SIM_POISON follows the declaration of a variable without a value. A float is then a NaN that arithmetic
// hands on, and by which the checker knows it: quiet, with a payload of its own. An integer has the same
// bits. The checker knows it where it is stored as it is; as an index it leads out of all arrays.
//
// SIM_UNWRITTEN stands there for an integer all of whose uses are understood: SIM_WRITE and SIM_READ. After
// a finding it is 0, so the thread goes on.
//
// SIM_INDEX is the index of an element: g++ itself takes that of the element past the end where a reference
// to it is made. SIM_INDEX_OF_PART is that of an element of dynamic shared memory: of the part that begins at
// one pointer, and ends where the next one begins.
namespace sim {
constexpr uint32_t POISON = 0x7fedbeef;
}
#ifdef SIM_CHECKED
namespace sim {
template <class T> SIM_ALWAYS_INLINE void poison(T& x) {
  using E = std::remove_all_extents_t<T>;
  constexpr bool floats = std::is_same<E, float>::value || std::is_same<E, float2>::value ||
                          std::is_same<E, float3>::value || std::is_same<E, float4>::value;
  constexpr bool integers = std::is_integral<E>::value && sizeof(E) % sizeof(uint32_t) == 0;
  if constexpr (floats || integers)
    for (size_t i = 0; i < sizeof x / sizeof(uint32_t); i++)
      reinterpret_cast<uint32_t*>(&x)[i] = POISON;
}

template <class Array, class Index>
SIM_ALWAYS_INLINE constexpr Index&& index(Index&& i, const char* array, SIM_SITE) {
  using A = std::remove_reference_t<Array>;
  if constexpr (std::extent<A>::value > 0 && std::is_integral<std::remove_reference_t<Index>>::value)
    if (size_t(i) >= std::extent<A>::value) sim_index_outside(i, array, typeid(A).name(), file, line);
  return static_cast<Index&&>(i);
}

template <class T, class Next, class Index>
SIM_ALWAYS_INLINE Index&& index_of_part(T* part, Next* next, Index&& i, const char* name,
                                        const char* next_name, SIM_SITE) {
  const auto inside = (reinterpret_cast<const volatile char*>(next) -
                       reinterpret_cast<const volatile char*>(part)) / int64_t(sizeof(T));
  if (inside > 0 && (int64_t(i) < 0 || int64_t(i) >= inside))
    sim_index_outside_of_part(i, name, next_name, file, line);
  return static_cast<Index&&>(i);
}
}  // namespace sim
#define SIM_POISON(variable) ::sim::poison(variable);
#define SIM_UNWRITTEN(variable)                  \
  bool variable##_is_written;                    \
  variable##_is_written = false;                 \
  ::sim::poison(variable);
#define SIM_WRITE(variable) (variable##_is_written = true, variable)
#define SIM_READ(variable)                                                                             \
  (void(variable##_is_written ||                                                                       \
        (::sim::sim_unwritten(#variable, __FILE__, __LINE__), SIM_WRITE(variable) = 0, true)), variable)
#define SIM_INDEX(array, ...) ::sim::index<decltype((array))>((__VA_ARGS__), #array)
#define SIM_INDEX_OF_PART(part, next, ...) ::sim::index_of_part(part, next, (__VA_ARGS__), #part, #next)
#endif

// -------------------------------------------------------------------------------- barriers, fences
inline void __syncthreads(SIM_SITE) { sim::sim_syncthreads(file, line); }
inline int __syncthreads_count(int p, SIM_SITE) {
  return sim::sim_syncthreads_count(p, "__syncthreads_count()", file, line);
}
inline int __syncthreads_or(int p, SIM_SITE) {
  return sim::sim_syncthreads_count(p, "__syncthreads_or()", file, line) != 0;
}
inline int __syncthreads_and(int p, SIM_SITE) {
  return sim::sim_syncthreads_count(!p, "__syncthreads_and()", file, line) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, SIM_SITE) { sim::sim_syncwarp(mask, file, line); }
inline void __threadfence() { sim::sim_threadfence(sim::Scope::DEVICE); }
inline void __threadfence_block() { sim::sim_threadfence(sim::Scope::BLOCK); }
inline void __nanosleep(unsigned) { sim::sim_yield(); }
inline void __trap(SIM_SITE) { sim::sim_fail("__trap()", file, line); }

// -------------------------------------------------------------------------------- shuffles, votes
namespace sim {
template <class T>
inline T shuffle(const char* name, unsigned mask, T value, int source, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "shuffles move values of up to 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = sim_shuffle(name, mask, bits, source, file, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace sim

// Lanes are shuffled within segments of `width`. A source outside of the segment: the lane's own value. Lane
// masks and distances have five bits, as in hardware.
template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIM_SITE) {
  const int lane = sim::sim_lane(), first = lane & -width;
  return sim::shuffle("__shfl_sync()", mask, value, first + (source & (width - 1)), file, line);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIM_SITE) {
  const int lane = sim::sim_lane(), first = lane & -width, source = lane ^ (lane_mask & 31);
  return sim::shuffle("__shfl_xor_sync()", mask, value, source < first + width ? source : lane, file, line);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIM_SITE) {
  const int lane = sim::sim_lane(), first = lane & -width, source = lane + int(delta & 31);
  return sim::shuffle("__shfl_down_sync()", mask, value, source < first + width ? source : lane, file, line);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIM_SITE) {
  const int lane = sim::sim_lane(), first = lane & -width, source = lane - int(delta & 31);
  return sim::shuffle("__shfl_up_sync()", mask, value, source >= first ? source : lane, file, line);
}
inline unsigned __ballot_sync(unsigned mask, int p, SIM_SITE) {
  return sim::sim_vote("__ballot_sync()", mask, p, file, line);
}
inline int __any_sync(unsigned mask, int p, SIM_SITE) {
  return sim::sim_vote("__any_sync()", mask, p, file, line) != 0;
}
inline int __all_sync(unsigned mask, int p, SIM_SITE) {
  return sim::sim_vote("__all_sync()", mask, !p, file, line) == 0;
}

// -------------------------------------------------------------------------------- atomics
namespace sim {
template <class T> constexpr ScalarType scalar_type() {
  if (std::is_same<T, float>::value) return ScalarType::FLOAT;
  if (std::is_same<T, double>::value) return ScalarType::DOUBLE;
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8),
                "atomics work on 4 and 8 bytes");
  if (sizeof(T) == 4) return std::is_signed<T>::value ? ScalarType::INT32 : ScalarType::UINT32;
  return std::is_signed<T>::value ? ScalarType::INT64 : ScalarType::UINT64;
}
template <class T> struct same { using type = T; };   // the address alone decides what T is
template <class T> SIM_ALWAYS_INLINE T atomic(AtomicOp op, T* address, T value, T compare = T()) {
  sim_atomic(op, scalar_type<T>(), address, &value, &compare);
  return value;
}
}  // namespace sim

template <class T>
SIM_ALWAYS_INLINE T atomicAdd(T* p, typename sim::same<T>::type v) {
  return sim::atomic(sim::AtomicOp::ADD, p, v);
}
template <class T> SIM_ALWAYS_INLINE T atomicMin(T* p, typename sim::same<T>::type v) {
  static_assert(std::is_integral<T>::value, "CUDA's atomicMin takes integers");
  return sim::atomic(sim::AtomicOp::MIN, p, v);
}
template <class T> SIM_ALWAYS_INLINE T atomicMax(T* p, typename sim::same<T>::type v) {
  static_assert(std::is_integral<T>::value, "CUDA's atomicMax takes integers");
  return sim::atomic(sim::AtomicOp::MAX, p, v);
}
template <class T>
SIM_ALWAYS_INLINE T atomicExch(T* p, typename sim::same<T>::type v) {
  return sim::atomic(sim::AtomicOp::EXCHANGE, p, v);
}
template <class T>
SIM_ALWAYS_INLINE T atomicCAS(T* p, typename sim::same<T>::type compare, typename sim::same<T>::type v) {
  return sim::atomic(sim::AtomicOp::COMPARE_EXCHANGE, p, v, compare);
}
