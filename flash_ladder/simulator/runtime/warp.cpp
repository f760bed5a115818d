// What the lanes of a warp do together. Each lane leaves its operands and waits; the last one to arrive
// computes the results of all. Lanes that meet at different operations are an error, which names both
// lines.
#include "checker.h"

#include <cstring>

namespace sim {

static std::string mismatch(const WarpOperation& op, const char* name) {
  return std::string("lanes of one warp are at different operations: ") + op.name + at(op.site) + ", and " +
         name + " here";
}

void together(unsigned mask, const char* name, void* operands, Site site, void (*f)(WarpOperation&),
              bool orders_memory) {
  Worker& w = *worker;
  if (interrupted()) fail(why_interrupted(), site);          // a lane alone never waits
  Fiber& self = *w.current;
  const int lanes = int(w.fibers.size()) - self.warp * WARP_SIZE;
  if (lanes < WARP_SIZE) mask &= (1u << lanes) - 1;      // the block's last warp may be a part of one
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
  if (op->arrived && strcmp(op->name, name)) fail(mismatch(*op, name), site);
  if (!op->arrived) {
    op->mask = mask;
    op->name = name;
    op->site = site;
  }
  op->operands[self.lane] = operands;
  op->arrived |= bit;
  if (op->arrived != mask) return wait_until_woken(State::AT_WARP_OPERATION, name, site);

  if (f) f(*op);
  if (w.launch->checked) warp_synchronised(w, self.warp, *op, orders_memory);
  op->arrived = 0;
  for (int lane = WARP_SIZE - 1; lane >= 0; lane--)  // the warp goes on together: its data are in the cache
    if (mask & ~bit & 1u << lane) wake(&w.fibers[self.warp * WARP_SIZE + lane], true);
}

template <class F> static void each_lane(const WarpOperation& op, F f) {
  for (int lane = 0; lane < WARP_SIZE; lane++)
    if (op.mask >> lane & 1) f(lane);
}

extern "C" int sim_lane() { return worker->current->lane; }

extern "C" void sim_syncwarp(unsigned mask, const char* file, int line) {
  together(mask, "__syncwarp()", nullptr, {file, line}, nullptr, true);
}

extern "C" uint64_t sim_shuffle(const char* name, unsigned mask, uint64_t value, int source, const char* file,
                                int line) {
  struct Operands { uint64_t value; int source; uint64_t result; } mine{value, source, 0};
  together(mask, name, &mine, {file, line}, [](WarpOperation& op) {
    each_lane(op, [&](int lane) {
      auto* o = static_cast<Operands*>(op.operands[lane]);
      if (!(op.mask >> o->source & 1))
        fail(std::string(op.name) + ": lane " + std::to_string(lane) + " reads lane " +
                 std::to_string(o->source) + ", which is not in the mask",
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
