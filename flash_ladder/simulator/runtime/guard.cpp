// Host code of a stage, launch() and workspace_bytes(): what it does wrong becomes an error, too. Python
// calls it through here.
#include "guard.h"

#include <exception>
#include <new>

namespace sim {

SIM_THREAD_LOCAL HostCall* host_call;

void leave_host_call(const std::string& error) {
  HostCall& call = *host_call;
  call.error = error;
  host_call = nullptr;
  admit_interruptions();
  siglongjmp(call.back, 1);
}

// Null, or what went wrong. What the code has allocated, or locked, stays so.
template <class F>
static const char* guarded(const char* what, const void* code, const F& f) {
  static thread_local std::string error;
  const std::optional<double> seconds = seconds_allowed();
  if (!seconds) return "FLASH_SIM_SECONDS: a number of seconds, more than 0, is possible";
  Guard guard;
  RunningThread running_thread(*seconds);
  HostCall call{code};
  HostCall* const outer = host_call;
  host_call = &call;
  if (!sigsetjmp(call.back, 0)) {
    try {
      f();
    } catch (const std::bad_alloc&) {
      make_room();
      call.error = ": out of memory: an allocation without an end?";
    } catch (const std::exception& e) {
      call.error = std::string(": C++ exception: ") + e.what();
    } catch (...) {
      call.error = ": C++ exception";
    }
  }
  host_call = outer;
  if (call.error.empty()) return nullptr;
  sim_take_error();                                 // what a launch left is not the next call's
  error = std::string("host code, ") + what + call.error;
  return error.c_str();
}

extern "C" const char* sim_guarded_run(const char* (*run)(const void*, void*), const void* params,
                                       void* stream) {
  const char* error = nullptr;
  const char* fault = guarded("launch()", reinterpret_cast<const void*>(run),
                              [&] { error = run(params, stream); });
  return fault ? fault : error;
}

extern "C" const char* sim_guarded_size(size_t (*size_of)(const void*), const void* params, size_t* size) {
  return guarded("workspace_bytes()", reinterpret_cast<const void*>(size_of),
                 [&] { *size = size_of(params); });
}

// Stages are linked with exit and its relatives wrapped.
[[noreturn]] static void exited(const char* name, int code) {
  const std::string what = std::string(name) + "(" + std::to_string(code) + ") was called";
  if (worker && worker->current) fail(what);
  if (host_call) leave_host_call(": " + what);
  std::_Exit(code);                                 // in a thread that the stage has started
}
extern "C" void __wrap_exit(int code) { exited("exit", code); }
extern "C" void __wrap__exit(int code) { exited("_exit", code); }
extern "C" void __wrap__Exit(int code) { exited("_Exit", code); }
extern "C" void __wrap_quick_exit(int code) { exited("quick_exit", code); }

}  // namespace sim
