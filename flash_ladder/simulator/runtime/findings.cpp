// What the checker has found: one finding for each pair of instructions and kind, with how often it happened.
#include "checker.h"

#include <algorithm>

namespace sim {

// -------------------------------------------------------------------------------- places in memory
static int64_t end_of(const Worker& w, const SharedArray& a) {
  return int64_t(a.bytes ? a.offset + a.bytes : w.launch->dynamic_shared);
}

// The array that an offset in shared memory belongs to. Between two arrays: the one whose end is nearer.
static const SharedArray* shared_array(const Worker& w, int64_t offset) {
  const SharedArray *before = nullptr, *after = nullptr;   // the nearest ones; of two names the later
  for (const SharedArray& a : w.arrays) {
    if (int64_t(a.offset) > offset) after = !after || a.offset <= after->offset ? &a : after;
    else before = !before || a.offset >= before->offset ? &a : before;
  }
  if (!before || !after) return before ? before : after;
  return offset - end_of(w, *before) < int64_t(after->offset) - offset ? before : after;
}

// x / y, rounded down, for a y above 0; x becomes what is left.
static int64_t divide(int64_t& x, int64_t y) {
  const int64_t rest = (x % y + y) % y, quotient = (x - rest) / y;
  x = rest;
  return quotient;
}

// The element of shared memory at an offset, such as tile[3][5], or tile[-1][5], outside of its 8 x 8
// elements.
std::string shared_element(const Worker& w, int64_t offset) {
  const SharedArray* array = shared_array(w, offset);
  if (!array) return "shared memory, outside of all arrays";
  const bool inside = offset >= int64_t(array->offset) && offset < end_of(w, *array);
  const bool fixed = array->identity;                        // in size: else a part of the dynamic array
  if (fixed && inside && array->extents.empty()) return array->name;     // __shared__ float x;

  int64_t rest = offset - int64_t(array->offset);
  int64_t index = divide(rest, int64_t(array->element_bytes));
  std::string subscripts, sizes;
  for (size_t i = array->extents.size(); i-- > 1;) {
    rest = index;
    index = divide(rest, int64_t(array->extents[i]));
    subscripts = "[" + std::to_string(rest) + "]" + subscripts;
    sizes = " x " + std::to_string(array->extents[i]) + sizes;
  }
  const std::string element = array->name + ("[" + std::to_string(index) + "]") + subscripts;
  if (inside) return element;
  if (!fixed)
    return element + ", outside of the " + std::to_string(w.launch->dynamic_shared) +
           " bytes of dynamic shared memory";
  if (array->extents.empty()) return element + ", outside of its 1 element";
  return element + ", outside of its " + std::to_string(array->extents[0]) + sizes + " elements";
}

// -------------------------------------------------------------------------------- how they are kept
constexpr size_t MOST_FINDINGS = 100;   // of different instructions

static Finding* find_same(const std::string& what, const std::vector<Party>& parties) {
  auto matches = [&](const Finding& f, bool swapped) {
    if (f.what != what || f.parties.size() != parties.size()) return false;
    for (size_t i = 0; i < parties.size(); i++) {
      const Party& p = f.parties[swapped ? parties.size() - 1 - i : i];
      if (p.access != parties[i].access || p.site.line != parties[i].site.line) return false;
    }
    return true;
  };
  for (Finding& f : checker->findings)
    if (f.kernel == checker->kernel->name && (matches(f, false) || matches(f, true))) return &f;
  return nullptr;
}

void found(Finding finding) {
  if (Finding* same = find_same(finding.what, finding.parties)) {
    same->count++;
    return;
  }
  if (checker->findings.size() >= MOST_FINDINGS) {
    checker->more_findings = true;
    return;
  }
  const Worker& w = *worker;
  finding.kernel = w.launch->name;
  finding.count = 1;
  if (finding.array == SHARED && finding.element.empty() && finding.bytes)
    finding.element = shared_element(w, finding.offset);
  checker->findings.push_back(std::move(finding));
}

static Party self(int access) {
  const Worker& w = *worker;
  return {w.current->thread_index, w.block_index, checker->accesses[access].kind, access, {}};
}

void found_about(const char* what, int access, int array, int64_t offset, size_t bytes, std::string text) {
  found({what, "", array, "", offset, bytes, {self(access)}, std::move(text), 0});
}

// -------------------------------------------------------------------------------- kinds of them
static uint3 block_index(const Worker& w, uint32_t number) {
  const dim3 g = w.launch->grid;
  return {number % g.x, number / g.x % g.y, number / g.x / g.y};
}

void found_race(int access, int array, int64_t offset, size_t bytes, unsigned thread, uint32_t block,
                int other) {
  const Worker& w = *worker;
  const Kind kind = checker->accesses[other].kind;
  const auto [asking_block, asking_thread] = thread_behind(block, thread);
  const uint3 index = w.fibers[asking_thread].thread_index;
  const Party before{index, block_index(w, asking_block), kind, other, {}};
  found({"race", "", array, "", offset, bytes, {before, self(access)}, "", 0});
}

// Of a local array, or of a __device__ variable: the compiler knows how long they are (-fsanitize=bounds).
void index_outside(Site site, int64_t index, const std::string& name, const std::string& type) {
  Worker& w = *worker;
  const std::string element = (name.empty() ? "an array" : name) + "[" + std::to_string(index) + "]";
  const std::string text = element + ", outside of its type " + type;
  found({"out of bounds", "", NO_ARRAY, "", index, 0,
         {{w.current->thread_index, w.block_index, Kind::READ, 0, site}}, text, 0});
  w.error_is_found = true;
  fail("access out of bounds, " + text, site);
}

// Of dynamic shared memory that the kernel has cut by hand: Y_smem = X_smem + n says that X_smem has n
// elements.
void index_outside_of_part(Site site, int64_t index, const std::string& part, const std::string& next) {
  const Worker& w = *worker;
  const std::string text = part + "[" + std::to_string(index) + "], outside of its part of shared memory, " +
                           (index < 0 ? "which begins there," : "which ends where " + next + " begins,");
  found({"out of bounds", "", NO_ARRAY, "", index, 0,
         {{w.current->thread_index, w.block_index, Kind::READ, 0, site}}, text, 0});
}

// A local variable that nothing has written is read; the thread goes on.
void unwritten_read(Site site, const std::string& name) {
  const Worker& w = *worker;
  found({"uninitialised", "", NO_ARRAY, name, 0, 0,
         {{w.current->thread_index, w.block_index, Kind::READ, 0, site}}, "", 0});
}

// Of the running thread, which goes on.
void mistake_found(const std::string& message, Site site) {
  const Worker& w = *worker;
  found({"error", "", SHARED, "", 0, 0, {{w.current->thread_index, w.block_index, Kind::READ, 0, site}},
         describe(w) + at(site) + ": " + message, 0});
}

// What ended the launch, unless it is a finding already.
void error_found(const Worker& w) {
  const std::string interrupted = ": interrupted";   // Ctrl-C is no mistake of the kernel's
  const size_t start = w.error.size() - std::min(w.error.size(), interrupted.size());
  if (w.error_is_found || w.error.substr(start) == interrupted) return;
  std::vector<Party> parties;
  for (auto& [thread, site] : w.error_sites)
    if (site.line) parties.push_back({thread, w.block_index, Kind::READ, 0, site});
  const bool deadlock = w.error.find(": deadlock: ") != std::string::npos;
  found({deadlock ? "deadlock" : "error", "", SHARED, "", 0, 0, parties, w.error, 0});
}

}  // namespace sim
