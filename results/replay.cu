// Makes calls of a stage without Python: what compute-sanitizer watches. sanitized_mutants.py writes them.
//
//   replay -       library call [library call ...]     outputs and workspace start uninitialised
//   replay RESULTS library call [library call ...]     they start as NaN, and what the calls give is written
//
// A library is a stage that nvcc has compiled from flash_fwd.cu or flash_bwd.cu. A call is a file: three
// numbers, FwdParams or BwdParams without addresses, then for each tensor where in them its address belongs,
// its bytes and whether it is an output; at last the bytes of those that are not. All numbers have 64 bits.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

struct Head { int64_t params_bytes, workspace_at, tensors; };
struct Part { int64_t at, bytes, is_output; };

static void fail(const char* what, const char* why) {
  printf("%s: %s\n", what, why);
  exit(1);
}

static void check(const char* what, cudaError_t error) {
  if (error != cudaSuccess) fail(what, cudaGetErrorString(error));
}

static void read(void* to, size_t bytes, FILE* file) {
  if (fread(to, 1, bytes, file) != bytes) fail("call", "the file is too short");
}

// Memory of the GPU, uninitialised; or NaN.
static void* memory(size_t bytes, bool poisoned) {
  void* address;
  check("cudaMalloc", cudaMalloc(&address, bytes));
  if (poisoned) check("cudaMemset", cudaMemset(address, 0xFF, bytes));
  return address;
}

static void* symbol(void* library, std::string name) {
  for (const char* entry : {"flash_fwd", "flash_bwd"})
    if (void* found = dlsym(library, (entry + name).c_str())) return found;
  fail("symbol", dlerror());
  return nullptr;
}

static void make_call(const char* library_path, const char* call_path, FILE* results) {
  void* library = dlopen(library_path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail("library", dlerror());
  FILE* file = fopen(call_path, "rb");
  if (!file) fail("call", "there is no such file");
  Head head;
  read(&head, sizeof head, file);
  std::vector<char> params(head.params_bytes), host;
  std::vector<Part> parts(head.tensors);
  read(params.data(), params.size(), file);
  read(parts.data(), parts.size() * sizeof(Part), file);

  std::vector<void*> all;
  for (const Part& part : parts) {
    all.push_back(memory(part.bytes, part.is_output && results));
    memcpy(params.data() + part.at, &all.back(), sizeof(void*));
    if (part.is_output) continue;
    host.resize(part.bytes);
    read(host.data(), part.bytes, file);
    check("cudaMemcpy", cudaMemcpy(all.back(), host.data(), part.bytes, cudaMemcpyHostToDevice));
  }
  fclose(file);
  auto workspace_bytes = (size_t (*)(const void*))symbol(library, "_workspace_bytes");
  if (const size_t bytes = workspace_bytes(params.data())) {
    all.push_back(memory(bytes, results));
    memcpy(params.data() + head.workspace_at, &all.back(), sizeof(void*));
  }

  auto run = (const char* (*)(const void*, void*))symbol(library, "");
  if (const char* error = run(params.data(), nullptr)) fail("launch", error);
  check("kernel", cudaDeviceSynchronize());
  for (size_t i = 0; i < parts.size(); i++) {
    if (!parts[i].is_output) continue;
    host.resize(parts[i].bytes);
    check("result", cudaMemcpy(host.data(), all[i], host.size(), cudaMemcpyDeviceToHost));
    if (results) fwrite(host.data(), 1, host.size(), results);
  }
  for (void* address : all) cudaFree(address);
}

int main(int number_of_arguments, char** arguments) {
  FILE* results = nullptr;
  if (number_of_arguments > 1 && strcmp(arguments[1], "-") && !(results = fopen(arguments[1], "wb")))
    fail("results", "cannot be written");
  for (int i = 2; i + 1 < number_of_arguments; i += 2) make_call(arguments[i], arguments[i + 1], results);
  if (results) fclose(results);
  return 0;
}
