#pragma once
// The product of _conv_geometry.cuh on the ordinary f32 units, multiplied as _gemm_simt.cuh does: a tile of either
// operand stands in shared memory as [K][PITCH] f32. Needs _types.cuh, _epilogue.cuh, _gemm.cuh, _gemm_simt.cuh and
// _conv_geometry.cuh.

// ---- from global to shared memory --------------------------------------------------------------------------------

// Which elements of a tile a thread carries: X rows of A, or X columns of B, by K of the summed dimension, VEC
// neighbours an access. Threads lie along lines of the tile first, so that a warp reads what lies together. All extents
// are powers of two, so a thread's accesses are a grid of constant steps: X_COUNT by K_COUNT.
template <int X, int K, int VEC, int THREADS, bool ALONG_K>
struct Share {
  static constexpr int ACROSS = (ALONG_K ? K : X) / VEC, LINES = ALONG_K ? X : K;  // accesses of a line, and lines
  static constexpr int THREADS_ACROSS = ACROSS < THREADS ? ACROSS : THREADS, THREADS_DOWN = THREADS / THREADS_ACROSS;
  static constexpr int COUNT_ACROSS = ACROSS / THREADS_ACROSS, COUNT_DOWN = ceil_div(LINES, THREADS_DOWN);
  static constexpr int K_COUNT = ALONG_K ? COUNT_ACROSS : COUNT_DOWN, X_COUNT = ALONG_K ? COUNT_DOWN : COUNT_ACROSS;
  static constexpr int K_STEP = ALONG_K ? THREADS_ACROSS * VEC : THREADS_DOWN;
  static constexpr int X_STEP = ALONG_K ? THREADS_DOWN : THREADS_ACROSS * VEC;
  // Where lines run along K the tile is transposed on its way: 4 more floats a line spread the stores over the banks.
  static constexpr int PITCH = X + (ALONG_K ? 4 : 0), FLOATS = K * PITCH;
  static_assert((ALONG_K ? K : X) % VEC == 0, "an access stays within its line");

  static __device__ __forceinline__ int across() { return int(threadIdx.x) % THREADS_ACROSS * VEC; }
  static __device__ __forceinline__ int down() { return int(threadIdx.x) / THREADS_ACROSS; }
  static __device__ __forceinline__ int k(int i) { return (ALONG_K ? across() : down()) + i * K_STEP; }
  static __device__ __forceinline__ int x(int i) { return (ALONG_K ? down() : across()) + i * X_STEP; }
  // A small tile does not keep all threads busy.
  static __device__ __forceinline__ bool busy() { return THREADS_DOWN <= LINES || down() < LINES; }
};

// What a thread has read and not yet stored.
template <class T, class S, int VEC>
struct Held {
  Vec<T, VEC> at[S::K_COUNT][S::X_COUNT];

  __device__ __forceinline__ void clear(int k) {
#pragma unroll
    for (int i = 0; i < S::X_COUNT; ++i)
#pragma unroll
      for (int e = 0; e < VEC; ++e) at[k][i].at[e] = from_float<T>(0.0f);
  }

  template <bool ALONG_K>
  __device__ __forceinline__ void store(float* tile) const {
    if (!S::busy()) return;
    constexpr int WIDTH = ALONG_K ? 1 : VEC < 4 ? VEC : 4;
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i)
#pragma unroll
        for (int e = 0; e < VEC; e += WIDTH) {
          Vec<float, WIDTH> values;
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) values.at[j] = to_float(at[k][i].at[e + j]);
          store_vec(tile + S::k(k) * S::PITCH + S::x(i) + e * (ALONG_K ? S::PITCH : 1), values);
        }
  }
};

// Tiles of A that move along K.
template <class T, class I, class P, int BM, int BK, int VEC, int THREADS>
struct TileA {
  using S = Share<BM, BK, VEC, THREADS, P::A_ALONG_K>;
  const T* source;
  Place<I> rows[S::X_COUNT];
  Digits<I> first, step;  // along K: of the thread's first access, and between accesses
  Held<T, S, VEC> held;

  __device__ __forceinline__ TileA(const T* a, const P& product, I group, I first_row)
      : source(a + product.a_group(group)), first(product.within_step(S::k(0))), step(product.within_step(S::K_STEP)) {
#pragma unroll
    for (int i = 0; i < S::X_COUNT; ++i) rows[i] = product.a_row(first_row + S::x(i));
  }

  // Reads the tile at `at`, the first digits of a step; what lies outside the image or K is 0.
  __device__ __forceinline__ void load(const P& product, Digits<I> at) {
    if (!S::busy()) return;
    at = product.moved(at, first);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) at = product.moved(at, step);
      held.clear(k);
      if (!product.inside_k(at)) continue;
      const Place<I> column = product.a_column(at);
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i)
        if (product.inside_image(rows[i], column))
          held.at[k][i] = load_vec<VEC>(source + (rows[i].offset + column.offset));
    }
  }
  __device__ __forceinline__ void store(float* tile) const { held.template store<P::A_ALONG_K>(tile); }
};

// Tiles of B that move along K.
template <class T, class I, class P, int BN, int BK, int VEC, int THREADS>
struct TileB {
  using S = Share<BN, BK, VEC, THREADS, P::B_ALONG_K>;
  const T* source;
  I columns[S::X_COUNT];  // offsets; negative beyond N
  Digits<I> first, step;
  Held<T, S, VEC> held;

  __device__ __forceinline__ TileB(const T* b, const P& product, I group, I first_column)
      : source(b + product.b_group(group)), first(product.within_step(S::k(0))), step(product.within_step(S::K_STEP)) {
#pragma unroll
    for (int i = 0; i < S::X_COUNT; ++i) {
      const I column = first_column + S::x(i);
      columns[i] = column < product.n ? product.b_column(column) : -1;
    }
  }

  __device__ __forceinline__ void load(const P& product, Digits<I> at) {
    if (!S::busy()) return;
    at = product.moved(at, first);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) at = product.moved(at, step);
      held.clear(k);
      if (!product.inside_k(at)) continue;
      const I row = product.b_row(at);
#pragma unroll
      for (int i = 0; i < S::X_COUNT; ++i)
        if (columns[i] >= 0) held.at[k][i] = load_vec<VEC>(source + (columns[i] + row));
    }
  }
  __device__ __forceinline__ void store(float* tile) const { held.template store<P::B_ALONG_K>(tile); }
};

// ---- from registers to global memory -----------------------------------------------------------------------------

// Lanes of a warp along n: a warp is as near to 4 x 8 threads as the tile allows, so that it reads few bytes.
template <int BM, int BN, int TM, int TN>
__host__ __device__ constexpr int usual_lanes_n() {
  const int lanes_n = BN / TN < 8 ? BN / TN : 8;
  return BM / TM < 32 / lanes_n ? 32 / (BM / TM) : lanes_n;
}

// What fprop does to a sum before it is rounded: bias is added, then residual, then relu is applied.
template <bool HAS_BIAS, bool HAS_RESIDUAL, bool HAS_RELU>
struct Epilogue {
  static constexpr bool BIAS = HAS_BIAS, RESIDUAL = HAS_RESIDUAL;

  static __device__ __forceinline__ float apply(float sum, float bias, float residual) {
    if constexpr (HAS_BIAS) sum += bias;
    if constexpr (HAS_RESIDUAL) sum += residual;
    if constexpr (HAS_RELU) sum = Relu()(sum);
    return sum;
  }
};

// Where a tile of C goes: the tensor, and the tile's first row and column in the product.
template <class Out, class I>
struct Corner {
  Out* tensor;
  I group, row, column;
};

// Finishes and stores a thread's sums, VEC neighbours an access (VEC divides a run of them in memory).
template <class Grid, class E, int VEC, class T, class Out, class I, class P>
__device__ __forceinline__ void store_product(const float (&sums)[Grid::M][Grid::N], const P& product,
                                              const Corner<Out, I>& corner, const T* bias, const T* residual) {
  constexpr int DOWN = P::C_ALONG_N ? 1 : VEC, ACROSS = P::C_ALONG_N ? VEC : 1;
#pragma unroll
  for (int j = 0; j < Grid::N; j += ACROSS) {
    const I column = corner.column + Grid::column() + j / Grid::CHUNK_N * Grid::STEP_N + j % Grid::CHUNK_N;
    if (column >= product.n) continue;
    const I channel = product.c_channel(corner.group, column), column_offset = product.c_column(channel);
    float bias_of[ACROSS] = {};
    if constexpr (E::BIAS) {
#pragma unroll
      for (int e = 0; e < ACROSS; ++e) bias_of[e] = to_float(bias[channel + e]);
    }
#pragma unroll
    for (int i = 0; i < Grid::M; i += DOWN) {
      const I row = corner.row + Grid::row() + i / Grid::CHUNK_M * Grid::STEP_M + i % Grid::CHUNK_M;
      if (row >= product.m) continue;
      const I offset = product.c_row(row) + column_offset;
      Vec<T, VEC> added = {};
      if constexpr (E::RESIDUAL) added = load_vec<VEC>(residual + offset);
      Vec<Out, VEC> values;
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        const float sum = P::C_ALONG_N ? sums[i][j + e] : sums[i + e][j];
        values.at[e] = from_float<Out>(E::apply(sum, bias_of[P::C_ALONG_N ? e : 0], to_float(added.at[e])));
      }
      store_vec(corner.tensor + offset, values);
    }
  }
}

// ---- parts of K ---------------------------------------------------------------------------------------------------

// Sums the parts of each element of C in order; channel i / inner % channels has its bias.
template <class T, class I, class E>
__global__ void __launch_bounds__(256)
    sum_parts(const float* __restrict__ partial, const T* __restrict__ bias, const T* __restrict__ residual,
              T* __restrict__ out, I parts, I size, I inner, I channels) {
  const I i = I(blockIdx.x) * 256 + threadIdx.x;
  if (i >= size) return;
  float sum = 0.0f;
  for (I part = 0; part < parts; ++part) sum += partial[part * (long long)size + i];
  float of_channel = 0.0f, added = 0.0f;
  if constexpr (E::BIAS) {
    const I outer = divide(i, inner);
    of_channel = to_float(bias[outer - divide(outer, channels) * channels]);
  }
  if constexpr (E::RESIDUAL) added = to_float(residual[i]);
  out[i] = from_float<T>(E::apply(sum, of_channel, added));
}
