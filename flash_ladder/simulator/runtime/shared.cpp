// Shared memory: one arena a block, of the size that an H100 allows. It starts as NaN, so that a read of
// what nobody wrote shows. In checked builds there are gaps between the arrays, so that an index past the end
// of one does not lead into the next.
#include "checker.h"

#include <algorithm>
#include <cstring>

namespace sim {

// Multiples of 128, all banks once: so an array starts at the same bank with a gap before it.
constexpr size_t GAP_BYTES = 4 * KB, SMALLEST_GAP_BYTES = 128;

void clear_shared_memory(Worker& w) {
  w.arrays.clear();
  memset(w.shared, 0xff,
         std::max(w.shared_top, w.launch->dynamic_shared));  // all bits set: a NaN in every type
  w.shared_bytes = w.shared_top = (w.launch->dynamic_shared + 15) / 16 * 16;
}

static void declare(Worker& w, const SharedArray& array) {
  w.arrays.push_back(array);
  if (w.launch->checked && array.bytes) shared_array_declared(w, array);
}

extern "C" void* sim_shared_dynamic(const char* name, const char* declared_at, size_t element_bytes) {
  Worker& w = *worker;
  for (const SharedArray& a : w.arrays)
    if (!a.identity && a.declared_at == declared_at) return w.shared;
  declare(w, {nullptr, name, declared_at, 0, w.launch->dynamic_shared, element_bytes, {}});
  return w.shared;
}

extern "C" void* sim_shared_static(const void* identity, const char* name, const char* declared_at,
                                   size_t bytes, size_t alignment, const SharedShape* shape) {
  Worker& w = *worker;
  for (const SharedArray& a : w.arrays)
    if (a.identity == identity) return w.shared + a.offset;
  alignment = std::max<size_t>(alignment, 16);
  auto aligned = [&](size_t top) { return (top + alignment - 1) / alignment * alignment; };
  const size_t total = aligned(w.shared_bytes) + bytes;
  if (total - (w.launch->dynamic_shared + 15) / 16 * 16 > SHARED_MEMORY_DEFAULT)
    fail(std::string("__shared__ ") + name + ": arrays of a fixed size may take " +
         std::to_string(SHARED_MEMORY_DEFAULT) +
         " bytes a block in all; larger ones must be dynamic (extern __shared__)");
  if (total > SHARED_MEMORY_PER_BLOCK)
    fail(std::string("__shared__ ") + name + ": the block needs " + std::to_string(total) +
         " bytes of shared memory, and has " + std::to_string(SHARED_MEMORY_PER_BLOCK));
  if (total > SHARED_MEMORY_DEFAULT && !w.opted_in)
    fail(std::string("__shared__ ") + name + ": with the dynamic ones the block needs " +
         std::to_string(total) + " bytes of shared memory; above " + std::to_string(SHARED_MEMORY_DEFAULT) +
         " the dynamic ones must first be allowed with cudaFuncSetAttribute(kernel, "
         "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)");
  const bool room = w.shared_top + GAP_BYTES + bytes < ARENA_BYTES / 2;
  const size_t gap = !w.launch->checked ? 0 : room ? GAP_BYTES : SMALLEST_GAP_BYTES;
  const size_t offset = aligned(w.shared_top + gap);
  if (offset + bytes > ARENA_BYTES) fail(std::string("__shared__ ") + name + ": too many arrays to check");
  declare(w, {identity, name, declared_at, offset, bytes, shape->element_bytes,
              {shape->extents, shape->extents + shape->dimensions}});
  w.shared_bytes = total;
  w.shared_top = offset + bytes;
  return w.shared + offset;
}

// Shared memory has 32-bit addresses of its own, which some instructions take: offsets in the arena, and in a
// cluster the block's rank from bit 24 on, as nvcc makes them for sm_90a.
constexpr int RANK_BIT = 24;

static uint32_t own_addresses() {
  return worker->cluster ? uint32_t(worker->rank) << RANK_BIT : 0;
}

extern "C" uint32_t sim_shared_address(const void* p, const char* file, int line) {
  const size_t offset = static_cast<const char*>(p) - worker->shared;
  if (offset >= ARENA_BYTES)
    fail("__cvta_generic_to_shared: this is no address of shared memory", {file, line});
  return own_addresses() | uint32_t(offset);
}

extern "C" void* sim_shared_pointer(const char* name, uint32_t address, size_t bytes, const char* file,
                                    int line) {
  address -= own_addresses();
  if (address + bytes > (worker->launch->checked ? ARENA_BYTES : SHARED_MEMORY_PER_BLOCK))
    fail(std::string(name) + ": the address " + std::to_string(address) + " lies outside of shared memory",
         {file, line});
  return worker->shared + address;
}

// In checked builds: a pointer to a part of the dynamic array has this name from now on.
extern "C" void sim_name_shared(const char* name, const volatile void* start, size_t element_bytes) {
  if (!worker || !worker->current) return;   // the host's code
  Worker& w = *worker;
  const size_t offset = static_cast<const volatile char*>(start) - w.shared;
  if (offset >= w.launch->dynamic_shared) return;
  for (const SharedArray& a : w.arrays)
    if (!a.bytes && a.offset == offset && !strcmp(a.name, name)) return;
  declare(w, {nullptr, name, "", offset, 0, element_bytes, {}});
}

}  // namespace sim
