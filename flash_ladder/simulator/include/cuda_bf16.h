// Stands in for NVIDIA's header: __nv_bfloat16, with the usual functions.
#pragma once
#include "cuda_runtime.h"

#include "sim/half.h"
