// Tensor maps, made on the host. Checked as the driver does: CUDA driver API, cuTensorMapEncodeTiled.
#include <cstring>

#include "checker.h"
#include "engines.h"

namespace sim {

constexpr uint64_t MAGIC = 0x70616d20726f736e;

const TensorMap* tensor_map(const CUtensorMap* map) {
  const auto* m = reinterpret_cast<const TensorMap*>(map);
  return m->magic == MAGIC ? m : nullptr;
}

static int bytes_of(CUtensorMapDataType type) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  return size_t(type) < sizeof bytes / sizeof *bytes ? bytes[type] : 0;
}

// "" or what is wrong
static std::string wrong_map(const CUtensorMap* map, int element, uint32_t rank, void* address,
                             const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                             const uint32_t* steps, int interleave, int swizzle) {
  auto number = [](const char* name, uint32_t i, uint64_t x) {
    return std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(x) + ": ";
  };
  if (reinterpret_cast<uintptr_t>(map) % 64) return "the map must be at a multiple of 64 bytes";
  if (!element) return "no such type";
  if (rank < 1 || rank > 5) return "a tensor of " + std::to_string(rank) + " dimensions; 1 to 5 are possible";
  if (reinterpret_cast<uintptr_t>(address) % 16) return "the tensor must start at a multiple of 16 bytes";
  if (interleave) return "interleaved layouts are not simulated";
  for (uint32_t i = 0; i < rank; i++) {
    if (!sizes[i] || sizes[i] > uint64_t(1) << 32)
      return number("size", i, sizes[i]) + "1 to 2^32 is possible";
    if (i && (strides[i - 1] % 16 || strides[i - 1] >= uint64_t(1) << 40))
      return number("stride", i - 1, strides[i - 1]) + "a multiple of 16 bytes below 2^40 is possible";
    if (!box[i] || box[i] > 256) return number("box", i, box[i]) + "1 to 256 is possible";
    if (i && steps[i] != 1) return number("step", i, steps[i]) + "only steps of 1 are simulated";
  }
  const uint64_t row = uint64_t(box[0]) * element;
  if (row % 16) return number("box", 0, box[0]) + "its rows must have a multiple of 16 bytes";
  if (swizzle < 0 || swizzle > 3) return "this swizzle is not simulated";
  if (swizzle && row > 16u << swizzle)
    return number("box", 0, box[0]) + "its rows must fit into the " + std::to_string(16 << swizzle) +
           " bytes of the swizzle";
  return "";
}

// A thread has one once the runtime has done something for it: a launch, say, or cudaFree(nullptr). The
// driver's functions do nothing without.
static thread_local bool has_context = false;

void give_context() { has_context = true; }

extern "C" cudaError_t sim_free(void* pointer) {
  if (pointer) return cudaErrorInvalidValue;       // there is no cudaMalloc
  give_context();
  return cudaSuccess;
}

extern "C" CUresult sim_encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                          void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                          const cuuint32_t* box, const cuuint32_t* steps,
                                          CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!has_context) {
    explain_error("cuTensorMapEncodeTiled: this thread has no context yet: cudaFree(nullptr) gives it one");
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  const int element = bytes_of(type);
  const std::string wrong = wrong_map(map, element, rank, address, sizes, strides, box, steps, interleave,
                                      swizzle);
  if (!wrong.empty()) {
    explain_error("cuTensorMapEncodeTiled: " + wrong);
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap m{};
  m.magic = MAGIC;
  m.address = static_cast<char*>(address);
  m.rank = uint8_t(rank);
  m.element_bytes = uint8_t(element);
  m.swizzle = uint8_t(swizzle ? 16 << swizzle : 0);
  for (uint32_t i = 0; i < 5; i++) {
    m.sizes[i] = i < rank ? sizes[i] : 1;
    m.box[i] = uint16_t(i < rank ? box[i] : 1);
    if (i + 1 < rank) m.strides[i] = strides[i];
  }
  memset(map, 0, sizeof *map);
  memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

// The driver's functions by name; of them there is this one.
extern "C" cudaError_t sim_driver_function(const char* name, void** function) {
  const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
  *function = known ? reinterpret_cast<void*>(&sim_encode_tensor_map) : nullptr;
  return known ? cudaSuccess : cudaErrorSymbolNotFound;
}

}  // namespace sim
