// cp.async: copies from global to shared memory that happen some time between their start and the end of the
// wait for them. A GPU chooses when; a kernel must be right whenever it is. FLASH_SIM_COPIES says when here:
//
//   late     (the default) at the wait: a kernel that does not wait reads what was there before
//   early    at the start: a kernel that starts a copy before all have read what it replaces loses that
//   random   at any time between, by FLASH_SIM_SEED
#include "checker.h"

#include <cstdlib>
#include <cstring>

#include "../include/sim/ptx.h"

namespace sim {

std::optional<CopiesLand> when_copies_land() {
  const char* set = getenv("FLASH_SIM_COPIES");
  const std::string when = set ? set : "";
  if (when == "" || when == "late") return CopiesLand::LATE;
  if (when == "early") return CopiesLand::EARLY;
  if (when == "random") return CopiesLand::RANDOM;
  return {};
}

static void land(Copy& c) {
  if (c.landed) return;
  memcpy(c.to, c.from, c.valid);
  memset(c.to + c.valid, 0, c.bytes - c.valid);
  c.landed = true;
}

static void land_perhaps(Worker& w, Copy& c) {
  if (next_random(w.copy_random) % 4 == 0) land(c);
}

void land_some_copies(Worker& w, Fiber& f) {
  for (Copy& c : f.copies) land_perhaps(w, c);
}

// The first `valid` bytes come from there, the rest are zeros.
extern "C" void sim_copy_async(void* to, const void* from, size_t bytes, size_t valid, const char* file,
                               int line) {
  Worker& w = *worker;
  if (valid > bytes)
    fail("cp.async: of " + std::to_string(bytes) + " bytes, " + std::to_string(valid) + " are to be copied",
         {file, line});
  for (const void* p : {static_cast<const void*>(to), from})
    if (reinterpret_cast<uintptr_t>(p) % bytes)
      fail(std::string("cp.async: the address in ") + (p == from ? "global" : "shared") +
           " memory must be a multiple of " + std::to_string(bytes), {file, line});
  const void* pc = __builtin_return_address(0);
  if (w.launch->checked) {
    if (valid) observe(from, valid, Kind::READ, pc, Asks::ALL_WRITTEN);
    observe(to, bytes, Kind::COPY, pc, Asks::ALIGNMENT);
  }
  Fiber& f = *w.current;
  f.copies.push_back({static_cast<char*>(to), static_cast<const char*>(from), bytes, valid, f.copy_groups, pc,
                      false});
  if (w.launch->checked) copy_has_started(f.copies.back());
  if (w.copies_land == CopiesLand::EARLY) land(f.copies.back());
  if (w.copies_land == CopiesLand::RANDOM) land_perhaps(w, f.copies.back());
}

extern "C" void sim_commit_copies() { worker->current->copy_groups++; }

// Until at most the last `groups_left` groups of this thread's copies are under way.
extern "C" void sim_wait_for_copies(int groups_left) {
  Fiber& f = *worker->current;
  size_t done = 0;
  while (done < f.copies.size() && f.copies[done].group + groups_left < f.copy_groups) {
    Copy& c = f.copies[done++];
    land(c);
    if (worker->launch->checked) copy_has_landed(f, c);
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

}  // namespace sim
