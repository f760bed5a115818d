// The host's side of CUDA: launching kernels, and the few calls of the run-time API that go with it.
#pragma once
#include <cstddef>
#include <utility>

#include "vector_types.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorSymbolNotFound = 500,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1
};
constexpr unsigned long long cudaEnableDefault = 0;
using cudaStream_t = struct CUstream_st*;

// Of the attributes of a launch those that stages use. On a CPU the kernel before has always ended.
#define __CUDA_ARCH_LIST__ 900
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
union cudaLaunchAttributeValue {
  struct { unsigned x, y, z; } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// Names of our own behind CUDA's: in a process where PyTorch has loaded NVIDIA's library, the linker would
// take those of that one.
namespace sim {
extern "C" {
cudaError_t sim_set_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t sim_take_error();
cudaError_t sim_peek_error();
const char* sim_error_text(cudaError_t error);
cudaError_t sim_driver_function(const char* name, void** function);
cudaError_t sim_free(void* pointer);
}
}  // namespace sim

template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  return sim::sim_set_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

// A kernel that starts as many blocks as there are multiprocessors has few of them here: so that each has
// several rounds of work on small inputs, too.
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81 };
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return *value = attribute == cudaDevAttrMultiProcessorCount ? 3 : 228 << 10, cudaSuccess;
}

inline cudaError_t cudaFree(void* pointer) { return sim::sim_free(pointer); }      // of nullptr alone
inline cudaError_t cudaGetLastError() { return sim::sim_take_error(); }
inline cudaError_t cudaPeekAtLastError() { return sim::sim_peek_error(); }
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* result = nullptr) {
  const cudaError_t error = sim::sim_driver_function(name, function);
  if (result)
    *result = error == cudaSuccess ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return error;
}
inline const char* cudaGetErrorString(cudaError_t error) {   // the whole report
  return sim::sim_error_text(error);
}

namespace sim {

struct Site {              // a place in the kernel's source
  const char* file = "";
  int line = 0;
};

struct Launch {
  const char* name;
  const void* kernel;
  Site site;
  dim3 grid, block;
  size_t dynamic_shared;
  void (*run_thread)(void* arguments);
  void* arguments;
  size_t argument_bytes;
  bool checked;            // the kernel reports its accesses (flash.inspect)
  dim3 cluster;            // blocks that run together
  bool early;              // it may start before the one before it has ended
};
#ifdef SIM_CHECKED
constexpr bool CHECKED = true;
#else
constexpr bool CHECKED = false;
#endif
extern "C" void sim_launch(const Launch* launch);

// A kernel and its arguments. (With a std::tuple of them a build took a tenth of a second longer.)
template <size_t, class P> struct Argument { P value; };
template <class Numbers, class... P> struct Call;
template <size_t... n, class... P> struct Call<std::index_sequence<n...>, P...> : Argument<n, P>... {
  void (*kernel)(P...);
  void run() { kernel(static_cast<Argument<n, P>*>(this)->value...); }
};

// kernel<<<grid, block, bytes, stream>>>(arguments)
//   becomes Launcher(grid, block, bytes, stream)("kernel", kernel, arguments)
// cudaLaunchKernelEx(config, kernel, arguments)
//   becomes Launcher{config}("kernel", kernel, arguments)    ({}: else it may declare `config`)
class Launcher {
  dim3 grid, block;
  size_t dynamic_shared;
  Site site;
  dim3 cluster{1, 1, 1};
  bool early = false;

 public:
  Launcher(dim3 grid, dim3 block, size_t dynamic_shared = 0, cudaStream_t = nullptr,
           const char* file = __builtin_FILE(), int line = __builtin_LINE())
      : grid(grid), block(block), dynamic_shared(dynamic_shared), site{file, line} {}
  Launcher(const cudaLaunchConfig_t* config, const char* file = __builtin_FILE(),
           int line = __builtin_LINE())
      : Launcher(config->gridDim, config->blockDim, config->dynamicSmemBytes, nullptr, file, line) {
    for (unsigned i = 0; i < config->numAttrs; i++) {
      const cudaLaunchAttribute& attribute = config->attrs[i];
      if (attribute.id == cudaLaunchAttributeClusterDimension)
        cluster = {attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z};
      else
        early |= attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }

  template <class... P, class... A>
  cudaError_t operator()(const char* name, void (*kernel)(P...), A&&... arguments) const {
    // The arguments are converted to the kernel's types once, and copied for every thread.
    using Call = sim::Call<std::make_index_sequence<sizeof...(P)>, P...>;
    Call call{{static_cast<P>(std::forward<A>(arguments))}..., kernel};
    auto run_thread = [](void* p) { static_cast<Call*>(p)->run(); };
    const Launch launch{name, reinterpret_cast<const void*>(kernel), site, grid, block, dynamic_shared,
                        run_thread, &call, sizeof call, CHECKED, cluster, early};
    sim_launch(&launch);
    return sim_peek_error();
  }
};

}  // namespace sim
