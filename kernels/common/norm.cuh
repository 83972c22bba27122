#pragma once
// Forward layernorm and rmsnorm of rows of x, or of x + bias + residual. Needs types.cuh, reduce.cuh and
// row_block.cuh. Lines that end with "edges" are for rows with edges only (row_edges.cuh), and those that end with
// "aligned" are for others.

// Compile-time description of the norm. CENTRED: layernorm, which subtracts the mean and adds beta; otherwise
// rmsnorm. RESIDUAL: the sum z = x + bias + residual is normalised and written. STATS: mean and rstd of each row
// are written too.
template <class Element, bool IS_CENTRED, bool HAS_BIAS, bool HAS_RESIDUAL, bool HAS_STATS>
struct Norm {
  using T = Element;
  static constexpr bool CENTRED = IS_CENTRED, BIAS = HAS_BIAS, RESIDUAL = HAS_RESIDUAL, STATS = HAS_STATS;
};

// The tensors of a workload; missing ones are never accessed.
#define NORM_PARAMETERS(T)                                                                                       \
  const T *__restrict__ x, const T *__restrict__ gamma, const T *__restrict__ beta, const T *__restrict__ bias,  \
      const T *__restrict__ residual, T *__restrict__ y, T *__restrict__ z, float *__restrict__ mean_of,         \
      float *__restrict__ rstd_of, int rows, int cols, float eps

// ---- one vector of a row ----------------------------------------------------------------------------------

template <int V>
__device__ __forceinline__ float sum_of(const float (&x)[V]) {
  float total = x[0];
#pragma unroll
  for (int i = 1; i < V; ++i) total = f32_op(total + x[i]);
  return total;
}

// The sum of squared deviations from `mean`, which is 0 unless the norm is centred.
template <bool CENTRED, int V>
__device__ __forceinline__ float squares_of(const float (&x)[V], float mean) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float apart = CENTRED ? f32_op(x[i] - mean) : x[i];
    total = multiply_add(apart, apart, total);
  }
  return total;
}

// The inputs of one row that are added; pointers are to the start of the row.
template <class P, int V>
struct Parts {
  using T = typename P::T;
  const T* x;
  const T* bias;  // aligned
  Unaligned<T, V> bias;  // edges
  const T* residual;
  T* z;

  __device__ __forceinline__ Parts<P, 1> singly() const {  // edges
    return {x, {bias.base, bias.at, bias.count}, residual, z};  // edges
  }  // edges

  __device__ __forceinline__ void load(int vector, float (&values)[V]) const {
    load_floats(x + vector * V, values);
    if constexpr (P::BIAS) add(bias + vector * V, values);
    if constexpr (P::RESIDUAL) add(residual + vector * V, values);
  }
  // The normalised value stays in f32; the stored sum is rounded.
  __device__ __forceinline__ void keep_sum(int vector, const float (&values)[V]) const {
    if constexpr (P::RESIDUAL) store_floats(z + vector * V, values);
  }

 private:
  template <class Source>  // edges
  static __device__ __forceinline__ void add(Source source, float (&values)[V]) {  // edges
  static __device__ __forceinline__ void add(const T* source, float (&values)[V]) {  // aligned
    float added[V];
    load_floats(source, added);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] = f32_op(values[i] + added[i]);
  }
};

// The weights, and the mean and factor that normalise a row.
template <class P, int V>
struct Affine {
  using T = typename P::T;
  const T* gamma;  // aligned
  const T* beta;  // aligned
  Unaligned<T, V> gamma, beta;  // edges
  float mean, rstd;

  __device__ __forceinline__ Affine<P, 1> singly() const {  // edges
    return {{gamma.base, gamma.at, gamma.count}, {beta.base, beta.at, beta.count}, mean, rstd};  // edges
  }  // edges
  __device__ __forceinline__ void store(T* target, int vector, float (&x)[V]) const {
    float scale[V], shift[V];
    load_floats(gamma + vector * V, scale);
    if constexpr (P::CENTRED) load_floats(beta + vector * V, shift);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float normal = f32_op((P::CENTRED ? f32_op(x[i] - mean) : x[i]) * rstd);
      x[i] = P::CENTRED ? multiply_add(normal, scale[i], shift[i]) : f32_op(normal * scale[i]);
    }
    store_floats(target + vector * V, x);
  }
  // Called by one thread of the row.
  __device__ __forceinline__ void keep_statistics(float* mean_of, float* rstd_of, int row) const {
    if constexpr (P::STATS && P::CENTRED) mean_of[row] = mean;
    if constexpr (P::STATS) rstd_of[row] = rstd;
  }
};

// Number of elements so far, their mean, and the sum of their squared deviations from it.
// Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
struct Moments {
  float count, mean, squares;

  __device__ __forceinline__ void merge(float more, float their_mean, float their_squares) {
    const float all = count + more, difference = their_mean - mean, share = __fdividef(more, all);
    squares += their_squares + difference * difference * count * share;
    mean += difference * share;
    count = all;
  }
  // Adds the moments of another vector.
  template <bool CENTRED, int V>
  __device__ __forceinline__ void see(const float (&x)[V]) {
    if constexpr (CENTRED) {
      const float own = sum_of(x) * (1.0f / V);
      merge(V, own, squares_of<true>(x, own));
    } else {
      squares += squares_of<false>(x, 0.0f);
    }
  }
};

// ---- forward, for rows with a block or a part of one ------------------------------------------------------
// Loops are unrolled N times only: the vectors that a thread has in flight are a parameter, and take registers.

// Row and vectors of a thread.
template <class P, int ROW_THREADS, int ROWS, int V>
struct Forward : Share<ROW_THREADS, ROWS, V> {  // aligned
struct Forward : EdgedShare<ROW_THREADS, ROWS, V> {  // edges
  using Base = Share<ROW_THREADS, ROWS, V>;  // aligned
  using Base = EdgedShare<ROW_THREADS, ROWS, V>;  // edges
  using T = typename P::T;
  Parts<P, V> parts;

  __device__ __forceinline__ Forward(const T* x, const T* bias, const T* residual, T* z, int rows, int cols)
      : Base(rows, cols), parts{x + Base::offset, bias, residual + Base::offset, z + Base::offset} {}  // aligned
      : Base(rows, cols),  // edges
        parts{x + Base::offset, {bias, Base::before, cols}, residual + Base::offset, z + Base::offset} {}  // edges

  // The mean and factor of a row, from the sum of its squared deviations.
  __device__ __forceinline__ Affine<P, V> affine(const T* gamma, const T* beta, float* mean_of, float* rstd_of,
                                                 float mean, float squares, int cols, float eps) const {
    const float rstd = fast_rsqrt(squares / cols + eps);  // edges
    const int before = this->before;  // edges
    const Affine<P, V> found = {{gamma, before, cols}, {beta, before, cols}, mean, rstd};  // edges
    const Affine<P, V> found = {gamma, beta, mean, fast_rsqrt(squares / cols + eps)};  // aligned
    if (this->count > 0 && this->thread == 0)
      found.keep_statistics(mean_of, rstd_of, blockIdx.x * ROWS + this->row_of_block);
    return found;
  }
};

template <class P, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) norm_registers(NORM_PARAMETERS(typename P::T)) {
  const Forward<P, ROW_THREADS, ROWS, V> my(x, bias, residual, z, rows, cols);
  const auto single = my.parts.singly();  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float values[N][V], mean = 0.0f, squares = 0.0f;
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
  if constexpr (P::CENTRED) {
    float total = 0.0f;
    each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { total += sum_of(values[n]); });
    my.each_edge([&](int, int n) { total += edge[n][0]; });  // edges
    mean = reduce_row<ROW_THREADS>(total, Sum()) / cols;
  }
  each_held_vector<N>(my.thread, my.STEP, my.count,
                      [&](int, int n) { squares += squares_of<P::CENTRED>(values[n], mean); });
  my.each_edge([&](int, int n) { squares += squares_of<P::CENTRED>(edge[n], mean); });  // edges
  squares = reduce_row<ROW_THREADS>(squares, Sum());
  const auto affine = my.affine(gamma, beta, mean_of, rstd_of, mean, squares, cols, eps);
  const auto single_affine = affine.singly();  // edges
  my.each_edge([&](int element, int n) {  // edges
    single.keep_sum(element, edge[n]);  // edges
    single_affine.store(y + my.offset, element, edge[n]);  // edges
  });  // edges
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int vector, int n) {
    my.parts.keep_sum(vector, values[n]);
    affine.store(y + my.offset, vector, values[n]);
  });
}

template <class P, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) norm_shared(NORM_PARAMETERS(typename P::T)) {
  extern __shared__ float all_kept[];
  const Forward<P, ROW_THREADS, ROWS, V> my(x, bias, residual, z, rows, cols);
  const auto single = my.parts.singly();  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  const KeptRow<V> kept = {all_kept + my.row_of_block * cols, my.count};
  float values[N][V], mean = 0.0f, total = 0.0f, squares = 0.0f;
#pragma unroll 1
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      my.parts.keep_sum(vector, values[n]);
      kept.put(vector, values[n]);
      if constexpr (P::CENTRED) total += sum_of(values[n]);
      else squares += squares_of<false>(values[n], 0.0f);
    });
  }
  if constexpr (P::CENTRED) {
    my.each_edge([&](int, int n) { total += edge[n][0]; });  // edges
    mean = reduce_row<ROW_THREADS>(total, Sum()) / cols;
#pragma unroll 1
    for (int first = my.thread; first < my.count; first += my.STEP * N)
      each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
        kept.get(vector, values[n]);
        squares += squares_of<true>(values[n], mean);
      });
  }
  my.each_edge([&](int, int n) { squares += squares_of<P::CENTRED>(edge[n], mean); });  // edges
  squares = reduce_row<ROW_THREADS>(squares, Sum());
  const auto affine = my.affine(gamma, beta, mean_of, rstd_of, mean, squares, cols, eps);
  const auto single_affine = affine.singly();  // edges
  my.each_edge([&](int element, int n) {  // edges
    single.keep_sum(element, edge[n]);  // edges
    single_affine.store(y + my.offset, element, edge[n]);  // edges
  });  // edges
#pragma unroll 1
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept.get(vector, values[n]);
      affine.store(y + my.offset, vector, values[n]);
    });
}

// Reads the row twice and adds its inputs twice, since y is computed from the sum before rounding.
template <class P, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) norm_online(NORM_PARAMETERS(typename P::T)) {
  const Forward<P, ROW_THREADS, ROWS, V> my(x, bias, residual, z, rows, cols);
  const auto single = my.parts.singly();  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  float values[N][V], mean = 0.0f;
  Moments seen = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int, int n) { seen.see<P::CENTRED>(values[n]); });
  }
  my.each_edge([&](int, int n) { seen.see<P::CENTRED>(edge[n]); });  // edges
  if constexpr (P::CENTRED) {
    mean = reduce_row<ROW_THREADS>(seen.count * seen.mean, Sum()) / cols;
    const float apart = seen.mean - mean;
    seen.squares += seen.count * apart * apart;
  }
  const float squares = reduce_row<ROW_THREADS>(seen.squares, Sum());
  const auto affine = my.affine(gamma, beta, mean_of, rstd_of, mean, squares, cols, eps);
  const auto single_affine = affine.singly();  // edges
  my.each_edge([&](int element, int n) {  // edges
    single.keep_sum(element, edge[n]);  // edges
    single_affine.store(y + my.offset, element, edge[n]);  // edges
  });  // edges
#pragma unroll 1
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      my.parts.keep_sum(vector, values[n]);
      affine.store(y + my.offset, vector, values[n]);
    });
  }
}
