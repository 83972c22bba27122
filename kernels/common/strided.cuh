#pragma once
// Elements of type bool: one byte, converted to and from f32; indices in memory. Needs types.cuh.

struct bool_t {
  u8 bits;  // 0 or 1
};

__device__ __forceinline__ float to_float(bool_t value) { return value.bits ? 1.0f : 0.0f; }

template <>
__device__ __forceinline__ bool_t from_float<bool_t>(float value) {
  return {u8(value != 0.0f)};
}

// An index from memory, below EXTENT and not negative; negative ones count from the end if WRAPS. Others stop the
// kernel, as in kernels of torch.
template <i64 EXTENT, bool WRAPS, class T>
__device__ __forceinline__ i64 valid_index(T value) {
  const i64 index = WRAPS && value < 0 ? i64(value) + EXTENT : i64(value);
  if (u64(index) >= u64(EXTENT)) __trap();
  return index;
}
