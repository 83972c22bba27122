#pragma once
// Element types, their conversions, and accesses of several elements at once. It includes no header, so that NVRTC
// compiles fast. With TUNEBENCH_EMULATE the host's C++ compiler compiles the same text, and each PTX instruction has an
// alternative body that computes the same bits.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i32 = int;
using i64 = long long;

// Storage only: arithmetic is done in f32.
struct half_t {
  u16 bits;  // IEEE 754 binary16
};
struct bf16_t {
  u16 bits;  // the upper half of an f32
};
struct e4m3_t {
  u8 bits;  // 1 sign, 4 exponent (bias 7), 3 fraction bits; no infinities, NaN where all seven are set
};

// The type in which elements are multiplied and products are summed.
template <class T>
struct WideOf {
  using type = float;
};
template <>
struct WideOf<i8> {
  using type = i32;
};
template <class T>
using Wide = typename WideOf<T>::type;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// ---- to f32 -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float value) { return value; }

__device__ __forceinline__ float to_float(half_t value) {
#ifdef TUNEBENCH_EMULATE
  const u32 sign = u32(value.bits & 0x8000u) << 16, rest = u32(value.bits & 0x7fffu) << 13;
  // 2^112 moves the exponent's bias from 15 to 127 and makes subnormals normal; both are exact.
  float magnitude = __uint_as_float(rest) * 0x1p112f;
  if (rest >= 0x0f800000u) magnitude = __uint_as_float(rest | 0x7f800000u);  // infinity or NaN
  return __uint_as_float(__float_as_uint(magnitude) | sign);
#else
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#endif
}

__device__ __forceinline__ float to_float(bf16_t value) { return __uint_as_float(u32(value.bits) << 16); }

// Source: PTX ISA, "cvt"; Micikevicius et al., "FP8 formats for deep learning", 2022.
__device__ __forceinline__ float to_float(e4m3_t value) {
#if !defined(TUNEBENCH_EMULATE) && __CUDA_ARCH__ >= 890
  u32 pair;  // two f16; the lower one is the result
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(u16(value.bits)));
  return to_float(half_t{u16(pair)});
#else
  const u32 sign = u32(value.bits & 0x80u) << 24, rest = value.bits & 0x7fu;
  // As for binary16: 2^120 moves the exponent's bias from 7 to 127 and makes subnormals normal; both are exact.
  const float magnitude = rest == 0x7fu ? __uint_as_float(0x7fffffffu) : __uint_as_float(rest << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(magnitude) | sign);
#endif
}

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(half_t value) { return to_float(value); }
__device__ __forceinline__ float widen(bf16_t value) { return to_float(value); }
__device__ __forceinline__ float widen(e4m3_t value) { return to_float(value); }
__device__ __forceinline__ i32 widen(i8 value) { return value; }

// ---- from f32, to nearest even ----------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ T from_float(float value);

template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}

template <>
__device__ __forceinline__ half_t from_float<half_t>(float value) {
#ifdef TUNEBENCH_EMULATE
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u16 sign = u16(bits >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return {0x7fff};                // NaN
  if (magnitude >= 0x477ff000u) return {u16(sign | 0x7c00u)};  // 65520 and above
  if (magnitude < 0x38800000u)  // subnormal: an f32 in [0.5, 1) has its spacing, so the addition rounds
    return {u16(sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u))};
  const u32 rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {u16(sign | (rounded - 0x38000000u) >> 13)};
#else
  half_t result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#endif
}

template <>
__device__ __forceinline__ bf16_t from_float<bf16_t>(float value) {
#if !defined(TUNEBENCH_EMULATE) && __CUDA_ARCH__ >= 800
  bf16_t result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
#else
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN
  return {u16((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

// Values beyond the largest number, 448, become 448: the type has no infinity.
template <>
__device__ __forceinline__ e4m3_t from_float<e4m3_t>(float value) {
#if !defined(TUNEBENCH_EMULATE) && __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(value));
  return {u8(pair)};
#else
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u8 sign = u8(bits >> 24 & 0x80u);
  if (magnitude > 0x7f800000u) return {0x7f};               // NaN
  if (magnitude >= 0x43e00000u) return {u8(sign | 0x7eu)};  // 448 and above
  if (magnitude < 0x3c800000u)  // subnormal: an f32 in [2^14, 2^15) has its spacing, so the addition rounds
    return {u8(sign | (__float_as_uint(__uint_as_float(magnitude) + 0x1p14f) - 0x46800000u))};
  const u32 rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
  return {u8(sign | (rounded - 0x3c000000u) >> 20)};
#endif
}

// Two elements in one register, `low` at the lower address, as in mma fragments and epilogues.
template <class T>
__device__ __forceinline__ u32 pack2(float low, float high) {
  return u32(from_float<T>(low).bits) | u32(from_float<T>(high).bits) << 16;
}

#if !defined(TUNEBENCH_EMULATE) && __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ u32 pack2<half_t>(float low, float high) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ __forceinline__ u32 pack2<bf16_t>(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
#endif

// The f32 nearest to `value` that tf32 can hold (ties away from zero), as an operand of mma_m16n8k8_tf32. sm_80 on.
__device__ __forceinline__ u32 to_tf32(float value) {
#ifdef TUNEBENCH_EMULATE
  const u32 bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits & 0x007fffffu ? 0x7fffffffu : bits;
  return (bits + 0x1000u) & 0xffffe000u;
#else
  u32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(value));
  return result;
#endif
}

// ---- arithmetic of the multiply-add pipe -----------------------------------------------------------------
// What the costs of a variant count goes through these, which change nothing: emulation counts it here.

// a * b + c, one instruction.
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
#ifdef TUNEBENCH_EMULATE
  emulated::count_f32();
  return a * b + c;
#else
  return fmaf(a, b, c);
#endif
}

// The same for integers, which also uses the multiply-add pipe.
__device__ __forceinline__ i32 multiply_add(i32 a, i32 b, i32 c) {
#ifdef TUNEBENCH_EMULATE
  emulated::count_f32();
#endif
  return a * b + c;
}

// Counts `result` as one addition or multiplication.
__device__ __forceinline__ float f32_op(float result) {
#ifdef TUNEBENCH_EMULATE
  emulated::count_f32();
#endif
  return result;
}

// ---- several elements in one access -----------------------------------------------------------------------

// `N` elements that move as one access; N is a power of two and N * sizeof(T) at most 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

// Elements of `T` in an access of 16 bytes.
template <class T>
constexpr int PER_16_BYTES = 16 / int(sizeof(T));

// `source` must be a multiple of the access's size: the hardware traps otherwise, and so does emulation.
template <int N, class T>
__device__ __forceinline__ Vec<T, N> load_vec(const T* source) {
#ifdef TUNEBENCH_EMULATE
  emulated::check_aligned(source, sizeof(Vec<T, N>), "load_vec");
#endif
  return *reinterpret_cast<const Vec<T, N>*>(source);
}

template <class T, int N>
__device__ __forceinline__ void store_vec(T* target, const Vec<T, N>& values) {
#ifdef TUNEBENCH_EMULATE
  emulated::check_aligned(target, sizeof(Vec<T, N>), "store_vec");
#endif
  *reinterpret_cast<Vec<T, N>*>(target) = values;
}
