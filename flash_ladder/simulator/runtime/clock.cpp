// What has certainly happened before what. Two accesses of different threads are ordered only if the later
// thread knows of the earlier access: by a barrier, by __syncwarp, or by an atomic between two fences.
// Shuffles and votes move values of registers; they order no memory.
#include "checker.h"
#include "engines.h"

#include <algorithm>

namespace sim {

// What an atomic's address hands on, from threads that fenced before it to threads that fence after it. An
// address in shared memory is another one in every block.
static std::map<std::pair<const void*, uint32_t>, Pasts> handed_on;
constexpr uint32_t ALL_BLOCKS = ~0u;

void begin_time(Worker& w) {
  auto past = std::make_shared<Past>();
  past->until.resize(w.fibers.size());
  for (Fiber& f : w.fibers) {
    f.past = past;
    f.now = 1;
    f.worked = 0;
    f.released.reset();
    f.released_in_block.reset();
    f.to_acquire.reset();
  }
}

// A Past that is handed on has no `elsewhere`: what its thread knows of other blocks is handed on beside it.
static void add_time(std::vector<uint32_t>& to, const std::vector<uint32_t>& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
}

static void add_time(Past& to, const Past& from) {
  add_time(to.until, from.until);
  if (!from.fenced.empty()) add_time(to.fenced, from.fenced);
}

static uint32_t time_of(const std::vector<uint32_t>& times, size_t i) {
  return i < times.size() ? times[i] : 0;
}

// Up to when the work of all is known. Threads that have ended do no more of it.
static uint32_t all_until(const Past& past) {
  uint32_t least = ENGINE_TIME - 1;
  for (const Fiber& f : worker->fibers)
    if (f.state != State::RETURNED || past.until[f.number] < f.worked)
      least = std::min(least, past.until[f.number]);
  return least;
}

static bool knows(const Past& a, const Past& b) {   // all that b knows
  for (size_t i = 0; i < b.until.size(); i++)
    if (time_of(a.until, i) < b.until[i]) return false;
  return true;
}

static void add(Pasts& to, const Pasts& from) {
  for (auto& [block, past] : from) {
    auto& mine = to[block];
    if (!mine || knows(*past, *mine)) {
      mine = past;
    } else if (!knows(*mine, *past)) {
      auto both = std::make_shared<Past>(*mine);
      add_time(*both, *past);
      mine = both;
    }
  }
}

static void add(std::shared_ptr<const Pasts>& to, const Pasts& from) {
  auto both = to ? std::make_shared<Pasts>(*to) : std::make_shared<Pasts>();
  add(*both, from);
  to = both;
}

void synchronise(const std::vector<Fiber*>& fibers) {
  auto past = std::make_shared<Past>(*fibers[0]->past);
  std::shared_ptr<const Pasts> released, released_in_block, to_acquire;
  bool one_scope = true;             // of all fences so far
  const void *added = fibers[0]->past.get(), *added_released = nullptr, *added_to_acquire = nullptr;
  for (const Fiber* f : fibers) {
    if (f->past.get() != added) {
      add_time(*past, *f->past);
      add(past->elsewhere, f->past->elsewhere);
    }
    if (f->released && f->released.get() != added_released) add(released, *f->released);
    one_scope &= f->released_in_block == f->released;
    if (f->to_acquire && f->to_acquire.get() != added_to_acquire) add(to_acquire, *f->to_acquire);
    added = f->past.get();
    added_released = f->released.get();
    added_to_acquire = f->to_acquire.get();
  }
  for (const Fiber* f : fibers) past->until[f->number] = f->now;
  past->all_until = all_until(*past);
  if (one_scope) released_in_block = released;
  for (const Fiber* f : fibers)
    if (!one_scope && f->released_in_block) add(released_in_block, *f->released_in_block);
  for (Fiber* f : fibers) {
    f->past = past;
    f->released = released;
    f->released_in_block = released_in_block;
    f->to_acquire = to_acquire;
    f->now++;
  }
}

// __threadfence(): what this thread knows can be handed on by later atomics, its own or, after a barrier,
// those of others in the block; and what was handed to earlier ones is now known. __threadfence_block() does
// so within the block alone.
void fence(Fiber& f, Scope scope) {
  auto known = std::make_shared<Past>(*f.past);
  known->until[f.number] = f.now++;
  if (f.to_acquire) {
    for (auto& [block, past] : *f.to_acquire) {
      if (block == worker->block) add_time(*known, *past);
      else if (scope == Scope::DEVICE) add(known->elsewhere, {{block, past}});
    }
    if (scope == Scope::DEVICE) f.to_acquire.reset();
  }
  known->all_until = all_until(*known);
  f.past = known;
  auto released = std::make_shared<Pasts>(known->elsewhere);
  (*released)[worker->block] = std::make_shared<Past>(Past{known->until, known->all_until, {}, {}});
  f.released_in_block = released;
  if (scope == Scope::DEVICE) f.released = released;
}

void order_by_atomic(Fiber& f, const void* address) {
  const bool shared = size_t(static_cast<const char*>(address) - worker->shared) < ARENA_BYTES;
  auto exchange = [&](uint32_t block, const std::shared_ptr<const Pasts>& mine) {
    const auto key = std::make_pair(address, block);
    const auto found = handed_on.find(key);
    if (found != handed_on.end()) add(f.to_acquire, found->second);
    if (mine) add(handed_on[key], *mine);
  };
  if (!shared) exchange(ALL_BLOCKS, f.released);
  const bool in_block = shared || f.released_in_block != f.released;
  exchange(worker->block, in_block ? f.released_in_block : nullptr);
  if (worker->engines) exchange_steps(address, f);
}

void forget_atomics() { handed_on.clear(); }

// -------------------------------------------------------------------------------- mbarriers, engines
// What a thread knows, its own work included
std::shared_ptr<Past> knowledge(const Fiber& f) {
  auto known = std::make_shared<Past>(*f.past);
  known->until[f.number] = f.now;
  return known;
}

// The same as a Past of another block: `until` is of that block's threads, and this one's are elsewhere.
std::shared_ptr<Past> knowledge_in(const Worker& block, const Fiber& f) {
  auto own = knowledge(f);
  if (block.block == worker->block) return own;
  auto known = std::make_shared<Past>();
  if (const auto there = own->elsewhere.find(block.block); there != own->elsewhere.end())
    known->until = there->second->until;
  known->until.resize(std::max(known->until.size(), block.fibers.size()));
  known->elsewhere = own->elsewhere;
  known->elsewhere.erase(block.block);
  known->elsewhere[worker->block] = std::make_shared<Past>(Past{own->until, own->all_until, {}, {}});
  return known;
}

void hand_over(std::shared_ptr<Past>& to, const Past& known) {
  if (!to) {
    to = std::make_shared<Past>(known);
    return;
  }
  add_time(*to, known);
  add(to->elsewhere, known.elsewhere);
}

void hand_over(std::shared_ptr<Past>& to, Fiber& f) {
  hand_over(to, *knowledge(f));
  f.now++;
}

// Threads that know the same, and learn the same, share what they know then.
void take_over(Fiber& f, const std::shared_ptr<const Past>& from) {
  static std::shared_ptr<const Past> knew, learnt, knows_now;
  if (knew != f.past || learnt != from) {
    auto known = std::make_shared<Past>(*f.past);
    add_time(*known, *from);
    add(known->elsewhere, from->elsewhere);
    known->all_until = all_until(*known);
    knew = f.past;
    learnt = from;
    knows_now = known;
  }
  f.past = knows_now;
}

// What each of some threads knows; each knows its own work.
std::shared_ptr<const Past> common_knowledge(const Fiber* first, size_t count) {
  std::map<const Past*, int> pasts;              // -1: of several threads
  for (const Fiber* f = first; f < first + count; f++) {
    const auto [place, is_new] = pasts.try_emplace(f->past.get(), f->number);
    if (!is_new) place->second = -1;
  }
  auto common = std::make_shared<Past>(*pasts.begin()->first);
  common->elsewhere.clear();
  auto least = [&](std::vector<uint32_t> Past::*times) {
    auto& all = (*common).*times;
    std::fill(all.begin(), all.end(), ~0u);
    for (auto& [past, only] : pasts) {             // one after the other: their times lie side by side
      const auto& those = past->*times;
      const size_t known = std::min(those.size(), all.size()), own = size_t(only);
      const uint32_t others_know = own < all.size() ? all[own] : 0;
      for (size_t i = 0; i < known; i++) all[i] = std::min(all[i], those[i]);
      std::fill(all.begin() + known, all.end(), 0);
      if (own < all.size()) all[own] = others_know;
    }
  };
  if (pasts.size() > 1) {
    least(&Past::until);
    least(&Past::fenced);
  }
  common->all_until = all_until(*common);
  return common;
}

// What the thread knows of is seen by the copy engine and by wgmma, too.
void fence_proxy(Fiber& f) {
  const auto known = knowledge(f);
  add_time(known->fenced, known->until);
  f.past = known;
  f.now++;
}

bool is_fenced(const Agent& a, unsigned thread, uint32_t time) {
  return time <= time_of(a.past->fenced, thread);
}

bool has_happened(const Agent& a, uint32_t block, unsigned thread, uint32_t time) {
  if (block == worker->block)
    return thread == unsigned(a.number) || time <= a.past->all_until ||
           time <= time_of(a.past->until, thread);
  const auto known = a.past->elsewhere.find(block);
  return known != a.past->elsewhere.end() && time <= time_of(known->second->until, thread);
}

}  // namespace sim
