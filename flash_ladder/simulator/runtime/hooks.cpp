// What a checked build calls before each load and store. It is compiled with -fsanitize=thread, which inserts
// these calls for ThreadSanitizer's own library; here they lead to the checker instead, so the source of a
// kernel needs no change. The address to which a call returns tells the line. -fsanitize=bounds adds a call
// where an index may lie outside of a local array.
#include <cxxabi.h>
#include <dlfcn.h>

#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "checker.h"

using sim::Asks;
using sim::Kind;
using sim::observe;

#define PC __builtin_return_address(0)

namespace sim {
// A file as the compiler saw it, to which columns belong: in the folder "translated" beside the library,
// under the end of its path (simulator.translated_files). It is at the first line.
static std::ifstream translated(const std::string& file, const void* pc) {
  Dl_info library = {};
  if (dladdr(pc, &library) && library.dli_fname) {
    const std::string path = library.dli_fname;
    const std::string folder = path.substr(0, path.rfind('/') + 1) + "translated/";
    std::string place = "elsewhere" + file;
    if (const size_t dot = place.rfind('.'); place.substr(dot + 1) == "cu") place.replace(dot, 3, ".cpp");
    for (size_t slash = 0; slash != std::string::npos; slash = place.find('/')) {
      if (slash) place.erase(0, slash + 1);
      std::ifstream there(folder + place);
      if (std::string line_directive; std::getline(there, line_directive)) return there;
    }
  }
  return std::ifstream(file);
}

// The name before the brackets of which the last one closes at a column, counted from 1; "" if there is none.
static std::string subscripted(std::ifstream source, unsigned line, unsigned column) {
  std::string text;
  for (unsigned i = 0; i < line; i++)
    if (!std::getline(source, text)) return "";
  size_t end = column;
  while (end && end <= text.size() && text[end - 1] == ']') {
    for (int depth = 0; end--;) {
      depth += (text[end] == ']') - (text[end] == '[');
      if (!depth) break;
    }
    if (end == std::string::npos) return "";
  }
  if (end == column || end > text.size()) return "";
  size_t start = end;
  while (start && (isalnum(uint8_t(text[start - 1])) || text[start - 1] == '_')) start--;
  return text.substr(start, end - start);
}
}  // namespace sim

extern "C" {

#define HOOKS_FOR(prefix, n, asks)                                                        \
  void __tsan_##prefix##read##n(void* p) { observe(p, n, Kind::READ, PC, Asks::asks); }   \
  void __tsan_##prefix##write##n(void* p) { observe(p, n, Kind::WRITE, PC, Asks::asks); }
#define HOOKS(n)                                \
  HOOKS_FOR(, n, BOTH)                          \
  HOOKS_FOR(unaligned_, n, ALL_WRITTEN)         \
  HOOKS_FOR(volatile_, n, BOTH)                 \
  HOOKS_FOR(unaligned_volatile_, n, ALL_WRITTEN)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

// A struct is copied in the largest pieces that its address and size allow. (nvcc goes by the type's
// alignment, which is not known here.)
static void observe_range(void* p, size_t bytes, Kind kind, const void* pc) {
  const uintptr_t alignment = reinterpret_cast<uintptr_t>(p) | bytes;
  const size_t piece = alignment % 16 == 0 ? 16 : alignment % 8 == 0 ? 8 : alignment % 4 == 0 ? 4
                       : alignment % 2 == 0 ? 2 : 1;
  for (size_t i = 0; i < bytes; i += piece)
    observe(static_cast<char*>(p) + i, piece, kind, pc, Asks::ALIGNMENT);
}
void __tsan_read_range(void* p, size_t bytes) { observe_range(p, bytes, Kind::READ, PC); }
void __tsan_write_range(void* p, size_t bytes) { observe_range(p, bytes, Kind::WRITE, PC); }

// Calls of these come here: the linker puts __wrap_ before their names (simulator.link_flags). It cannot for
// __builtin_memcpy and its like, which go unseen.
static void observe_bytes(void* p, size_t bytes, Kind kind, const void* pc) {
  if (sim::is_watched(p)) observe_range(p, bytes, kind, pc);
}
void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  observe_bytes(const_cast<void*>(from), bytes, Kind::READ, PC);
  observe_bytes(to, bytes, Kind::WRITE, PC);
  return memcpy(to, from, bytes);
}
void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  observe_bytes(const_cast<void*>(from), bytes, Kind::READ, PC);
  observe_bytes(to, bytes, Kind::WRITE, PC);
  return memmove(to, from, bytes);
}
void* __wrap_memset(void* to, int value, size_t bytes) {
  observe_bytes(to, bytes, Kind::WRITE, PC);
  return memset(to, value, bytes);
}

// Atomics of C++, in the host's code: of a std::atomic, or for a static variable that is initialised once
#define SEQ __ATOMIC_SEQ_CST
#define ATOMICS(bits, T)                                                                            \
  T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, SEQ); }          \
  void __tsan_atomic##bits##_store(volatile T* p, T x, int) { __atomic_store_n(p, x, SEQ); }          \
  T __tsan_atomic##bits##_exchange(volatile T* p, T x, int) { return __atomic_exchange_n(p, x, SEQ); } \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T x, int) { return __atomic_fetch_add(p, x, SEQ); } \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T x, int) { return __atomic_fetch_sub(p, x, SEQ); } \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T x, int) { return __atomic_fetch_and(p, x, SEQ); } \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T x, int) { return __atomic_fetch_or(p, x, SEQ); }   \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T x, int) { return __atomic_fetch_xor(p, x, SEQ); } \
  T __tsan_atomic##bits##_fetch_nand(volatile T* p, T x, int) { return __atomic_fetch_nand(p, x, SEQ); } \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T x, int, int) {    \
    return __atomic_compare_exchange_n(p, expected, x, false, SEQ, SEQ);                                \
  }                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T x, int, int) {      \
    return __atomic_compare_exchange_n(p, expected, x, true, SEQ, SEQ);                                 \
  }
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

// -fsanitize=bounds: an index lies outside of an array whose length the compiler knows. Of arrays in shared
// memory the checker knows more, once they are accessed.
struct ArrayOfSanitizer {
  const char* file;
  uint32_t line, column;                           // of the bracket that closes
  const struct { uint16_t kind, info; char name[1]; } *type, *index_type;   // 'float [4]', in quotes
};
static bool is_in_checked_kernel() {
  const sim::Worker* w = sim::worker;
  return sim::checker && w && w->current && w->launch->checked;
}
static bool is_shared(const std::string& name) {
  for (const sim::SharedArray& a : sim::worker->arrays)
    if (name == a.name) return true;
  return false;
}
void __ubsan_handle_out_of_bounds(const ArrayOfSanitizer* array, uintptr_t index) {
  if (!is_in_checked_kernel()) return;
  const std::string name = sim::subscripted(sim::translated(array->file, PC), array->line, array->column);
  if (is_shared(name)) return;
  const std::string type = array->type->name;
  sim::index_outside({array->file, int(array->line)}, int64_t(index), name, type.substr(1, type.size() - 2));
}

// The same of SIM_INDEX; array: with indices of outer dimensions, if it is a row.
void sim_index_outside(int64_t index, const char* array, const char* type, const char* file, int line) {
  if (!is_in_checked_kernel()) return;
  std::string name(array, strcspn(array, "["));
  name.erase(0, name.find_last_of(".: ") + 1);
  if (is_shared(name)) return;
  char* readable = abi::__cxa_demangle(type, nullptr, nullptr, nullptr);
  const std::string of_type = readable ? readable : type;
  free(readable);
  sim::index_outside({file, line}, index, name, of_type);
}

// The same of SIM_INDEX_OF_PART. The memory is there, so the thread goes on.
void sim_index_outside_of_part(int64_t index, const char* part, const char* next, const char* file,
                               int line) {
  if (is_in_checked_kernel()) sim::index_outside_of_part({file, line}, index, part, next);
}

// SIM_READ of an integer that nothing has written
void sim_unwritten(const char* name, const char* file, int line) {
  if (is_in_checked_kernel()) sim::unwritten_read({file, line}, name);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
