// A failed assert is reported as an error of CUDA's, with the thread if it is in a kernel; the C library's
// would end the process.
#include_next <assert.h>
#include "cuda_runtime.h"
#ifndef NDEBUG
#undef assert
#define assert(condition) \
  ((condition) ? void() : sim::sim_assert_failed(#condition, __FILE__, __LINE__))
#endif
