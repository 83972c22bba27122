#pragma once
// Elements of one byte, bool and i8, converted to and from f32. Needs types.cuh.

struct bool_t {
  u8 bits;  // 0 or 1
};

__device__ __forceinline__ float to_float(bool_t value) { return value.bits ? 1.0f : 0.0f; }
__device__ __forceinline__ float to_float(i8 value) { return float(value); }

template <>
__device__ __forceinline__ bool_t from_float<bool_t>(float value) {
  return {u8(value != 0.0f)};
}

template <>
__device__ __forceinline__ i8 from_float<i8>(float value) {
  return i8(i32(value));
}
