// Runtime: a stack for each thread of a block, and switching between stacks. Needs no other header.
#pragma once
#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define TUNEBENCH_ASAN 1
#endif
#if !defined(__x86_64__) && !defined(TUNEBENCH_UCONTEXT)
#define TUNEBENCH_UCONTEXT 1
#endif
#ifdef TUNEBENCH_UCONTEXT
#include <ucontext.h>
#endif

namespace emulated {
namespace {

#ifdef TUNEBENCH_ASAN
constexpr std::size_t STACK_BYTES = 512 << 10, PAGE = 4096;  // redzones make frames larger
#else
constexpr std::size_t STACK_BYTES = 128 << 10, PAGE = 4096;
#endif

#ifdef TUNEBENCH_UCONTEXT
struct Context {
  ucontext_t saved;
};
void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }
void make_context(Context& context, char* stack, std::size_t bytes, void (*run)()) {
  getcontext(&context.saved);
  context.saved.uc_stack.ss_sp = stack;
  context.saved.uc_stack.ss_size = bytes;
  context.saved.uc_link = nullptr;
  makecontext(&context.saved, run, 0);
}
#else
struct Context {
  void* stack_pointer;
};
// Saves the registers that a call must preserve (System V ABI), switches stacks, restores the other side's.
extern "C" void tunebench_switch(void** from, void* to);
asm(R"(
.text
tunebench_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
void switch_context(Context& from, Context& to) { tunebench_switch(&from.stack_pointer, to.stack_pointer); }
// The first switch pops six registers, then returns into `run`; the word above is its return address.
void make_context(Context& context, char* stack, std::size_t bytes, void (*run)()) {
  auto words = reinterpret_cast<void**>(stack + bytes);
  *--words = nullptr;
  *--words = reinterpret_cast<void*>(run);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
  context.stack_pointer = words;
}
#endif

}  // namespace
}  // namespace emulated
