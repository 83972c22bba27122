// Runtime: threads of the blocks that run together, as fibers of one host thread. Needs state.h.
#pragma once
#include <sys/mman.h>

#include "watch.h"

namespace emulated {
namespace {

// Runs a fiber until it waits or exits.
void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  blockIdx = blocks[size_t(fiber.block)].index;
  dynamic_shared = shared_memory()[size_t(fiber.block)].data;
#ifdef TUNEBENCH_ASAN
  void* fake;
  __sanitizer_start_switch_fiber(&fake, fiber.stack, STACK_BYTES);
#endif
  switch_context(scheduler, fiber.context);
#ifdef TUNEBENCH_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  current = nullptr;
}

// Returns to the scheduler; continues when the fiber is resumed.
void leave(bool for_good) {
  Fiber& fiber = *current;
#ifdef TUNEBENCH_ASAN
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_bytes);
#else
  (void)for_good;
#endif
  switch_context(fiber.context, scheduler);
#ifdef TUNEBENCH_ASAN
  __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
#endif
}

void complete(int warp_index);
void leave_asynchronous();

void run_fiber() {
#ifdef TUNEBENCH_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  kernel_entry->call(kernel_entry->kernel, kernel_arguments);
  current->state = State::exited;
  current->copies.clear();
  leave_asynchronous();
  const int warp = current->linear / 32;
  warps[size_t(warp)].alive &= ~(1u << lane());
  complete(warp);
  leave(true);
}

// Stacks are reused from block to block. The lowest page of each is protected, so that an overflow is
// detected.
void make_fibers(int count) {
  const size_t stride = STACK_BYTES + PAGE;
  const auto memory = static_cast<char*>(mmap(nullptr, stride * size_t(count), PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (memory == MAP_FAILED) fail("no memory for the stacks of %d threads", count);
  fibers = std::vector<Fiber>(size_t(count));
  for (int i = 0; i < count; ++i) {
    mprotect(memory + stride * size_t(i), PAGE, PROT_NONE);
    fibers[size_t(i)].stack = memory + stride * size_t(i) + PAGE;
  }
}

void drop_fibers() {
  munmap(fibers.front().stack - PAGE, (STACK_BYTES + PAGE) * fibers.size());
  fibers.clear();
}

void start_fiber(Fiber& fiber, int linear) {
  fiber.linear = linear;
  const unsigned threads = unsigned(fibers.size() / blocks.size()), i = unsigned(linear) % threads;
  fiber.block = int(unsigned(linear) / threads);
  fiber.progress = {};
  fiber.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  fiber.state = State::ready;
  fiber.groups = 0;
  // Tops are staggered by cache lines: at equal offsets in a page, all stacks would share a few cache sets.
  make_context(fiber.context, fiber.stack, STACK_BYTES - i % 61 * 64, run_fiber);
}

}  // namespace
}  // namespace emulated
