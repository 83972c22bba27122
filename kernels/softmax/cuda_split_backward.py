"""Gradients of softmax in CUDA C++ for few long rows: several blocks share a row, in two launches.

The first launch sums y dy (dy for log-softmax) over each part. In the second, each block adds the sums of its
row and writes its part. It reads the part again, from L2 if the inputs fit there. See
`tunebench.kernels.common.row_split` for the parameters.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.row_block import kernels_for_rows
from tunebench.kernels.common.row_split import CudaRowSplit, part_costs, split_space
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

KERNELS = r"""
// Writes the sum of each part: `partial` is (rows, parts).
template <class T, bool LOG, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
softmax_backward_part(const T* __restrict__ y, const T* __restrict__ dy, float* __restrict__ partial,
                      int cols) {
  const Part<THREADS, V> my(cols);
  const Gradient<T, LOG, V> row = {y + my.offset, dy + my.offset, 1.0f};
  const Gradient<T, LOG, 1> single = {row.y, row.dy, 1.0f};  // edges
  float edge_p[my.EDGES][1], edge_g[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge_p[n], edge_g[n]); });  // edges
  float p[N][V], g[N][V], total = 0.0f;
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int, int n) { total += row.sum_of(p[n], g[n]); });
  }
  my.each_edge([&](int, int n) { total += single.sum_of(edge_p[n], edge_g[n]); });  // edges
  total = reduce_row<THREADS>(total, Sum());
  if (my.thread == 0) partial[my.index] = total;
}

template <class T, bool LOG, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
softmax_backward_whole(const T* __restrict__ y, const T* __restrict__ dy, float scale,
                       const float* __restrict__ partial, T* __restrict__ dx, int cols) {
  const Part<THREADS, V> my(cols);
  const Gradient<T, LOG, V> row = {y + my.offset, dy + my.offset, scale};
  const Gradient<T, LOG, 1> single = {row.y, row.dy, scale};  // edges
  float edge_p[my.EDGES][1], edge_g[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge_p[n], edge_g[n]); });  // edges
  float p[N][V], g[N][V], total = 0.0f;
  for (int part = threadIdx.x; part < gridDim.y; part += THREADS)
    total += partial[size_t(blockIdx.x) * gridDim.y + part];
  total = reduce_row<THREADS>(total, Sum());
  my.each_edge([&](int i, int n) { single.store(dx + my.offset, i, total, edge_p[n], edge_g[n]); });  // edges
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { row.load(vector, p[n], g[n]); });
    each_vector<N>(first, my.STEP, my.count,
                   [&](int vector, int n) { row.store(dx + my.offset, vector, total, p[n], g[n]); });
  }
}
"""


class CudaSplitSoftmaxBackward(CudaRowSplit[Softmax]):
    """Backward variant for few long rows of every type, with fused scale."""

    name = "cuda_split_backward"
    operator = Softmax
    direction = "backward"
    space = split_space(tensors=2)
    partial_shape = ()

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count the sum; log-softmax does without the first addition of each vector."""
        vector = table["vector"]
        fma = (vector - 1) / vector if workload.log else 1.0
        inputs = 1 if workload.log else 2
        return part_costs(
            workload, table, device, row_tensors=inputs, fma=fma, sfu=0.0, reductions=1, read_again=2
        )

    def claims(self, workload: Softmax, config: Config) -> tuple[str, ...]:
        """Return the special-function unit if there are exponentials."""
        return ("MUFU",) if workload.log else ()

    def source(self, workload: Softmax, config: Config) -> str:
        """Return both kernels."""
        kernels = kernels_for_rows(KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax_backward", "row_split") + kernels

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of a row, twice."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        types = f"{ctype(workload.dtype)}, {flag(workload.log)}"
        whole = ("y", "dy", scale, "partial", "dx")
        return (
            self.launch(workload, config, "softmax_backward_part", types, "y", "dy", "partial"),
            self.launch(workload, config, "softmax_backward_whole", types, *whole),
        )


VARIANT = CudaSplitSoftmaxBackward()
