#pragma once
// Layernorm and rmsnorm of few long rows: several blocks share a row. Each writes the moments of its part. In a second
// launch each merges the moments of all parts of its row, in a fixed order, and normalises its part. Needs types.cuh,
// reduce.cuh, row_block.cuh and norm.cuh.

// The part of a row that a block has: `chunk` vectors, or fewer in the last part.
template <class P, int V>
struct RowPart {
  using T = typename P::T;
  int row, first, count;  // first vector and number of vectors
  size_t offset;          // of the first, in elements
  Parts<P, V> parts;

  __device__ __forceinline__ RowPart(const T* x, const T* bias, const T* residual, T* z, int cols, int in_row, int chunk)
      : row(blockIdx.x / in_row),
        first(int(blockIdx.x % in_row) * chunk),
        count(min(chunk, cols / V - first)),
        offset(size_t(row) * cols + size_t(first) * V),
        parts{x + offset, bias + size_t(first) * V, residual + offset, z + offset} {}
};

// in_row: parts of a row. moments (rows * in_row, 2): mean and squared deviations; for rmsnorm 0 and squares.
template <class P, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS)
norm_split_moments(NORM_PARAMETERS(typename P::T), float* __restrict__ moments, int in_row, int chunk) {
  const RowPart<P, V> my(x, bias, residual, z, cols, in_row, chunk);
  float values[N][V], mean = 0.0f;
  Moments seen = {0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = threadIdx.x; first < my.count; first += THREADS * N) {
    each_vector<N>(first, THREADS, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, THREADS, my.count, [&](int vector, int n) {
      my.parts.keep_sum(vector, values[n]);
      seen.see<P::CENTRED>(values[n]);
    });
  }
  if constexpr (P::CENTRED) {
    mean = reduce_row<THREADS>(seen.count * seen.mean, Sum()) / (float(my.count) * V);
    const float apart = seen.mean - mean;
    seen.squares += seen.count * apart * apart;
  }
  const float squares = reduce_row<THREADS>(seen.squares, Sum());
  if (threadIdx.x == 0) store_vec(moments + size_t(blockIdx.x) * 2, Vec<float, 2>{mean, squares});
}

template <class P, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS)
norm_split_finish(NORM_PARAMETERS(typename P::T), const float* __restrict__ moments, int in_row, int chunk) {
  const RowPart<P, V> my(x, bias, residual, z, cols, in_row, chunk);
  const float* const of_row = moments + size_t(my.row) * in_row * 2;
  const int lane = threadIdx.x % 32;
  float mean = 0.0f, squares = 0.0f;
  if constexpr (P::CENTRED) {  // each warp separately
    for (int part = lane; part < in_row; part += 32)
      mean += of_row[2 * part] * (float(min(chunk, cols / V - part * chunk)) * V);
    mean = warp_reduce_sum(mean) / cols;
  }
  for (int part = lane; part < in_row; part += 32) {
    const Vec<float, 2> own = load_vec<2>(of_row + 2 * part);
    const float apart = own.at[0] - mean;
    squares += own.at[1];
    if constexpr (P::CENTRED) squares += apart * apart * (float(min(chunk, cols / V - part * chunk)) * V);
  }
  squares = warp_reduce_sum(squares);
  const size_t weights = size_t(my.first) * V;
  const Affine<P, V> affine = {gamma + weights, beta + weights, mean, fast_rsqrt(squares / cols + eps)};
  if (my.first == 0 && threadIdx.x == 0) affine.keep_statistics(mean_of, rstd_of, my.row);
  float values[N][V];
#pragma unroll 1
  for (int first = threadIdx.x; first < my.count; first += THREADS * N) {
    each_vector<N>(first, THREADS, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, THREADS, my.count,
                   [&](int vector, int n) { affine.store(y + my.offset, vector, values[n]); });
  }
}
