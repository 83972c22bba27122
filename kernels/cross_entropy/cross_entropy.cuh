#pragma once
// Result of cross entropy in the forward direction. Needs softmax.cuh.

// loss = lse - x[target], computed by one thread, which has the sum of its row.
template <class T>
__device__ __forceinline__ void store_loss(const Powers& row, const T* x, int target, float* loss, float* lse) {
  const float log = row.log();
  *loss = log - to_float(x[target]);
  *lse = log;
}
