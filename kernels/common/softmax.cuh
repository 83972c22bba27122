#pragma once
// Parts of softmax, log-softmax and their common sum. Arguments are scaled by log2 e, so that exponentials are powers
// of two. Needs types.cuh, reduce.cuh and row_block.cuh.
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

constexpr float LN_2 = 0.6931471805599453f;

// Below any argument, and finite, since a row may start with minus infinity.
__device__ __forceinline__ float lowest() { return -3.402823466e38f; }

// Arguments of the powers of two in a row: (scale x + mask) log2 e.
template <class T, bool MASKED, int V>
struct Arguments {
  const T* x;
  const T* mask;
  float scale;

  __device__ __forceinline__ void load(int vector, float (&z)[V]) const {
    load_floats(x + vector * V, z);
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = f32_op(z[i] * scale);
    if constexpr (MASKED) {
      float added[V];
      load_floats(mask + vector * V, added);
#pragma unroll
      for (int i = 0; i < V; ++i) z[i] = multiply_add(added[i], LOG2_E, z[i]);
    }
  }
};

template <int V>
__device__ __forceinline__ float max_of(float top, const float (&z)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) top = fmaxf(top, z[i]);
  return top;
}

// Returns the sum of 2^(z - top); replaces z by the powers if KEPT.
template <bool KEPT, int V>
__device__ __forceinline__ float raise(float top, float (&z)[V]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float power = fast_exp2(f32_op(z[i] - top));
    if constexpr (KEPT) z[i] = power;
    total = f32_op(total + power);
  }
  return total;
}

// The maximum so far, and the sum of the powers relative to it.
struct Powers {
  float top, total;

  // Adds those of N vectors of arguments, `step` apart starting at `first`, that are below `count`.
  template <int N, class Source, int V>
  __device__ __forceinline__ void read(const Source& source, int first, int step, int count, float (&z)[N][V]) {
    float higher = top;
    each_vector<N>(first, step, count, [&](int vector, int n) { source.load(vector, z[n]); });
    each_vector<N>(first, step, count, [&](int, int n) { higher = max_of(higher, z[n]); });
    total *= fast_exp2(top - higher);
    each_vector<N>(first, step, count, [&](int, int n) { total += raise<false>(higher, z[n]); });
    top = higher;
  }

  // Adds the sum of other arguments, relative to their maximum.
  __device__ __forceinline__ void add(float their_top, float their_total) {
    const float higher = fmaxf(top, their_top);
    total = total * fast_exp2(top - higher) + their_total * fast_exp2(their_top - higher);
    top = higher;
  }

  // Returns the result for the whole row to each of its threads.
  template <int ROW_THREADS>
  __device__ __forceinline__ void join() {
    const float highest = reduce_row<ROW_THREADS>(top, Max());
    total = reduce_row<ROW_THREADS>(total * fast_exp2(top - highest), Sum());
    top = highest;
  }

  // The logarithm of the sum of exponentials.
  __device__ __forceinline__ float log() const { return top * LN_2 + logf(total); }
};

__device__ __forceinline__ Powers no_powers() { return {lowest(), 0.0f}; }

// Turns powers into results, their quotients by the sum; or arguments into logarithms of the results.
template <bool LOG>
struct Finish {
  float factor, shift;

  __device__ __forceinline__ explicit Finish(const Powers& row) {
    factor = LOG ? LN_2 : 1.0f / row.total;
    shift = LOG ? -row.log() : 0.0f;
  }

  template <class T, int V>
  __device__ __forceinline__ void store(T* target, float (&z)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = LOG ? multiply_add(z[i], factor, shift) : f32_op(z[i] * factor);
    store_floats(target, z);
  }
};
