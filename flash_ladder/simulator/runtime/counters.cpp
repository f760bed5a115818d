// What an access costs. On a GPU the lanes of a warp execute an instruction together, and their addresses are
// one request; here each lane runs alone, so the requests are put together again: between two points at which
// the lanes of a warp meet, the n-th time that one lane executes an instruction belongs to the n-th time of
// the others. (That is right where the lanes take the same path. A lane that skips rounds of a loop is
// matched with earlier rounds of the others.)
//
//   global memory   a request moves whole sectors of 32 bytes: 32 lanes that read 32 neighbouring floats need
//                   4, 32 lanes that read a float each from 32 rows need 32
//   shared memory   a request takes as many wavefronts as the busiest of the 32 banks has different 4-byte
//                   words to deliver; lanes that read the same word share it
#include "checker.h"

#include <algorithm>

namespace sim {

struct Log {                             // of one access by one warp, since its lanes met last
  uint32_t next[WARP_SIZE] = {};         // request, by lane
  size_t used = 0, room = 0;             // requests
  std::vector<uint32_t> offset;          // by lane and request: each lane goes on alone, through its own
  std::vector<uint32_t> bytes;           // of one lane, by request
};

static std::vector<std::vector<Log>> logs;           // by warp and access
static std::vector<std::vector<uint16_t>> in_use;    // by warp: accesses whose logs are not empty
constexpr size_t MOST_REQUESTS = 1 << 16;   // in a log; in a loop of more rounds lanes are matched no longer

static void flush(Log& log, int access);

static void make_room(Log& log) {
  const size_t room = 2 * log.room + 1;
  std::vector<uint32_t> wider(WARP_SIZE * room);
  for (int lane = 0; lane < WARP_SIZE; lane++)
    std::copy_n(log.offset.begin() + lane * log.room, log.room, wider.begin() + lane * room);
  log.offset = std::move(wider);
  log.bytes.resize(room);
  log.room = room;
}

static Request request_of(const Log& log, size_t i) {
  Request r{};
  r.access_bytes = log.bytes[i];
  for (int lane = 0; lane < WARP_SIZE; lane++) {
    if (i >= log.next[lane]) continue;
    r.lanes |= 1u << lane;
    r.offset[lane] = log.offset[lane * log.room + i];
  }
  return r;
}

void count_access(int access, int warp, int lane, uint64_t offset, size_t bytes) {
  if (logs.size() <= size_t(warp)) {
    logs.resize(warp + 1);
    in_use.resize(warp + 1);
  }
  if (logs[warp].size() <= size_t(access)) logs[warp].resize(access + 1);
  Log& log = logs[warp][access];
  if (log.next[lane] == MOST_REQUESTS) flush(log, access);
  if (!log.used) in_use[warp].push_back(uint16_t(access));
  const uint32_t i = log.next[lane]++;
  if (i >= log.room) make_room(log);
  if (i >= log.used) log.used = i + 1;
  log.bytes[i] = uint32_t(bytes);
  log.offset[lane * log.room + i] = uint32_t(offset);
}

template <class F> static void each_lane(unsigned lanes, F f) {
  for (; lanes; lanes &= lanes - 1) f(__builtin_ctz(lanes));
}

struct Cost { uint64_t bytes; unsigned units, ideal; };

// What a request's lanes touch, each byte once, as stretches in the order of their addresses
struct Stretch { uint32_t first, last; };
static int stretches_of(const Request& r, Stretch (&stretches)[WARP_SIZE]) {
  uint32_t sorted[WARP_SIZE];
  int lanes = 0, count = 0;
  each_lane(r.lanes, [&](int lane) { sorted[lanes++] = r.offset[lane]; });
  if (!std::is_sorted(sorted, sorted + lanes)) std::sort(sorted, sorted + lanes);
  for (int i = 0; i < lanes; i++) {
    const uint32_t last = sorted[i] + r.access_bytes - 1;
    if (count && sorted[i] <= stretches[count - 1].last + 1)
      stretches[count - 1].last = std::max(stretches[count - 1].last, last);
    else
      stretches[count++] = {sorted[i], last};
  }
  return count;
}

static Cost cost_in_sectors(const Request& r) {
  Stretch stretches[WARP_SIZE];
  const int count = stretches_of(r, stretches);
  Cost cost{0, 0, 0};
  uint32_t next_sector = 0;
  for (int i = 0; i < count; i++) {
    cost.bytes += stretches[i].last - stretches[i].first + 1;
    const uint32_t first = std::max(stretches[i].first / 32, next_sector);
    next_sector = stretches[i].last / 32 + 1;
    cost.units += unsigned(next_sector - first);
  }
  cost.ideal = unsigned((cost.bytes + 31) / 32);
  return cost;
}

// Does every lane read what the lane at distance 1 reads, if that one reads at all? Or the one at distance 2?
static bool read_in_pairs(const Request& r) {
  for (const int distance : {1, 2}) {
    bool all = true;
    each_lane(r.lanes, [&](int lane) {
      const int other = lane ^ distance;
      all &= !(r.lanes >> other & 1) || r.offset[lane] == r.offset[other];
    });
    if (all) return true;
  }
  return false;
}

// The wavefronts of some of the lanes, which are served together.
static unsigned wavefronts_of(const Request& r, unsigned lanes) {
  uint32_t word_in[32][WARP_SIZE];               // of each bank, the different words
  unsigned different[32] = {}, busiest = 0;
  const unsigned words = std::max(1u, r.access_bytes / 4);
  each_lane(lanes & r.lanes, [&](int lane) {
    for (unsigned k = 0; k < words; k++) {
      const uint32_t word = r.offset[lane] / 4 + k;
      const unsigned bank = word % 32;
      uint32_t* const end = word_in[bank] + different[bank];
      if (std::find(word_in[bank], end, word) != end) continue;
      *end = word;
      busiest = std::max(busiest, ++different[bank]);
    }
  });
  return busiest;
}

// 8 bytes a lane: half of the lanes at a time; 16: a quarter. When they are read in pairs, twice as many.
// (NVIDIA does not document this. It agrees with all that was measured on an H200: results/h200/banks.json.)
static Cost cost_in_wavefronts(const Request& r, bool reads) {
  Stretch stretches[WARP_SIZE];
  const int count = stretches_of(r, stretches);
  Cost cost{0, 0, 0};
  for (int i = 0; i < count; i++) cost.bytes += stretches[i].last - stretches[i].first + 1;
  int at_a_time = r.access_bytes <= 4 ? 32 : r.access_bytes == 8 ? 16 : 8;
  if (at_a_time < 32 && reads && read_in_pairs(r)) at_a_time *= 2;
  for (int first = 0; first < WARP_SIZE; first += at_a_time) {
    const unsigned lanes = unsigned(((uint64_t(1) << at_a_time) - 1) << first);
    const unsigned wavefronts = wavefronts_of(r, lanes);
    cost.units += wavefronts;
    cost.ideal += wavefronts > 0;
  }
  return cost;
}

// Most requests ask for what another one has asked for, some bytes further on: by so many that its sectors
// or banks lie in the same way, it costs the same.
struct Known {
  Request request{};
  Cost cost{};
};
static bool is_shifted(const Request& a, const Request& b, unsigned period) {
  if (a.lanes != b.lanes || a.access_bytes != b.access_bytes) return false;
  const int first = __builtin_ctz(a.lanes);
  const uint32_t distance = b.offset[first] - a.offset[first];
  uint32_t different = distance % period;
  for (int lane = 0; lane < WARP_SIZE; lane++)
    different |= (b.offset[lane] - a.offset[lane] - distance) & -(a.lanes >> lane & 1);
  return !different;
}

static void flush(Log& log, int access) {
  auto& counters = checker->kernel->counters;
  if (counters.size() < checker->accesses.size()) counters.resize(checker->accesses.size());
  Counters& total = counters[access];
  const bool shared = checker->accesses[access].array == SHARED;
  const bool reads = checker->accesses[access].kind == Kind::READ;
  const unsigned period = shared ? 4 : 32;
  Known known[8];
  for (size_t i = 0; i < log.used; i++) {
    const Request request = request_of(log, i);
    Known& like = known[shared ? 0 : request.offset[__builtin_ctz(request.lanes)] / 4 % 8];
    if (!is_shifted(like.request, request, period))
      like = {request, shared ? cost_in_wavefronts(request, reads) : cost_in_sectors(request)};
    const Cost& cost = like.cost;
    total.requests++;
    total.lanes += __builtin_popcount(request.lanes);
    total.bytes += cost.bytes;
    total.units += cost.units;
    total.ideal += cost.ideal;
    if (cost.units <= total.worst) continue;
    total.worst = cost.units;
    total.example = request;
    if (shared) total.example_element = shared_element(*worker, request.offset[__builtin_ctz(request.lanes)]);
  }
  log.used = 0;
  std::fill(log.next, log.next + WARP_SIZE, 0);
}

// What an engine asks for at once
void count_by_engine(int access, uint64_t bytes, uint64_t units, uint64_t ideal, uint32_t offset) {
  auto& counters = checker->kernel->counters;
  if (counters.size() < checker->accesses.size()) counters.resize(checker->accesses.size());
  Counters& c = counters[access];
  c.requests++;
  c.lanes++;
  c.bytes += bytes;
  c.units += units;
  c.ideal += ideal;
  if (units <= c.worst) return;
  c.worst = unsigned(units);
  c.example.lanes = 1;
  c.example.access_bytes = uint32_t(bytes);
  c.example.offset[0] = offset;
  if (checker->accesses[access].array == SHARED) c.example_element = shared_element(*worker, offset);
}

void flush_requests(int warp) {
  if (in_use.size() <= size_t(warp)) return;
  for (const uint16_t access : in_use[warp]) flush(logs[warp][access], access);
  in_use[warp].clear();
}

void flush_all_requests(size_t warps) {
  for (size_t warp = 0; warp < warps; warp++) flush_requests(int(warp));
}

void forget_requests() {
  logs.clear();
  in_use.clear();
}

}  // namespace sim
