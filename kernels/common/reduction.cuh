#pragma once
// Operations that join values of a reduction, sequentially or by lanes. Needs types.cuh and reduce.cuh. They keep NaN,
// so that a wrong result stays visible.

struct Total {
  static __device__ __forceinline__ float neutral() { return 0.0f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return f32_op(a + b); }
};
struct Greatest {
  static __device__ __forceinline__ float neutral() { return -infinity(); }
  __device__ __forceinline__ float operator()(float a, float b) const { return b > a || b != b ? b : a; }
};
struct Least {
  static __device__ __forceinline__ float neutral() { return infinity(); }
  __device__ __forceinline__ float operator()(float a, float b) const { return b < a || b != b ? b : a; }
};

// Destination of a result: the output, finished, or scratch memory for the launch that joins parts.
template <class Op, class Out>
struct Finished {
  Out* out;
  float factor;
  __device__ __forceinline__ void put(size_t index, float value) const {
    out[index] = from_float<Out>(finish(value * factor));
  }
};
struct Partial {
  float* partial;
  __device__ __forceinline__ void put(size_t index, float value) const { partial[index] = value; }
};
