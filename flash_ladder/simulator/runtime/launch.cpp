// A kernel launch: the blocks of the grid, shared out over the CPU's cores. Unlike on a GPU it has finished
// when it returns. An error ends the launch and stays pending, as in CUDA, until cudaGetLastError reads it;
// later launches do nothing.
#include "checker.h"
#include "cluster.h"
#include "guard.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <numeric>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <unordered_map>

namespace sim {

static thread_local cudaError_t pending = cudaSuccess;
static thread_local std::string report;                        // of the last error of this thread
static thread_local bool reported;                             // that error is of the call under way
std::mutex launch_mutex;                                       // guards what follows
static std::unordered_map<const void*, int> opted_in_shared;   // cudaFuncSetAttribute, by kernel
static std::vector<Worker*> idle_workers;                      // kept for their stacks
constexpr size_t MOST_IDLE_STACKS = 4096, MOST_STACKS = 16384; // two mappings each, of 65530 a process has
constexpr size_t MOST_BLOCKS_OF_A_CLUSTER = 8;                 // on every GPU that has clusters
static const size_t PAGE = sysconf(_SC_PAGESIZE);
static const size_t STACK_PITCH = (STACK_BYTES + GUARD_BYTES + PAGE - 1) / PAGE * PAGE;

static void set_error(cudaError_t error, const std::string& text) {
  pending = error;
  report = text;
  reported = true;
}

void explain_error(const std::string& text) {
  report = text;
  reported = true;
}

// -------------------------------------------------------------------------------- workers
static char* map_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

static Worker* take_worker(const Launch& launch) {
  std::lock_guard<std::mutex> lock(launch_mutex);
  Worker* w = idle_workers.empty() ? new Worker : idle_workers.back();
  if (!idle_workers.empty()) idle_workers.pop_back();
  const auto allowed = opted_in_shared.find(launch.kernel);
  w->opted_in = allowed != opted_in_shared.end() && size_t(allowed->second) >= launch.dynamic_shared;
  return w;
}

static void unmap_stacks(Worker& w) {
  if (w.stacks) munmap(w.stacks, w.stack_count * STACK_PITCH);
  w.stack_count = 0;
  w.stacks = nullptr;
}

static void give_back(Worker* w) {       // the mutex is held
  w->shadow.reset();
  w->engines.reset();
  w->cluster.reset();
  size_t stacks = w->stack_count;
  for (const Worker* idle : idle_workers) stacks += idle->stack_count;
  if (stacks > MOST_IDLE_STACKS) unmap_stacks(*w);
  idle_workers.push_back(w);
}

// Of the order of threads and blocks; 0: blocks by their numbers, threads first come, first served
static uint64_t random_seed() {
  const char* seed = getenv("FLASH_SIM_SEED");
  return seed && *seed ? (strtoull(seed, nullptr, 10) + 1) * 0x9E3779B97F4A7C15ull : 0;
}

static void prepare(Worker& w, const Launch& launch, size_t threads) {
  const size_t shared_pages = (SHARED_MEMORY_PER_BLOCK + PAGE - 1) / PAGE * PAGE;
  if (!w.shared) {                       // between two guards
    char* p = map_memory(ARENA_BYTES + 2 * GUARD_BYTES);
    mprotect(p, GUARD_BYTES, PROT_NONE);
    mprotect(p + GUARD_BYTES + ARENA_BYTES, GUARD_BYTES, PROT_NONE);
    w.shared = p + GUARD_BYTES;
    w.shared_top = SHARED_MEMORY_PER_BLOCK;
  }
  if (!launch.checked) w.shared_top = std::min(w.shared_top, SHARED_MEMORY_PER_BLOCK);
  mprotect(w.shared + shared_pages, ARENA_BYTES - shared_pages,
           launch.checked ? PROT_READ | PROT_WRITE : PROT_NONE);
  if (threads > w.stack_count) {         // each stack above such a guard
    unmap_stacks(w);
    w.stacks = map_memory(threads * STACK_PITCH);
    for (size_t i = 0; i < threads; i++) mprotect(w.stacks + i * STACK_PITCH, GUARD_BYTES, PROT_NONE);
    w.stack_count = threads;
  }
  w.fibers.assign(threads, {});
  w.warps.resize((threads + WARP_SIZE - 1) / WARP_SIZE);
  for (size_t i = 0; i < threads; i++) {
    Fiber& f = w.fibers[i];
    f.stack = w.stacks + i * STACK_PITCH + GUARD_BYTES;
    f.number = int(i);
    f.warp = f.number / WARP_SIZE;
    f.lane = f.number % WARP_SIZE;
  }
  w.seed = random_seed();
  w.copies_land = *when_copies_land();
  w.launch = &launch;
  w.error.clear();
  w.error_sites.clear();
  w.error_is_found = false;
}

// -------------------------------------------------------------------------------- blocks
// Of blocks that may wait for one another: as many as a multiprocessor of an H100 holds
static size_t stretch_of(size_t threads) { return std::min(size_t(32), 2048 / threads); }

// Blocks start in the order of their numbers; with a seed, within stretches, in another one. In
// either, a block that waits for those of lower numbers comes to its end.
static size_t nth_block(size_t n, size_t blocks, size_t stretch, uint64_t seed) {
  if (!seed) return n;
  const size_t first = n / stretch * stretch;
  std::vector<size_t> order(std::min(stretch, blocks - first));
  std::iota(order.begin(), order.end(), first);
  uint64_t random = seed ^ (first + 1) * 0xD6E8FEB86659FD93ull;
  for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[next_random(random) % i]);
  return order[n - first];
}

static size_t volume(dim3 d) { return size_t(d.x) * d.y * d.z; }

static void run_grid(const Launch& launch, size_t threads, size_t blocks, double seconds) {
  const char* limit = getenv("FLASH_SIM_THREADS");
  size_t count = limit ? size_t(std::max(1, atoi(limit))) : std::max(1u, std::thread::hardware_concurrency());
  count = launch.checked ? 1 : std::min(count, blocks);   // the checker keeps one book
  const size_t stretch = stretch_of(threads);
  // So many run by turns on an OS thread where they wait for others; a stretch, or more, on all of them
  const size_t most = std::max(size_t(1), std::min(stretch, MOST_STACKS / threads / count));
  std::atomic<size_t> next_block{0};
  std::atomic<bool> failed{false};
  std::string first_error;
  auto finish = [&](Worker* w, Worker* outer, const std::vector<Worker*>& all) {
    if (interrupted() && w->error.empty())
      w->error = std::string("kernel ") + launch.name + ": " + why_interrupted();
    if (launch.checked && !w->error.empty()) error_found(*w);
    worker = outer;
    std::lock_guard<std::mutex> lock(launch_mutex);
    if (!w->error.empty()) {
      failed = true;                     // the other OS threads end the block that they are at
      if (first_error.empty()) first_error = w->error;
    }
    for (Worker* each : all) give_back(each);
  };
  const std::string too_little = std::string("kernel ") + launch.name + ": not enough memory to simulate a " +
                                 "block of " + std::to_string(threads) + " threads";
  auto work = [&] {
    RunningThread running_thread(seconds);
    Worker* const outer = worker;
    Worker* w = worker = take_worker(launch);
    std::vector<Worker*> idle;           // others, without a block
    std::deque<Worker*> under_way;       // whose blocks wait for other blocks
    try {
      prepare(*w, launch, threads);
      while (w->error.empty()) {
        const size_t n = under_way.size() < most && !failed && !interrupted() ? next_block++ : blocks;
        if (n < blocks) {
          begin_block(*w, nth_block(n, blocks, stretch, w->seed));
        } else {
          if (under_way.empty() || failed) break;
          idle.push_back(w);
          w = worker = under_way.front();
          under_way.pop_front();
        }
        if (continue_block(*w)) continue;
        if (idle.empty()) {
          idle.push_back(take_worker(launch));
          prepare(*idle.back(), launch, threads);
        }
        under_way.push_back(w);
        w = worker = idle.back();
        idle.pop_back();
      }
    } catch (const std::bad_alloc&) {
      w->error = too_little;
    }
    idle.push_back(w);
    idle.insert(idle.end(), under_way.begin(), under_way.end());
    finish(w, outer, idle);
  };
  const size_t together = volume(launch.cluster);
  auto work_on_clusters = [&] {
    RunningThread running_thread(seconds);
    Worker* const outer = worker;
    std::vector<Worker*> all(together);
    for (Worker*& w : all) w = take_worker(launch);
    Worker* w = worker = all[0];
    try {
      for (Worker* each : all) prepare(*each, launch, threads);
      while (w->error.empty() && !failed && !interrupted()) {
        const size_t n = next_block++;
        if (n >= blocks / together) break;
        begin_cluster(all, n);
        run_cluster(all);
        for (Worker* each : all)
          if (!each->error.empty()) w = each;
      }
    } catch (const std::bad_alloc&) {
      w->error = too_little;
    }
    worker = w;
    finish(w, outer, all);
  };
  if (launch.checked) begin_checked_launch(launch);
  auto do_it = [&] { together > 1 ? work_on_clusters() : work(); };
  std::vector<std::thread> others;
  try {
    for (size_t i = 1; i < count; i++) others.emplace_back(do_it);
  } catch (const std::system_error&) {   // no more threads to be had: the blocks wait for those there are
  }
  do_it();
  for (std::thread& t : others) t.join();
  if (!first_error.empty()) set_error(cudaErrorLaunchFailure, first_error);
}

static std::string wrong_configuration(const Launch& l, size_t threads, size_t blocks) {
  if (!threads || threads > MOST_THREADS)
    return std::to_string(threads) + " threads a block; 1 to " + std::to_string(MOST_THREADS) +
           " are possible";
  if (l.block.z > 64)
    return "a block of " + std::to_string(l.block.z) + " threads in z; at most 64 are possible";
  if (!blocks) return "a grid without blocks";
  if (l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    return "a grid of " + std::to_string(l.grid.x) + " x " + std::to_string(l.grid.y) + " x " +
           std::to_string(l.grid.z) + " blocks; at most 2147483647 x 65535 x 65535 are possible";
  if (!volume(l.cluster) || volume(l.cluster) > MOST_BLOCKS_OF_A_CLUSTER || l.grid.x % l.cluster.x ||
      l.grid.y % l.cluster.y || l.grid.z % l.cluster.z)
    return "clusters of " + std::to_string(l.cluster.x) + " x " + std::to_string(l.cluster.y) + " x " +
           std::to_string(l.cluster.z) + " blocks; " + std::to_string(MOST_BLOCKS_OF_A_CLUSTER) +
           " are possible, and the grid must be a multiple";
  if (!when_copies_land())
    return std::string("FLASH_SIM_COPIES=") + getenv("FLASH_SIM_COPIES") +
           "; late, early and random are possible";
  if (!seconds_allowed())
    return std::string("FLASH_SIM_SECONDS=") + getenv("FLASH_SIM_SECONDS") +
           "; a number of seconds, more than 0, is possible";
  const std::string bytes = std::to_string(l.dynamic_shared) + " bytes of shared memory a block";
  if (l.dynamic_shared > SHARED_MEMORY_PER_BLOCK)
    return bytes + "; at most " + std::to_string(SHARED_MEMORY_PER_BLOCK) + " are possible";
  std::lock_guard<std::mutex> lock(launch_mutex);
  const auto allowed = opted_in_shared.find(l.kernel);
  if (l.dynamic_shared > SHARED_MEMORY_DEFAULT &&
      (allowed == opted_in_shared.end() || size_t(allowed->second) < l.dynamic_shared))
    return bytes + "; above " + std::to_string(SHARED_MEMORY_DEFAULT) +
           " they must first be allowed with cudaFuncSetAttribute(kernel, "
           "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)";
  return "";
}

extern "C" void sim_launch(const Launch* requested) {
  give_context();
  if (pending != cudaSuccess) return;
  Launch copy = *requested;
  const Launch* launch = &copy;
  std::unique_lock<std::mutex> alone(checker_mutex, std::defer_lock);
  if (copy.checked) alone.lock();
  copy.checked &= checker != nullptr;
  if (!copy.checked) alone = {};
  const size_t threads = size_t(launch->block.x) * launch->block.y * launch->block.z;
  const size_t blocks = size_t(launch->grid.x) * launch->grid.y * launch->grid.z;
  const std::string wrong = wrong_configuration(*launch, threads, blocks);
  if (!wrong.empty())
    return set_error(cudaErrorInvalidConfiguration,
                     std::string("kernel ") + launch->name + at(launch->site) + ": launched with " + wrong);
  Guard guard;
  if (host_call) host_call->launches++;
  run_grid(*launch, threads, blocks, *seconds_allowed());
  if (host_call) host_call->launches--;
  fflush(stdout);                        // what kernels printed
}

extern "C" cudaError_t sim_set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > SHARED_MEMORY_PER_BLOCK) {
    set_error(cudaErrorInvalidValue, "cudaFuncSetAttribute: " + std::to_string(value) +
                                         " bytes of shared memory a block; at most " +
                                         std::to_string(SHARED_MEMORY_PER_BLOCK) + " are possible");
    return cudaErrorInvalidValue;
  }
  std::lock_guard<std::mutex> lock(launch_mutex);
  opted_in_shared[kernel] = value;
  return cudaSuccess;
}

// In a kernel it ends the launch. On the host the code after it goes on, but no later kernel is launched.
extern "C" void sim_assert_failed(const char* condition, const char* file, int line) {
  const std::string message = std::string("assertion failed: ") + condition;
  if (worker) fail(message, {file, line});
  if (pending != cudaSuccess) return;
  set_error(cudaErrorLaunchFailure, "host code" + at({file, line}) + ": " + message);
}

extern "C" cudaError_t sim_peek_error() { return pending; }

extern "C" cudaError_t sim_take_error() {
  const cudaError_t error = pending;
  if (error == cudaSuccess) reported = false;
  pending = cudaSuccess;
  return error;
}

extern "C" const char* sim_error_text(cudaError_t error) {
  if (error == cudaSuccess) return "no error";
  if (!reported)
    report = "launch() returned error " + std::to_string(error) +
             ", which no kernel and no call of CUDA's gave it";
  return report.c_str();
}

}  // namespace sim
