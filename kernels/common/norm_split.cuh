#pragma once
// Layernorm and rmsnorm of few long rows: several blocks share a row. Each writes the moments of its part. In a second
// launch each merges the moments of all parts of its row, in a fixed order, and normalises its part. Needs types.cuh,
// reduce.cuh, row_block.cuh and norm.cuh. The first part of a row has its edges.

// The part of a row that a block has: `chunk` vectors, or fewer in the last part.
template <class P, int V>  // aligned
struct RowPart {  // aligned
template <class P, int V, int THREADS>  // edges
struct RowPart : Edges<THREADS, V> {  // edges
  using T = typename P::T;
  int row, first, count;  // first vector and number of vectors
  size_t offset;          // of the first, in elements
  Parts<P, V> parts;

  __device__ __forceinline__ RowPart(const T* x, const T* bias, const T* residual, T* z, int cols, int in_row, int chunk)
      : row(blockIdx.x / in_row),  // aligned
        first(int(blockIdx.x % in_row) * chunk),  // aligned
        count(min(chunk, cols / V - first)),  // aligned
        offset(size_t(row) * cols + size_t(first) * V),  // aligned
        parts{x + offset, bias + size_t(first) * V, residual + offset, z + offset} {}  // aligned
      : Edges<THREADS, V>(threadIdx.x, size_t(blockIdx.x / in_row) * cols, cols, blockIdx.x % in_row == 0),  // edges
        row(blockIdx.x / in_row),  // edges
        first(int(blockIdx.x % in_row) * chunk),  // edges
        count(min(chunk, this->vectors - first)),  // edges
        offset(this->start(size_t(row) * cols, first)),  // edges
        parts{x + offset, {bias, this->before + first * V, cols}, residual + offset, z + offset} {}  // edges

  // Elements of a part of this row.  // edges
  __device__ __forceinline__ float elements(int part, int cols, int chunk) const {  // edges
    const int held = min(chunk, this->vectors - part * chunk) * V;  // edges
    return float(held + (part == 0 ? cols - this->vectors * V : 0));  // edges
  }  // edges
};

// in_row: parts of a row. moments (rows * in_row, 2): mean and squared deviations; for rmsnorm 0 and squares.
template <class P, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS)  // aligned
__global__ void __launch_bounds__(THREADS, 1)  // edges
norm_split_moments(NORM_PARAMETERS(typename P::T), float* __restrict__ moments, int in_row, int chunk) {
  const RowPart<P, V, THREADS> my(x, bias, residual, z, cols, in_row, chunk);  // edges
  const RowPart<P, V> my(x, bias, residual, z, cols, in_row, chunk);  // aligned
  const auto single = my.parts.singly();  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
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
  my.each_edge([&](int element, int n) {  // edges
    single.keep_sum(element, edge[n]);  // edges
    seen.see<P::CENTRED>(edge[n]);  // edges
  });  // edges
  if constexpr (P::CENTRED) {
    const float elements = fmaxf(1.0f, my.elements(blockIdx.x % in_row, cols, chunk));  // edges
    mean = reduce_row<THREADS>(seen.count * seen.mean, Sum()) / elements;  // edges
    mean = reduce_row<THREADS>(seen.count * seen.mean, Sum()) / (float(my.count) * V);  // aligned
    const float apart = seen.mean - mean;
    seen.squares += seen.count * apart * apart;
  }
  const float squares = reduce_row<THREADS>(seen.squares, Sum());
  if (threadIdx.x == 0) store_vec(moments + size_t(blockIdx.x) * 2, Vec<float, 2>{mean, squares});
}

template <class P, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS)  // aligned
__global__ void __launch_bounds__(THREADS, 1)  // edges
norm_split_finish(NORM_PARAMETERS(typename P::T), const float* __restrict__ moments, int in_row, int chunk) {
  const RowPart<P, V, THREADS> my(x, bias, residual, z, cols, in_row, chunk);  // edges
  const RowPart<P, V> my(x, bias, residual, z, cols, in_row, chunk);  // aligned
  const auto single = my.parts.singly();  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  const float* const of_row = moments + size_t(my.row) * in_row * 2;
  const int lane = threadIdx.x % 32;
  float mean = 0.0f, squares = 0.0f;
  if constexpr (P::CENTRED) {  // each warp separately
    for (int part = lane; part < in_row; part += 32)
      mean += of_row[2 * part] * my.elements(part, cols, chunk);  // edges
      mean += of_row[2 * part] * (float(min(chunk, cols / V - part * chunk)) * V);  // aligned
    mean = warp_reduce_sum(mean) / cols;
  }
  for (int part = lane; part < in_row; part += 32) {
    const Vec<float, 2> own = load_vec<2>(of_row + 2 * part);
    const float apart = own.at[0] - mean;
    squares += own.at[1];
    if constexpr (P::CENTRED) squares += apart * apart * my.elements(part, cols, chunk);  // edges
    if constexpr (P::CENTRED) squares += apart * apart * (float(min(chunk, cols / V - part * chunk)) * V);  // aligned
  }
  squares = warp_reduce_sum(squares);
  const size_t weights = size_t(my.first) * V;  // aligned
  const Affine<P, V> affine = {gamma + weights, beta + weights, mean, fast_rsqrt(squares / cols + eps)};  // aligned
  const int at = my.before + my.first * V;  // edges
  const Affine<P, V> affine = {{gamma, at, cols}, {beta, at, cols}, mean, fast_rsqrt(squares / cols + eps)};  // edges
  if (my.first == 0 && threadIdx.x == 0) affine.keep_statistics(mean_of, rstd_of, my.row);
  const auto single_affine = affine.singly();  // edges
  my.each_edge([&](int element, int n) {  // edges
    single_affine.store(y + my.offset, element, edge[n]);  // edges
  });  // edges
  float values[N][V];
#pragma unroll 1
  for (int first = threadIdx.x; first < my.count; first += THREADS * N) {
    each_vector<N>(first, THREADS, my.count, [&](int vector, int n) { my.parts.load(vector, values[n]); });
    each_vector<N>(first, THREADS, my.count,
                   [&](int vector, int n) { affine.store(y + my.offset, vector, values[n]); });
  }
}
