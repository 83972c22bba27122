#pragma once
// The product of _conv_geometry.cuh on FMA units: tiles of A and B in shared memory as f32, a tile of C in the
// registers of a block, TM x TN elements a thread. Needs _types.cuh, _epilogue.cuh and
// _conv_geometry.cuh.

constexpr int LARGEST_SHARED_ACCESS = 4;  // f32 elements of 16 bytes

constexpr __host__ __device__ int at_most(int value, int limit) { return value < limit ? value : limit; }

// ---- from global to shared memory --------------------------------------------------------------------------------

// Which elements of a tile of EXTENT rows (or columns) and BK along K a thread copies, VEC neighbours at a time.
template <int EXTENT, int BK, int VEC, int THREADS, bool ALONG_K>
struct Share {
  static constexpr int ACROSS_K = ALONG_K ? BK / VEC : BK, ACROSS = ALONG_K ? EXTENT : EXTENT / VEC;
  // Consecutive threads first take what lies together in memory.
  static constexpr int INNER = ALONG_K ? ACROSS_K : ACROSS, OUTER = ALONG_K ? ACROSS : ACROSS_K;
  static constexpr int INNER_COUNT = INNER > THREADS ? INNER / THREADS : 1;
  static constexpr int OUTER_STEP = INNER > THREADS ? 1 : THREADS / INNER;
  static constexpr int OUTER_COUNT = OUTER > OUTER_STEP ? OUTER / OUTER_STEP : 1;
  static constexpr int INNER_STEP = INNER_COUNT > 1 ? THREADS * VEC : 0;
  static constexpr bool SOME_IDLE = OUTER < OUTER_STEP;
  static_assert(INNER_COUNT == 1 || INNER % THREADS == 0, "threads and tiles are powers of two");

  static constexpr int COUNT = ALONG_K ? OUTER_COUNT : INNER_COUNT, K_COUNT = ALONG_K ? INNER_COUNT : OUTER_COUNT;
  static constexpr int STEP = ALONG_K ? OUTER_STEP : INNER_STEP, K_STEP = ALONG_K ? INNER_STEP : OUTER_STEP;

  int first, first_k;
  bool busy;

  __device__ __forceinline__ Share() {
    const int thread = threadIdx.x, inner = thread % INNER * VEC, outer = thread / INNER;
    first = ALONG_K ? outer : inner;
    first_k = ALONG_K ? inner : outer;
    busy = !SOME_IDLE || outer < OUTER;
  }
};

// A tile in shared memory: element (k, i) of f32 at k * PITCH + i. Where neighbours along K are stored together,
// PITCH spreads them over the banks.
template <int EXTENT, int BK, bool ALONG_K>
struct SharedTile {
  static constexpr int PITCH = EXTENT + (ALONG_K ? LARGEST_SHARED_ACCESS : 0), SIZE = PITCH * BK;
};

// The elements that a thread has read and not yet stored.
template <class T, class S, int VEC>
struct Held {
  Vec<T, VEC> at[S::K_COUNT][S::COUNT];
};

template <class T, int EXTENT, int BK, int VEC, int THREADS, bool ALONG_K>
__device__ __forceinline__ void store_shared(
    float* tile, const Share<EXTENT, BK, VEC, THREADS, ALONG_K>& share,
    const Held<T, Share<EXTENT, BK, VEC, THREADS, ALONG_K>, VEC>& held) {
  using S = Share<EXTENT, BK, VEC, THREADS, ALONG_K>;
  constexpr int PITCH = SharedTile<EXTENT, BK, ALONG_K>::PITCH;
  constexpr int WIDTH = ALONG_K ? 1 : at_most(VEC, LARGEST_SHARED_ACCESS);
  if (!share.busy) return;
#pragma unroll
  for (int k = 0; k < S::K_COUNT; ++k)
#pragma unroll
    for (int i = 0; i < S::COUNT; ++i) {
      float* target = tile + (share.first_k + k * S::K_STEP) * PITCH + share.first + i * S::STEP;
#pragma unroll
      for (int e = 0; e < VEC; e += WIDTH) {
        Vec<float, WIDTH> values;
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) values.at[j] = to_float(held.at[k][i].at[e + j]);
        store_vec(target + e * (ALONG_K ? PITCH : 1), values);
      }
    }
}

template <class T, int VEC>
__device__ __forceinline__ Vec<T, VEC> zeros() {
  Vec<T, VEC> result;
#pragma unroll
  for (int e = 0; e < VEC; ++e) result.at[e] = from_float<T>(0.0f);
  return result;
}

template <class T, class P, class I, int BM, int BK, int VEC, int THREADS>
struct LoaderA {
  using S = Share<BM, BK, VEC, THREADS, P::A_ALONG_K>;
  S share;
  Place<I> place[S::COUNT];
  Digits<I> first_k, k_step;
  Held<T, S, VEC> held;

  __device__ __forceinline__ LoaderA(const P& product, I first_row) {
    first_k = product.in_step(share.first_k);
    k_step = product.in_step(S::K_STEP);
#pragma unroll
    for (int i = 0; i < S::COUNT; ++i) place[i] = product.a_row(first_row + share.first + i * S::STEP);
  }

  // Reads the elements of the step that begins at `step`; what lies outside the image or K is 0.
  __device__ __forceinline__ void load(const T* a, const P& product, const Digits<I>& step) {
    if (!share.busy) return;
    Digits<I> at = product.moved(step, first_k);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) at = product.moved(at, k_step);
#pragma unroll
      for (int i = 0; i < S::COUNT; ++i) held.at[k][i] = zeros<T, VEC>();
      if (product.inside_k(at)) {
        const Place<I> here = product.a_column(at);
#pragma unroll
        for (int i = 0; i < S::COUNT; ++i)
          if (product.inside_image(place[i], here)) held.at[k][i] = load_vec<VEC>(a + (place[i].offset + here.offset));
      }
    }
  }
};

template <class T, class P, class I, int BN, int BK, int VEC, int THREADS>
struct LoaderB {
  using S = Share<BN, BK, VEC, THREADS, P::B_ALONG_K>;
  S share;
  I offset[S::COUNT];
  bool inside[S::COUNT];
  Digits<I> first_k, k_step;
  Held<T, S, VEC> held;

  __device__ __forceinline__ LoaderB(const P& product, I first_column) {
    first_k = product.in_step(share.first_k);
    k_step = product.in_step(S::K_STEP);
#pragma unroll
    for (int i = 0; i < S::COUNT; ++i) {
      const I index = first_column + share.first + i * S::STEP;
      inside[i] = index < product.n;
      offset[i] = inside[i] ? product.b_column(index) : 0;
    }
  }

  __device__ __forceinline__ void load(const T* b, const P& product, const Digits<I>& step) {
    if (!share.busy) return;
    Digits<I> at = product.moved(step, first_k);
#pragma unroll
    for (int k = 0; k < S::K_COUNT; ++k) {
      if (k > 0) at = product.moved(at, k_step);
#pragma unroll
      for (int i = 0; i < S::COUNT; ++i) held.at[k][i] = zeros<T, VEC>();
      if (product.inside_k(at)) {
        const I here = product.b_row(at);
#pragma unroll
        for (int i = 0; i < S::COUNT; ++i)
          if (inside[i]) held.at[k][i] = load_vec<VEC>(b + (offset[i] + here));
      }
    }
  }
};

// ---- from shared memory to registers -----------------------------------------------------------------------------

// Which elements of C a thread owns: TM rows and TN columns in runs of up to 4, the runs of a warp side by side, so
// that its reads of shared memory are without conflicts. A warp is as near to 4 x 8 threads as the tile allows.
template <int BM, int BN, int TM, int TN>
struct Owned {
  static constexpr int DOWN = BM / TM, ACROSS = BN / TN, THREADS = DOWN * ACROSS;
  static constexpr int LANES_DOWN = at_most(DOWN, 32 / at_most(ACROSS, 8)), LANES_ACROSS = 32 / LANES_DOWN;
  static constexpr int ROW_RUN = at_most(TM, LARGEST_SHARED_ACCESS), COLUMN_RUN = at_most(TN, LARGEST_SHARED_ACCESS);
  static_assert(THREADS % 32 == 0 && ACROSS % LANES_ACROSS == 0, "whole warps only");

  int down, across;

  __device__ __forceinline__ Owned() {
    constexpr int WARPS_ACROSS = ACROSS / LANES_ACROSS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    down = warp / WARPS_ACROSS * LANES_DOWN + lane / LANES_ACROSS;
    across = warp % WARPS_ACROSS * LANES_ACROSS + lane % LANES_ACROSS;
  }
  __device__ __forceinline__ int row(int i) const {
    return (i / ROW_RUN * DOWN + down) * ROW_RUN + i % ROW_RUN;
  }
  __device__ __forceinline__ int column(int j) const {
    return (j / COLUMN_RUN * ACROSS + across) * COLUMN_RUN + j % COLUMN_RUN;
  }
};

template <int BK, int A_PITCH, int B_PITCH, int TM, int TN, class O>
__device__ __forceinline__ void multiply(const float* a, const float* b, const O& owned, float (&c)[TM][TN]) {
#pragma unroll
  for (int k = 0; k < BK; ++k) {
    float left[TM], right[TN];
#pragma unroll
    for (int i = 0; i < TM; i += O::ROW_RUN) {
      const Vec<float, O::ROW_RUN> run = load_vec<O::ROW_RUN>(a + k * A_PITCH + owned.row(i));
#pragma unroll
      for (int e = 0; e < O::ROW_RUN; ++e) left[i + e] = run.at[e];
    }
#pragma unroll
    for (int j = 0; j < TN; j += O::COLUMN_RUN) {
      const Vec<float, O::COLUMN_RUN> run = load_vec<O::COLUMN_RUN>(b + k * B_PITCH + owned.column(j));
#pragma unroll
      for (int e = 0; e < O::COLUMN_RUN; ++e) right[j + e] = run.at[e];
    }
#pragma unroll
    for (int i = 0; i < TM; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j) c[i][j] = fmaf(left[i], right[j], c[i][j]);
  }
}

// ---- from registers to global memory -----------------------------------------------------------------------------

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

// Stores the elements of C that a thread owns, VEC neighbours at a time.
template <class E, int VEC, class T, class Out, class P, class I, class O, int TM, int TN>
__device__ __forceinline__ void store_owned(Out* out, const T* bias, const T* residual, const P& product, I group,
                                            I first_row, I first_column, const O& owned, const float (&c)[TM][TN]) {
  constexpr int DOWN = P::C_ALONG_N ? 1 : VEC, ACROSS = P::C_ALONG_N ? VEC : 1;
  float bias_of[TN] = {};
  if constexpr (E::BIAS) {
#pragma unroll
    for (int j = 0; j < TN; ++j) {
      const I column = first_column + owned.column(j);
      if (column < product.n) bias_of[j] = to_float(bias[product.c_channel(group, column)]);
    }
  }
#pragma unroll
  for (int i = 0; i < TM; i += DOWN) {
    const I row = first_row + owned.row(i);
    if (row >= product.m) continue;
    const I row_offset = product.c_row(row);
#pragma unroll
    for (int j = 0; j < TN; j += ACROSS) {
      const I column = first_column + owned.column(j);
      if (column >= product.n) continue;
      const I offset = row_offset + product.c_column(product.c_channel(group, column));
      Vec<T, VEC> added = {};
      if constexpr (E::RESIDUAL) added = load_vec<VEC>(residual + offset);
      Vec<Out, VEC> values;
#pragma unroll
      for (int e = 0; e < VEC; ++e) {
        const float sum = P::C_ALONG_N ? c[i][j + e] : c[i + e][j];
        const float result = E::apply(sum, bias_of[P::C_ALONG_N ? j + e : j], to_float(added.at[e]));
        values.at[e] = from_float<Out>(result);
      }
      store_vec(out + offset, values);
    }
  }
}
