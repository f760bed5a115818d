// The checker (flash.inspect): a kernel of a checked build reports every access to memory before it makes
// it, and the checker asks two things. Is it allowed? What does it cost?
//
//   hooks.cpp      what the compiler calls at every load and store of a checked build
//   clock.cpp      what has certainly happened before what
//   checker.cpp    is it allowed: an access, within the memory that is there; what meets at a barrier
//   memory.cpp     the memory that is there
//   races.cpp      who has used it last, and what nothing has written
//   engine_checks.cpp  the same of Hopper's engines: the copy engine, wgmma; of mbarriers
//   findings.cpp   what was not allowed
//   counters.cpp   what it costs: the sectors and wavefronts of a warp's requests
//   report.cpp     findings and counts, as JSON for Python
//
// A checked launch runs its blocks on one OS thread, and holds checker_mutex. So do the functions that Python
// calls.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime.h"

namespace sim {

enum class Kind : uint8_t {
  READ,
  TMA_READ, WGMMA,             // of shared memory, by the copy engine and by tensor cores
  SEND,                        // the same, by the copy engine for another block
  WRITE, ATOMIC,
  EXCHANGE,                    // an atomic; it needs no old value
  COPY,                        // a write that is made some time before its thread's wait for it has ended
  SOURCE,                      // the read that goes with it
  TMA_WRITE                    // of shared memory, by the copy engine
};

inline bool is_atomic(Kind kind) { return kind == Kind::ATOMIC || kind == Kind::EXCHANGE; }
inline bool is_read(Kind kind) { return kind <= Kind::SEND; }

// -------------------------------------------------------------------------------- clock.cpp
// A thread's time is a number that grows whenever it synchronises with others. A Past says up to which time
// the work of each thread of a block has certainly happened, from one thread's point of view: a vector clock
// (Mattern 1989; for finding races: Flanagan and Freund, FastTrack, 2009).
struct Past {
  std::vector<uint32_t> until;               // by thread of the block
  uint32_t all_until = 0;                    // the least of these
  Pasts elsewhere;                           // of other blocks of the launch
  std::vector<uint32_t> fenced;              // as `until`: the work that engines see, too
};
constexpr uint32_t ENGINE_TIME = 1u << 31;   // their times, of which each engine counts its own, begin here
void begin_time(Worker& w);                                    // of a block
void synchronise(const std::vector<Fiber*>& fibers);           // now each knows what any of them knows
void fence(Fiber& f, Scope scope);
void order_by_atomic(Fiber& f, const void* address);
void forget_atomics();
std::shared_ptr<Past> knowledge(const Fiber& f);
std::shared_ptr<Past> knowledge_in(const Worker& block, const Fiber& f);   // of its cluster
void hand_over(std::shared_ptr<Past>& to, Fiber& f);
void hand_over(std::shared_ptr<Past>& to, const Past& known);
void take_over(Fiber& f, const std::shared_ptr<const Past>& from);
std::shared_ptr<const Past> common_knowledge(const Fiber* first, size_t count);
void fence_proxy(Fiber& f);
bool is_fenced(const Agent& a, unsigned thread, uint32_t time);
bool has_happened(const Agent& a, uint32_t block, unsigned thread, uint32_t time);

// -------------------------------------------------------------------------------- memory.cpp
struct Lanes {                 // of one warp, that did something at one time
  uint32_t lanes, time, block; // lanes: a bit each; 0: nobody
  uint16_t warp, access;
};

// What was done last to a few bytes of memory.
struct Cell {
  uint32_t epoch;              // in which block (shared memory) or launch (global); an older one: nothing
  bool read, written;          // in this epoch at all
  bool has_atomics;            // else there are none in `atomics`
  bool copying;                // `write` is a copy that may still be under way
  enum : uint8_t { READ = 1, WRITTEN = 2 };
  uint8_t used_before, launches_ago;   // by an earlier launch: the last one that used it
  uint8_t bytes;               // of the last write; 0: none
  uint16_t sources;            // copies from here that may still be under way
  Lanes write;                 // the last plain write
  Lanes reads[3], atomics[2];  // since then, of as many warps (one more that is not ordered pushes one out)
};

struct FreeCells { void operator()(Cell* p) const; };

// A stretch of memory with a cell for every 2^shift bytes of it: 4 bytes, until a smaller access is seen.
struct Memory {
  enum : uint8_t { VALID = 1, INITIALISED = 2 };

  std::string name;
  char* base = nullptr;
  size_t bytes = 0;
  int shift = 2;
  uint32_t epoch = 0;                     // of shared memory
  std::vector<uint8_t> state;             // of each cell's bytes
  std::unique_ptr<Cell[], FreeCells> cells;

  Memory(std::string name, char* base, size_t bytes, int shift = 2);
  size_t granule() const { return size_t(1) << shift; }
  bool allows(uint64_t offset, size_t bytes) const {
    for (size_t i = offset >> shift; i <= (offset + bytes - 1) >> shift; i++)
      if (!(state[i] & VALID)) return false;
    return true;
  }
  void refine(int new_shift);
};
int find_array(const char* address, const void* pc = nullptr);   // the number of its array, or NO_ARRAY
const Memory* nearest_array(const char* address);   // null: none is near
bool is_known_otherwise(const Worker& w, const char* address);

struct Access {                // an instruction and what it touches
  const void* pc;
  int array;                   // number in Checker::arrays; or SHARED memory, or NO_ARRAY
  Kind kind;
};
constexpr int SHARED = -1, NO_ARRAY = -2;

// What the lanes of a warp ask of memory by executing one instruction together
struct Request {
  uint32_t lanes;              // a bit each
  uint32_t access_bytes;       // of one lane
  uint32_t offset[WARP_SIZE];  // in the array, or in shared memory
};

struct Counters {              // of one access, over all its requests
  uint64_t requests = 0, lanes = 0;
  uint64_t bytes = 0;                // asked for; by several lanes of a request: once
  uint64_t unique = 0;               // of global memory: different bytes of each launch
  std::vector<bool> touched;         // cells, in this launch
  uint64_t units = 0, ideal = 0;     // sectors, of global memory; wavefronts, of shared memory
  unsigned worst = 0;
  Request example{};                 // the worst one
  std::string example_element;       // in shared memory: of its first lane
};

struct Traffic {               // of one array in one kernel
  uint64_t unique_read = 0, unique_written = 0;   // distinct bytes of each launch
};

struct Barriers {              // at one line of the source
  Site site;
  const char* name;            // such as "__syncthreads()" or "__syncwarp()"
  uint64_t count;              // of blocks, or of warps, each time that they are there
};

struct Kernel {
  const void* function = nullptr;
  std::string name;
  dim3 grid, block;
  size_t shared_bytes = 0;     // a block, at most
  uint64_t launches = 0, blocks = 0, accesses = 0;
  std::vector<Barriers> barriers;
  std::vector<Counters> counters;     // by access
  std::vector<Traffic> traffic;       // by array
};

// -------------------------------------------------------------------------------- findings.cpp
struct Party {                 // to a finding: a thread and what it does
  uint3 thread, block;
  Kind kind;
  int access;                  // number in Checker::accesses; 0: `site` says where
  Site site;
};

struct Finding {
  std::string what;            // "race", "out of bounds", "misaligned", "uninitialised", "barrier", ...
  std::string kernel;
  int array;
  std::string element;         // of shared memory
  int64_t offset;              // in the array
  uint64_t bytes;
  std::vector<Party> parties;
  std::string text;
  uint64_t count;              // how often it happened
};

void found(Finding finding);
void found_about(const char* what, int access, int array, int64_t offset, size_t bytes,
                 std::string text = "");
void found_race(int access, int array, int64_t offset, size_t bytes, unsigned thread, uint32_t block,
                int other);
[[noreturn]] void index_outside(Site site, int64_t index, const std::string& name, const std::string& type);
void index_outside_of_part(Site site, int64_t index, const std::string& part, const std::string& next);
void unwritten_read(Site site, const std::string& name);
void mistake_found(const std::string& message, Site site);
void error_found(const Worker& w);
std::string shared_element(const Worker& w, int64_t offset);

// -------------------------------------------------------------------------------- races.cpp
void check_cells(const Agent& f, Memory& m, int array, uint16_t access, Kind kind, uint64_t offset,
                 size_t bytes, bool all_written);
void observe_for_lane(int lane, const void* address, size_t bytes, const void* pc);
void copy_has_started(const Copy& copy);
void copy_has_landed(Fiber& f, const Copy& copy);
void copy_was_not_waited_for(const Fiber& f, const Copy& copy);

// -------------------------------------------------------------------------------- early.cpp
// Earlier launches that may still run, as this one may start early: the lowest bit is the one just before.
struct StillRunning {
  uint64_t at_start = 0, after_wait = 0;         // when a thread starts, and when it has waited
  bool a_thread_waited = false;                  // in this launch
  bool next_starts_after = false;                // when one of its blocks has waited
};
void begin_early_launch(const Launch& launch);
void end_of_block(const Worker& w);
bool may_still_run(const Agent& f, unsigned launches_ago);

// -------------------------------------------------------------------------------- checker.cpp
struct Checker {
  std::vector<std::unique_ptr<Memory>> arrays;   // in global memory; null once forgotten
  std::vector<Access> accesses;
  std::vector<Kernel> kernels;
  Kernel* kernel = nullptr;                      // that runs
  uint32_t launch = 0;                           // the epoch of global memory
  uint32_t blocks = 0;                           // of all launches: their numbers are epochs of shared memory
  StillRunning still_running;
  // Engines, by block and number: the block and the number of the thread that has asked last
  std::map<std::pair<uint32_t, unsigned>, std::pair<uint32_t, unsigned>> threads_behind;
  std::vector<Finding> findings;
  bool more_findings = false;                    // than are kept
};
extern Checker* checker;       // null: nothing is inspected
extern std::mutex checker_mutex;

// What an access asks for beside memory that is there: an address that is a multiple of its size; that all of
// it has been written, as the copy of a struct does not, which has padding.
enum class Asks : uint8_t { NOTHING, ALIGNMENT, ALL_WRITTEN, BOTH };

[[noreturn]] void forbid(const char* p, size_t bytes, Kind kind, const void* pc);
uint16_t number_of(const void* pc, int array, Kind kind);      // of an instruction and what it touches
bool is_watched(const void* address);
void observe(const void* address, size_t bytes, Kind kind, const void* pc, Asks asks,
             const void* operand = nullptr);   // of an atomic
void begin_checked_launch(const Launch& launch);
void begin_checked_block(Worker& w);
void end_checked_block(Worker& w);
void shared_array_declared(Worker& w, const SharedArray& array);
void barrier_reached(Worker& w, const std::vector<Fiber*>& all);
void warp_synchronised(Worker& w, int warp, const WarpOperation& op);
void thread_has_ended(Worker& w);

// -------------------------------------------------------------------------------- counters.cpp
void count_access(int access, int warp, int lane, uint64_t offset, size_t bytes);
void count_by_engine(int access, uint64_t bytes, uint64_t units, uint64_t ideal, uint32_t offset);
void flush_requests(int warp);
void flush_all_requests(size_t warps);
void forget_requests();

// -------------------------------------------------------------------------------- engine_checks.cpp
std::pair<uint32_t, unsigned> thread_behind(uint32_t block, unsigned number);
void check_registers(Fiber& f, const char* address, size_t bytes, Kind kind, const void* pc);
void check_engines_at_end(Worker& w);

}  // namespace sim
