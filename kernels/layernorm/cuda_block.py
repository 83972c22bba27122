"""layernorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

Where the row is kept, its mean is found first and its variance about the mean after. Where it is read twice,
both are found together: each thread merges the mean and the squared deviations of its vectors into its own,
and the threads of a row merge theirs, so that no large sum of squares cancels. See
`tunebench.kernels._row_block` for the parameters.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels._cuda import ctype, helpers
from tunebench.kernels._row_block import SPACE, batch, default_config, row_costs, smem_bytes, tiles
from tunebench.space import Config, Table
from tunebench.variant import Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.layernorm import LayerNorm

KERNELS = r"""
template <int V>
__device__ __forceinline__ float sum_of(const float (&x)[V]) {
  float total = x[0];
#pragma unroll
  for (int i = 1; i < V; ++i) total = f32_op(total + x[i]);
  return total;
}

// The sum of squared deviations from `mean`.
template <int V>
__device__ __forceinline__ float squares_of(const float (&x)[V], float mean) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    const float apart = f32_op(x[i] - mean);
    total = multiply_add(apart, apart, total);
  }
  return total;
}

// gamma and beta, and what turns a row into its normal form.
template <class T, int V>
struct Affine {
  const T* gamma;
  const T* beta;
  float mean, inverse;

  __device__ __forceinline__ void store(T* target, int vector, float (&x)[V]) const {
    float scale[V], shift[V];
    load_floats(gamma + vector * V, scale);
    load_floats(beta + vector * V, shift);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float normal = f32_op(f32_op(x[i] - mean) * inverse);
      x[i] = multiply_add(normal, scale[i], shift[i]);
    }
    store_floats(target + vector * V, x);
  }
};

#define LAYERNORM_PARAMETERS                                                                      \
  const T *__restrict__ all_x, const T *__restrict__ gamma, const T *__restrict__ beta,           \
      T *__restrict__ all_y, int rows, int cols, float eps

template <class T, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) layernorm_registers(LAYERNORM_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const T* const row = all_x + my.offset;
  float x[N][V], total = 0.0f, squares = 0.0f;
  each_held_vector<N>(my.thread, my.STEP, my.count,
                      [&](int vector, int n) { load_floats(row + vector * V, x[n]); });
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { total += sum_of(x[n]); });
  const float mean = reduce_row<ROW_THREADS>(total, Sum()) / cols;
  each_held_vector<N>(my.thread, my.STEP, my.count, [&](int, int n) { squares += squares_of(x[n], mean); });
  const float variance = reduce_row<ROW_THREADS>(squares, Sum()) / cols;
  const Affine<T, V> affine = {gamma, beta, mean, fast_rsqrt(variance + eps)};
  each_held_vector<N>(my.thread, my.STEP, my.count,
                      [&](int vector, int n) { affine.store(all_y + my.offset, vector, x[n]); });
}

template <class T, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) layernorm_shared(LAYERNORM_PARAMETERS) {
  extern __shared__ float all_kept[];
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const KeptRow<V> kept = {all_kept + my.row_of_block * cols, my.count};
  const T* const row = all_x + my.offset;
  float x[N][V], total = 0.0f, squares = 0.0f;
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { load_floats(row + vector * V, x[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      total += sum_of(x[n]);
      kept.put(vector, x[n]);
    });
  }
  const float mean = reduce_row<ROW_THREADS>(total, Sum()) / cols;
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept.get(vector, x[n]);
      squares += squares_of(x[n], mean);
    });
  const float variance = reduce_row<ROW_THREADS>(squares, Sum()) / cols;
  const Affine<T, V> affine = {gamma, beta, mean, fast_rsqrt(variance + eps)};
  for (int first = my.thread; first < my.count; first += my.STEP * N)
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      kept.get(vector, x[n]);
      affine.store(all_y + my.offset, vector, x[n]);
    });
}

// How many elements have been seen, their mean, and the sum of their squared deviations from it.
struct Moments {
  float count, mean, squares;

  __device__ __forceinline__ void merge(float more, float their_mean, float their_squares) {
    const float all = count + more, difference = their_mean - mean, share = __fdividef(more, all);
    squares += their_squares + difference * difference * count * share;
    mean += difference * share;
    count = all;
  }
};

template <class T, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS, 1) layernorm_online(LAYERNORM_PARAMETERS) {
  const Share<ROW_THREADS, ROWS, V> my(rows, cols);
  const T* const row = all_x + my.offset;
  float x[N][V];
  Moments seen = {0.0f, 0.0f, 0.0f};
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { load_floats(row + vector * V, x[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int, int n) {
      const float mean = sum_of(x[n]) * (1.0f / V);
      seen.merge(V, mean, squares_of(x[n], mean));
    });
  }
  const float mean = reduce_row<ROW_THREADS>(seen.count * seen.mean, Sum()) / cols;
  const float apart = seen.mean - mean;
  const float squares = reduce_row<ROW_THREADS>(seen.squares + seen.count * apart * apart, Sum());
  const Affine<T, V> affine = {gamma, beta, mean, fast_rsqrt(squares / cols + eps)};
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { load_floats(row + vector * V, x[n]); });
    each_vector<N>(first, my.STEP, my.count,
                   [&](int vector, int n) { affine.store(all_y + my.offset, vector, x[n]); });
  }
}
"""


class CudaBlockLayerNorm(CudaVariant[LayerNorm]):
    """Serves every size and type."""

    name = "cuda_block"
    operator = LayerNorm
    space = SPACE

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return wide accesses and about 16 elements a thread."""
        return default_config(workload, device)

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count the sum, deviation, square and affine map, in case two are done by one instruction."""
        return row_costs(workload, table, device, row_tensors=1, fma=(2.5, 3.0), sfu=(0.0, 0.0), sums=2)

    def source(self, workload: LayerNorm, config: Config) -> str:
        """Return all three kernels; the entry says which is instantiated."""
        return helpers("types", "reduce", "row_block") + KERNELS

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        row_threads, rows, vector = config["row_threads"], config["rows"], config["vector"]
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols), Scalar("float", workload.eps))
        return (
            Launch(
                entry=f"layernorm_{config['cache']}<{ctype(workload.dtype)}, "
                f"{row_threads}, {rows}, {vector}, {batch(workload, config)}>",
                grid=(ceil_div(workload.rows, rows), 1, 1),
                block=(row_threads * rows, 1, 1),
                arguments=("x", "gamma", "beta", "y", *sizes),
                smem_bytes=smem_bytes(workload, config),
            ),
        )

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return two full blocks of rows and a cut one; the length of rows decides the unrolling."""
        return LayerNorm(
            rows=min(workload.rows, 2 * config["rows"] + 1), cols=workload.cols, dtype=workload.dtype
        )


VARIANT = CudaBlockLayerNorm()
