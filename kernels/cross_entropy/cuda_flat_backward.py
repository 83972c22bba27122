"""Gradient of cross entropy in CUDA C++: flat over the elements, for any length of rows.

x and dx are accessed as flat arrays, so that accesses are wide even if a row has an odd number of elements. A
block has a tile of consecutive elements. It locates the tile among the rows by one division, and each vector
by a cheaper one; a vector may span several rows.
"""

from __future__ import annotations

import dataclasses
import math

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.expected import LANES, PROLOGUE, converted, l1_passes
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.cross_entropy import CrossEntropy

KERNELS = r"""
// Gradient of the elements of one row.
struct Row {
  float shift, dloss;
  int target;

  // (e^(x - lse) - onehot) dloss.
  __device__ __forceinline__ float gradient(float x, int column) const {
    const float p = fast_exp2(multiply_add(x, LOG2_E, shift));
    return f32_op((column == target ? p - 1.0f : p) * dloss);
  }
};

template <class T, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
cross_entropy_backward(const T* __restrict__ x, const i32* __restrict__ target, const float* __restrict__ lse,
                       const float* __restrict__ dloss, T* __restrict__ dx, i64 elements, int cols) {
  const i64 base = i64(blockIdx.x) * (THREADS * V * N), first_row = base / cols;
  const u32 first_column = u32(base - first_row * cols);
  const auto row_at = [&](i64 row) { return Row{-lse[row] * LOG2_E, dloss[row], target[row]}; };
  float g[N][V];
  // Vectors of the tile within the matrix; the last one is full.
  const int count = int(min((elements - base) / V, i64(THREADS * N)));
  each_vector<N>(threadIdx.x, THREADS, count,
                 [&](int vector, int n) { load_floats(x + base + vector * V, g[n]); });
  each_vector<N>(threadIdx.x, THREADS, count, [&](int vector, int n) {
    const u32 place = first_column + vector * V, passed = place / u32(cols);
    i64 index = first_row + passed;
    int column = int(place - passed * u32(cols));
    Row row = row_at(index);
#pragma unroll
    for (int i = 0; i < V; ++i, ++column) {
      if (column == cols) {
        row = row_at(++index);
        column = 0;
      }
      g[n][i] = row.gradient(g[n][i], column);
    }
    store_floats(dx + base + vector * V, g[n]);
  });
}
"""

OF_VECTOR = 40
"""Instructions of a vector: its place in a row, by a division, and the figures of that row."""
LOOP_REGISTERS = 32
"""Registers of a thread besides its elements: places, figures of a row, addresses."""
MAX_BLOCKS = 2**31 - 1
"""Most blocks along x of a grid. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

SPACE = Space(
    (
        Parameter("threads", (64, 128, 256, 512, 1024), "threads of a block"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4), "vectors of a thread, all in flight"),
    ),
    (
        # No vector may extend beyond the matrix.
        lambda vector, workload: (
            (workload.rows * workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16)
        ),
        # Threads without a vector are useless.
        lambda threads, vector, unroll, workload: (
            ((threads == 64) & (unroll == 1))
            | (threads * vector * unroll < 2 * workload.rows * workload.cols)
        ),
        lambda threads, vector, unroll, workload: (
            1.0 * workload.rows * workload.cols / (threads * vector * unroll) <= MAX_BLOCKS
        ),
    ),
)


class CudaFlatCrossEntropyBackward(CudaVariant[CrossEntropy]):
    """Backward variant for every size and type."""

    name = "cuda_flat_backward"
    operator = CrossEntropy
    direction = "backward"
    space = SPACE

    def limits(self, workload: CrossEntropy, device: Device) -> str | None:
        """Refuse more elements than a grid can have."""
        if len(self.configs(workload, device)) == 0:
            return f"x ({workload.rows}, {workload.cols}) needs more than {MAX_BLOCKS} blocks"
        return None

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return the widest accesses, two of them per thread, and blocks of 256 threads."""
        elements = workload.rows * workload.cols
        vector = math.gcd(elements, 16 // itemsize(workload.dtype))
        unroll = 2 if 256 * vector * 2 < 2 * elements else 1
        threads = max(t for t in (64, 128, 256) if t == 64 or t * vector * unroll < 2 * elements)
        return Config({"threads": threads, "vector": vector, "unroll": unroll})

    def tiles(self, workload: CrossEntropy, config: Config) -> tuple[Tiling, ...]:
        """Return the elements of a block."""
        return (Tiling(dimension="rows*cols", extent=workload.rows * workload.cols, tile=_tile(config)),)

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count the argument of the exponential and the product; only one column needs a difference."""
        tile = 1.0 * table["threads"] * table["vector"] * table["unroll"]
        elements = workload.rows * workload.cols
        return Costs(
            blocks=elements / tile,
            full_blocks=elements // tile,
            threads=table["threads"],
            fma=2.0 * tile,
            sfu=tile,
            fill_bytes=tile * itemsize(workload.dtype),
            accesses=2.0 * tile / table["vector"],
            chain_clocks=device.l2_latency,
            execution=_execution(workload, table),
        )

    def claims(self, workload: CrossEntropy, config: Config) -> tuple[str, ...]:
        """Return the special-function unit, which computes exponentials."""
        return ("MUFU",)

    def source(self, workload: CrossEntropy, config: Config) -> str:
        """Return the kernel."""
        return helpers("types", "reduce", "row_block") + KERNELS

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch one block for each tile."""
        elements = workload.rows * workload.cols
        return (
            Launch(
                entry=f"cross_entropy_backward<{ctype(workload.dtype)}, "
                f"{config['threads']}, {config['vector']}, {config['unroll']}>",
                grid=(ceil_div(elements, _tile(config)), 1, 1),
                block=(config["threads"], 1, 1),
                arguments=(
                    *("x", "target", "lse", "dloss", "dx"),
                    *(Scalar("long long", elements), Scalar("int", workload.cols)),
                ),
            ),
        )

    def emulation_workload(self, workload: CrossEntropy, config: Config) -> CrossEntropy:
        """Return rows with more than two tiles, divisible by the access width like all rows."""
        rows, step = ceil_div(2 * _tile(config), workload.cols) + 1, config["vector"]
        few = rows + (workload.rows - rows) % step
        return dataclasses.replace(workload, rows=min(workload.rows, few))


def _execution(workload: CrossEntropy, table: Table) -> Execution:
    """Describe a tile: all its loads are in flight together, and then those of three figures of a row."""
    threads, vector, unroll = (table[name] for name in ("threads", "vector", "unroll"))
    vectors, size = 1.0 * threads * unroll, itemsize(workload.dtype)
    # Argument, power, comparison with the target, difference, product, end of the row; and conversions.
    of_element = 9 + 2 * converted(size)
    return Execution(
        registers=unroll * vector + LOOP_REGISTERS,
        instructions=vectors / LANES * (vector * of_element + OF_VECTOR) + threads / LANES * PROLOGUE,
        accesses=5 * vectors,
        passes=vectors / LANES * (2 * l1_passes(LANES, vector * size) + 3),
        l2_bytes=2.0 * vectors * vector * size + 96,
        memory_waits=1,
        l2_waits=unroll,
    )


def _tile(config: Config) -> int:
    """Return the elements of a block."""
    return int(config["threads"] * config["vector"] * config["unroll"])


VARIANT = CudaFlatCrossEntropyBackward()
