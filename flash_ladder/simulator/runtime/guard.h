// What keeps a stage's code from ending the process: signals.cpp and guard.cpp.
#pragma once
#include "runtime.h"

#include <csetjmp>
#include <csignal>
#include <memory>
#include <mutex>
#include <pthread.h>

namespace sim {

// While one exists in the process: faults, Ctrl-C and the memory limit are the simulator's affair.
struct Guard {
  Guard();
  ~Guard();
};

// While it exists, this OS thread runs code of a stage: it can be interrupted, after `seconds` by itself
// (0: never).
struct RunningThread {
  explicit RunningThread(double seconds);
  ~RunningThread();
  const double seconds;
  double deadline = 0;                   // by the monotonic clock; 0: none
  volatile bool overdue = false;
  int ticks_in_the_system = 0;           // in a row
  double in_the_system_since;
  const pthread_t thread;
  RunningThread* const outer;            // host code that launches has one already
  sigset_t mask;                         // of signals that are blocked

 private:
  // For several at a time: a fault in the handler, an interruption while it is left. Not set to 0
  static constexpr size_t SIGNAL_STACK_BYTES = 256 * KB;
  const std::unique_ptr<char[]> signal_stack{new char[SIGNAL_STACK_BYTES]};
  stack_t before{};
};

struct HostCall {                        // host code of a stage, called by Python
  const void* code;                      // a function of its library
  int launches = 0;                      // 1 while it waits for a kernel
  std::string error;
  sigjmp_buf back;
};
extern SIM_THREAD_LOCAL HostCall* host_call;               // this OS thread's
[[noreturn]] void leave_host_call(const std::string& error);

extern std::mutex launch_mutex;            // of launch.cpp

void admit_interruptions();                // as before the stage ran; none of its code is under way any more
void make_room();                          // for a message, where memory has run out
std::optional<double> seconds_allowed();   // FLASH_SIM_SECONDS; 0: no limit; nothing: it makes no sense

}  // namespace sim
