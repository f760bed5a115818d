// In a kernel, a failed assert ends the launch and names the CUDA thread; the C library's would end the
// process.
#include_next <assert.h>
#include "cuda_runtime.h"
#ifndef NDEBUG
#undef assert
#define assert(condition) \
  ((condition) ? void() : sim::sim_fail("assertion failed: " #condition, __FILE__, __LINE__))
#endif
