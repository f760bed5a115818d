// What the lanes of a warp do together. Each lane leaves its operands and waits; the last one to arrive
// computes the results of all. Lanes that meet at different operations are an error, which names both
// lines. Lanes that have returned from the kernel are not waited for: "all non-exited threads named in mask
// must execute the same intrinsic with the same mask" (CUDA C++ Programming Guide, warp shuffle functions).
#include "checker.h"

#include <cstring>

namespace sim {

static std::string mismatch(const WarpOperation& op, const char* name) {
  return std::string("lanes of one warp are at different operations: ") + op.name + at(op.site) + ", and " +
         name + " here";
}

// Lanes of the block's last warp, which may be a part of one.
static unsigned lanes_that_were(const Worker& w, int warp) {
  const int lanes = int(w.fibers.size()) - warp * WARP_SIZE;
  return lanes < WARP_SIZE ? (1u << lanes) - 1 : ~0u;
}

static bool has_come(const WarpOperation& op, const Warp& warp) {
  return op.arrived == (op.whole ? op.mask : op.mask & ~warp.exited);
}

static void complete(Worker& w, int warp, WarpOperation& op) {
  if (op.act) op.act(op);
  if (w.launch->checked) warp_synchronised(w, warp, op);
  const unsigned arrived = op.arrived;
  op.arrived = 0;
  for (int lane = WARP_SIZE - 1; lane >= 0; lane--) {  // the warp goes on together: its data are in the cache
    Fiber* f = &w.fibers[warp * WARP_SIZE + lane];
    if (arrived & 1u << lane && f->state == State::AT_WARP_OPERATION) wake(f, true);
  }
}

void leave_warp(Worker& w) {
  Fiber* const self = w.current;
  Warp& warp = w.warps[self->warp];
  warp.exited |= 1u << self->lane;
  for (size_t i = 0; i < warp.open.size(); i++) {
    WarpOperation& op = warp.open[i];
    if (!op.arrived || !has_come(op, warp)) continue;
    w.current = &w.fibers[self->warp * WARP_SIZE + __builtin_ctz(op.arrived)];   // an error is one of theirs
    complete(w, self->warp, op);
    w.current = self;
  }
}

void together(unsigned mask, const char* name, void* operands, Site site, void (*act)(WarpOperation&),
              Orders orders, Needs needs) {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);          // a lane alone never waits
  Fiber& self = *w.current;
  const unsigned were = lanes_that_were(w, self.warp);
  if (mask & ~were && orders == Orders::NOTHING && w.launch->checked)   // __syncwarp() has a default
    mistake_found(std::string(name) + ": the mask names lanes " + std::to_string(__builtin_popcount(were)) +
                      " to 31, which this warp does not have, as the block ends before them", site);
  mask &= were;
  const unsigned bit = 1u << self.lane;
  if (!(mask & bit)) fail(std::string(name) + ": the lane that calls is not in its own mask", site);

  WarpOperation* op = nullptr;
  auto& open = w.warps[self.warp].open;
  for (WarpOperation& o : open) {
    if (!o.arrived) {
      if (!op) op = &o;
    } else if (o.mask == mask) {
      op = &o;
      break;
    } else if (o.mask & bit && o.arrived & mask) {       // each waits for the other, and will for ever
      fail(mismatch(o, name) + " (their masks differ)", site);
    }
  }
  if (!op) op = &open.emplace_back();
  if (op->arrived && op->name != name && strcmp(op->name, name)) fail(mismatch(*op, name), site);
  if (!op->arrived) {
    op->mask = mask;
    op->name = name;
    op->site = site;
    op->act = act;
    op->orders_memory = orders == Orders::MEMORY;
    op->whole = needs == Needs::ALL_LANES;
  }
  op->operands[self.lane] = operands;
  op->arrived |= bit;
  self.site = site;
  if (has_come(*op, w.warps[self.warp])) complete(w, self.warp, *op);
  else wait_until_woken(State::AT_WARP_OPERATION, name, site);
}

template <class F> static void each_lane(const WarpOperation& op, F f) {
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (op.arrived >> lane & 1) f(lane);
}

extern "C" int sim_lane() { return worker->current->lane; }

extern "C" void sim_syncwarp(unsigned mask, const char* file, int line) {
  together(mask, "__syncwarp()", nullptr, {file, line}, nullptr, Orders::MEMORY);
}

extern "C" uint64_t sim_shuffle(const char* name, unsigned mask, uint64_t value, int source, const char* file,
                                int line) {
  struct Operands { uint64_t value; int source; uint64_t result; } mine{value, source, 0};
  together(mask, name, &mine, {file, line}, [](WarpOperation& op) {
    each_lane(op, [&](int lane) {
      auto* o = static_cast<Operands*>(op.operands[lane]);
      if (!(op.arrived >> o->source & 1))
        fail(std::string(op.name) + ": lane " + std::to_string(lane) + " reads lane " +
                 std::to_string(o->source) + ", which " +
                 (op.mask >> o->source & 1 ? "has returned from the kernel" : "is not in the mask"),
             op.site);
      o->result = static_cast<Operands*>(op.operands[o->source])->value;
    });
  });
  return mine.result;
}

extern "C" unsigned sim_vote(const char* name, unsigned mask, int predicate, const char* file, int line) {
  struct Operands { int predicate; unsigned result; } mine{predicate, 0};
  together(mask, name, &mine, {file, line}, [](WarpOperation& op) {
    unsigned ballot = 0;
    each_lane(op, [&](int lane) {
      ballot |= unsigned(static_cast<Operands*>(op.operands[lane])->predicate != 0) << lane;
    });
    each_lane(op, [&](int lane) { static_cast<Operands*>(op.operands[lane])->result = ballot; });
  });
  return mine.result;
}

}  // namespace sim
