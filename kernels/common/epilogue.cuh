#pragma once
// Activations of the epilogue: functors applied to an accumulated f32 value before it is rounded and stored. Needs
// nothing else. tunebench/activation.py names the struct of an activation; others are generated from their definition.
// IS_LONG marks activations of tens of instructions, whose code is not repeated often.

// 1 / (1 + e^-x), by two special functions. The error is a few units in the last place, about |x| of them for negative
// x, because the exponent is rounded. Below -87.3 the result is flushed to zero.
__device__ __forceinline__ float fast_sigmoid(float x) {
  constexpr float MINUS_LOG2_E = -1.4426950408889634f;
#ifdef TUNEBENCH_EMULATE
  emulated::count_special();
  return 1.0f / (1.0f + exp2f(x * MINUS_LOG2_E));
#else
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * MINUS_LOG2_E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
#endif
}

struct Identity {
  static constexpr bool IS_LONG = false;
  __device__ __forceinline__ float operator()(float value) const { return value; }
};

struct Relu {
  static constexpr bool IS_LONG = false;
  // NaN stays NaN, so that a wrong result is not hidden.
  __device__ __forceinline__ float operator()(float value) const { return value < 0.0f ? 0.0f : value; }
};

// The exact form: x times the normal distribution function. Source: Hendrycks and Gimpel, "Gaussian Error Linear
// Units", 2016.
struct Gelu {
  static constexpr bool IS_LONG = true;
  __device__ __forceinline__ float operator()(float value) const {
    return 0.5f * value * (1.0f + erff(value * 0.70710678118654752f));
  }
};

struct Sigmoid {
  static constexpr bool IS_LONG = true;
  __device__ __forceinline__ float operator()(float value) const { return fast_sigmoid(value); }
};

// x times the logistic function. NaN stays NaN. Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for
// neural network function approximation in reinforcement learning", 2017; Ramachandran, Zoph and Le, "Searching for
// activation functions", 2017 (called swish there).
struct Silu {
  static constexpr bool IS_LONG = true;
  __device__ __forceinline__ float operator()(float value) const { return value * fast_sigmoid(value); }
};
