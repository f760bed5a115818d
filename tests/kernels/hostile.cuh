// A stage that does what no stage should: in its kernel, in launch(), or in workspace_bytes(). The call's
// scale says what; test_containment.py has a name for each number. With scale 0 it sets O to 7 and L to 0.
#pragma once
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

constexpr int BLOCKS = 3, THREADS = 64;

__host__ __device__ int depth_of(volatile int n) {
  volatile char frame[256];
  frame[0] = char(n);
  return depth_of(n + 1) + frame[0];
}

__host__ __device__ void misbehave(int what) {
  volatile int zero = 0;
  switch (what) {
    case 1: zero = 100 / zero; break;
    case 2: zero = 100 / 0; break;
    case 3: zero = 1 % 0; break;
    case 4: abort(); break;
    case 5: exit(0); break;
    case 6: _exit(3); break;
    case 7: quick_exit(4); break;
    case 8: throw std::runtime_error("thrown here"); break;
    case 9: throw 42; break;
    case 10: *static_cast<volatile int*>(nullptr) = 1; break;
    case 11: zero = *reinterpret_cast<volatile int*>(0x7ff000000000); break;
    case 12: *reinterpret_cast<volatile int*>(0xdeadbeefdeadbeef) = 1; break;
    case 13: zero = depth_of(0); break;
    case 14: for (;;) *static_cast<volatile char*>(malloc(1 << 26)) = 1; break;
    case 15: for (;;) *const_cast<volatile char*>(new char[1 << 26]) = 1; break;
    case 16: __builtin_trap(); break;
    case 17: raise(SIGSEGV); break;
    case 18: raise(SIGFPE); break;
    case 19: std::string().at(3); break;
    case 20: []() noexcept { throw 1; }(); break;                     // std::terminate
    case 21: reinterpret_cast<void (*)()>(8)(); break;               // a jump to nowhere
    case 22: free(reinterpret_cast<void*>(0x10)); break;
    case 23: strlen(reinterpret_cast<const char*>(16)); break;
    case 30: for (;;) zero = 0; break;                                // endless
    case 31: for (;;) free(malloc(100)); break;
    case 32: for (std::vector<std::string> all;; all.clear()) all.emplace_back(100, 'x'); break;
    case 33: for (;;) usleep(1000); break;
  }
}

__global__ void hostile_kernel(FwdParams p, int what) {
  misbehave(what);
  for (int n = blockIdx.x * THREADS + threadIdx.x; n < p.B * p.H * p.N_q; n += BLOCKS * THREADS) {
    p.L[n] = 0.f;
    for (int k = 0; k < HEAD_DIM; k++) p.O.data[n * HEAD_DIM + k] = 7.f;
  }
}

size_t workspace_bytes(const FwdParams& p) {
  misbehave(int(p.scale) - 2000);
  return 0;
}

cudaError_t launch(const FwdParams& p, cudaStream_t stream) {
  misbehave(int(p.scale) - 1000);
  hostile_kernel<<<BLOCKS, THREADS, 0, stream>>>(p, int(p.scale));
  return cudaGetLastError();
}
