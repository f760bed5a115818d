// mbarriers: barriers in shared memory that count threads and bytes. A phase is complete when as many threads
// have arrived as the initialisation says, and all bytes that were announced have come. (PTX ISA, "Parallel
// Synchronization and Communication Instructions: mbarrier", in particular "Phase of the mbarrier object",
// "Tracking asynchronous operations" and "mbarrier.test_wait/mbarrier.try_wait".)
//
// The word in shared memory is opaque to kernels; the counts are kept beside it, by its address.
#include "checker.h"
#include "engines.h"

namespace sim {

constexpr int MOST_ARRIVALS = (1 << 20) - 1;      // PTX ISA, "Contents of the mbarrier object"
constexpr int64_t MOST_BYTES = (1 << 20) - 1;
constexpr size_t MOST_VAIN_TESTS = 1000;          // of all threads that can run

Engines& engines_of(Worker& w) {
  if (!w.engines) {
    w.engines = std::make_shared<Engines>();
    w.engines->warpgroups.resize((w.fibers.size() + WARPGROUP_SIZE - 1) / WARPGROUP_SIZE);
  }
  return *w.engines;
}

static size_t offset_of(const uint64_t* barrier, const char* name, Site site) {
  const size_t offset = reinterpret_cast<const char*>(barrier) - worker->shared;
  if (offset >= ARENA_BYTES) fail(std::string(name) + ": an mbarrier must be in shared memory", site);
  if (offset % 8) fail(std::string(name) + ": the address of an mbarrier must be a multiple of 8", site);
  return offset;
}

Mbarrier& mbarrier_at(const uint64_t* barrier, const char* name, Site site) {
  const size_t offset = offset_of(barrier, name, site);
  auto& all = engines_of(*worker).mbarriers;
  const auto found = all.find(offset);
  if (found == all.end())
    fail(std::string(name) + ": nothing has initialised this mbarrier, " + shared_element(*worker, offset) +
             " (mbarrier_init)", site);
  return found->second;
}

void complete_if_all_is_there(Mbarrier& m) {
  if (m.missing || m.bytes) return;
  m.phase++;
  m.missing = m.arrivals;
  if (worker->launch->checked) phase_completed(m);
  std::vector<Fiber*> all;
  all.swap(m.waiting);
  for (Fiber* f : all) wake(f);
}

void bytes_have_come(Mbarrier& m, size_t bytes) {
  m.bytes -= int64_t(bytes);
  complete_if_all_is_there(m);
}

extern "C" void sim_mbarrier_init(uint64_t* barrier, int arrivals, const char* file, int line) {
  const Site site{file, line};
  const size_t offset = offset_of(barrier, "mbarrier_init()", site);
  if (arrivals < 1 || arrivals > MOST_ARRIVALS)
    fail("mbarrier_init(): " + std::to_string(arrivals) + " arrivals; 1 to " + std::to_string(MOST_ARRIVALS) +
             " are possible", site);
  Mbarrier& m = engines_of(*worker).mbarriers[offset];
  m = {};
  m.offset = offset;
  m.arrivals = m.missing = arrivals;
  m.site = site;
  if (worker->launch->checked) mbarrier_initialised(m, __builtin_return_address(0));
  *barrier = uint64_t(arrivals);
}

extern "C" void sim_mbarrier_arrive(const char* name, uint64_t* barrier, int bytes, const char* file,
                                    int line) {
  const Site site{file, line};
  Mbarrier& m = mbarrier_at(barrier, name, site);
  if (bytes < 0 || m.bytes + bytes > MOST_BYTES)
    fail(std::string(name) + ": " + std::to_string(m.bytes + bytes) + " bytes to come; at most " +
             std::to_string(MOST_BYTES) + " are possible", site);
  if (!m.missing)
    fail(std::string(name) + ": of the " + std::to_string(m.arrivals) + " arrivals of " +
             shared_element(*worker, m.offset) + " all have been made in this phase, which waits for " +
             std::to_string(m.bytes) + " bytes", site);
  if (worker->launch->checked) {
    mbarrier_used(m, __builtin_return_address(0));
    arrived(m, *worker->current, site);
  }
  m.bytes += bytes;
  m.missing--;
  complete_if_all_is_there(m);
}

static bool is_complete(const Mbarrier& m, int parity) { return (m.phase & 1) != unsigned(parity); }

static Mbarrier& tested(const char* name, uint64_t* barrier, int parity, Site site, const void* pc) {
  if (interrupted()) fail(why_interrupted(), site);
  if (parity != 0 && parity != 1)
    fail(std::string(name) + ": a parity of " + std::to_string(parity) + "; 0 and 1 are possible", site);
  Mbarrier& m = mbarrier_at(barrier, name, site);
  if (worker->launch->checked) mbarrier_used(m, pc);
  return m;
}

static void wait(Mbarrier& m, int parity, const char* name, Site site) {
  Fiber& f = *worker->current;
  f.site = site;
  while (!is_complete(m, parity)) {
    m.waiting.push_back(&f);
    f.waits_at = &m;
    f.parity = parity;
    wait_until_woken(State::AT_MBARRIER, name, site);
  }
  if (worker->launch->checked) waited(m, f, site);
}

extern "C" void sim_mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line) {
  const Site site{file, line};
  const char* name = "mbarrier_wait()";
  wait(tested(name, barrier, parity, site, __builtin_return_address(0)), parity, name, site);
}

// A thread that asks again and again lets others run. When all that can run do nothing else, nothing more
// will come: they wait like those at mbarrier_wait(), and that is a deadlock.
extern "C" bool sim_mbarrier_test(uint64_t* barrier, int parity, const char* file, int line) {
  const Site site{file, line};
  Worker& w = *worker;
  const char* name = "mbarrier_test()";
  Mbarrier& m = tested(name, barrier, parity, site, __builtin_return_address(0));
  if (is_complete(m, parity)) {
    w.vain_tests = 0;
    if (w.launch->checked) waited(m, *w.current, site);
    return true;
  }
  if (w.vain_tests++ < MOST_VAIN_TESTS * (w.ready.size() + 1)) {
    sim_yield();
    return false;
  }
  wait(m, parity, name, site);
  return true;
}

extern "C" void sim_fence_mbarrier_init() {
  Worker& w = *worker;
  if (w.launch->checked && w.engines) fence_mbarriers(*w.current);
}

// Where a thread waits, and for what
std::string describe_mbarrier(const Worker& w, const Fiber& waits) {
  const auto& m = *static_cast<const Mbarrier*>(waits.waits_at);
  std::string s = " for a phase of parity " + std::to_string(waits.parity) + " of " +
                  shared_element(w, m.offset) + ", which is in its phase " + std::to_string(m.phase) + ": ";
  s += std::to_string(m.missing) + " of " + std::to_string(m.arrivals) + " arrivals are missing";
  if (m.bytes > 0) s += ", " + std::to_string(m.bytes) + " bytes are still to come";
  if (m.bytes < 0) s += ", " + std::to_string(-m.bytes) + " bytes more have come than were announced";
  return s;
}

}  // namespace sim
