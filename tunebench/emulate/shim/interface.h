// What kernel code, compiled for the host, asks of the emulator's runtime (runtime.h).
//
// A block's threads are fibers of one host thread: one runs until it waits for others, then the next. Nothing is
// included here or in cuda.h, so that a kernel compiles in a fraction of a second.
#pragma once

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned in_x = 1, unsigned in_y = 1, unsigned in_z = 1) : x(in_x), y(in_y), z(in_z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// Of the fiber that runs; the scheduler sets them.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulated {

using Bytes = __SIZE_TYPE__;
using Address = __UINTPTR_TYPE__;

// Reports that the kernel is wrong, with block and thread, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Base of the block's dynamic shared memory. Each `extern __shared__` array is a reference to it.
extern unsigned char* dynamic_shared;

// Memory of one `__shared__` declaration, which has become the struct T: one for all blocks, poisoned before each.
unsigned char* allocate_static_shared(Bytes bytes, Bytes alignment);
template <class T>
T& static_shared() {
  static unsigned char* const memory = allocate_static_shared(sizeof(T), alignof(T));
  return *reinterpret_cast<T*>(memory);
}

// Fails unless the bytes lie within shared memory at an address that is a multiple of their number.
void check_shared(const void* address, Bytes bytes, const char* what);

inline void check_aligned(const void* address, Bytes bytes, const char* what) {
  if (reinterpret_cast<Address>(address) % bytes != 0)
    fail("%s: address %p is no multiple of %d bytes", what, address, int(bytes));
}

// ---- waiting for the block --------------------------------------------------------------------------------

// What the block agreed on at a barrier: over the predicates of all threads.
struct Vote {
  int count;
  bool all, any;
};
Vote block_barrier(int line, bool predicate);

// ---- waiting for lanes of the warp ------------------------------------------------------------------------

// What a lane hands in and takes out of a collective call.
struct alignas(16) Slot {
  unsigned char bytes[64];
};

// The slots of a warp, seen as values of one type.
template <class T>
class Lanes {
 public:
  explicit Lanes(Slot* slots) : slots_(slots) {}
  T& operator[](int lane) const { return *reinterpret_cast<T*>(slots_[lane].bytes); }

 private:
  Slot* slots_;
};

// Which call it is: only lanes that make the same call, with the same mask, belong together.
struct Call {
  const char* name;
  int line;
  unsigned mask;
  bool whole_warp;  // all 32 lanes must be there; else lanes that have exited are excused
};

// Runs once for all lanes of a call, when the last has come.
using Combiner = void (*)(const void* combine, Slot* in, Slot* out, unsigned lanes);

int lane();
Slot* slots_in();
Slot* slots_out();
// Returns when all lanes of the call have come, their results have been combined, and it is this lane's turn.
void join(const Call& call, const void* combine, Combiner combiner);

// Hands in `mine`; `combine(in, out, lanes)` runs once for all lanes of the call; returns this lane's part.
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

// The same for instructions that PTX calls `.aligned`: all 32 lanes make them together. They are counted by name; that
// of a matrix product says its size, and its inputs' type last, as in "mma.m16n8k16.f16".
template <class Out, class In, class Combine>
Out whole_warp(const char* name, const In& mine, Combine combine) {
  return collective<Out>(Call{name, 0, 0xffffffffu, true}, mine,
                         [combine](Lanes<const In> in, Lanes<Out> out, unsigned) { combine(in, out); });
}

// ---- asynchronous copies ----------------------------------------------------------------------------------

// A copy may happen at once or when its group is waited for; the run's order decides, so that a missing wait shows.
// `past_l1` tells that each copy comes from L2, also where L1 has the bytes.
void copy_async(void* target, const void* source, int bytes, int source_bytes, bool past_l1 = false);
void commit_copies();
void wait_for_copies(int groups_left);

// ---- what is counted --------------------------------------------------------------------------------------
// Of the lane that calls; nothing where nobody watches (see watch.h).

#ifdef TUNEBENCH_WATCH
void count_f32();      // one full-rate f32 instruction
void count_special();  // one result of the special-function unit
void see_atomic(const void* address, Bytes bytes, const void* pc);
// What an instruction of the whole warp reads of shared memory: by the address that a lane passes.
void tell_shared_read(int lane, const void* address, Bytes bytes);
// A function whose accesses are told by itself: its caller is the instruction.
#define TUNEBENCH_UNSEEN __attribute__((noinline, no_sanitize("thread")))
#else
inline void count_f32() {}
inline void count_special() {}
inline void see_atomic(const void*, Bytes, const void*) {}
inline void tell_shared_read(int, const void*, Bytes) {}
#define TUNEBENCH_UNSEEN
#endif

// ---- asynchronous barriers, bulk copies, warpgroups, clusters (hopper.h) -----------------------------
// Shared memory by its 32-bit address, as instructions of sm_90 name it: that of the block that runs, or, in the window
// that `cluster_address` opens, that of another block of its cluster.

unsigned shared_address(const void* pointer);
void mbarrier_init(unsigned barrier, unsigned count);
void mbarrier_arrive(unsigned barrier, unsigned expected_bytes);
void mbarrier_wait(unsigned barrier, unsigned parity);  // returns when the phase of that parity has ended
void fence_mbarrier_init();

// Copies the box of a tensor map at `corner` (innermost coordinate first) and tells the barrier; with `blocks`, a mask,
// to the same place of all these blocks of the cluster, each of which has its barrier told.
void copy_box(unsigned target, const void* tensor_map, int rank, const int* corner, unsigned barrier, unsigned blocks);

// The same of a column of pixels, from the one at `corner` on, each read `offsets` further.
void copy_pixels(unsigned target, const void* tensor_map, int rank, const int* corner, const unsigned short* offsets,
                 unsigned barrier, unsigned blocks);

// D (64, n) = A (64, K) B (K, n), plus D if `accumulate`, of a warpgroup. K is 32 bytes of elements; A and B are given
// by descriptors, and an element's value by a function. A of 16-bit elements may be in four registers of each thread
// instead: they are read when the product happens.
struct Product {
  unsigned long long a, b;
  float (*value)(const void* element);
  const char* type;  // of an element, as PTX names it
  int element_bytes, n;
  bool a_along_m, b_along_n, accumulate;
  const unsigned* a_registers = nullptr;
};
void warpgroup_multiply(const Product& product, float* sums);
void warpgroup_fence();
void warpgroup_commit();
void warpgroup_wait(int groups_left);
void set_registers(int count);

unsigned cluster_rank();
unsigned cluster_address(unsigned address, unsigned rank);
void cluster_arrive();
void cluster_wait();

// ---- kernels by index -------------------------------------------------------------------------------------

// A kernel and how to call it with arguments whose types only the compiler knows.
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

// Defined beside the kernel, by generated code: the kernels that a job may launch.
extern const Entry* const entries;
extern const int entry_count;

}  // namespace emulated
