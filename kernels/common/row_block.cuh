#pragma once
// Rows of a matrix, each shared by ROW_THREADS consecutive threads of a block. Needs types.cuh and reduce.cuh.

// Reduction over the threads of a row. All threads of the block must call it.
template <int ROW_THREADS, class Op>
__device__ __forceinline__ float reduce_row(float value, Op op) {
  if constexpr (ROW_THREADS <= 32) {
    return warp_reduce<ROW_THREADS>(value, op);
  } else {
    __shared__ float scratch[ROW_THREADS / 32];
    return block_reduce<ROW_THREADS>(value, scratch, op);
  }
}

// Vectors of a thread: `thread`, `thread + STEP`, ... of `count`. A row beyond the end has none; its threads still take
// part in reductions.
template <int ROW_THREADS, int ROWS, int V>
struct Share {
  static constexpr int STEP = ROW_THREADS;
  int row_of_block, thread, count;
  size_t offset;  // of the row, in elements

  __device__ __forceinline__ Share(int rows, int cols) {
    row_of_block = threadIdx.x / ROW_THREADS;
    thread = threadIdx.x % ROW_THREADS;
    const int row = blockIdx.x * ROWS + row_of_block;
    count = row < rows ? cols / V : 0;
    offset = size_t(row) * cols;
  }
};

// Calls `f(vector, n)` for those of N vectors, `step` apart starting at `first`, that exist.
template <int N, class F>
__device__ __forceinline__ void each_vector(int first, int step, int count, F f) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * step < count) f(first + n * step, n);
}

// The same for N vectors that are all of a thread's vectors: only the last may be missing, unless the row is.
template <int N, class F>
__device__ __forceinline__ void each_held_vector(int first, int step, int count, F f) {
  if (count > 0) {
#pragma unroll
    for (int n = 0; n < N - 1; ++n) f(first + n * step, n);
    if (first + (N - 1) * step < count) f(first + (N - 1) * step, N - 1);
  }
}

// Rounds and stores one vector.
template <class T, int V>
__device__ __forceinline__ void store_floats(T* target, const float (&values)[V]) {
  Vec<T, V> rounded;
#pragma unroll
  for (int i = 0; i < V; ++i) rounded.at[i] = from_float<T>(values[i]);
  store_vec(target, rounded);
}

// Loads one vector.
template <class T, int V>
__device__ __forceinline__ void load_floats(const T* source, float (&values)[V]) {
  const Vec<T, V> stored = load_vec<V>(source);
#pragma unroll
  for (int i = 0; i < V; ++i) values[i] = to_float(stored.at[i]);
}

// Rows in shared memory, as f32. Element i of a vector is `count` words after element i - 1, so that the lanes of a
// warp use different banks. A thread accesses only its own vectors, so that no barrier is needed.
template <int V>
struct KeptRow {
  float* base;
  int count;

  __device__ __forceinline__ void put(int vector, const float (&values)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) base[i * count + vector] = values[i];
  }
  __device__ __forceinline__ void get(int vector, float (&values)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = base[i * count + vector];
  }
};
