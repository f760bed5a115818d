// Stands in for NVIDIA's header when a kernel is compiled for the CPU: the part of CUDA C++ that kernels use.
#pragma once
#include <cstdint>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS   // Bessel functions and the like: half of what <cmath> includes
#include <cstdio>
#include <cstdlib>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#ifdef __OPTIMIZE__
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline   // a debugger can step into it
#endif

#include "sim/vector_types.h"
#include "sim/host.h"
#include "sim/device.h"
#include "sim/math.h"

// A loop that prints without end spends its time in the C library, where no fiber can be abandoned.
#define printf(...) (sim::sim_check_interrupt(), ::printf(__VA_ARGS__))
