// Atomics on global or shared memory. Blocks run on different OS threads, so these are real atomics of the
// CPU.
#include "checker.h"

#include <algorithm>
#include <cstring>

namespace sim {

template <class T> static T combine(AtomicOp op, T old, T value, T compare) {
  switch (op) {
    case AtomicOp::ADD: return old + value;
    case AtomicOp::MIN: return std::min(old, value);
    case AtomicOp::MAX: return std::max(old, value);
    case AtomicOp::EXCHANGE: return value;
    case AtomicOp::COMPARE_EXCHANGE: return old == compare ? value : old;
  }
  __builtin_unreachable();
}

// Whether it has changed anything.
template <class T> static bool update(AtomicOp op, void* address, void* value, const void* compare) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;   // the CPU's atomics work on integers
  auto* p = static_cast<Bits*>(address);
  Bits seen = __atomic_load_n(p, __ATOMIC_RELAXED), desired;
  T operand, comparand, old;
  memcpy(&operand, value, sizeof(T));
  memcpy(&comparand, compare, sizeof(T));
  do {
    memcpy(&old, &seen, sizeof(T));
    const T updated = combine(op, old, operand, comparand);
    memcpy(&desired, &updated, sizeof(T));
  } while (!__atomic_compare_exchange_n(p, &seen, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
  memcpy(value, &old, sizeof(T));
  return desired != seen;
}

static bool update(AtomicOp op, ScalarType type, void* address, void* value, const void* compare) {
  switch (type) {
    case ScalarType::FLOAT: return update<float>(op, address, value, compare);
    case ScalarType::DOUBLE: return update<double>(op, address, value, compare);
    case ScalarType::INT32: return update<int32_t>(op, address, value, compare);
    case ScalarType::UINT32: return update<uint32_t>(op, address, value, compare);
    case ScalarType::INT64: return update<int64_t>(op, address, value, compare);
    case ScalarType::UINT64: return update<uint64_t>(op, address, value, compare);
  }
  __builtin_unreachable();
}

// value comes in as the operand and goes out as what the memory held before.
extern "C" void sim_atomic(AtomicOp op, ScalarType type, void* address, void* value, const void* compare) {
  static __thread unsigned count;
  worker->vain_tests = 0;
  if (++count % 16 == 0) sim_yield();   // so that a thread that spins on an atomic lets the others run
  if (worker->launch->checked) {
    const size_t bytes = type == ScalarType::DOUBLE || type >= ScalarType::INT64 ? 8 : 4;
    const Kind kind = op == AtomicOp::EXCHANGE ? Kind::EXCHANGE : Kind::ATOMIC;
    observe(address, bytes, kind, __builtin_return_address(0), Asks::BOTH, value);
    order_by_atomic(*worker->current, address);
  }
  if (update(op, type, address, value, compare)) worker->vain_yields = 0;
}

}  // namespace sim
