#pragma once
// Places of the scales of quantised matrices. Needs types.cuh.

// In the order of the workload's choices.
enum class Scales { TENSOR, ROW, GROUP, BLOCK };

// Scales of the elements of a matrix of rows along K, and what is added to scaled elements.
template <class T, Scales KIND, int GROUP, bool SHIFTS>
struct ScaleMap {
  static constexpr bool HAS_SHIFT = SHIFTS;
  const T* scale;
  const T* shift;  // not read without HAS_SHIFT
  i64 groups;      // of a row

  __device__ __forceinline__ i64 place(int row, int k) const {
    if constexpr (KIND == Scales::TENSOR) return 0;
    if constexpr (KIND == Scales::ROW) return row;
    return (KIND == Scales::BLOCK ? row / GROUP : row) * groups + k / GROUP;
  }
};
