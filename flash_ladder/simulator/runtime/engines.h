// What works beside a block's threads on Hopper, and how they wait for it:
//
//   mbarrier.cpp    barriers in shared memory that count threads and bytes
//   tma.cpp         the copy engine, tensor_map.cpp: the maps that tell it of tensors
//   wgmma.cpp       products of a warpgroup
//   warpgroup.cpp   four warps together; setmaxnreg, named barriers
//   engine_checks.cpp, phases.cpp: what the checker asks of them
//
// A copy by the engine is made, late, when no thread of its block can go on, and a product at the wait for
// it; early, both where they start; at random, any time between (FLASH_SIM_COPIES, as for cp.async).
#pragma once
#include <bitset>
#include <functional>

#include "../include/sim/hopper.h"
#include "runtime.h"

namespace sim {

constexpr int WARPGROUP_SIZE = 128;
constexpr int NAMED_BARRIERS = 16;

// For the checker (phases.cpp): by warp, up to which of its steps all is over
using Steps = std::vector<uint32_t>;
struct Seen {                     // by a warp, that a phase is complete
  uint32_t step = 0;              // of the warp; 0: it still waits
  Site site;
};

struct Phases { Steps came, came_before; };   // when warps have arrived, in this one and in the one before

struct Mbarrier {
  size_t offset = 0;              // in shared memory
  int arrivals = 0;               // that a phase takes
  int missing = 0;                // of them, in the phase under way
  int64_t bytes = 0;              // that are announced and have not come; negative: more have come
  uint32_t phase = 0;             // under way; its parity is the last bit
  Site site;                      // of its initialisation
  std::vector<Fiber*> waiting;

  // For the checker: its number as an agent; whether engines see it; what has been handed to it, in all and
  // in complete phases; of how many somebody knows; the last load whose bytes it counts
  int agent = -1;
  Fiber* initialised_by = nullptr;
  bool is_visible = false;
  std::shared_ptr<Past> released;
  std::shared_ptr<const Past> complete;
  uint32_t waited = 0, last_load = 0;
  const Fiber* last_load_by = nullptr;
  const void* last_load_pc = nullptr;
  const char* last_load_to = nullptr;
  Steps steps, steps_over;        // known by all arrivals, and by those of complete phases
  std::map<int, Seen> seen;       // of the last complete phase, by warp
  Phases phases;
};

// What cuTensorMapEncodeTiled makes of its arguments. (NVIDIA's layout is not documented.)
struct TensorMap {
  uint64_t magic;
  char* address;
  uint64_t sizes[5], strides[4];  // innermost first; strides in bytes, of all but the innermost
  uint16_t box[5];
  uint8_t rank, element_bytes, swizzle;   // swizzle: bytes; 0: none
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "it must fit into the user's");
const TensorMap* tensor_map(const CUtensorMap* map);   // null: no such thing has been made there

enum class Bulk { LOAD, STORE, ADD };

struct BulkCopy {                 // by the copy engine
  Bulk kind;
  char* shared;
  TensorMap map;                  // LOAD, STORE: of the box; rank 0: no box, but bytes as they lie
  int64_t corner[5];              // of the box
  char* global;                   // no box: so many bytes from here on
  Worker* sender;                 // LOAD: of the cluster, in whose shared memory that is; else null
  size_t bytes;                   // of shared memory
  Mbarrier* mbarrier;             // LOAD: where its bytes count
  uint32_t phase;                 // in which it has started
  Fiber* fiber;                   // that has started it
  int group;                      // STORE, ADD: of this thread
  Site site;
  const void* pc;
  bool done;                      // LOAD: all of it; STORE, ADD: shared memory has been read
  bool is_again;                  // the same for another block of the cluster: no traffic of HBM
  std::shared_ptr<const Past> known;   // for the checker: by the thread, where it is in another block
  std::vector<char> buffer;       // what has been read there, and is not written yet
};

struct Wgmma {                    // D += A B under way
  WgmmaShape shape;
  bool A_in_registers;
  uint64_t A, B;                  // descriptors
  float* D[WARPGROUP_SIZE];       // of each thread
  uint32_t A_registers[WARPGROUP_SIZE][4];
  int group;
  Site site;
  const void* pc;
  bool done;
};

struct Warpgroup {
  const char* name = "";          // of what its threads are about to do together
  Site site;
  int arrived = 0;
  void* operands[WARPGROUP_SIZE] = {};
  std::deque<Wgmma> products;     // that nobody has waited for
  int groups = 0;                 // of them, committed
  int registers = 0;              // of a thread; 0: as at the start
  int wanted = 0;                 // setmaxnreg_inc() waits for so many
  int agent = -1;                 // for the checker
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  std::bitset<MOST_THREADS> by;   // who has arrived
  Site site;                      // of the last arrival
  std::vector<Fiber*> waiting;
  std::shared_ptr<Past> released; // for the checker: what has been handed to it
  Steps steps;                    // the same
  Phases phases;                  // the same
};

struct Stores {                   // of one thread, for the checker
  int reads = -1, writes = -1;    // the agents that do both
  uint32_t last = 0, waited = 0;  // group; of which it knows that shared memory has been read
  const void* pc = nullptr;       // of the last one
  const char* from = nullptr;
};

struct Engines {                  // of one block
  std::map<size_t, Mbarrier> mbarriers;             // by their offset
  std::deque<BulkCopy> copies;                      // under way, in the order of their start
  std::vector<Warpgroup> warpgroups;
  NamedBarrier named_barriers[NAMED_BARRIERS];
  int agents = 0;                                   // for the checker
  std::map<int, Stores> stores;                     // the same, by thread
  std::vector<Steps> known;                         // the same: by warps
  std::map<const void*, Steps> known_by_atomic;     // the same
};
Engines& engines_of(Worker& w);   // from their first use in a block on

// mbarrier.cpp
Mbarrier& mbarrier_at(const uint64_t* barrier, const char* name, Site site);
void bytes_have_come(Mbarrier& m, size_t bytes);
void complete_if_all_is_there(Mbarrier& m);

// tma.cpp: f(shared, global, skip, count) for each 16 bytes of a copy
void each_chunk_of(const Worker& w, const BulkCopy& c,
                   const std::function<void(char*, char*, size_t, size_t)>& f);

// wgmma.cpp: f(offset) for each 16 bytes of so many rows of an operand
void each_operand_chunk(uint64_t descriptor, bool mn_major, int first, int rows,
                        const std::function<void(size_t)>& f);

// warpgroup.cpp: act runs once, when all 128 threads have come
void warpgroup_together(const char* name, void* operands, Site site, void (*act)(Worker&, Warpgroup&));

// engine_checks.cpp: in checked launches
void mbarrier_initialised(Mbarrier& m, const void* pc);
void mbarrier_used(const Mbarrier& m, const void* pc);
void fence_mbarriers(Fiber& f);
void arrived(Mbarrier& m, Fiber& f, Site site);
void phase_completed(Mbarrier& m);
void waited(Mbarrier& m, Fiber& f, Site site);
void load_started(BulkCopy& c);
void load_came_late(const BulkCopy& c);
void store_started(BulkCopy& c);
void stores_waited_for(Fiber& f, int groups_left, bool read_only);
void fence_registers(Fiber& f);
void product_started(Worker& w, Warpgroup& g, const Wgmma& p, const uint32_t* const* A_registers);
void products_waited_for(Worker& w, const Warpgroup& g, int groups);

// phases.cpp: in checked launches
void hand_over_steps(Steps& to, const Fiber& f);
void take_over_steps(const Fiber& f, const Steps& from);
void steps_meet(Fiber* const* fibers, size_t count);
void exchange_steps(const void* address, const Fiber& f);
void phase_entered(Mbarrier& m, const Fiber& f, Site site);
void phase_seen(Mbarrier& m, const Fiber& f, Site site);
void phase_over(Mbarrier& m);
void phase_entered(NamedBarrier& b, const Fiber& f, const std::string& name, int id);
void phase_over(NamedBarrier& b);

}  // namespace sim
