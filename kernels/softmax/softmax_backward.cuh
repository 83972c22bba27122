#pragma once
// Parts of the gradients of softmax and log-softmax. Needs types.cuh, reduce.cuh and row_block.cuh.

// One row: p is loaded from y, g from dy. Softmax needs the sum of y dy. Log-softmax needs the sum of dy only, so that
// y is read for the result only.
template <class T, bool LOG, int V>
struct Gradient {
  const T* y;
  const T* dy;
  float scale;

  __device__ __forceinline__ void load(int vector, float (&p)[V], float (&g)[V]) const {
    if constexpr (!LOG) load_floats(y + vector * V, p);
    load_floats(dy + vector * V, g);
  }

  static __device__ __forceinline__ float sum_of(const float (&p)[V], const float (&g)[V]) {
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) total = LOG ? f32_op(total + g[i]) : multiply_add(p[i], g[i], total);
    return total;
  }

  // scale y (dy - total), or scale (dy - e^y total).
  __device__ __forceinline__ void store(T* dx, int vector, float total, float (&p)[V], float (&g)[V]) const {
    if constexpr (LOG) load_floats(y + vector * V, p);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (LOG)
        g[i] = f32_op(scale * multiply_add(-fast_exp2(f32_op(p[i] * LOG2_E)), total, g[i]));
      else
        g[i] = f32_op(f32_op(scale * p[i]) * f32_op(g[i] - total));
    }
    store_floats(dx + vector * V, g);
  }
};
