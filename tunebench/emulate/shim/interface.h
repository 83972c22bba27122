// Functions of the emulator's runtime (runtime.h) that kernel code, compiled for the host, calls.
//
// A block's threads are fibers of one host thread: one runs until it waits for others, then the next. Neither
// this file nor cuda.h includes a library header, so that a kernel compiles in a fraction of a second.
#pragma once

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned in_x = 1, unsigned in_y = 1, unsigned in_z = 1) : x(in_x), y(in_y), z(in_z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// Of the running fiber; set by the scheduler.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulated {

using Bytes = __SIZE_TYPE__;
using Address = __UINTPTR_TYPE__;

// Reports that the kernel is wrong, with block and thread, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Base of the block's dynamic shared memory. Each `extern __shared__` array is a reference to it.
extern unsigned char* dynamic_shared;

// Memory of one `__shared__` declaration, rewritten to the struct T: common to all blocks, poisoned before
// each.
unsigned char* allocate_static_shared(Bytes bytes, Bytes alignment);
template <class T>
T& static_shared() {
  static unsigned char* const memory = allocate_static_shared(sizeof(T), alignof(T));
  return *reinterpret_cast<T*>(memory);
}

// Fails unless the bytes are within shared memory, at an address that is a multiple of their number.
void check_shared(const void* address, Bytes bytes, const char* what);

inline void check_aligned(const void* address, Bytes bytes, const char* what) {
  if (reinterpret_cast<Address>(address) % bytes != 0)
    fail("%s: address %p is no multiple of %d bytes", what, address, int(bytes));
}

// ---- waiting for the block --------------------------------------------------------------------------------

// Result of a barrier: combined predicates of all threads.
struct Vote {
  int count;
  bool all, any;
};
Vote block_barrier(int line, bool predicate);

// ---- waiting for lanes of the warp ------------------------------------------------------------------------

// Operands and results of a lane in a collective call.
struct alignas(16) Slot {
  unsigned char bytes[64];
};

// The slots of a warp as values of one type.
template <class T>
class Lanes {
 public:
  explicit Lanes(Slot* slots) : slots_(slots) {}
  T& operator[](int lane) const { return *reinterpret_cast<T*>(slots_[lane].bytes); }

 private:
  Slot* slots_;
};

// Identity of a call: only lanes that make the same call with the same mask belong together.
struct Call {
  const char* name;
  int line;
  unsigned mask;
  bool whole_warp;  // whether all 32 lanes must take part; otherwise lanes that have exited are excused
};

// Runs once for all lanes of a call, when the last has arrived.
using Combiner = void (*)(const void* combine, Slot* in, Slot* out, unsigned lanes);

int lane();
Slot* slots_in();
Slot* slots_out();
// Returns when all lanes of the call have arrived, their results have been combined, and this lane may
// continue.
void join(const Call& call, const void* combine, Combiner combiner);

// Passes `mine` to the call; `combine(in, out, lanes)` runs once for all lanes. Returns this lane's result.
template <class Out, class In, class Combine>
Out collective(const Call& call, const In& mine, const Combine& combine) {
  static_assert(sizeof(In) <= sizeof(Slot) && sizeof(Out) <= sizeof(Slot), "a slot is too small");
  const Lanes<In> in(slots_in());
  in[lane()] = mine;
  join(call, &combine, [](const void* of_one_lane, Slot* all_in, Slot* all_out, unsigned lanes) {
    const auto& run = *static_cast<const Combine*>(of_one_lane);
    run(Lanes<const In>(all_in), Lanes<Out>(all_out), lanes);
  });
  const Lanes<Out> out(slots_out());
  return out[lane()];
}

// The same for instructions that PTX calls `.aligned`: all 32 lanes execute them together. They are counted
// by name. The name of a matrix product contains its shape and ends in the type of its inputs, as in
// "mma.m16n8k16.f16".
template <class Out, class In, class Combine>
Out whole_warp(const char* name, const In& mine, Combine combine) {
  return collective<Out>(Call{name, 0, 0xffffffffu, true}, mine,
                         [combine](Lanes<const In> in, Lanes<Out> out, unsigned) { combine(in, out); });
}

// ---- asynchronous copies ----------------------------------------------------------------------------------

// A copy may happen at once or when its group is waited for. The run's order decides, so that a missing wait
// shows. `past_l1` says that each copy comes from L2, also if L1 has the bytes.
void copy_async(void* target, const void* source, int bytes, int source_bytes, bool past_l1 = false);
void commit_copies();
void wait_for_copies(int groups_left);

// ---- counts -----------------------------------------------------------------------------------------------
// Counts of the calling lane; no-ops without watching (see watch.h).

#ifdef TUNEBENCH_WATCH
void count_f32();      // one full-rate f32 instruction
void count_special();  // one result of the special-function unit
void see_atomic(const void* address, Bytes bytes, const void* pc);
// Bytes that a whole-warp instruction reads from shared memory, at the address that a lane passes.
void tell_shared_read(int lane, const void* address, Bytes bytes);
// A function that reports its accesses itself: they are attributed to its caller.
#define TUNEBENCH_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#else
inline void count_f32() {}
inline void count_special() {}
inline void see_atomic(const void*, Bytes, const void*) {}
inline void tell_shared_read(int, const void*, Bytes) {}
#define TUNEBENCH_UNSEEN
#endif

// ---- asynchronous barriers, bulk copies, warpgroups, clusters (hopper.h) ----------------------------------
// Shared memory by its 32-bit address, as in instructions of sm_90: that of the running block, or, in the
// window that `cluster_address` opens, that of another block of its cluster.

unsigned shared_address(const void* pointer);
void mbarrier_init(unsigned barrier, unsigned count);
void mbarrier_arrive(unsigned barrier, unsigned expected_bytes);
void mbarrier_wait(unsigned barrier, unsigned parity);  // returns when the phase of that parity has ended
void fence_mbarrier_init();
// Makes what this thread knows of generic accesses visible to bulk copies and products (`fence.proxy.async`).
void fence_proxy_async();

// Copies the box of a tensor map at `corner` (innermost coordinate first) and notifies the barrier. With the
// mask `blocks`, copies to the same address in these blocks of the cluster and notifies the barrier of each.
void copy_box(unsigned target, const void* tensor_map, int rank, const int* corner, unsigned barrier, unsigned blocks);

// The same for a column of pixels, from the one at `corner` on, each read at `offsets`.
void copy_pixels(unsigned target, const void* tensor_map, int rank, const int* corner, const unsigned short* offsets,
                 unsigned barrier, unsigned blocks);

// Copies a box from shared memory to the tensor, asynchronously, in the thread's open bulk group. The wait returns when
// all but that many groups have read their shared memory.
void store_box(unsigned source, const void* tensor_map, int rank, const int* corner);
void commit_stores();
void wait_for_stores(int groups_left);

// D (64, n) = A (64, K) B (K, n), plus D if `accumulate`, of a warpgroup. K is 32 bytes of elements. A and B
// are given by descriptors, and an element's value by a function. A with 16- or 32-bit elements may be in four
// registers of each thread instead: they are read when the product happens. The sums are NaN until `settle`.
struct Product {
  unsigned long long a, b;
  float (*value)(const void* element);
  const char* type;  // of an element, as PTX names it
  int element_bytes, n;
  bool a_along_m, b_along_n, accumulate;
  const unsigned* a_registers = nullptr;
  bool integers = false;  // the sums are 32-bit integers, which wrap around
};
void warpgroup_multiply(const Product& product, float* sums);
void warpgroup_multiply(Product product, int* sums);
void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(int groups_left);
void settle(float* sums, int count);
void settle(int* sums, int count);

// What `__launch_bounds__` declares: called at the start of a kernel that has it.
void launch_bounds(int threads, int blocks_per_sm = 0, int blocks_per_cluster = 0);
enum class Registers { taken, given };
void set_registers(int count, Registers direction);

unsigned cluster_rank();
unsigned cluster_address(unsigned address, unsigned rank);
void cluster_arrive();
void cluster_wait();

// ---- kernels by index -------------------------------------------------------------------------------------

// A kernel, and how to call it with arguments whose types only the compiler knows.
struct Entry {
  void (*kernel)();
  void (*call)(void (*kernel)(), void* const* arguments);
  int arity;
  const int* sizes;  // of each argument, in bytes
};

template <class... Arguments>
struct Caller {
  static constexpr int sizes[sizeof...(Arguments) + 1] = {int(sizeof(Arguments))..., 0};

  template <int... I>
  struct Indices {};
  template <int N, int... I>
  struct Upto : Upto<N - 1, N - 1, I...> {};
  template <int... I>
  struct Upto<0, I...> {
    using type = Indices<I...>;
  };

  template <int... I>
  static void spread(void (*kernel)(Arguments...), [[maybe_unused]] void* const* arguments, Indices<I...>) {
    kernel(*static_cast<Arguments*>(arguments[I])...);
  }
  static void call(void (*kernel)(), void* const* arguments) {
    spread(reinterpret_cast<void (*)(Arguments...)>(kernel), arguments,
           typename Upto<int(sizeof...(Arguments))>::type());
  }
};

template <class... Arguments>
Entry entry(void (*kernel)(Arguments...)) {
  return {reinterpret_cast<void (*)()>(kernel), Caller<Arguments...>::call, int(sizeof...(Arguments)),
          Caller<Arguments...>::sizes};
}

// Defined by generated code next to the kernel: the kernels that a job may launch.
extern const Entry* const entries;
extern const int entry_count;

}  // namespace emulated
