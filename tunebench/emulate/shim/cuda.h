// The part of CUDA C++ that kernels use, for the host's compiler: keywords, vector types, built-in functions.
//
// `__shared__` and `__launch_bounds__` are missing: no macro can place such variables in memory that is poisoned and
// watched, or report the bounds. host_source.py rewrites both before the compiler sees them.
#pragma once
#include "interface.h"

#define TUNEBENCH_EMULATE 1

#define __global__
#define __device__
#define __host__
#define __constant__ static
#ifdef TUNEBENCH_WATCH  // each access is a separate instruction, wherever it was written
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline
#endif
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
#define __restrict__ __restrict

using size_t = __SIZE_TYPE__;
using uint = unsigned;
constexpr int warpSize = 32;

// ---- vector types -----------------------------------------------------------------------------------------

#define TUNEBENCH_VECTORS(type, name, unit)                                                                      \
  struct name##1 {                                                                                               \
    type x;                                                                                                      \
  };                                                                                                             \
  struct alignas(2 * unit) name##2 {                                                                             \
    type x, y;                                                                                                   \
  };                                                                                                             \
  struct alignas(4 * unit > 16 ? 16 : 4 * unit) name##4 {                                                        \
    type x, y, z, w;                                                                                             \
  };                                                                                                             \
  inline name##1 make_##name##1(type x) { return {x}; }                                                          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                               \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
TUNEBENCH_VECTORS(signed char, char, 1)
TUNEBENCH_VECTORS(unsigned char, uchar, 1)
TUNEBENCH_VECTORS(short, short, 2)
TUNEBENCH_VECTORS(unsigned short, ushort, 2)
TUNEBENCH_VECTORS(int, int, 4)
TUNEBENCH_VECTORS(unsigned, uint, 4)
TUNEBENCH_VECTORS(float, float, 4)
TUNEBENCH_VECTORS(long long, longlong, 8)
TUNEBENCH_VECTORS(unsigned long long, ulonglong, 8)
TUNEBENCH_VECTORS(double, double, 8)
#undef TUNEBENCH_VECTORS
struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }

// ---- bits -------------------------------------------------------------------------------------------------

template <class To, class From>
inline To tunebench_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}
inline float __int_as_float(int bits) { return tunebench_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return tunebench_bits<float>(bits); }
inline int __float_as_int(float value) { return tunebench_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return tunebench_bits<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return tunebench_bits<double>(bits); }
inline long long __double_as_longlong(double value) { return tunebench_bits<long long>(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(unsigned(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }

// ---- arithmetic -------------------------------------------------------------------------------------------

// Functions that the special-function unit computes, or that need at least one of its results.
inline float tunebench_special(float result) {
  emulated::count_special();
  return result;
}
// exp and exp2 need one result, also in their accurate forms.
#define TUNEBENCH_EXPONENTIAL(name)                                                                              \
  float tunebench_##name(float) __asm__(#name "f");                                                              \
  extern "C" double name(double);                                                                                \
  inline float name##f(float x) { return tunebench_special(tunebench_##name(x)); }                               \
  inline float name(float x) { return name##f(x); }
TUNEBENCH_EXPONENTIAL(exp)
TUNEBENCH_EXPONENTIAL(exp2)
#undef TUNEBENCH_EXPONENTIAL

#define TUNEBENCH_UNARY(name)                                                                                    \
  extern "C" float name##f(float);                                                                               \
  extern "C" double name(double);                                                                                \
  inline float name(float x) { return name##f(x); }
TUNEBENCH_UNARY(expm1)
TUNEBENCH_UNARY(log)
TUNEBENCH_UNARY(log2)
TUNEBENCH_UNARY(log1p)
TUNEBENCH_UNARY(log10)
TUNEBENCH_UNARY(sqrt)
TUNEBENCH_UNARY(cbrt)
TUNEBENCH_UNARY(sin)
TUNEBENCH_UNARY(cos)
TUNEBENCH_UNARY(tanh)
TUNEBENCH_UNARY(erf)
TUNEBENCH_UNARY(erfc)
TUNEBENCH_UNARY(fabs)
TUNEBENCH_UNARY(floor)
TUNEBENCH_UNARY(ceil)
TUNEBENCH_UNARY(rint)
TUNEBENCH_UNARY(trunc)
TUNEBENCH_UNARY(round)
#undef TUNEBENCH_UNARY
#define TUNEBENCH_BINARY(name)                                                                                   \
  extern "C" float name##f(float, float);                                                                        \
  extern "C" double name(double, double);                                                                        \
  inline float name(float x, float y) { return name##f(x, y); }
TUNEBENCH_BINARY(pow)
TUNEBENCH_BINARY(fmod)
TUNEBENCH_BINARY(fmax)
TUNEBENCH_BINARY(fmin)
TUNEBENCH_BINARY(copysign)
#undef TUNEBENCH_BINARY
extern "C" float fmaf(float, float, float);
extern "C" double fma(double, double, double);
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" int abs(int);
inline float abs(float x) { return __builtin_fabsf(x); }

inline float rsqrtf(float x) { return tunebench_special(1.0f / __builtin_sqrtf(x)); }
inline float fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return tunebench_special(logf(x)); }
inline float __log2f(float x) { return tunebench_special(log2f(x)); }
inline float __sinf(float x) { return tunebench_special(sinf(x)); }
inline float __cosf(float x) { return tunebench_special(cosf(x)); }
inline float __powf(float x, float y) { return tunebench_special(powf(x, y)); }
inline float __fdividef(float x, float y) { return tunebench_special(x / y); }
inline float __frcp_rn(float x) { return tunebench_special(1.0f / x); }
inline float __fsqrt_rn(float x) { return tunebench_special(__builtin_sqrtf(x)); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline float __int2float_rn(int x) { return float(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }

#define TUNEBENCH_MIN_MAX(type)                                                                                  \
  inline type min(type a, type b) { return b < a ? b : a; }                                                      \
  inline type max(type a, type b) { return a < b ? b : a; }
TUNEBENCH_MIN_MAX(int)
TUNEBENCH_MIN_MAX(unsigned)
TUNEBENCH_MIN_MAX(long)
TUNEBENCH_MIN_MAX(unsigned long)
TUNEBENCH_MIN_MAX(long long)
TUNEBENCH_MIN_MAX(unsigned long long)
#undef TUNEBENCH_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }  // returns the other operand if one is NaN, as on the device
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// ---- memory -----------------------------------------------------------------------------------------------

#define TUNEBENCH_LOAD(name)                                                                                     \
  template <class T>                                                                                             \
  T name(const T* address) {                                                                                     \
    return *address;                                                                                             \
  }
TUNEBENCH_LOAD(__ldg)
TUNEBENCH_LOAD(__ldca)
TUNEBENCH_LOAD(__ldcg)
TUNEBENCH_LOAD(__ldcs)
TUNEBENCH_LOAD(__ldcv)
#undef TUNEBENCH_LOAD
#define TUNEBENCH_STORE(name)                                                                                    \
  template <class T>                                                                                             \
  void name(T* address, T value) {                                                                               \
    *address = value;                                                                                            \
  }
TUNEBENCH_STORE(__stwb)
TUNEBENCH_STORE(__stcg)
TUNEBENCH_STORE(__stcs)
TUNEBENCH_STORE(__stwt)
#undef TUNEBENCH_STORE
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
extern "C" void* memcpy(void*, const void*, size_t) noexcept;
extern "C" void* memset(void*, int, size_t) noexcept;

// One fiber runs at a time, so that plain code is atomic. As in CUDA, the operand has the target's type.
template <class T>
struct tunebench_same {
  using type = T;
};
#define TUNEBENCH_ATOMIC(name, result)                                                                           \
  template <class T>                                                                                             \
  TUNEBENCH_UNSEEN T name(T* address, typename tunebench_same<T>::type value) {                                  \
    emulated::see_atomic(address, sizeof(T), __builtin_return_address(0));                                       \
    const T old = *address;                                                                                      \
    *address = result;                                                                                           \
    return old;                                                                                                  \
  }
TUNEBENCH_ATOMIC(atomicAdd, old + value)
TUNEBENCH_ATOMIC(atomicSub, old - value)
TUNEBENCH_ATOMIC(atomicMax, old < value ? value : old)
TUNEBENCH_ATOMIC(atomicMin, value < old ? value : old)
TUNEBENCH_ATOMIC(atomicAnd, old & value)
TUNEBENCH_ATOMIC(atomicOr, old | value)
TUNEBENCH_ATOMIC(atomicXor, old ^ value)
TUNEBENCH_ATOMIC(atomicExch, value)
TUNEBENCH_ATOMIC(atomicInc, old >= value ? T(0) : old + 1)
TUNEBENCH_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef TUNEBENCH_ATOMIC
template <class T>
TUNEBENCH_UNSEEN T atomicCAS(T* address, typename tunebench_same<T>::type expected,
                             typename tunebench_same<T>::type value) {
  emulated::see_atomic(address, sizeof(T), __builtin_return_address(0));
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}

// ---- barriers, votes, shuffles ----------------------------------------------------------------------------
// The line of the call is part of its identity: threads that wait in different places have diverged.

inline void __syncthreads(int line = __builtin_LINE()) { emulated::block_barrier(line, false); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return emulated::block_barrier(line, predicate != 0).count;
}
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) {
  return emulated::block_barrier(line, predicate != 0).all;
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return emulated::block_barrier(line, predicate != 0).any;
}

namespace emulated {

struct Nothing {};

template <class T>
struct Exchanged {
  T value;
  int source;  // the lane whose value is requested
};

template <class T>
T shuffle(const char* name, int line, unsigned mask, T value, int source) {
  return collective<T>(Call{name, line, mask, false}, Exchanged<T>{value, source},
                       [](Lanes<const Exchanged<T>> in, Lanes<T> out, unsigned lanes) {
                         for (int i = 0; i < 32; ++i) {
                           if (!(lanes >> i & 1u)) continue;
                           const int from = in[i].source;
                           if (lanes >> from & 1u)
                             out[i] = in[from].value;
                           else  // undefined on a GPU: that lane has exited or is not in the mask
                             __builtin_memset(&out[i], 0xff, sizeof(T));
                         }
                       });
}

// Returns in `holds` the lanes of the call whose predicate holds, and in `lanes` all lanes of the call.
struct Ballot {
  unsigned holds, lanes;
};
inline Ballot ballot(const char* name, int line, unsigned mask, bool predicate) {
  return collective<Ballot>(Call{name, line, mask, false}, predicate,
                            [](Lanes<const bool> in, Lanes<Ballot> out, unsigned lanes) {
                              unsigned holds = 0;
                              for (int i = 0; i < 32; ++i)
                                if (lanes >> i & 1u && in[i]) holds |= 1u << i;
                              for (int i = 0; i < 32; ++i)
                                if (lanes >> i & 1u) out[i] = {holds, lanes};
                            });
}

}  // namespace emulated

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
  emulated::collective<emulated::Nothing>(
      emulated::Call{"__syncwarp", line, mask, false}, emulated::Nothing(),
      [](emulated::Lanes<const emulated::Nothing>, emulated::Lanes<emulated::Nothing>, unsigned) {});
}

// Source lanes as PTX ISA defines them for shfl.sync: a lane beyond the segment of `width` keeps its own
// value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
  const int self = emulated::lane();
  return emulated::shuffle("__shfl_sync", line, mask, value, (self & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int self = emulated::lane(), from = self - int(delta);
  return emulated::shuffle("__shfl_up_sync", line, mask, value, from < (self & ~(width - 1)) ? self : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
  const int self = emulated::lane(), from = self + int(delta);
  return emulated::shuffle("__shfl_down_sync", line, mask, value, from > (self | (width - 1)) ? self : from);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
  const int self = emulated::lane(), from = self ^ lanes;
  return emulated::shuffle("__shfl_xor_sync", line, mask, value, from > (self | (width - 1)) ? self : from);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emulated::ballot("__ballot_sync", line, mask, predicate != 0).holds;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return emulated::ballot("__any_sync", line, mask, predicate != 0).holds != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const emulated::Ballot ballot = emulated::ballot("__all_sync", line, mask, predicate != 0);
  return ballot.holds == ballot.lanes;
}

// ---- other functions --------------------------------------------------------------------------------------

[[noreturn]] inline void __trap() { emulated::fail("__trap()"); }
inline void __nanosleep(unsigned) {}
inline long long clock64() { return 0; }
inline int clock() { return 0; }
#define assert(condition) \
  ((condition) ? (void)0 : emulated::fail("assertion failed, line %d: %s", __LINE__, #condition))
extern "C" int printf(const char*, ...) __attribute__((format(printf, 1, 2)));
#define __builtin_assume(condition) ((void)0)
