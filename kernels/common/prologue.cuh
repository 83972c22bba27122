#pragma once
// What is multiplied in place of the elements of a left operand: `Prologue` of each, rounded to the type they are stored
// in. Needs types.cuh, and before it the struct `Prologue`: operator()(x, scale, shift) of f32, HAS_SCALE and HAS_SHIFT.

// Vectors that have a number for each k; neither is read unless the function names it.
template <class T>
struct PrologueVectors {
  const T* scale;
  const T* shift;
};

// Those numbers that an access of VEC elements meets: one for each where they lie along K, else one for all.
template <class T, int VEC, bool ALONG_K>
struct PrologueNumbers {
  static constexpr int COUNT = ALONG_K ? VEC : 1;
  Vec<T, COUNT> scale, shift;

  // Loads them from `k` on of either vector; unless they exist, they are zero.
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
