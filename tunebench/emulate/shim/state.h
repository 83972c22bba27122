// Runtime: data of the running cluster. Needs stack.h.
#pragma once
#include <unistd.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "interface.h"
#include "stack.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulated {

unsigned char* dynamic_shared;

namespace {

enum class State { ready, in_call, at_barrier, waiting, exited };
enum class Order { forward, reverse, random };

struct Copy {
  void* target;
  const void* source;
  int bytes, source_bytes;
  int group;
};

// The sums of products in registers of a thread, from the first product until `settle`.
struct Sums {
  float* registers;
  std::vector<float> values;  // what they will hold
  size_t product;             // number of the latest, in the records of the warpgroup
};

// What a fiber in State::waiting waits for, and what it has requested of its warpgroup (see hopper.h).
struct Progress {
  enum Cause { barrier, products, cluster, registers } waits_for;
  unsigned address, parity;        // of the barrier, in the window of the cluster
  size_t target;                   // of `issued`, or the phase of the cluster's barrier, or the registers
  size_t issued, groups;           // of the warpgroup's products: records and committed groups so far
  size_t waited;                   // number of the last product waited for
  bool fenced;                     // since the last wait for products
  std::vector<Sums> unsettled;     // in registers that must not be accessed
  std::vector<unsigned> unfenced;  // barriers that it has initialised without a fence since
};

struct Fiber {
  Context context;
  char* stack;  // lowest usable address
  void* fake_stack;
  State state;
  uint3 thread;
  int linear;
  int line;        // of the barrier it waits at
  bool predicate;  // passed to the barrier
  int groups;      // of asynchronous copies, committed so far
  const void* site;  // of its latest collective call
  std::vector<Copy> copies;
  int block;  // its block's rank in the cluster
  Progress progress;
};

// A block of the running cluster, usually the only one.
struct Block {
  uint3 index;
  int alive;  // threads that have not exited
};

// A piece of shared memory: first the dynamic one of the block, then those of `__shared__` declarations. A
// cluster has only dynamic pieces, one for each block by its rank.
struct Shared {
  unsigned char* data;
  size_t bytes;
};
bool cluster_memory = false;  // whether the latest launch has clusters
// A function, because declarations outside of functions are reached before the variables here are
// initialised.
std::vector<Shared>& shared_memory() {
  static std::vector<Shared> all(1);
  return all;
}

// A call that some lanes of a warp have entered.
struct Group {
  Call call;
  const void* combine;  // in the frame of a waiting lane
  Combiner combiner;
  unsigned arrived;
};

struct Warp {
  Slot in[32], out[32];
  unsigned alive;  // lanes that exist and have not exited
  std::vector<Group> open;
  int registers;  // per thread, as set by setmaxnreg; 0: as launched
};

constexpr size_t GUARD = 256;

Order order = Order::forward;
uint64_t random_state = 0;
std::vector<Block> blocks;  // of the running cluster
std::vector<Fiber> fibers;  // of all its blocks, one block after the other
std::vector<Warp> warps;
Fiber* current = nullptr;
Context scheduler;
#ifdef TUNEBENCH_ASAN
const void* scheduler_stack = nullptr;
size_t scheduler_stack_bytes = 0;
#endif
int poison_byte = 0xff;  // of the running cluster
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

// Fills `indices` with 0 … count - 1 in the run's order.
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

}  // namespace emulated
