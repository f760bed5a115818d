// Switching between fibers: push the registers that a function call must preserve, swap the stack pointer,
// pop them. Fifteen instructions, some 7 ns; the C library's swapcontext makes a system call each time and
// takes 220.
#include "runtime.h"

#include <cstring>

#ifdef __APPLE__   // its assembler: a leading underscore, no .type. Written from its manual, untested.
#define SYMBOL(name) "_" name
#define FUNCTION(name) ".globl _" name "\n_" name ":\n"
#else
#define SYMBOL(name) name
#define FUNCTION(name) ".globl " name "\n.type " name ", %function\n" name ":\n"
#endif

// void sim_switch(void** save, void* next): store the stack pointer in *save, continue on the stack `next`.
// sim_fiber_start: the return address on a fresh stack. The two zero words above it end a debugger's
// backtrace.
#if defined(__x86_64__)
asm(".text\n" FUNCTION("sim_switch") R"(
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq  %rsp, (%rdi)
  movq  %rsi, %rsp
  popq  %r15
  popq  %r14
  popq  %r13
  popq  %r12
  popq  %rbx
  popq  %rbp
  ret
)" FUNCTION("sim_fiber_start") R"(
  .cfi_startproc
  .cfi_undefined rip
  call )" SYMBOL("sim_fiber_main") R"(
  ud2
  .cfi_endproc
)");
#elif defined(__aarch64__)
asm(".text\n" FUNCTION("sim_switch") R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8,  d9,  [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8,  d9,  [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)" FUNCTION("sim_fiber_start") R"(
  bl )" SYMBOL("sim_fiber_main") R"(
  brk #0
)");
#else
#error "The simulator switches threads in assembly, written for x86-64 and aarch64 only."
#endif

extern "C" void sim_fiber_start();

namespace sim {

void* fresh_stack(char* top) {
  auto* words = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(63));
  const auto start = reinterpret_cast<uint64_t>(&sim_fiber_start);
#if defined(__x86_64__)
  words -= 2 + 1 + 6;                        // end of the backtrace, return address, six registers
  memset(words, 0, 9 * sizeof(uint64_t));    // `ret` leaves the stack 16-byte aligned, as a call expects
  words[6] = start;
#else
  words -= 20;
  memset(words, 0, 20 * sizeof(uint64_t));
  words[11] = start;                         // x30, the return address
#endif
  return words;
}

}  // namespace sim
