// Faults and interruption: nothing that a stage's code does may end the reader's Python. While a Guard
// exists, faults, Ctrl-C and the time limit come here. What they hit is abandoned: a fiber like one that
// failed, and host code (guard.cpp) by a jump back to where Python called it.
#include "checker.h"
#include "guard.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <mutex>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace sim {

// SIGURG: the ticks below. Nobody is harmed by one that comes late: by default it is ignored.
constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGINT, SIGURG};
constexpr int SIGNAL_COUNT = sizeof SIGNALS / sizeof *SIGNALS;
constexpr int TICK_MS = 2;
static struct sigaction previous[SIGNAL_COUNT];

static std::mutex mutex;                                // guards what follows
static int guards = 0;
static std::vector<RunningThread*> running;
static bool ticking = false;
static rlimit memory_limit;                             // as it was

static int wake_ticker[2] = {-1, -1};                   // a pipe
static std::atomic<bool> stop_requested;                // Ctrl-C
std::atomic<bool> somebody_is_interrupted;              // this, or a time limit
static SIM_THREAD_LOCAL RunningThread* this_thread;
static SIM_THREAD_LOCAL int own_guards;                 // of `guards`, this thread's

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

bool this_thread_is_interrupted() { return stop_requested || (this_thread && this_thread->overdue); }

std::string why_interrupted() {
  if (!this_thread || !this_thread->overdue) return "interrupted";
  char text[80];
  snprintf(text, sizeof text, "ran longer than %g s (FLASH_SIM_SECONDS)", this_thread->seconds);
  return text;
}

// -------------------------------------------------------------------------------- places in the source
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

static const char* stack_pointer(void* context) {
  auto* c = static_cast<ucontext_t*>(context);
#if defined(__APPLE__) && defined(__x86_64__)
  return reinterpret_cast<char*>(c->uc_mcontext->__ss.__rsp);
#elif defined(__APPLE__)
  return reinterpret_cast<char*>(c->uc_mcontext->__ss.__sp);
#elif defined(__x86_64__)
  return reinterpret_cast<char*>(c->uc_mcontext.gregs[REG_RSP]);
#else
  return reinterpret_cast<char*>(c->uc_mcontext.sp);
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

// The stage's code under way in this OS thread: a kernel, or host code; null in the simulator's own
static const void* code_under_way() {
  if (worker && worker->current) return worker->launch->kernel;
  return host_call && !host_call->launches ? host_call->code : nullptr;
}

// May it be abandoned at pc? Not in the C library, say, where it may hold a lock.
static bool in_stage_code(const void* pc) {
  const auto math = reinterpret_cast<const void*>(static_cast<float (*)(float)>(expf));
  const void* code = code_under_way();
  return code && (in_library_of(code, pc) || in_library_of(math, pc));
}

// The place in the stage that a fault at pc is to be reported at: pc, or the call that led to it, of an
// atomic for example. Null if it is not to be found.
static const void* place_in_stage(const void* pc, const char* stack) {
  static SIM_THREAD_LOCAL bool looking_back;
  const void* code = code_under_way();
  if (in_library_of(code, pc)) return pc;
  Dl_info info;
  if (!dladdr(pc, &info)) {                    // a jump to nowhere: the return address lies on the stack
    const auto* call = *reinterpret_cast<char* const*>(stack) - 1;
    return in_library_of(code, call) ? call : nullptr;
  }
  if (looking_back) {                          // the fault is backtrace's own: the stack is overwritten
    looking_back = false;
    return nullptr;
  }
  looking_back = true;
  void* callers[64];
  const int count = backtrace(callers, 64);
  looking_back = false;
  for (int i = 0; i < count; i++) {
    const char* call = static_cast<char*>(callers[i]) - 1;      // these are return addresses
    if (in_library_of(code, call)) return call;
  }
  return pc;
}

// A handler that abandons what it hit does not return, and leaves interruptions blocked.
void admit_interruptions() { pthread_sigmask(SIG_SETMASK, &this_thread->mask, nullptr); }

[[noreturn]] static void abandon(const void* pc, const std::string& what) {
  if (worker && worker->current) abandon_block(describe(*worker) + source_line(pc) + ": " + what);
  leave_host_call(source_line(pc) + ": " + what);
}

// Has every tick for some time found this thread in a system call, such as sleep? No lock is held so long.
static bool waits_in_the_system(const void* pc) {
#if defined(__x86_64__)
  const bool called = !memcmp(static_cast<const char*>(pc) - 2, "\x0f\x05", 2);           // syscall
#else
  const bool called = !memcmp(static_cast<const char*>(pc) - 4, "\x01\x00\x00\xd4", 4);   // svc #0
#endif
  RunningThread& t = *this_thread;
  t.ticks_in_the_system = called ? t.ticks_in_the_system + 1 : 0;
  if (t.ticks_in_the_system == 1) t.in_the_system_since = now();
  return t.ticks_in_the_system * TICK_MS > 200 && now() - t.in_the_system_since > 0.2;
}

// -------------------------------------------------------------------------------- the handler
static std::string fault(int signal, siginfo_t* info, void* context) {
  const auto* address = static_cast<const char*>(info->si_addr);
  switch (signal) {
    case SIGFPE: return "integer division by zero";
    case SIGILL: return "an illegal instruction: a division by zero that the compiler has seen, or a trap";
    case SIGTRAP: return "a trap";
    case SIGABRT: return "abort() was called, or the C library called it: memory of the host overwritten?";
  }
  if (worker && worker->current) {
    const char* stack = worker->current->stack;
    if (address < stack && address >= stack - GUARD_BYTES)
      return "stack overflow: local arrays take more than " + std::to_string(LOCAL_BYTES / KB) +
             " KB a thread";
  } else if (std::abs(address - stack_pointer(context)) < long(GUARD_BYTES)) {
    return "stack overflow: a recursion without an end?";
  }
#ifdef SI_KERNEL   // x86: the address is not known then
  if (info->si_code == SI_KERNEL)
    return "access to an address that is no memory, or not as aligned as its type: an index out of bounds?";
#endif
  char text[100];
  snprintf(text, sizeof text, "access to address %p, which is no memory: an index out of bounds?",
           info->si_addr);
  return text;
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  const void* pc = program_counter(context);
  if (signal == SIGINT || signal == SIGURG) {
    if (signal == SIGINT) {
      stop_requested = somebody_is_interrupted = true;
      [[maybe_unused]] const ssize_t written = write(wake_ticker[1], "", 1);
    } else if (this_thread && this_thread->deadline && now() >= this_thread->deadline) {
      this_thread->overdue = somebody_is_interrupted = true;
    }
    if (interrupted() && code_under_way() && (in_stage_code(pc) || waits_in_the_system(pc)))
      abandon(place_in_stage(pc, stack_pointer(context)), why_interrupted());
    return;                                    // elsewhere: at the fiber's next wait, or at another tick
  }
  if (!code_under_way()) {                     // not a stage's fault: to whom it belonged before
    for (int i = 0; i < SIGNAL_COUNT; i++)
      if (SIGNALS[i] == signal) sigaction(signal, &previous[i], nullptr);
    return;
  }
  make_room();                                 // want of memory may have led here; a message takes some, too
  abandon(place_in_stage(pc, stack_pointer(context)), fault(signal, info, context));
}

// -------------------------------------------------------------------------------- the ticker
// A signal finds a thread where it may not be abandoned, say in malloc, and a loop may call malloc for ever.
// So a thread of its own sends signals, until they have stopped all that are to stop; and it looks at the
// clock for those that have a time limit. It sleeps while there is nothing of the kind.
static int milliseconds_to_wait() {
  std::lock_guard<std::mutex> lock(mutex);
  double wait = INFINITY;
  for (RunningThread* thread : running) {
    if (stop_requested || (thread->deadline && now() >= thread->deadline)) {
      pthread_kill(thread->thread, SIGURG);
      wait = std::min(wait, double(TICK_MS));
    } else if (thread->deadline) {
      wait = std::min(wait, 1000 * (thread->deadline - now()) + 1);
    }
  }
  return std::isinf(wait) ? -1 : int(std::min(wait, 1e6));
}

static void tick() {
  for (;;) {
    pollfd wake{wake_ticker[0], POLLIN, 0};
    char bytes[64];
    if (poll(&wake, 1, milliseconds_to_wait()) > 0)
      [[maybe_unused]] const ssize_t count = read(wake_ticker[0], bytes, sizeof bytes);
  }
}

static void start_ticker() {                   // once in a process. The mutex is held
  if (ticking) return;
  ticking = true;
  if (pipe(wake_ticker)) return;               // without it, Ctrl-C waits for the end of calls of malloc
  for (int end : wake_ticker) {
    fcntl(end, F_SETFL, O_NONBLOCK);
    fcntl(end, F_SETFD, FD_CLOEXEC);
  }
  sigset_t all, before;                        // signals are for the other threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread(tick).detach();
  } catch (const std::system_error&) {         // no more threads to be had
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// -------------------------------------------------------------------------------- memory
// An allocation without an end must fail before the machine is out of memory: the process may grow by so much
// while a stage runs, under the checker by all that there is.
static size_t room() {
  if (checker) return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE));
  const char* threads = getenv("FLASH_SIM_THREADS");
  const size_t count = std::max(threads ? atoi(threads) : 1, int(std::thread::hardware_concurrency()));
  return (size_t(4) << 30) + count * (size_t(512) << 20);
}

static void allow_to_grow(size_t bytes, rlim_t at_least = 0) {
  const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);       // no stdio: handlers come here, too
  char text[32] = "";
  const ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
  if (file >= 0) close(file);
  if (length <= 0) return;                     // macOS: no limit
  rlimit limit = memory_limit;
  const rlim_t most = strtoull(text, nullptr, 10) * sysconf(_SC_PAGESIZE) + bytes;
  limit.rlim_cur = std::min(limit.rlim_cur, std::max(most, at_least));
  setrlimit(RLIMIT_AS, &limit);
}

void make_room() {                             // none is taken away: other calls may be under way
  rlimit now;
  getrlimit(RLIMIT_AS, &now);
  allow_to_grow(size_t(64) << 20, now.rlim_cur);
}

// -------------------------------------------------------------------------------- guards
Guard::Guard() {
  std::lock_guard<std::mutex> lock(mutex);
  own_guards++;
  if (guards++) return;
  start_ticker();
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  sigemptyset(&action.sa_mask);                // interruptions wait for the end of a handler: however fast
  sigaddset(&action.sa_mask, SIGINT);          // they come, its stack has room
  sigaddset(&action.sa_mask, SIGURG);
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER | SA_RESTART;   // NODEFER: left without returning
  for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &action, &previous[i]);
  getrlimit(RLIMIT_AS, &memory_limit);
  allow_to_grow(room());
}

static void restore() {
  setrlimit(RLIMIT_AS, &memory_limit);
  for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &previous[i], nullptr);
  somebody_is_interrupted = false;
}

Guard::~Guard() {
  std::lock_guard<std::mutex> lock(mutex);
  own_guards--;
  if (--guards) return;
  restore();
  if (stop_requested.exchange(false)) raise(SIGINT);        // for Python, which raises KeyboardInterrupt
}

// A handler cannot run on a stack that has overflowed, so each OS thread lends it another one.
RunningThread::RunningThread(double seconds) : seconds(seconds), thread(pthread_self()), outer(this_thread) {
  stack_t s{};
  s.ss_sp = signal_stack.get();
  s.ss_size = SIGNAL_STACK_BYTES;
  sigaltstack(&s, &before);
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  this_thread = this;
  std::lock_guard<std::mutex> lock(mutex);
  if (seconds > 0) deadline = now() + seconds;
  if (outer) outer->deadline = 0;
  running.push_back(this);
  if (deadline || stop_requested) [[maybe_unused]] const ssize_t written = write(wake_ticker[1], "", 1);
}

RunningThread::~RunningThread() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& thread : running)
      if (thread == this) {
        thread = running.back();
        running.pop_back();
        break;
      }
    if (outer && outer->seconds > 0) outer->deadline = now() + outer->seconds;
  }
  this_thread = outer;
  sigaltstack(&before, nullptr);
}

// -------------------------------------------------------------------------------- forks
// The child has only the thread that forks. No other one may hold a mutex then, so a fork waits for the end
// of a kernel that another one inspects. What the others ran is not the child's.
static bool inspects() { return worker && worker->launch->checked; }   // and holds the checker's mutex

static void before_fork() {
  if (!inspects()) checker_mutex.lock();
  launch_mutex.lock();
  mutex.lock();
}

static void after_fork() {
  mutex.unlock();
  launch_mutex.unlock();
  if (!inspects()) checker_mutex.unlock();
}

static void after_fork_in_child() {
  running.clear();
  for (RunningThread* thread = this_thread; thread; thread = thread->outer) running.push_back(thread);
  if (guards && !own_guards) {
    restore();
    stop_requested = false;
  }
  guards = own_guards;
  if (ticking)
    for (const int end : wake_ticker) close(end);
  ticking = false;
  after_fork();
}

[[maybe_unused]] static const int handlers_of_forks =
    pthread_atfork(before_fork, after_fork, after_fork_in_child);

std::optional<double> seconds_allowed() {
  const char* text = getenv("FLASH_SIM_SECONDS");
  if (!text || !*text) return 0;
  char* end;
  const double seconds = strtod(text, &end);
  return *end || !(seconds > 0) ? std::nullopt : std::optional<double>(seconds);
}

}  // namespace sim
