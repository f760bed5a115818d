// What the checker keeps of memory beside its bytes (shadow memory): which of it kernels may use, what of it
// has been written, and who has used it last.
#include "checker.h"

#include <algorithm>
#include <cstdlib>
#include <dlfcn.h>
#include <new>
#include <unordered_set>

namespace sim {

void FreeCells::operator()(Cell* p) const { free(p); }

static Cell* new_cells(size_t count) {       // zero, and untouched until they are used
  void* p = calloc(count, sizeof(Cell));
  if (!p) throw std::bad_alloc();
  return static_cast<Cell*>(p);
}

Memory::Memory(std::string name, char* base, size_t bytes, int shift)
    : name(std::move(name)), base(base), bytes(bytes), shift(shift), state((bytes >> shift) + 1),
      cells(new_cells((bytes >> shift) + 1)) {}

// From now on with a cell for every 2^new_shift bytes. What is known of a cell holds for each of its parts.
void Memory::refine(int new_shift) {
  const int parts = 1 << (shift - new_shift);
  const size_t count = state.size();
  std::vector<uint8_t> new_state(count * parts);
  std::unique_ptr<Cell[], FreeCells> finer(new_cells(count * parts));
  for (size_t i = 0; i < count * parts; i++) {
    new_state[i] = state[i / parts];
    finer[i] = cells[i / parts];
  }
  state = std::move(new_state);
  cells = std::move(finer);
  shift = new_shift;
}

// Memory that a kernel may use although no array was declared for it: the launch's arguments, threadIdx and
// its like, and what the kernel's own library holds (__device__ variables, constants). None of it is checked.
bool is_known_otherwise(const Worker& w, const char* p) {
  static std::unordered_set<uintptr_t> pages_of_library;
  if (size_t(p - static_cast<const char*>(w.launch->arguments)) < w.launch->argument_bytes) return true;
  for (auto* own : {reinterpret_cast<const char*>(&threadIdx), reinterpret_cast<const char*>(&blockIdx),
                    reinterpret_cast<const char*>(&blockDim), reinterpret_cast<const char*>(&gridDim)})
    if (size_t(p - own) < sizeof(dim3)) return true;
  const uintptr_t page = reinterpret_cast<uintptr_t>(p) / 4096;
  if (pages_of_library.count(page)) return true;
  Dl_info here, kernel;
  if (!dladdr(p, &here) || !dladdr(w.launch->kernel, &kernel)) return false;
  if (here.dli_fbase != kernel.dli_fbase) return false;
  pages_of_library.insert(page);
  return true;
}

// The number of the array that an address lies in: of one that may be used there, if arrays overlap. pc: of
// the instruction, which mostly asks for the same array as the last time.
int find_array(const char* p, const void* pc) {
  static size_t last_of[256];
  size_t& last = last_of[reinterpret_cast<uintptr_t>(pc) % 256];
  auto& arrays = checker->arrays;
  auto holds = [&](size_t i) { return arrays[i] && size_t(p - arrays[i]->base) < arrays[i]->bytes; };
  auto allows = [&](size_t i) {
    return holds(i) && arrays[i]->state[size_t(p - arrays[i]->base) >> arrays[i]->shift] & Memory::VALID;
  };
  if (last < arrays.size() && allows(last)) return int(last);
  for (size_t i = 0; i < arrays.size(); i++)
    if (allows(i)) return int(last = i);
  for (size_t i = 0; i < arrays.size(); i++)
    if (holds(i)) return int(i);
  return NO_ARRAY;
}

// The array nearest to an address that is in none, if one is near; else null.
const Memory* nearest_array(const char* p) {
  const Memory* nearest = nullptr;
  ptrdiff_t least = 1 << 16;
  for (auto& m : checker->arrays) {
    if (!m) continue;
    const ptrdiff_t distance = std::max({m->base - p, p - (m->base + m->bytes) + 1, ptrdiff_t(0)});
    if (distance < least) {
      least = distance;
      nearest = m.get();
    }
  }
  return nearest;
}

}  // namespace sim
