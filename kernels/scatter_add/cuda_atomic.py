"""scatter_add in CUDA C++: atomic additions in f32, after a launch that fills the sums with base or 0.

A thread loads `unroll` vectors of x, reads the index of each row, and adds the elements to the row of sums.
Results of 16 bits are summed in f32 in scratch memory, which a third launch rounds. The order of additions
differs from run to run, and so do the roundings of f32.

Source: NVIDIA, "CUDA C++ Programming Guide", "Atomic Functions".
"""

from __future__ import annotations

import dataclasses

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.scatter_add import ScatterAdd

SPACE = Space(
    (
        Parameter("threads", (64, 128, 256, 512), "threads of a block"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4), "vectors of x that a thread has in flight"),
    ),
    (
        lambda vector, workload: (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16),
        lambda threads, vector, unroll, workload: (
            ((threads == 64) & (unroll == 1))
            | (1.0 * threads * vector * unroll < 2.0 * workload.rows * workload.cols)
        ),
    ),
)

WIDE = 4
"""f32 elements of an access of 16 bytes."""

KERNEL = r"""
// Fills the sums with base, or with 0.
template <class T, bool HAS_BASE, int THREADS, int V>
__global__ void __launch_bounds__(THREADS)
    scatter_start(const T* __restrict__ base, float* __restrict__ sums, i64 vectors) {
  const i64 vector = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (vector >= vectors) return;
  float values[V] = {};
  if constexpr (HAS_BASE) load_floats(base + vector * V, values);
  store_floats(sums + vector * V, values);
}

template <class T, class Index, i64 BINS, i64 SKIPPED, bool WRAPS, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS)
    scatter_rows(const T* __restrict__ x, const Index* __restrict__ index, float* __restrict__ sums,
                 i64 vectors, int cols) {
  const i64 first = i64(blockIdx.x) * (THREADS * N) + threadIdx.x;
  const int vectors_of_row = cols / V;
  Vec<T, V> loaded[N];
  i64 rows[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const i64 vector = first + n * THREADS;
    rows[n] = SKIPPED;
    if (vector >= vectors) continue;
    loaded[n] = load_vec<V>(x + vector * V);
    rows[n] = valid_index<BINS, WRAPS>(index[vector / vectors_of_row]);
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const i64 vector = first + n * THREADS;
    if (vector >= vectors || (SKIPPED >= 0 && rows[n] == SKIPPED)) continue;
    float* const row = sums + rows[n] * cols + vector % vectors_of_row * V;
#pragma unroll
    for (int i = 0; i < V; ++i) atomicAdd(row + i, to_float(loaded[n].at[i]));
  }
}

// Rounds the sums.
template <class T, int THREADS, int V>
__global__ void __launch_bounds__(THREADS)
    scatter_end(const float* __restrict__ sums, T* __restrict__ out, i64 vectors) {
  const i64 vector = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (vector >= vectors) return;
  float values[V];
  load_floats(sums + vector * V, values);
  store_floats(out + vector * V, values);
}
"""


class CudaAtomicScatterAdd(CudaVariant[ScatterAdd]):
    """Variant for every size and type."""

    name = "cuda_atomic"
    operator = ScatterAdd
    space = SPACE

    def default(self, workload: ScatterAdd, device: Device) -> Config:
        """Return the widest loads, and up to 2 vectors in flight for each of 256 threads."""
        choices = (
            Config({"threads": threads, "vector": vector, "unroll": unroll})
            for vector in (8, 4, 2, 1)
            for unroll in (2, 1)
            for threads in (256, 128, 64)
        )
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: ScatterAdd, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of elements of x."""
        tile = config["threads"] * config["vector"] * config["unroll"]
        return (Tiling(dimension="elements", extent=workload.rows * workload.cols, tile=tile),)

    def costs(self, workload: ScatterAdd, table: Table, device: Device) -> Costs:
        """Count the loads of a block of the second launch, and its additions, which no row may need."""
        elements = 1.0 * table["threads"] * table["vector"] * table["unroll"]
        added = elements if workload.skipped < 0 else 0.0
        return Costs(
            blocks=workload.rows * workload.cols / elements,
            full_blocks=workload.rows * workload.cols // elements,
            threads=table["threads"],
            accesses=elements / table["vector"] + added,
            serial_launches=2 + self._rounds(workload),
        )

    @staticmethod
    def _rounds(workload: ScatterAdd) -> bool:
        """Return whether sums are in scratch memory."""
        return workload.dtype != "f32"

    def scratch(self, workload: ScatterAdd, config: Config) -> tuple[Tensor, ...]:
        """Return memory for sums in f32, if results have 16 bits."""
        shape = (workload.bins, workload.cols)
        return (Tensor(name="sums", shape=shape, dtype="f32"),) if self._rounds(workload) else ()

    def is_reproducible(self, workload: ScatterAdd, config: Config) -> bool:
        """Return False: the order of additions differs from run to run."""
        return False

    def claims(self, workload: ScatterAdd, config: Config) -> tuple[str, ...]:
        """Return loads, stores, and additions in memory without a result."""
        return ("LDG", "STG", "RED")

    def source(self, workload: ScatterAdd, config: Config) -> str:
        """Return all kernels; the entries select those that are instantiated."""
        return helpers("types", "reduce", "row_block", "gather") + KERNEL

    def launches(self, workload: ScatterAdd, config: Config) -> tuple[Launch, ...]:
        """Launch a thread for each vector of the sums, for some of x, and for each of the results."""
        dtype, threads, vector, unroll = ctype(workload.dtype), *map(config.__getitem__, SPACE.names)
        wide = next(v for v in (WIDE, 2, 1) if workload.bins * workload.cols % v == 0)
        (tiling,) = self.tiles(workload, config)
        sums = "sums" if self._rounds(workload) else "out"
        of_sums = workload.bins * workload.cols // wide
        grid, block = (ceil_div(of_sums, threads), 1, 1), (threads, 1, 1)
        start = Launch(
            entry=f"scatter_start<{dtype}, {flag(workload.base)}, {threads}, {wide}>",
            arguments=("base" if workload.base else "x", sums, Scalar("long long", of_sums)),
            grid=grid,
            block=block,
        )
        kinds = (
            f"{dtype}, {ctype(workload.index)}, {workload.bins}, {workload.skipped}, {flag(workload.wraps)}"
        )
        vectors = workload.rows * workload.cols // vector
        add = Launch(
            entry=f"scatter_rows<{kinds}, {threads}, {vector}, {unroll}>",
            grid=(tiling.count, 1, 1),
            block=block,
            arguments=("x", "index", sums, Scalar("long long", vectors), Scalar("int", workload.cols)),
        )
        if not self._rounds(workload):
            return (start, add)
        end = Launch(
            entry=f"scatter_end<{dtype}, {threads}, {wide}>",
            arguments=("sums", "out", Scalar("long long", of_sums)),
            grid=grid,
            block=block,
        )
        return (start, add, end)

    def emulation_workload(self, workload: ScatterAdd, config: Config) -> ScatterAdd:
        """Return two tiles of x and a partial one, approximately, and few rows of out."""
        (tiling,) = self.tiles(workload, config)
        vector = config["vector"]
        cols = min(workload.cols, 16 * vector + workload.cols % vector)
        rows = min(workload.rows, ceil_div(2 * tiling.tile + 1, cols))
        bins = min(workload.bins, max(workload.skipped + 2, 37))
        return dataclasses.replace(workload, rows=rows, cols=cols, bins=bins)


VARIANT = CudaAtomicScatterAdd()
