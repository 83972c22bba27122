"""softmax in CUDA C++: one or more threads a row, the row kept in registers, in shared memory, or read twice.

A thread takes every `row_threads`-th vector of its row, so that a warp's accesses are contiguous. `cache` says
where the row waits between its maximum and its exponentials:

- ``registers``: unrolled, for up to 64 elements a thread; each is read once and costs one exponential.
- ``shared``: for longer rows that fit; likewise.
- ``online``: nowhere: maximum and sum are found together and the row is read again, two exponentials an element.

Up to a warp a row, several rows share a block and reduce by shuffles alone; above, a row has a block of its own.
Exponentials are powers of two of arguments scaled by log2 e.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels._cuda import ctype, helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, ceil_div
from tunebench.workloads.operators.softmax import Softmax

HELD_ELEMENTS = 64
"""Most elements of a row that a thread keeps in registers."""
OTHER_REGISTERS = 24
"""Registers a thread needs besides those: addresses, loop state, what reductions use."""
SCRATCH_BYTES = 128
"""Static shared memory of a reduction over a block: one f32 for each of at most 32 warps."""


def _held(workload: Softmax, row_threads: Any, vector: Any) -> Any:
    """Return the elements of a row that each of its threads keeps in registers, for columns too."""
    return ceil_div(workload.cols, row_threads * vector) * vector


def _most_held(threads: Any, device: Device) -> Any:
    """Return how many a thread can keep in a block of so many threads without spilling."""
    return np.minimum(HELD_ELEMENTS, device.registers_per_sm // threads - OTHER_REGISTERS)


SPACE = Space(
    (
        Parameter("cache", ("registers", "shared", "online"), "where a row waits for its maximum"),
        Parameter("row_threads", (4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
        Parameter("rows", (1, 2, 4, 8, 16, 32), "rows of a block"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4), "vectors a thread has in flight where the row is not in registers"),
    ),
    (
        lambda row_threads, rows: (row_threads <= 32) | (rows == 1),
        lambda row_threads, rows: (row_threads * rows >= 32) & (row_threads * rows <= 1024),
        # Every row must begin at a multiple of an access.
        lambda vector, workload: (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16),
        # Threads without a vector are of no use.
        lambda row_threads, vector, workload: (row_threads == 4) | (row_threads * vector < 2 * workload.cols),
        lambda cache, row_threads, rows, vector, workload, device: (
            (cache != "registers")
            | (_held(workload, row_threads, vector) <= _most_held(row_threads * rows, device))
        ),
        lambda cache, rows, workload, device: (
            (cache != "shared") | (4 * rows * workload.cols + SCRATCH_BYTES <= device.smem_per_block_bytes)
        ),
        lambda cache, row_threads, vector, unroll, workload: (
            (unroll == 1)
            | ((cache != "registers") & (row_threads * vector * unroll < 2 * workload.cols))
        ),
    ),
)

KERNELS = r"""
// Below any argument, and finite: a row may begin with minus infinity.
__device__ __forceinline__ float lowest() { return -3.402823466e38f; }

// One row's arguments of the powers of two: (scale x + mask) log2 e.
template <class T, bool MASKED, int V>
struct Row {
  const T* x;
  const T* mask;
  float scale;

  __device__ __forceinline__ void load(int vector, float (&z)[V]) const {
    const Vec<T, V> values = load_vec<V>(x + vector * V);
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = to_float(values.at[i]) * scale;
    if constexpr (MASKED) {
      const Vec<T, V> added = load_vec<V>(mask + vector * V);
#pragma unroll
      for (int i = 0; i < V; ++i) z[i] += to_float(added.at[i]) * LOG2_E;
    }
  }
};

// Loads N vectors, `STEP` apart from `first` on, of the row's `count`; returns the largest element.
template <int STEP, int N, int V, class Source>
__device__ __forceinline__ float load_batch(const Source& source, int first, int count, float (&z)[N][V]) {
  float top = lowest();
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * STEP < count) source.load(first + n * STEP, z[n]);
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * STEP < count)
#pragma unroll
      for (int i = 0; i < V; ++i) top = fmaxf(top, z[n][i]);
  return top;
}

// Puts 2^(z - top) in place of z; returns the sum.
template <int STEP, int N, int V>
__device__ __forceinline__ float raise_batch(int first, int count, float top, float (&z)[N][V]) {
  float total = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * STEP < count)
#pragma unroll
      for (int i = 0; i < V; ++i) total += z[n][i] = fast_exp2(z[n][i] - top);
  return total;
}

template <int STEP, int N, int V, class T>
__device__ __forceinline__ void store_batch(T* y, int first, int count, float factor, const float (&e)[N][V]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
    if (first + n * STEP < count) {
      Vec<T, V> values;
#pragma unroll
      for (int i = 0; i < V; ++i) values.at[i] = from_float<T>(e[n][i] * factor);
      store_vec(y + (first + n * STEP) * V, values);
    }
}

// Over the threads of a row. All threads of the block take part.
template <int ROW_THREADS, class Op>
__device__ __forceinline__ float reduce_row(float value, Op op) {
  if constexpr (ROW_THREADS <= 32) {
    return warp_reduce<ROW_THREADS>(value, op);
  } else {
    __shared__ float scratch[ROW_THREADS / 32];
    return block_reduce<ROW_THREADS>(value, scratch, op);
  }
}

// What the three kernels begin with. A missing row has no vectors; its threads take part in reductions only.
#define SOFTMAX_ROW                                                             \
  const int row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;                \
  const int thread = threadIdx.x % ROW_THREADS, count = row < rows ? cols / V : 0; \
  const size_t offset = size_t(row) * cols;                                     \
  const Row<T, MASKED, V> source = {x + offset, mask + offset, scale * LOG2_E}; \
  T* const target = y + offset

// N vectors a thread cover the row.
template <class T, bool MASKED, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS)
    softmax_registers(const T* __restrict__ x, float scale, const T* __restrict__ mask, T* __restrict__ y, int rows,
                      int cols) {
  SOFTMAX_ROW;
  float z[N][V];
  const float top = reduce_row<ROW_THREADS>(load_batch<ROW_THREADS>(source, thread, count, z), Max());
  const float total = reduce_row<ROW_THREADS>(raise_batch<ROW_THREADS>(thread, count, top, z), Sum());
  store_batch<ROW_THREADS>(target, thread, count, 1.0f / total, z);
}

// Each thread writes and reads its own elements of shared memory, so that only reductions need barriers. Element i
// of a vector lies `count` words after element i - 1: the lanes of a warp then use different banks.
template <class T, bool MASKED, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS)
    softmax_shared(const T* __restrict__ x, float scale, const T* __restrict__ mask, T* __restrict__ y, int rows,
                   int cols) {
  extern __shared__ float kept[];
  SOFTMAX_ROW;
  float* const mine = kept + threadIdx.x / ROW_THREADS * cols;
  float top = lowest(), total = 0.0f;
  for (int first = thread; first < count; first += ROW_THREADS * N) {
    float z[N][V];
    top = fmaxf(top, load_batch<ROW_THREADS>(source, first, count, z));
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (first + n * ROW_THREADS < count)
#pragma unroll
        for (int i = 0; i < V; ++i) mine[i * count + first + n * ROW_THREADS] = z[n][i];
  }
  top = reduce_row<ROW_THREADS>(top, Max());
#pragma unroll N
  for (int vector = thread; vector < count; vector += ROW_THREADS)
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float e = fast_exp2(mine[i * count + vector] - top);
      mine[i * count + vector] = e;
      total += e;
    }
  const float factor = 1.0f / reduce_row<ROW_THREADS>(total, Sum());
#pragma unroll N
  for (int vector = thread; vector < count; vector += ROW_THREADS) {
    float e[1][V];
#pragma unroll
    for (int i = 0; i < V; ++i) e[0][i] = mine[i * count + vector];
    store_batch<ROW_THREADS>(target, vector, count, factor, e);
  }
}

// Keeps the maximum so far and the sum of the powers relative to it.
template <class T, bool MASKED, int ROW_THREADS, int ROWS, int V, int N>
__global__ void __launch_bounds__(ROW_THREADS * ROWS)
    softmax_online(const T* __restrict__ x, float scale, const T* __restrict__ mask, T* __restrict__ y, int rows,
                   int cols) {
  SOFTMAX_ROW;
  float z[N][V], top = lowest(), total = 0.0f;
  for (int first = thread; first < count; first += ROW_THREADS * N) {
    const float higher = fmaxf(top, load_batch<ROW_THREADS>(source, first, count, z));
    total = total * fast_exp2(top - higher) + raise_batch<ROW_THREADS>(first, count, higher, z);
    top = higher;
  }
  const float highest = reduce_row<ROW_THREADS>(top, Max());
  const float factor = 1.0f / reduce_row<ROW_THREADS>(total * fast_exp2(top - highest), Sum());
  for (int first = thread; first < count; first += ROW_THREADS * N) {
    load_batch<ROW_THREADS>(source, first, count, z);
    raise_batch<ROW_THREADS>(first, count, highest, z);
    store_batch<ROW_THREADS>(target, first, count, factor, z);
  }
}
"""


class CudaBlockSoftmax(CudaVariant[Softmax]):
    """Serves every size and type, prologue fused."""

    name = "cuda_block"
    operator = Softmax
    space = SPACE

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return the widest accesses, and as few threads a row as leave each about 16 elements."""
        widest = 16 // itemsize(workload.dtype)
        vector = max(v for v in (1, 2, 4, 8) if v <= widest and workload.cols % v == 0)
        threads = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
        row_threads = next((t for t in threads if workload.cols <= 16 * t), 1024)
        while row_threads > 4 and row_threads * vector >= 2 * workload.cols:
            row_threads //= 2
        rows = max(1, 128 // row_threads) if row_threads <= 32 else 1
        held = _held(workload, row_threads, vector) <= _most_held(row_threads * rows, device)
        fits = 4 * workload.cols + SCRATCH_BYTES <= device.smem_per_block_bytes
        cache = "registers" if held else "shared" if fits else "online"
        unroll = 1 if cache == "registers" else 2
        return Config(
            {"cache": cache, "row_threads": row_threads, "rows": rows, "vector": vector, "unroll": unroll}
        )

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count what every element needs: its bytes, its exponentials, and the arithmetic around them.

        An element is scaled, diminished by the maximum, added and multiplied; packed instructions may do two
        at a time.
        """
        rows, elements = table["rows"], table["rows"] * float(workload.cols)
        online, shared = table["cache"] == "online", table["cache"] == "shared"
        tensors = 2 if workload.has_mask else 1
        # A sector at either end may have come with a neighbour's row.
        fill_bytes = np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * tensors)
        return Costs(
            blocks=workload.rows / rows,
            full_blocks=workload.rows // rows,
            threads=table["row_threads"] * rows,
            smem_bytes=np.where(shared, 4.0 * elements, 0.0)
            + np.where(table["row_threads"] > 32, table["row_threads"] / 8.0, 0.0),
            fma=elements * np.where(online, 2.5, 2.0),
            sfu=elements * np.where(online, 2.0, 1.0),
            smem_traffic_bytes=np.where(shared, 16.0 * elements, 0.0),
            fill_bytes=fill_bytes,
        )

    def source(self, workload: Softmax, config: Config) -> str:
        """Return all three kernels; the entry says which is instantiated."""
        return helpers("types", "reduce") + KERNELS

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows; a missing mask is passed as x and not read."""
        cache, row_threads, rows, vector = (
            config[name] for name in ("cache", "row_threads", "rows", "vector")
        )
        held = _held(workload, row_threads, vector) // vector
        batch = held if cache == "registers" else config["unroll"]
        masked = str(workload.has_mask).lower()
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        return (
            Launch(
                entry=f"softmax_{cache}<{ctype(workload.dtype)}, {masked}, "
                f"{row_threads}, {rows}, {vector}, {batch}>",
                grid=(ceil_div(workload.rows, rows), 1, 1),
                block=(row_threads * rows, 1, 1),
                arguments=(
                    "x",
                    scale,
                    "mask" if workload.has_mask else "x",
                    "y",
                    Scalar("int", workload.rows),
                    Scalar("int", workload.cols),
                ),
                smem_bytes=4 * rows * workload.cols if cache == "shared" else 0,
            ),
        )

    def miniature(self, workload: Softmax, config: Config) -> Softmax:
        """Return a full block of rows and a cut one; rows keep their length, which decides the unrolling."""
        rows: int = min(workload.rows, 2 * config["rows"] + 1)
        return Softmax(rows=rows, cols=workload.cols, dtype=workload.dtype, prologue=workload.prologue)


VARIANT = CudaBlockSoftmax()
