#pragma once
// What joins values of a reduction, one after the other or by lanes. Needs types.cuh and reduce.cuh. A NaN stays one, so
// that a broken result is not hidden.

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

// Where a kernel leaves a result: finished, or in scratch memory for the launch that puts those of parts together.
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
