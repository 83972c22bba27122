#pragma once
// What is applied to an accumulated f32 value before it is rounded and stored. Needs nothing else.

struct Identity {
  __device__ __forceinline__ float operator()(float value) const { return value; }
};

struct Relu {
  // A NaN stays one, so that a broken result is not hidden.
  __device__ __forceinline__ float operator()(float value) const { return value < 0.0f ? 0.0f : value; }
};

// The exact form: x times the normal distribution function. Source: Hendrycks and Gimpel, "Gaussian Error Linear
// Units", 2016.
struct Gelu {
  __device__ __forceinline__ float operator()(float value) const {
    return 0.5f * value * (1.0f + erff(value * 0.70710678118654752f));
  }
};
