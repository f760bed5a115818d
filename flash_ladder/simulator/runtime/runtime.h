// The simulator's run-time library, seen from the inside: what one block looks like while it runs.
//
//   fiber.cpp      switching between the threads of a block
//   block.cpp      the scheduler: runs one block to its end, or reports why it cannot end
//   barrier.cpp    __syncthreads and its relatives
//   warp.cpp       operations that the lanes of a warp do together: shuffles, votes, __syncwarp
//   matrix.cpp     among these: ldmatrix, stmatrix, products on tensor cores
//   copy.cpp       asynchronous copies to shared memory (cp.async)
//   shared.cpp     shared memory
//   atomic.cpp     atomics
//   engines.h      Hopper's copy engine and asynchronous products, mbarriers, named barriers
//   cluster.h      blocks that run together
//   launch.cpp     a kernel launch: the grid's blocks over the CPU's cores; errors
//   signals.cpp    faults, Ctrl-C and the time limit, with guard.h;
//   guard.cpp      a stage's host code
//
// and, in checked builds (flash.inspect), the checker, with a header of its own: checker.h
//
// Every CUDA thread of a block is a fiber (a stack of its own). All fibers of a block run on one OS thread,
// one at a time, each until it has to wait for others. Different blocks run on different OS threads. A block
// that waits for another one, by asking for a flag again and again, lets other blocks of its OS thread run.
#pragma once
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../include/sim/device.h"
#include "../include/sim/host.h"

namespace sim {

constexpr size_t KB = 1024;
constexpr int MOST_THREADS = 1024;              // of a block
constexpr size_t SHARED_MEMORY_PER_BLOCK = 227 * KB;   // as on an H100, after opting in
constexpr size_t SHARED_MEMORY_DEFAULT = 48 * KB;      // without
constexpr size_t ARENA_BYTES = 512 * KB;   // for it, and in checked builds for gaps between its arrays
constexpr size_t LOCAL_BYTES = 128 * KB;               // for the local variables of one fiber
constexpr size_t STACK_BYTES = LOCAL_BYTES + 4 * KB;   // of its stack: tops are shifted by less than 4 KB
constexpr size_t GUARD_BYTES = 64 * KB;   // beside it, never accessed: the largest page of any CPU
constexpr int WARP_SIZE = 32;

struct Past;               // checker.h
struct Memory;
struct Engines;            // engines.h
struct Cluster;            // cluster.h

struct Registers {         // of one thread, an operand of wgmma
  const char* start;
  size_t bytes;
  bool touched;            // since the last wgmma_fence()
};
using Pasts = std::map<uint32_t, std::shared_ptr<const Past>>;   // by block

enum class State {
  READY, AT_BARRIER, AT_WARP_OPERATION, RETURNED,
  AT_MBARRIER, AT_NAMED_BARRIER, AT_WARPGROUP_OPERATION, AT_REGISTERS,     // engines.h
  AT_CLUSTER_BARRIER                                                       // cluster.h
};

enum class CopiesLand { LATE, EARLY, RANDOM };

struct Copy {              // an asynchronous one, to shared memory
  char* to;
  const char* from;
  size_t bytes, valid;     // the rest are zeros
  int group;
  const void* pc;          // where it was started
  bool landed;
};

// Who works, as the checker sees it: a thread, or an engine in a thread's name (engine_checks.cpp).
struct Agent {
  int number = 0;          // of a thread within the block: x fastest, then y, then z
  int warp = 0, lane = 0;
  uint32_t now = 1;        // its time
  std::shared_ptr<const Past> past;   // what it knows of the others
  bool knows_previous_kernel = false;   // has waited for its end, where a launch need not
};

struct alignas(64) Fiber : Agent {   // one CUDA thread. What every block sets anew stands first, together
  void* stack_pointer = nullptr;
  char* stack = nullptr;   // its lowest address
  uint3 thread_index{};
  State state = State::READY;
  int copy_groups = 0;            // committed
  int bulk_groups = 0;            // the same, of stores by the copy engine
  bool at_cluster_barrier = false;     // it has arrived, in this phase, and not waited
  bool has_fenced_registers = false;   // wgmma_fence() has come since the kernel's start
  Site site;               // where it waits
  std::vector<Copy> copies;       // that nobody has waited for, in the order of their start
  std::vector<Registers> registers;   // arrays that it has given wgmma as registers

  const char* waits_for = "";
  const void* waits_at = nullptr; // an Mbarrier, for a phase of this parity; or a NamedBarrier
  int parity = 0;
  uint32_t cluster_phase = 0;

  // For the checker: the time of its last access, and what its fences and atomics have passed on
  uint32_t worked = 0;
  std::shared_ptr<const Pasts> released, released_in_block, to_acquire;

  // What it has stored last, looked at when it has been, and the number of that access
  const char* stored = nullptr;
  uint16_t stored_bytes = 0, stored_access = 0;
};

struct Barrier {           // __syncthreads: all threads of the block that have not exited
  std::vector<Fiber*> waiting;
  int sum = 0;             // of the predicates, for __syncthreads_count and its relatives
  int result = 0;
};

// Lanes of one warp that are to do something together: each leaves its operands, the last to come does it
// for all.
struct WarpOperation {
  unsigned mask = 0, arrived = 0;   // a bit a lane
  const char* name = "";
  Site site;
  void* operands[WARP_SIZE] = {};
  void (*act)(WarpOperation&) = nullptr;   // for all of them; in each, arrived says who they are
  bool orders_memory = false;
  bool whole = false;                // all 32 lanes must come: exited ones are not made up for
};

struct Warp {
  std::vector<WarpOperation> open;   // under way; more than one when sets of lanes work apart
  unsigned exited = 0;               // lanes that have returned from the kernel
};

struct SharedArray {
  const void* identity;     // of a static array: no two declarations share it; dynamic: null
  const char* name;
  const char* declared_at;  // "file:line"
  size_t offset, bytes;     // bytes 0: a name for a part of the dynamic array
  size_t element_bytes;
  std::vector<size_t> extents;   // of a static array's dimensions
};

struct Worker {            // a block that runs, and what it runs on
  const Launch* launch = nullptr;
  uint3 block_index{};
  uint32_t block = 0;             // its number in the grid: x fastest, then y, then z

  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  std::deque<Fiber*> ready;
  Fiber* current = nullptr;       // null while the scheduler itself runs
  int alive = 0;                  // threads that have not returned
  void* scheduler_stack_pointer = nullptr;
  size_t vain_yields = 0;         // since one of its threads has done something else
  size_t vain_tests = 0;          // of mbarriers, since one of its threads has done something else
  bool set_aside = false;         // all of them wait for another block, as it seems
  bool let_next_start = false;    // one of them has let the next kernel start

  char* shared = nullptr;         // the block's shared memory
  size_t shared_top = 0;          // bytes of it in use, gaps between arrays included
  size_t shared_bytes = 0;        // without those
  std::vector<SharedArray> arrays;
  std::shared_ptr<Memory> shadow; // for the checker: of the shared memory, and what tells blocks apart in it
  uint32_t epoch = 0;

  std::shared_ptr<Engines> engines;   // null: the block has not used any
  std::shared_ptr<Cluster> cluster;   // null: the launch has none
  int rank = 0;                       // in it

  char* stacks = nullptr;
  size_t stack_count = 0;
  bool opted_in = false;          // cudaFuncSetAttribute has allowed the dynamic shared memory in use
  uint64_t seed = 0;              // of the random scheduler; 0: first come, first served
  uint64_t random = 0;            // its state, set anew for every block: no timing matters
  CopiesLand copies_land = CopiesLand::LATE;
  uint64_t copy_random = 0;       // the same for copies that land at random
  std::string error;
  std::vector<std::pair<uint3, Site>> error_sites;   // where which thread is stuck or failed
  bool error_is_found = false;    // the checker has a finding that says it better
};

extern SIM_THREAD_LOCAL Worker* worker;   // this OS thread's, at this moment

// fiber.cpp
extern "C" void sim_switch(void** save_stack_pointer, void* next_stack_pointer);
void* fresh_stack(char* top);     // a stack that starts in sim_fiber_main when it is switched to

// block.cpp
void begin_block(Worker& w, size_t number);
bool continue_block(Worker& w);   // until it has ended: true; or waits for another one: false
void wait_until_woken(State state, const char* waits_for, Site site);
void wake(Fiber* fiber, bool next = false);
[[noreturn]] void fail(const std::string& message, Site site = {});   // ends the launch, not the process
[[noreturn]] void abandon_block(const std::string& report);
std::string deadlock_report(Worker& w);
std::string describe(const Worker& w);                          // "kernel, block (..), thread (..)"
std::string at(Site site);
uint64_t next_random(uint64_t& state);

// signals.cpp
extern std::atomic<bool> somebody_is_interrupted;
bool this_thread_is_interrupted();
inline bool interrupted() {                // by Ctrl-C, or as the time is over
  return somebody_is_interrupted.load(std::memory_order_relaxed) && this_thread_is_interrupted();
}
std::string why_interrupted();
std::string source_line(const void* pc);   // " at ..."

// barrier.cpp, warp.cpp: the running thread has returned from the kernel; nobody waits for it any more
void leave_barrier(Worker& w);
void leave_warp(Worker& w);

// warp.cpp: act runs once, when the last lane of the mask has arrived or exited
enum class Orders { NOTHING, MEMORY };
enum class Needs { LANES_THAT_ARE_LEFT, ALL_LANES };
void together(unsigned mask, const char* name, void* operands, Site site, void (*act)(WarpOperation&),
              Orders orders = Orders::NOTHING, Needs needs = Needs::LANES_THAT_ARE_LEFT);

// copy.cpp
std::optional<CopiesLand> when_copies_land();   // nothing: FLASH_SIM_COPIES makes no sense
void land_some_copies(Worker& w, Fiber& f);

// shared.cpp
void clear_shared_memory(Worker& w);

// tma.cpp, mbarrier.cpp, warpgroup.cpp
bool land_next_load(Worker& w);
void land_some_bulk_copies(Worker& w);
void finish_bulk_copies(Worker& w);
std::string describe_mbarrier(const Worker& w, const Fiber& waits);
std::string describe_meeting(const Worker& w, const Fiber& waits);

// wgmma.cpp
void multiply_some(Worker& w);

// launch.cpp: why a call on the host will return an error
void explain_error(const std::string& text);
void give_context();                       // to this thread, for the driver

}  // namespace sim
