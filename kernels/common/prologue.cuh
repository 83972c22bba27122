#pragma once
// Prologue: the function `Prologue` applied to elements of the left operand before they are multiplied; results are
// rounded to the stored type. Needs types.cuh and the struct `Prologue`: operator()(x, scale, shift) of f32, HAS_SCALE,
// HAS_SHIFT.

// Vectors with one number per k; a vector that the function does not use is not read.
template <class T>
struct PrologueVectors {
  const T* scale;
  const T* shift;
};

// The numbers for an access of VEC elements: one each where they are along K, else one for all.
template <class T, int VEC, bool ALONG_K>
struct PrologueNumbers {
  static constexpr int COUNT = ALONG_K ? VEC : 1;
  Vec<T, COUNT> scale, shift;

  // Loads the numbers from `k` on of both vectors, or zeros if they do not exist.
  __device__ __forceinline__ void load(const PrologueVectors<T>& vectors, i64 k, bool exist) {
    if constexpr (Prologue::HAS_SCALE) scale = exist ? load_vec<COUNT>(vectors.scale + k) : Vec<T, COUNT>{};
    if constexpr (Prologue::HAS_SHIFT) shift = exist ? load_vec<COUNT>(vectors.shift + k) : Vec<T, COUNT>{};
  }

  __device__ __forceinline__ void apply(Vec<T, VEC>& elements) const {
#pragma unroll
    for (int e = 0; e < VEC; ++e) {
      const int number = ALONG_K ? e : 0;
      const float factor = Prologue::HAS_SCALE ? to_float(scale.at[number]) : 0.0f;
      const float added = Prologue::HAS_SHIFT ? to_float(shift.at[number]) : 0.0f;
      elements.at[e] = from_float<T>(Prologue()(to_float(elements.at[e]), factor, added));
    }
  }
};
