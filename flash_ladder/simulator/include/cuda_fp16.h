// Stands in for NVIDIA's header: __half, with the usual functions.
#pragma once
#include "cuda_runtime.h"

#include "sim/half.h"
