// A kernel launch: the blocks of the grid, shared out over the CPU's cores. Unlike on a GPU it has finished
// when it returns. An error ends the launch and stays pending, as in CUDA, until cudaGetLastError reads it;
// later launches do nothing.
#include "checker.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <execinfo.h>
#include <mutex>
#include <new>
#include <sys/mman.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <unordered_map>

namespace sim {

static thread_local cudaError_t pending = cudaSuccess;
static thread_local std::string report;                        // of the last error of this thread
static thread_local bool reported;                             // that error is of the call under way
static std::mutex mutex;                                       // guards what follows
static std::unordered_map<const void*, int> opted_in_shared;   // cudaFuncSetAttribute, by kernel
static std::vector<Worker*> idle_workers;                      // kept for their stacks
static int running_launches = 0;
static std::atomic<pthread_t> running_threads[256];            // read by the signal handler; 0: free
static std::atomic<bool> stop_requested;                       // Ctrl-C

bool interrupted() { return stop_requested.load(std::memory_order_relaxed); }

static void set_error(cudaError_t error, const std::string& text) {
  pending = error;
  report = text;
  reported = true;
}

// -------------------------------------------------------------------------------- signals
// A wild pointer in a kernel must not end the reader's Python, and Ctrl-C must end an endless loop in a
// kernel. While a launch runs, the signals of both come here, and the fiber that they hit is abandoned like
// one that failed.
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGINT};
static struct sigaction previous[4];

static const void* program_counter(void* context) {
  auto* c = static_cast<ucontext_t*>(context);
#if defined(__APPLE__) && defined(__x86_64__)
  return reinterpret_cast<void*>(c->uc_mcontext->__ss.__rip);
#elif defined(__APPLE__)
  return reinterpret_cast<void*>(c->uc_mcontext->__ss.__pc);
#elif defined(__x86_64__)
  return reinterpret_cast<void*>(c->uc_mcontext.gregs[REG_RIP]);
#else
  return reinterpret_cast<void*>(c->uc_mcontext.pc);
#endif
}

// "@library+offset@": Python turns it into file and line
std::string source_line(const void* pc) {
  Dl_info info;
  if (!dladdr(pc, &info) || !info.dli_fname) return "";
  char text[32];
  snprintf(text, sizeof text, "+0x%zx@",
           size_t(static_cast<const char*>(pc) - static_cast<char*>(info.dli_fbase)));
  return std::string(" at @") + info.dli_fname + text;
}

static bool in_library_of(const void* function, const void* pc) {
  Dl_info here, there;
  return dladdr(pc, &here) && dladdr(function, &there) && here.dli_fbase == there.dli_fbase;
}

// May a fiber be abandoned at pc? Not in the C library, say, where it may hold a lock.
static bool in_kernel_code(const void* pc) {
  const auto math = reinterpret_cast<const void*>(static_cast<float (*)(float)>(expf));
  return worker && worker->current && (in_library_of(worker->launch->kernel, pc) || in_library_of(math, pc));
}

// The place in the kernel that a fault at pc is to be reported at: pc, or the call that led to it, of an
// atomic for example.
static const void* place_in_kernel(const void* pc) {
  if (in_library_of(worker->launch->kernel, pc)) return pc;
  void* callers[64];
  const int count = backtrace(callers, 64);
  for (int i = 0; i < count; i++) {
    const char* call = static_cast<char*>(callers[i]) - 1;      // these are return addresses
    if (in_library_of(worker->launch->kernel, call)) return call;
  }
  return pc;
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  const void* pc = program_counter(context);
  if (signal == SIGINT) {
    const bool first = !stop_requested.exchange(true);
#ifdef SI_TKILL
    const bool passed_on = info->si_code == SI_TKILL;   // by pthread_kill; another Ctrl-C is passed on anew
#else
    const bool passed_on = !first;
#endif
    if (first || !passed_on)
      for (const auto& slot : running_threads)
        if (pthread_t thread = slot; thread && !pthread_equal(thread, pthread_self()))
          pthread_kill(thread, SIGINT);
    if (in_kernel_code(pc)) abandon_block(describe(*worker) + source_line(pc) + ": interrupted");
    return;                                    // elsewhere: at the fiber's next wait
  }
  if (!worker || !worker->current) {           // not a kernel's fault: to whom it belonged before
    for (int i = 0; i < 4; i++)
      if (SIGNALS[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;
  }
  const auto* address = static_cast<const char*>(info->si_addr);
  char text[200];
  if (signal == SIGFPE) {
    snprintf(text, sizeof text, "integer division by zero");
  } else {
    const char* stack = worker->current->stack;
    const bool overflow = address < stack && address >= stack - GUARD_BYTES;
    if (overflow)
      snprintf(text, sizeof text, "stack overflow: local arrays take more than %zu KB a thread",
               STACK_BYTES / KB);
#ifdef SI_KERNEL   // x86: the address is not known then
    else if (info->si_code == SI_KERNEL)
      snprintf(text, sizeof text, "access to an address that is no memory, or not as aligned as its type: "
                                  "an index out of bounds?");
#endif
    else
      snprintf(text, sizeof text, "access to address %p, which is no memory: an index out of bounds?",
               info->si_addr);
  }
  abandon_block(describe(*worker) + source_line(place_in_kernel(pc)) + ": " + text);
}

static void catch_signals() {
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;   // NODEFER: the handler is left without returning
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &action, &previous[i]);
}

static void release_signals() {
  for (int i = 0; i < 4; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
  if (stop_requested.exchange(false)) raise(SIGINT);        // for Python, which raises KeyboardInterrupt
}

// A handler cannot run on a stack that has overflowed, so each OS thread lends it another one.
struct SignalStack {
  std::vector<char> bytes = std::vector<char>(64 * KB);
  stack_t before{};
  SignalStack() {
    stack_t s{};
    s.ss_sp = bytes.data();
    s.ss_size = bytes.size();
    sigaltstack(&s, &before);
  }
  ~SignalStack() { sigaltstack(&before, nullptr); }
};

// While it exists, Ctrl-C is passed on to this OS thread. (From the 257th thread on it is not.)
struct RunningThread {
  std::atomic<pthread_t>* mine = nullptr;
  RunningThread() {
    for (auto& slot : running_threads)
      if (pthread_t free{}; slot.compare_exchange_strong(free, pthread_self())) {
        mine = &slot;
        return;
      }
  }
  ~RunningThread() {
    if (mine) *mine = pthread_t{};
  }
};

// -------------------------------------------------------------------------------- workers
static char* map_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  return static_cast<char*>(p);
}

static void prepare(Worker& w, const Launch& launch, size_t threads) {
  const size_t page = sysconf(_SC_PAGESIZE);
  const size_t shared_pages = (SHARED_MEMORY_PER_BLOCK + page - 1) / page * page;
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
  constexpr size_t pitch = STACK_BYTES + GUARD_BYTES;
  if (threads > w.stack_count) {         // each stack above such a guard
    if (w.stacks) munmap(w.stacks, w.stack_count * pitch);
    w.stack_count = 0;
    w.stacks = nullptr;
    w.stacks = map_memory(threads * pitch);
    for (size_t i = 0; i < threads; i++) mprotect(w.stacks + i * pitch, GUARD_BYTES, PROT_NONE);
    w.stack_count = threads;
  }
  w.fibers.assign(threads, {});
  w.warps.resize((threads + WARP_SIZE - 1) / WARP_SIZE);
  for (size_t i = 0; i < threads; i++) {
    Fiber& f = w.fibers[i];
    f.stack = w.stacks + i * pitch + GUARD_BYTES;
    f.number = int(i);
    f.warp = f.number / WARP_SIZE;
    f.lane = f.number % WARP_SIZE;
  }
  const char* seed = getenv("FLASH_SIM_SEED");
  w.seed = seed && *seed ? (strtoull(seed, nullptr, 10) + 1) * 0x9E3779B97F4A7C15ull : 0;
  w.copies_land = *when_copies_land();
  w.launch = &launch;
  w.error.clear();
  w.error_sites.clear();
  w.error_is_found = false;
}

static void run_grid(const Launch& launch, size_t threads, size_t blocks) {
  std::atomic<size_t> next_block{0};
  std::string first_error;
  auto work = [&] {
    SignalStack signal_stack;
    Worker* w;
    {
      std::lock_guard<std::mutex> lock(mutex);
      w = idle_workers.empty() ? new Worker : idle_workers.back();
      if (!idle_workers.empty()) idle_workers.pop_back();
      const auto allowed = opted_in_shared.find(launch.kernel);
      w->opted_in = allowed != opted_in_shared.end() && size_t(allowed->second) >= launch.dynamic_shared;
    }
    RunningThread running_thread;
    Worker* outer = worker;
    worker = w;
    try {
      prepare(*w, launch, threads);
      if (launch.checked) begin_checked_launch(*w);
      for (size_t i; w->error.empty() && !interrupted() && (i = next_block++) < blocks;)
        run_block(*w, {unsigned(i % launch.grid.x), unsigned(i / launch.grid.x % launch.grid.y),
                       unsigned(i / launch.grid.x / launch.grid.y)});
    } catch (const std::bad_alloc&) {
      w->error = std::string("kernel ") + launch.name + ": not enough memory to simulate a block of " +
                 std::to_string(threads) + " threads";
    }
    if (launch.checked && !w->error.empty()) error_found(*w);
    worker = outer;
    std::lock_guard<std::mutex> lock(mutex);
    if (!w->error.empty()) {
      next_block = blocks;               // the other workers end their block and stop
      if (first_error.empty()) first_error = w->error;
    }
    idle_workers.push_back(w);
  };
  const char* limit = getenv("FLASH_SIM_THREADS");
  size_t count = limit ? size_t(std::max(1, atoi(limit))) : std::max(1u, std::thread::hardware_concurrency());
  count = launch.checked ? 1 : std::min(count, blocks);   // the checker keeps one book
  std::vector<std::thread> others;
  try {
    for (size_t i = 1; i < count; i++) others.emplace_back(work);
  } catch (const std::system_error&) {   // no more threads to be had: the blocks wait for those there are
  }
  work();
  for (std::thread& t : others) t.join();
  if (first_error.empty() && interrupted())
    first_error = std::string("kernel ") + launch.name + ": interrupted";
  if (!first_error.empty()) set_error(cudaErrorLaunchFailure, first_error);
}

static std::string wrong_configuration(const Launch& l, size_t threads, size_t blocks) {
  if (!threads || threads > 1024) return std::to_string(threads) + " threads a block; 1 to 1024 are possible";
  if (l.block.z > 64)
    return "a block of " + std::to_string(l.block.z) + " threads in z; at most 64 are possible";
  if (!blocks) return "a grid without blocks";
  if (l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    return "a grid of " + std::to_string(l.grid.x) + " x " + std::to_string(l.grid.y) + " x " +
           std::to_string(l.grid.z) + " blocks; at most 2147483647 x 65535 x 65535 are possible";
  if (!when_copies_land())
    return std::string("FLASH_SIM_COPIES=") + getenv("FLASH_SIM_COPIES") +
           "; late, early and random are possible";
  const std::string bytes = std::to_string(l.dynamic_shared) + " bytes of shared memory a block";
  if (l.dynamic_shared > SHARED_MEMORY_PER_BLOCK)
    return bytes + "; at most " + std::to_string(SHARED_MEMORY_PER_BLOCK) + " are possible";
  std::lock_guard<std::mutex> lock(mutex);
  const auto allowed = opted_in_shared.find(l.kernel);
  if (l.dynamic_shared > SHARED_MEMORY_DEFAULT &&
      (allowed == opted_in_shared.end() || size_t(allowed->second) < l.dynamic_shared))
    return bytes + "; above " + std::to_string(SHARED_MEMORY_DEFAULT) +
           " they must first be allowed with cudaFuncSetAttribute(kernel, "
           "cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)";
  return "";
}

extern "C" void sim_launch(const Launch* requested) {
  if (pending != cudaSuccess) return;
  Launch copy = *requested;
  const Launch* launch = &copy;
  std::unique_lock<std::mutex> alone(checker_mutex, std::defer_lock);
  if (copy.checked) alone.lock();
  copy.checked &= checker != nullptr;
  const size_t threads = size_t(launch->block.x) * launch->block.y * launch->block.z;
  const size_t blocks = size_t(launch->grid.x) * launch->grid.y * launch->grid.z;
  const std::string wrong = wrong_configuration(*launch, threads, blocks);
  if (!wrong.empty())
    return set_error(cudaErrorInvalidConfiguration,
                     std::string("kernel ") + launch->name + at(launch->site) + ": launched with " + wrong);
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (running_launches++ == 0) catch_signals();
  }
  run_grid(*launch, threads, blocks);
  fflush(stdout);                        // what kernels printed
  std::lock_guard<std::mutex> lock(mutex);
  if (--running_launches == 0) release_signals();
}

extern "C" cudaError_t sim_set_attribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || size_t(value) > SHARED_MEMORY_PER_BLOCK) {
    set_error(cudaErrorInvalidValue, "cudaFuncSetAttribute: " + std::to_string(value) +
                                         " bytes of shared memory a block; at most " +
                                         std::to_string(SHARED_MEMORY_PER_BLOCK) + " are possible");
    return cudaErrorInvalidValue;
  }
  std::lock_guard<std::mutex> lock(mutex);
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
