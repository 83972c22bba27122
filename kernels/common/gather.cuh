#pragma once
// Indices in memory. Needs types.cuh.

// An index from memory, below EXTENT and not negative; negative ones count from the end if WRAPS. Others stop the
// kernel, as in kernels of torch.
template <i64 EXTENT, bool WRAPS, class T>
__device__ __forceinline__ i64 valid_index(T value) {
  const i64 index = WRAPS && value < 0 ? i64(value) + EXTENT : i64(value);
  if (u64(index) >= u64(EXTENT)) __trap();
  return index;
}
