#pragma once
// Batch statistics of each column, and the gradients of scale and shift. Needs types.cuh, reduce.cuh and row_block.cuh.
// Threads, and parts of the rows, contribute two numbers for a column. Forward, these are the mean of some rows and
// their squared deviations from it. A thread sums differences from its first value, and later from the mean so far. One
// pass therefore suffices, however far the mean is from zero and the first value from the mean. The numbers of several
// threads, or parts, are joined relative to their common mean.
// Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations", 1983.

struct Figures {
  float first, second;
};

// The rows of each of `shares` shares: the first have one more if they are not equal.
struct Shares {
  u32 each, more;
  __device__ __forceinline__ Shares(u32 rows, u32 shares) : each(rows / shares), more(rows % shares) {}
  __device__ __forceinline__ u32 rows(u32 share) const { return each + (share < more); }
  __device__ __forceinline__ u32 begin(u32 share) const { return share * each + min(share, more); }
};

// ---- forward: mean, and squared deviations ----------------------------------------------------------------

template <class In, int V>
struct Moments {
  using Loaded = Vec<In, V>;
  const In* x;
  float from[V], first[V] = {}, second[V] = {}, kept[V] = {};

  __device__ __forceinline__ Moments(const In* x, u32) : x(x) {}
  __device__ __forceinline__ Loaded load(size_t at) const { return load_vec<V>(x + at); }
  __device__ __forceinline__ void begin(const Loaded& loaded) {
#pragma unroll
    for (int i = 0; i < V; ++i) from[i] = to_float(loaded.at[i]);
  }
  __device__ __forceinline__ void see(const Loaded& loaded, size_t) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float apart = f32_op(to_float(loaded.at[i]) - from[i]);
      first[i] = f32_op(first[i] + apart);
      second[i] = multiply_add(apart, apart, second[i]);
    }
  }
  // Further differences are from the mean of all rows so far, as exactly as f32 holds it; the sums of the current rows
  // change accordingly. Squares are accumulated separately, so that no long sum has many small terms. NaN is kept.
  __device__ __forceinline__ void centre(u32 rows) {
    const float share = 1.0f / rows;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float to = from[i] + first[i] * share, moved = to - from[i], left = first[i] - moved * rows;
      kept[i] += second[i] - moved * (first[i] + left);
      from[i] = to;
      first[i] = left;
      second[i] = 0.0f;
    }
  }
  __device__ __forceinline__ void end(u32 rows) {
    if (rows == 0) return;
    centre(rows);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      first[i] = from[i];
      second[i] = kept[i] < 0.0f ? 0.0f : kept[i];
    }
  }
  // The joined numbers of COUNT shares of the rows; `get(share, which)` returns a number of one share.
  template <int COUNT, class Get>
  static __device__ __forceinline__ Figures join(u32 rows, Get get) {
    const Shares shares(rows, COUNT);
    const float some = get(0, 0);
    float total = 0.0f, squares = 0.0f;
#pragma unroll 8
    for (int s = 1; s < COUNT; ++s) total = multiply_add(float(shares.rows(s)), get(s, 0) - some, total);
    const float mean = some + total / rows;
#pragma unroll 8
    for (int s = 0; s < COUNT; ++s) {
      const float apart = get(s, 0) - mean;
      squares = multiply_add(float(shares.rows(s)) * apart, apart, squares + get(s, 1));
    }
    return {mean, squares};
  }
};

// Destinations of the results of columns.
struct Statistics {
  const float *running_mean, *running_var;
  float *mean, *rstd, *new_mean, *new_var;
  float eps, momentum;
  int rows;
  __device__ __forceinline__ void put(size_t column, Figures found) const {
    const float variance = found.second / rows, kept = 1.0f - momentum;
    mean[column] = found.first;
    rstd[column] = fast_rsqrt(variance + eps);
    new_mean[column] = kept * running_mean[column] + momentum * found.first;
    new_var[column] = kept * running_var[column] + momentum * (found.second / (rows - 1));
  }
};

// ---- backward: sums of dy (x - mean) and of dy ------------------------------------------------------------

// Tensors of a relu with the result y: its gradient dz replaces dy, and is written.
template <class In, bool RELU, int V>
struct Products {
  struct Loaded {
    Vec<In, V> dy, x, y;
  };
  const In *dy, *x, *y;
  In* dz;
  float mean[V], first[V] = {}, second[V] = {};

  __device__ __forceinline__ Products(const In* dy, const In* x, const In* y, In* dz, const float* means, u32 column,
                                      u32 cols)
      : dy(dy), x(x), y(y), dz(dz) {
    if (column < cols) load_floats(means + column, mean);
  }
  __device__ __forceinline__ Loaded load(size_t at) const {
    Loaded loaded;
    loaded.dy = load_vec<V>(dy + at);
    loaded.x = load_vec<V>(x + at);
    if constexpr (RELU) loaded.y = load_vec<V>(y + at);
    return loaded;
  }
  __device__ __forceinline__ void begin(const Loaded&) {}
  __device__ __forceinline__ void see(const Loaded& loaded, size_t at) {
    Vec<In, V> gradient = loaded.dy;
    if constexpr (RELU) {
#pragma unroll
      for (int i = 0; i < V; ++i)
        if (to_float(loaded.y.at[i]) <= 0.0f) gradient.at[i] = In{};
      store_vec(dz + at, gradient);
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float d = to_float(gradient.at[i]);
      first[i] = multiply_add(d, f32_op(to_float(loaded.x.at[i]) - mean[i]), first[i]);
      second[i] = f32_op(second[i] + d);
    }
  }
  __device__ __forceinline__ void centre(u32) {}
  __device__ __forceinline__ void end(u32) {}
  template <int COUNT, class Get>
  static __device__ __forceinline__ Figures join(u32, Get get) {
    Figures total = {get(0, 0), get(0, 1)};
#pragma unroll 8
    for (int s = 1; s < COUNT; ++s) {
      total.first = f32_op(total.first + get(s, 0));
      total.second = f32_op(total.second + get(s, 1));
    }
    return total;
  }
};

struct Gradients {
  const float* rstd;
  float *dgamma, *dbeta;
  __device__ __forceinline__ void put(size_t column, Figures found) const {
    dgamma[column] = found.first * rstd[column];
    dbeta[column] = found.second;
  }
};

// ---- both -------------------------------------------------------------------------------------------------

// The numbers of a part of the rows, in scratch memory: (2, parts, cols).
struct Part {
  float* partial;
  int cols;
  __device__ __forceinline__ void put(size_t column, Figures found) const {
    float* const mine = partial + size_t(blockIdx.y) * cols + column;
    mine[0] = found.first;
    mine[size_t(gridDim.y) * cols] = found.second;
  }
};

// Rows whose differences a thread takes from its first value, and then from one mean; at least those it has in flight.
constexpr u32 AT_FIRST = 8, AT_ONCE = 32;

// The first column of this thread.
template <int COL_THREADS, int V>
__device__ __forceinline__ u32 own_column() {
  return (blockIdx.x * COL_THREADS + threadIdx.x % COL_THREADS) * V;
}

// Processes the rows of a block's part: COL_THREADS threads along a row, ROW_THREADS down; N rows in flight.
template <int COL_THREADS, int ROW_THREADS, int V, int N, class Sums, class Target>
__device__ __forceinline__ void over_rows(Sums& sums, const Target& target, int rows, int cols) {
  const u32 column = own_column<COL_THREADS, V>(), line = threadIdx.x / COL_THREADS;
  const Shares parts(rows, gridDim.y);
  const u32 there = parts.rows(blockIdx.y);
  // Columns beyond the end have no rows; their threads still reach the barrier.
  const u32 count = column < u32(cols) ? there : 0;
  const size_t start = size_t(parts.begin(blockIdx.y)) * cols + column;
  u32 seen = 0;
  for (u32 top = line; top < count; top += ROW_THREADS * N) {
    typename Sums::Loaded held[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (top + n * ROW_THREADS < count) held[n] = sums.load(start + size_t(top + n * ROW_THREADS) * cols);
    if (top == line) sums.begin(held[0]);
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (top + n * ROW_THREADS < count) sums.see(held[n], start + size_t(top + n * ROW_THREADS) * cols);
    seen += N;
    if ((seen == AT_FIRST || seen % AT_ONCE == 0) && top + ROW_THREADS * N < count) sums.centre(seen);
  }
  sums.end(Shares(count, ROW_THREADS).rows(line));

  if constexpr (ROW_THREADS > 1) {
    // Element i of all threads of a row is contiguous, so that the lanes of a warp use different banks.
    __shared__ float met[2][ROW_THREADS][V][COL_THREADS];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      met[0][line][i][threadIdx.x % COL_THREADS] = sums.first[i];
      met[1][line][i][threadIdx.x % COL_THREADS] = sums.second[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < V * COL_THREADS; c += COL_THREADS * ROW_THREADS) {
      const int i = c / COL_THREADS, thread = c % COL_THREADS;
      const u32 at = (blockIdx.x * COL_THREADS + thread) * V + i;
      if (at < u32(cols))
        target.put(at, Sums::template join<ROW_THREADS>(there, [&](int s, int which) { return met[which][s][i][thread]; }));
    }
  } else if (column < u32(cols)) {
#pragma unroll
    for (int i = 0; i < V; ++i) target.put(column + i, {sums.first[i], sums.second[i]});
  }
}

template <class In, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    statistics(const In* __restrict__ x, const float* __restrict__ running_mean, const float* __restrict__ running_var,
               float* __restrict__ mean, float* __restrict__ rstd, float* __restrict__ new_mean,
               float* __restrict__ new_var, float eps, float momentum, int rows, int cols) {
  Moments<In, V> sums(x, cols);
  const Statistics target = {running_mean, running_var, mean, rstd, new_mean, new_var, eps, momentum, rows};
  over_rows<COL_THREADS, ROW_THREADS, V, N>(sums, target, rows, cols);
}

template <class In, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    statistics_of_part(const In* __restrict__ x, float* __restrict__ partial, int rows, int cols) {
  Moments<In, V> sums(x, cols);
  over_rows<COL_THREADS, ROW_THREADS, V, N>(sums, Part{partial, cols}, rows, cols);
}

template <class In, bool RELU, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    gradients(const In* __restrict__ dy, const In* __restrict__ x, const float* __restrict__ mean, const In* __restrict__ y,
              In* __restrict__ dz, const float* __restrict__ rstd, float* __restrict__ dgamma, float* __restrict__ dbeta,
              int rows, int cols) {
  Products<In, RELU, V> sums(dy, x, y, dz, mean, own_column<COL_THREADS, V>(), cols);
  over_rows<COL_THREADS, ROW_THREADS, V, N>(sums, Gradients{rstd, dgamma, dbeta}, rows, cols);
}

template <class In, bool RELU, int COL_THREADS, int ROW_THREADS, int V, int N>
__global__ void __launch_bounds__(COL_THREADS * ROW_THREADS)
    gradients_of_part(const In* __restrict__ dy, const In* __restrict__ x, const float* __restrict__ mean,
                      const In* __restrict__ y, In* __restrict__ dz, float* __restrict__ partial, int rows, int cols) {
  Products<In, RELU, V> sums(dy, x, y, dz, mean, own_column<COL_THREADS, V>(), cols);
  over_rows<COL_THREADS, ROW_THREADS, V, N>(sums, Part{partial, cols}, rows, cols);
}

// ---- the launch that joins parts: 32 columns a block, LINES threads for each ------------------------------

// Returns the sum over the threads of a column to each of them. `met` is not free when the function returns.
template <int LINES>
__device__ __forceinline__ float over_lines(float value, float (&met)[LINES][32]) {
  met[threadIdx.x / 32][threadIdx.x % 32] = value;
  __syncthreads();
  float total = met[0][threadIdx.x % 32];
#pragma unroll
  for (int line = 1; line < LINES; ++line) total += met[line][threadIdx.x % 32];
  return total;
}

template <int LINES>
__global__ void __launch_bounds__(32 * LINES)
    end_statistics(const float* __restrict__ partial, const float* __restrict__ running_mean,
                   const float* __restrict__ running_var, float* __restrict__ mean, float* __restrict__ rstd,
                   float* __restrict__ new_mean, float* __restrict__ new_var, float eps, float momentum, int rows,
                   int cols, int parts) {
  __shared__ float met[2][LINES][32];
  const u32 column = blockIdx.x * 32 + threadIdx.x % 32, line = threadIdx.x / 32;
  const Shares shares(rows, parts);
  const float* const means = partial + column;
  const float* const squares = means + size_t(parts) * cols;
  const int count = column < u32(cols) ? parts : 0;
  const float some = count ? means[0] : 0.0f;
  float total = 0.0f, sum = 0.0f;
#pragma unroll 4
  for (int part = line; part < count; part += LINES)
    total += float(shares.rows(part)) * (means[size_t(part) * cols] - some);
  const float centre = some + over_lines(total, met[0]) / rows;
#pragma unroll 4
  for (int part = line; part < count; part += LINES) {
    const float apart = means[size_t(part) * cols] - centre;
    sum += squares[size_t(part) * cols] + float(shares.rows(part)) * apart * apart;
  }
  sum = over_lines(sum, met[1]);
  if (line != 0 || count == 0) return;
  Statistics{running_mean, running_var, mean, rstd, new_mean, new_var, eps, momentum, rows}.put(column, {centre, sum});
}

template <int LINES>
__global__ void __launch_bounds__(32 * LINES)
    end_gradients(const float* __restrict__ partial, const float* __restrict__ rstd, float* __restrict__ dgamma,
                  float* __restrict__ dbeta, int cols, int parts) {
  __shared__ float met[2][LINES][32];
  const u32 column = blockIdx.x * 32 + threadIdx.x % 32, line = threadIdx.x / 32;
  const int count = column < u32(cols) ? parts : 0;
  float along = 0.0f, sum = 0.0f;
#pragma unroll 4
  for (int part = line; part < count; part += LINES) {
    along += partial[size_t(part) * cols + column];
    sum += partial[size_t(parts + part) * cols + column];
  }
  along = over_lines(along, met[0]);
  sum = over_lines(sum, met[1]);
  if (line == 0 && count != 0) Gradients{rstd, dgamma, dbeta}.put(column, {along, sum});
}
