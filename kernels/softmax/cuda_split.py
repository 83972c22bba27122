"""Softmax in CUDA C++ for few long rows: several blocks share a row, in two launches.

The first launch computes the maximum of each part, and the sum of its exponentials relative to that maximum.
In the second, each block merges those of its row and writes its part. It reads the part again, from L2 if x
fits there. See `tunebench.kernels.common.row_split` for the parameters.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.row_block import kernels_for_rows
from tunebench.kernels.common.row_split import CudaRowSplit, part_costs
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax

KERNELS = r"""
// Writes the maximum and the sum of each part: `partial` has (rows, parts) of both.
template <class T, bool MASKED, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
softmax_part(const T* __restrict__ x, float scale, const T* __restrict__ mask,
             float* __restrict__ partial, int cols) {
  const Part<THREADS, V> my(cols);
  const Arguments<T, MASKED, V> source = {x + my.offset, mask + my.offset, scale * LOG2_E};
  store_powers(powers_of_part<N>(my, source), partial + 2 * my.index);
}

template <class T, bool MASKED, bool LOG, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
softmax_whole(const T* __restrict__ x, float scale, const T* __restrict__ mask,
              const float* __restrict__ partial, T* __restrict__ y, int cols) {
  const Part<THREADS, V> my(cols);
  const Arguments<T, MASKED, V> source = {x + my.offset, mask + my.offset, scale * LOG2_E};
  const auto single = singly(source);  // edges
  float edge[my.EDGES][1];  // edges
  my.each_edge([&](int element, int n) { single.load(element, edge[n]); });  // edges
  const Powers row = powers_of_parts<THREADS>(partial + 2 * size_t(blockIdx.x) * gridDim.y, gridDim.y);
  const Finish<LOG> finish(row);
  if constexpr (!LOG) my.each_edge([&](int, int n) { raise<true>(row.top, edge[n]); });  // edges
  my.each_edge([&](int element, int n) { finish.store(y + my.offset + element, edge[n]); });  // edges
  float z[N][V];
  for (int first = my.thread; first < my.count; first += my.STEP * N) {
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) { source.load(vector, z[n]); });
    each_vector<N>(first, my.STEP, my.count, [&](int vector, int n) {
      if constexpr (!LOG) raise<true>(row.top, z[n]);
      finish.store(y + my.offset + vector * V, z[n]);
    });
  }
}
"""


class CudaSplitSoftmax(CudaRowSplit[Softmax]):
    """Forward variant for few long rows of every type, with fused prologue."""

    name = "cuda_split"
    operator = Softmax
    direction = "forward"

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count scaling, difference and sum; scaling and difference may be one instruction."""
        inputs = 1 + workload.has_mask
        return part_costs(
            workload, table, device, row_tensors=inputs, fma=2.0, sfu=1.0, reductions=2, read_again=inputs
        )

    def source(self, workload: Softmax, config: Config) -> str:
        """Return both kernels."""
        kernels = kernels_for_rows(helpers("softmax_split") + KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax", "row_split") + kernels

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of a row, twice; a missing mask is passed as x and not read."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        inputs = ("x", scale, "mask" if workload.has_mask else "x", "partial")
        types = f"{ctype(workload.dtype)}, {flag(workload.has_mask)}"
        return (
            self.launch(workload, config, "softmax_part", types, *inputs),
            self.launch(workload, config, "softmax_whole", f"{types}, {flag(workload.log)}", *inputs, "y"),
        )


VARIANT = CudaSplitSoftmax()
