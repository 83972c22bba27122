// The emulator's runtime: it runs blocks one after the other, their threads as fibers, and reports what a GPU would
// have hidden. Compiled once and linked with each kernel, whose source sees shim.h.
//
// What shows a mistake:
// - Shared memory is filled with a poison before every block, so that a value read before it was written is noticed.
// - Blocks, warps and lanes run forward, in reverse, or in a seeded random order. One of two threads that race runs
//   first in one order and last in the other, so that a missing barrier changes the result of at least one run.
// - Asynchronous copies happen at once (forward), as late as they may (reverse), or either (random).
// - Threads that wait for each other in different places are reported, as divergence or as a deadlock.
// - Each tensor is an allocation of its own, of its exact size, with guards that no write may touch; under
//   AddressSanitizer no read either. Inputs must be left as they were.
//
// What is to be run comes from shim_job.h.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "shim_interface.h"

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

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {

unsigned char* dynamic_shared;

namespace {

// ---- switching stacks -------------------------------------------------------------------------------------

#ifdef TUNEBENCH_UCONTEXT
struct Context {
  ucontext_t saved;
};
void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }
void make_context(Context& context, char* stack, size_t bytes, void (*run)()) {
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
// Saves the registers that a call must keep (System V ABI), changes stacks, restores the other side's.
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
// The first switch pops six registers, then returns into `run`; the word above stands for its return address.
void make_context(Context& context, char* stack, size_t bytes, void (*run)()) {
  auto words = reinterpret_cast<void**>(stack + bytes);
  *--words = nullptr;
  *--words = reinterpret_cast<void*>(run);
  for (int i = 0; i < 6; ++i) *--words = nullptr;
  context.stack_pointer = words;
}
#endif

// ---- state ------------------------------------------------------------------------------------------------

enum class State { ready, in_call, at_barrier, exited };
enum class Order { forward, reverse, random };

struct Copy {
  void* target;
  const void* source;
  int bytes, source_bytes;
  int group;
};

struct Fiber {
  Context context;
  char* stack;  // lowest address that may be used
  void* fake_stack;
  State state;
  uint3 thread;
  int linear;
  int line;        // of the barrier it waits at
  bool predicate;  // it brought to the barrier
  int groups;      // of asynchronous copies, committed so far
  std::vector<Copy> copies;
};

// A piece of shared memory: the block's dynamic one is the first, those of `__shared__` declarations follow.
struct Shared {
  unsigned char* data;
  size_t bytes;
};
// A function, for declarations outside of any are reached before the variables here are initialised.
std::vector<Shared>& shared_memory() {
  static std::vector<Shared> all(1);
  return all;
}

// A call that some lanes of a warp have entered.
struct Group {
  Call call;
  const void* combine;  // in the frame of a lane that waits
  Combiner combiner;
  unsigned arrived;
};

struct Warp {
  Slot in[32], out[32];
  unsigned alive;  // lanes that exist and have not exited
  std::vector<Group> open;
};

#ifdef TUNEBENCH_ASAN
constexpr size_t STACK_BYTES = 512 << 10, PAGE = 4096;  // redzones make frames larger
#else
constexpr size_t STACK_BYTES = 128 << 10, PAGE = 4096;
#endif
constexpr size_t GUARD = 256;

Order order = Order::forward;
uint64_t random_state = 0;
std::vector<Fiber> fibers;  // of the block that runs
std::vector<Warp> warps;
Fiber* current = nullptr;
Context scheduler;
#ifdef TUNEBENCH_ASAN
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif
int poison_byte = 0xff;  // of the block that runs
Vote vote;
const Entry* kernel_entry = nullptr;
void* const* kernel_arguments = nullptr;

// SplitMix64. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
uint64_t draw() {
  uint64_t z = random_state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Fills `indices` with 0 … count - 1 as the run's order has it.
void arrange(std::vector<int>& indices, int count) {
  indices.resize(size_t(count));
  for (int i = 0; i < count; ++i) indices[size_t(i)] = order == Order::reverse ? count - 1 - i : i;
  if (order == Order::random)
    for (int i = count - 1; i > 0; --i) std::swap(indices[size_t(i)], indices[draw() % uint64_t(i + 1)]);
}

}  // namespace

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "emulation: ");
  if (current)
    fprintf(stderr, "block (%u,%u,%u), thread (%u,%u,%u): ", blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x,
            threadIdx.y, threadIdx.z);
  fprintf(stderr, "%s\n", text);
  fflush(stderr);
  _exit(3);
}

void check_shared(const void* address, Bytes bytes, const char* what) {
  check_aligned(address, bytes, what);
  const auto at = static_cast<const unsigned char*>(address);
  for (const Shared& shared : shared_memory())
    if (at >= shared.data && at + bytes <= shared.data + shared.bytes) return;
  fail("%s: %d bytes at %p are not within shared memory", what, int(bytes), address);
}

// ---- fibers -----------------------------------------------------------------------------------------------

namespace {

// Runs a fiber until it waits or exits.
void resume(Fiber& fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
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

// Goes back to the scheduler; returns when the fiber is resumed.
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

void run_fiber() {
#ifdef TUNEBENCH_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  kernel_entry->call(kernel_entry->kernel, kernel_arguments);
  current->state = State::exited;
  current->copies.clear();
  const int warp = current->linear / 32;
  warps[size_t(warp)].alive &= ~(1u << lane());
  complete(warp);
  leave(true);
}

// Stacks are kept from block to block; the lowest page of each is out of bounds, so that an overflow is noticed.
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
  const unsigned i = unsigned(linear);
  fiber.thread = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
  fiber.state = State::ready;
  fiber.groups = 0;
  // Tops are staggered by cache lines: at equal offsets in a page, all stacks would share a few cache sets.
  make_context(fiber.context, fiber.stack, STACK_BYTES - i % 61 * 64, run_fiber);
}

}  // namespace

// ---- warps ------------------------------------------------------------------------------------------------

int lane() { return current->linear % 32; }
Slot* slots_in() { return warps[size_t(current->linear / 32)].in; }
Slot* slots_out() { return warps[size_t(current->linear / 32)].out; }

void join(const Call& call, const void* combine, Combiner combiner) {
  const int index = current->linear / 32;
  Warp& warp = warps[size_t(index)];
  const unsigned self = 1u << lane();
  if (!(call.mask & self))
    fail("%s of line %d: mask %08x leaves out the lane that calls", call.name, call.line, call.mask);
  auto same = [&](const Group& group) {
    return group.call.mask == call.mask && group.call.line == call.line && !strcmp(group.call.name, call.name);
  };
  auto found = std::find_if(warp.open.begin(), warp.open.end(), same);
  if (found == warp.open.end()) found = warp.open.insert(found, Group{call, combine, combiner, 0});
  found->arrived |= self;
  current->state = State::in_call;
  complete(index);
  leave(false);
}

namespace {

// Combines and releases the calls that wait for no lane any more. A lane that has exited is excused, except where all
// 32 must take part. Source: CUDA C++ Programming Guide, "Warp Shuffle Functions" and "__syncwarp".
void complete(int index) {
  Warp& warp = warps[size_t(index)];
  for (size_t i = 0; i < warp.open.size();) {
    const Group group = warp.open[i];
    if (group.call.whole_warp && warp.alive != 0xffffffffu)
      fail("%s needs all 32 lanes of the warp; only lanes %08x are there", group.call.name, warp.alive);
    if (group.call.mask & warp.alive & ~group.arrived) {
      ++i;
      continue;
    }
    group.combiner(group.combine, warp.in, warp.out, group.arrived);
    for (int l = 0; l < 32; ++l)
      if (group.arrived >> l & 1u) fibers[size_t(32 * index + l)].state = State::ready;
    warp.open.erase(warp.open.begin() + long(i));
  }
}

}  // namespace

// ---- blocks -----------------------------------------------------------------------------------------------

Vote block_barrier(int line, bool predicate) {
  current->state = State::at_barrier;
  current->line = line;
  current->predicate = predicate;
  leave(false);
  return vote;
}

namespace {

// Opens the barrier if every thread that has not exited stands at it.
bool open_barrier() {
  const Fiber* first = nullptr;
  vote = {0, true, false};
  for (const Fiber& fiber : fibers) {
    if (fiber.state == State::exited) continue;
    if (fiber.state != State::at_barrier) return false;
    if (!first) first = &fiber;
    if (fiber.line != first->line)
      fail("block (%u,%u,%u): threads have diverged: (%u,%u,%u) waits at the barrier of line %d, (%u,%u,%u) at that "
           "of line %d",
           blockIdx.x, blockIdx.y, blockIdx.z, first->thread.x, first->thread.y, first->thread.z, first->line,
           fiber.thread.x, fiber.thread.y, fiber.thread.z, fiber.line);
    vote.count += fiber.predicate;
    vote.all &= fiber.predicate;
    vote.any |= fiber.predicate;
  }
  for (Fiber& fiber : fibers)
    if (fiber.state == State::at_barrier) fiber.state = State::ready;
  return true;
}

// Says who waits for whom when no thread can go on.
[[noreturn]] void fail_deadlock() {
  std::string text;
  char part[200];
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::at_barrier) continue;
    snprintf(part, sizeof part, "; thread (%u,%u,%u) waits at the barrier of line %d", fiber.thread.x, fiber.thread.y,
             fiber.thread.z, fiber.line);
    text += part;
    break;
  }
  int told = 0;
  for (size_t w = 0; w < warps.size() && told < 3; ++w)
    for (const Group& group : warps[w].open) {
      if (++told > 3) break;
      const unsigned missing = group.call.mask & warps[w].alive & ~group.arrived;
      snprintf(part, sizeof part, "; lanes %08x of warp %d wait in %s of line %d for lanes %08x", group.arrived,
               int(w), group.call.name, group.call.line, missing);
      text += part;
    }
  fail("block (%u,%u,%u): deadlock%s", blockIdx.x, blockIdx.y, blockIdx.z, text.c_str());
}

// Runs the lanes of a warp that can go on, each once; returns whether there were any.
bool pass_over(int warp, std::vector<int>& lanes) {
  bool ran = false;
  arrange(lanes, std::min(32, int(fibers.size()) - 32 * warp));
  for (const int i : lanes) {
    Fiber& fiber = fibers[size_t(32 * warp + i)];
    if (fiber.state != State::ready) continue;
    resume(fiber);
    ran = true;
  }
  return ran;
}

// Bytes that are a NaN, or large and positive, or large and negative, as f32, f16 and bf16 alike: a maximum hides the
// first, a minimum the second.
int poison() {
  static const int bytes[] = {0xff, 0x7b, 0xfb};
  return order == Order::forward ? bytes[0] : order == Order::reverse ? bytes[1] : bytes[draw() % 3];
}

void run_block() {
  poison_byte = poison();
  for (const Shared& shared : shared_memory()) memset(shared.data, poison_byte, shared.bytes);
  for (size_t i = 0; i < fibers.size(); ++i) start_fiber(fibers[i], int(i));
  for (size_t w = 0; w < warps.size(); ++w) {
    const int lanes = std::min(32, int(fibers.size() - 32 * w));
    warps[w].alive = lanes == 32 ? 0xffffffffu : (1u << lanes) - 1;
    warps[w].open.clear();
  }
  std::vector<int> warp_order, lane_order;
  auto exited = [](const Fiber& fiber) { return fiber.state == State::exited; };
  do {
    arrange(warp_order, int(warps.size()));
    for (bool ran = true; ran;) {
      ran = false;
      for (const int warp : warp_order)
        // As far as it gets, or, at random, only to its next call: warps then overlap.
        while (pass_over(warp, lane_order)) {
          ran = true;
          if (order == Order::random && draw() % 2) break;
        }
    }
    if (std::all_of(fibers.begin(), fibers.end(), exited)) return;
  } while (open_barrier());
  fail_deadlock();
}

}  // namespace

// ---- asynchronous copies ----------------------------------------------------------------------------------

namespace {

void perform(const Copy& copy) {
  memcpy(copy.target, copy.source, size_t(copy.source_bytes));
  memset(static_cast<char*>(copy.target) + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
}

}  // namespace

void copy_async(void* target, const void* source, int bytes, int source_bytes) {
  check_shared(target, Bytes(bytes), "cp.async target");
  check_aligned(source, Bytes(bytes), "cp.async source");
  if (source_bytes < 0 || source_bytes > bytes) fail("cp.async: %d of %d bytes", source_bytes, bytes);
  const Copy copy = {target, source, bytes, source_bytes, current->groups};
  if (order == Order::forward || (order == Order::random && draw() % 2))
    perform(copy);
  else
    current->copies.push_back(copy);
}

void commit_copies() { ++current->groups; }

void wait_for_copies(int groups_left) {
  auto& copies = current->copies;
  size_t kept = 0;
  for (const Copy& copy : copies)
    if (copy.group < current->groups - groups_left)
      perform(copy);
    else
      copies[kept++] = copy;
  copies.resize(kept);
}

}  // namespace emulated

#include "shim_job.h"
