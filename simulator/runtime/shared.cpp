// Shared memory: one arena a block, of the size that an H100 allows. It starts as NaN, so that a read of
// what nobody wrote shows.
#include "runtime.h"

#include <algorithm>
#include <cstring>

namespace sim {

void clear_shared_memory(Worker& w) {
  w.arrays.clear();
  memset(w.shared, 0xff,
         std::max(w.shared_top, w.launch->dynamic_shared));  // all bits set: a NaN in every type
  w.shared_top = (w.launch->dynamic_shared + 15) / 16 * 16;
}

extern "C" void* sim_shared_dynamic(const char* name, const char* declared_at) {
  Worker& w = *worker;
  for (const SharedArray& a : w.arrays)
    if (!a.identity && a.declared_at == declared_at) return w.shared;
  w.arrays.push_back({nullptr, name, declared_at, 0});
  return w.shared;
}

extern "C" void* sim_shared_static(const void* identity, const char* name, const char* declared_at,
                                   size_t bytes, size_t alignment) {
  Worker& w = *worker;
  for (const SharedArray& a : w.arrays)
    if (a.identity == identity) return w.shared + a.offset;
  alignment = std::max<size_t>(alignment, 16);
  const size_t offset = (w.shared_top + alignment - 1) / alignment * alignment, end = offset + bytes;
  if (end - (w.launch->dynamic_shared + 15) / 16 * 16 > SHARED_MEMORY_DEFAULT)
    fail(std::string("__shared__ ") + name + ": arrays of a fixed size may take " +
         std::to_string(SHARED_MEMORY_DEFAULT) +
         " bytes a block in all; larger ones must be dynamic (extern __shared__)");
  if (end > SHARED_MEMORY_PER_BLOCK)
    fail(std::string("__shared__ ") + name + ": the block needs " + std::to_string(end) +
         " bytes of shared memory, and has " + std::to_string(SHARED_MEMORY_PER_BLOCK));
  if (end > SHARED_MEMORY_DEFAULT && !w.opted_in)
    fail(std::string("__shared__ ") + name + ": with the dynamic ones the block needs " +
         std::to_string(end) + " bytes of shared memory; above " + std::to_string(SHARED_MEMORY_DEFAULT) +
         " the dynamic ones must first be allowed with cudaFuncSetAttribute(kernel, "
         "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)");
  w.arrays.push_back({identity, name, declared_at, offset});
  w.shared_top = end;
  return w.shared + offset;
}

}  // namespace sim
