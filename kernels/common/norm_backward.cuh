#pragma once
// Gradients of layernorm and rmsnorm. Needs types.cuh, reduce.cuh, row_block.cuh and norm.cuh. With n = (x - mean) rstd
// and g = dy gamma, dx of a row is rstd (g - mean(g) - n mean(g n)); rmsnorm has no means of x and g. The gradients of
// the weights are sums over all rows, dgamma = sum(dy n) and dbeta = sum(dy). Blocks are persistent and process groups
// of rows one after the other. A thread has the same columns in each group. It keeps its sums in registers, in shared
// memory, or leaves them to a kernel that owns columns. Each block writes partial sums, SUMS x cols in f32, and a last
// kernel adds them in a fixed order, so that results do not depend on the order of blocks.
//
// Lines that end with "edges" are for rows with edges (row_edges.cuh), those that end with "aligned" for others. The
// rows of all blocks together are a multiple of V, so that all rows of a thread have the same edges, and it has the
// same columns in each. Lines of partial sums have room for vectors to start at the same multiples as those of the row.

// Gradients of weights: dgamma, and for layernorm dbeta.
template <class P>
constexpr int SUMS = P::CENTRED ? 2 : 1;

#define NORM_BACKWARD_INPUTS(T)                                                                        \
  const T *__restrict__ x, const T *__restrict__ gamma, const float *__restrict__ mean_of,             \
      const float *__restrict__ rstd_of, const T *__restrict__ dy

// A normalised vector of x, and the gradient of the same elements.
template <class P, int V>  // aligned
__device__ __forceinline__ void load_normal(const typename P::T* x, const typename P::T* dy, float mean, float rstd,  // aligned
template <class P, int V, class Source>  // edges
__device__ __forceinline__ void load_normal(Source x, Source dy, float mean, float rstd,  // edges
                                            float (&normal)[V], float (&d)[V]) {
  load_floats(x, normal);
  load_floats(dy, d);
#pragma unroll
  for (int i = 0; i < V; ++i) normal[i] = f32_op((P::CENTRED ? f32_op(normal[i] - mean) : normal[i]) * rstd);
}

// d becomes g.
template <class T, int V>  // aligned
__device__ __forceinline__ void scale_by(const T* gamma, float (&d)[V]) {  // aligned
template <class Source, int V>  // edges
__device__ __forceinline__ void scale_by(Source gamma, float (&d)[V]) {  // edges
  float scale[V];
  load_floats(gamma, scale);
#pragma unroll
  for (int i = 0; i < V; ++i) d[i] = f32_op(d[i] * scale[i]);
}

// Adds V sums to an array of f32 whose lines are multiples of V.
template <int V>
__device__ __forceinline__ void store_sums(float* target, const float (&sums)[V]) {
  constexpr int WIDTH = V < 4 ? V : 4;
#pragma unroll
  for (int first = 0; first < V; first += WIDTH) {
    Vec<float, WIDTH> some;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) some.at[i] = sums[first + i];
    store_vec(target + first, some);
  }
}

// ---- storage of a thread's sums over rows -----------------------------------------------------------------
// `add` takes the n-th vector of a thread, or the vector of that number in the row; `leave` stores a block's partial
// sums.

template <class P, int V, int N>
struct SumsInRegisters {
  static constexpr bool ANY = true;
  float sums[SUMS<P>][N][V];

  __device__ __forceinline__ SumsInRegisters(int, int, int) {
#pragma unroll
    for (int s = 0; s < SUMS<P>; ++s)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < V; ++i) sums[s][n][i] = 0.0f;
  }
  __device__ __forceinline__ void add(int, int n, const float (&normal)[V], const float (&d)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sums[0][n][i] = multiply_add(d[i], normal[i], sums[0][n][i]);
      if constexpr (P::CENTRED) sums[1][n][i] = f32_op(sums[1][n][i] + d[i]);
    }
  }
  __device__ __forceinline__ void leave(float* part, int thread, int step, int count) const {  // aligned
  __device__ __forceinline__ void leave(float* part, int thread, int step, int count, int pitch) const {  // edges
#pragma unroll
    for (int s = 0; s < SUMS<P>; ++s)
      each_vector<N>(thread, step, count,
                     [&](int vector, int n) { store_sums(part + s * size_t(pitch) + vector * V, sums[s][n]); });  // edges
                     [&](int vector, int n) { store_sums(part + (size_t(s) * count + vector) * V, sums[s][n]); });  // aligned
  }
};

// A thread accesses only its own vectors, in the layout of KeptRow, so that no barrier is needed.
template <class P, int V, int N>
struct SumsInShared {
  static constexpr bool ANY = true;
  float* base;
  int count;

  __device__ __forceinline__ SumsInShared(int thread, int step, int count) : count(count) {
    extern __shared__ float all_sums[];
    base = all_sums;
    for (int vector = thread; vector < count; vector += step)
#pragma unroll
      for (int i = 0; i < SUMS<P> * V; ++i) base[i * count + vector] = 0.0f;
  }
  __device__ __forceinline__ void add(int vector, int, const float (&normal)[V], const float (&d)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float& scale = base[i * count + vector];
      scale = multiply_add(d[i], normal[i], scale);
      if constexpr (P::CENTRED) {
        float& shift = base[(V + i) * count + vector];
        shift = f32_op(shift + d[i]);
      }
    }
  }
  __device__ __forceinline__ void leave(float* part, int thread, int step, int count) const {  // aligned
  __device__ __forceinline__ void leave(float* part, int thread, int step, int count, int pitch) const {  // edges
    for (int vector = thread; vector < count; vector += step)
#pragma unroll
      for (int s = 0; s < SUMS<P>; ++s) {
        float sums[V];
#pragma unroll
        for (int i = 0; i < V; ++i) sums[i] = base[(s * V + i) * count + vector];
        store_sums(part + (size_t(s) * count + vector) * V, sums);  // aligned
        store_sums(part + s * size_t(pitch) + vector * V, sums);  // edges
      }
  }
};

template <class P, int V, int N>
struct SumsApart {
  static constexpr bool ANY = false;
  __device__ __forceinline__ SumsApart(int, int, int) {}
  __device__ __forceinline__ void add(int, int, const float (&)[V], const float (&)[V]) {}
  __device__ __forceinline__ void leave(float*, int, int, int) const {}  // aligned
  __device__ __forceinline__ void leave(float*, int, int, int, int) const {}  // edges
};

// ---- rows -------------------------------------------------------------------------------------------------

// Both sums over the threads of a row; the second barrier frees the scratch memory for the next row.
template <int ROW_THREADS>
__device__ __forceinline__ void reduce_both(float& a, float& b) {
  constexpr int WIDTH = ROW_THREADS < 32 ? ROW_THREADS : 32, WARPS = ROW_THREADS / 32;
  a = warp_reduce_sum<WIDTH>(a);
  b = warp_reduce_sum<WIDTH>(b);
  if constexpr (WARPS > 1) {
    __shared__ float scratch[2][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) {
      scratch[0][warp] = a;
      scratch[1][warp] = b;
    }
    __syncthreads();
    a = warp_reduce_sum(lane < WARPS ? scratch[0][lane] : 0.0f);
    b = warp_reduce_sum(lane < WARPS ? scratch[1][lane] : 0.0f);
    __syncthreads();
  }
}

// Elements of a line of partial sums, and of those before the first column.  // edges
template <int V>  // edges
__device__ __forceinline__ int padded(int cols) {  // edges
  return ceil_div(cols + V - 1, V) * V;  // edges
}  // edges
template <int V>  // edges
__device__ __forceinline__ int lead(size_t row, int cols) {  // edges
  return int(row * cols % V);  // edges
}  // edges

template <class T, int V>
__device__ __forceinline__ void store_dx(T* target, float rstd, float shift, float along, float (&g)[V],
                                         const float (&normal)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) g[i] = f32_op(multiply_add(-normal[i], along, f32_op(g[i] - shift)) * rstd);
  store_floats(target, g);
}

// Groups of ROWS rows, each shared by ROW_THREADS threads; a thread processes N vectors at a time. HELD: these are all
// its vectors of a row, which is read once; otherwise the row is read a second time when its means are known.
template <class P, template <class, int, int> class Sums, bool HELD, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1)
norm_backward(NORM_BACKWARD_INPUTS(typename P::T), typename P::T* __restrict__ dx, float* __restrict__ partial, int rows,
              int cols) {
  const int thread = threadIdx.x % ROW_THREADS, line = threadIdx.x / ROW_THREADS, vectors = cols / V;  // aligned
  const int thread = threadIdx.x % ROW_THREADS, line = threadIdx.x / ROW_THREADS;  // edges
  using OfRow = Edges<ROW_THREADS, V>;  // edges
  const OfRow of_rows(thread, size_t(i64(blockIdx.x) * ROWS + line) * cols, cols, true);  // edges
  const int vectors = of_rows.vectors;  // edges
  const Unaligned<typename P::T, V> scales = {gamma, of_rows.before, cols};  // edges
  const Unaligned<typename P::T, 1> single_scales = {gamma, of_rows.before, cols};  // edges
  SumsInRegisters<P, 1, OfRow::EDGES> edge_sums(0, 0, 0);  // edges
  Sums<P, V, N> sums(thread, ROW_THREADS, vectors);
  for (i64 group = i64(blockIdx.x) * ROWS; group < rows; group += i64(gridDim.x) * ROWS) {
    const bool there = group + line < rows;
    const int row = there ? int(group) + line : 0, count = there ? vectors : 0;
    const size_t offset = size_t(row) * cols;  // aligned
    const size_t offset = of_rows.start(size_t(row) * cols);  // edges
    const float mean = P::CENTRED ? mean_of[row] : 0.0f, rstd = rstd_of[row];
    float normal[N][V], g[N][V], shift = 0.0f, along = 0.0f;
    const auto see = [&](int vector, int n) {
      load_normal<P>(x + offset + vector * V, dy + offset + vector * V, mean, rstd, normal[n], g[n]);
      sums.add(vector, n, normal[n], g[n]);
      scale_by(gamma + vector * V, g[n]);  // aligned
      scale_by(scales + vector * V, g[n]);  // edges
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if constexpr (P::CENTRED) shift = f32_op(shift + g[n][i]);
        along = multiply_add(g[n][i], normal[n][i], along);
      }
    };
    OfRow of_row = of_rows;  // edges
    if (!there) of_row.edges = 0;  // edges
    float edge_normal[OfRow::EDGES][1], edge_g[OfRow::EDGES][1];  // edges
    of_row.each_edge([&](int element, int n) {  // edges
      float(&one_normal)[1] = edge_normal[n], (&one_g)[1] = edge_g[n];  // edges
      load_normal<P>(x + offset + element, dy + offset + element, mean, rstd, one_normal, one_g);  // edges
      if constexpr (Sums<P, V, N>::ANY) edge_sums.add(0, n, one_normal, one_g);  // edges
      scale_by(single_scales + element, one_g);  // edges
      if constexpr (P::CENTRED) shift = f32_op(shift + one_g[0]);  // edges
      along = multiply_add(one_g[0], one_normal[0], along);  // edges
    });  // edges
    if constexpr (HELD) {
      each_held_vector<N>(thread, ROW_THREADS, count, see);
    } else {
#pragma unroll 1
      for (int first = thread; first < count; first += ROW_THREADS * N)
        each_vector<N>(first, ROW_THREADS, count, see);
    }
    reduce_both<ROW_THREADS>(shift, along);
    shift /= cols;
    along /= cols;
    of_row.each_edge([&](int element, int n) {  // edges
      store_dx(dx + offset + element, rstd, shift, along, edge_g[n], edge_normal[n]);  // edges
    });  // edges
    if constexpr (HELD) {
      each_held_vector<N>(thread, ROW_THREADS, count, [&](int vector, int n) {
        store_dx(dx + offset + vector * V, rstd, shift, along, g[n], normal[n]);
      });
    } else {
#pragma unroll 1
      for (int first = thread; first < count; first += ROW_THREADS * N)
        each_vector<N>(first, ROW_THREADS, count, [&](int vector, int n) {
          load_normal<P>(x + offset + vector * V, dy + offset + vector * V, mean, rstd, normal[n], g[n]);
          scale_by(gamma + vector * V, g[n]);  // aligned
          scale_by(scales + vector * V, g[n]);  // edges
          store_dx(dx + offset + vector * V, rstd, shift, along, g[n], normal[n]);
        });
    }
  }
  const size_t part = size_t(blockIdx.x) * ROWS + line;
  if constexpr (Sums<P, V, N>::ANY) sums.leave(partial + part * SUMS<P> * cols, thread, ROW_THREADS, vectors);  // aligned
  if constexpr (Sums<P, V, N>::ANY) {  // edges
    const int pitch = padded<V>(cols);  // edges
    float* const line_of_part = partial + part * SUMS<P> * pitch + lead<V>(part, cols) + of_rows.before;  // edges
    sums.leave(line_of_part, thread, ROW_THREADS, vectors, pitch);  // edges
    of_rows.each_edge([&](int element, int n) {  // edges
      for (int s = 0; s < SUMS<P>; ++s) line_of_part[s * i64(pitch) + element] = edge_sums.sums[s][n][0];  // edges
    });  // edges
  }  // edges
}

// ---- columns ----------------------------------------------------------------------------------------------

constexpr int COLUMN_LINES = 8;

// Partial sums of 32 V columns over an equal share of the rows; the lines of a block alternate.
template <class P, int V>
__global__ void __launch_bounds__(32 * COLUMN_LINES)
norm_columns(NORM_BACKWARD_INPUTS(typename P::T), float* __restrict__ partial, int rows, int cols) {
  __shared__ float kept[COLUMN_LINES][SUMS<P> * V][32];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32, vector = blockIdx.x * 32 + lane, vectors = cols / V;  // aligned
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32, vector = blockIdx.x * 32 + lane;  // edges
  const int vectors = ceil_div(cols, V);  // edges
  const int begin = int(i64(rows) * blockIdx.y / gridDim.y), end = int(i64(rows) * (blockIdx.y + 1) / gridDim.y);
  SumsInRegisters<P, V, 1> sums(0, 0, 0);
  if (vector < vectors) {
#pragma unroll 2
    for (int row = begin + line; row < end; row += COLUMN_LINES) {
      const size_t offset = size_t(row) * cols + vector * V;  // aligned
      float normal[V], d[V];
      load_normal<P>(x + offset, dy + offset, P::CENTRED ? mean_of[row] : 0.0f, rstd_of[row], normal, d);  // aligned
      const int shift = lead<V>(row, cols), at = shift + vector * V, end = shift + cols;  // edges
      const size_t start = size_t(row) * cols - shift;  // edges
      const Unaligned<typename P::T, V> some_x = {x + start, at, end}, some_dy = {dy + start, at, end};  // edges
      load_normal<P>(some_x, some_dy, P::CENTRED ? mean_of[row] : 0.0f, rstd_of[row], normal, d);  // edges
      sums.add(0, 0, normal, d);
    }
  }
#pragma unroll
  for (int s = 0; s < SUMS<P>; ++s)
#pragma unroll
    for (int i = 0; i < V; ++i) kept[line][s * V + i][lane] = sums.sums[s][0][i];
  __syncthreads();
  if (line == 0 && vector < vectors) {
#pragma unroll
    for (int s = 0; s < SUMS<P>; ++s) {
      float total[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        total[i] = kept[0][s * V + i][lane];
#pragma unroll
        for (int other = 1; other < COLUMN_LINES; ++other) total[i] += kept[other][s * V + i][lane];
      }
      store_sums(partial + (size_t(blockIdx.y) * SUMS<P> + s) * cols + vector * V, total);  // aligned
      store_sums(partial + (size_t(blockIdx.y) * SUMS<P> + s) * padded<V>(cols) + vector * V, total);  // edges
    }
  }
}

// ---- parts ------------------------------------------------------------------------------------------------

constexpr int FINISH_LINES = 16;

// LEADS: each line of partial sums has its lead.  // edges
// Adds the partial sums of 32 columns: each line of the block adds some, in order, then the lines are added in order.
template <class P>  // aligned
template <class P, int V, bool LEADS>  // edges
__global__ void __launch_bounds__(32 * FINISH_LINES)
norm_finish(const float* __restrict__ partial, typename P::T* __restrict__ dgamma, typename P::T* __restrict__ dbeta,
            int parts, int cols) {
  __shared__ float kept[FINISH_LINES][32];
  const int lane = threadIdx.x % 32, line = threadIdx.x / 32;
  const i64 width = i64(SUMS<P>) * cols, column = i64(blockIdx.x) * 32 + lane;
  float total = 0.0f;
  const int pitch = padded<V>(cols);  // edges
  const i64 place = column < cols ? column : column - cols + pitch;  // edges
  if (column < width) {
#pragma unroll 4
    for (int part = line; part < parts; part += FINISH_LINES) total += partial[part * width + column];  // aligned
    for (int part = line; part < parts; part += FINISH_LINES)  // edges
      total += partial[part * i64(SUMS<P>) * pitch + place + (LEADS ? lead<V>(part, cols) : 0)];  // edges
  }
  kept[line][lane] = total;
  __syncthreads();
  if (line == 0 && column < width) {
#pragma unroll
    for (int other = 1; other < FINISH_LINES; ++other) total += kept[other][lane];
    const auto rounded = from_float<typename P::T>(total);
    if (column < cols) dgamma[column] = rounded;
    else dbeta[column - cols] = rounded;
  }
}
