// Stands in for NVIDIA's header when a kernel is compiled for the CPU.
#pragma once
#include "cuda_runtime.h"
#include "sim/tensor_map.h"
