"""Cross entropy in CUDA C++ for few long rows: several blocks share a row, in two launches.

The first launch computes the maximum of each part, and the sum of its exponentials relative to that maximum.
In the second, a warp merges those of each row. See `tunebench.kernels.common.row_split` for the parameters.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.row_block import kernels_for_rows
from tunebench.kernels.common.row_split import CudaRowSplit, part_costs
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch, Scalar
from tunebench.workloads.operators.cross_entropy import CrossEntropy

KERNELS = r"""
// Writes the maximum and the sum of each part: `partial` has (rows, parts) of both.
template <class T, int THREADS, int V, int N>
__global__ void __launch_bounds__(THREADS, 1)
cross_entropy_part(const T* __restrict__ x, float* __restrict__ partial, int cols) {
  const Part<THREADS, V> my(cols);
  const Arguments<T, false, V> source = {x + my.offset, nullptr, LOG2_E};
  store_powers(powers_of_part<N>(my, source), partial + 2 * my.index);
}

// A block of one warp for each row.
template <class T>
__global__ void __launch_bounds__(32, 1)
cross_entropy_whole(const T* __restrict__ x, const i32* __restrict__ target,
                    const float* __restrict__ partial, float* __restrict__ loss, float* __restrict__ lse,
                    int cols, int parts) {
  const size_t row = blockIdx.x;
  const Powers powers = powers_of_parts<32>(partial + 2 * row * parts, parts);
  if (threadIdx.x == 0) store_loss(powers, x + row * cols, target[row], loss + row, lse + row);
}
"""


class CudaSplitCrossEntropy(CudaRowSplit[CrossEntropy]):
    """Forward variant for few long rows of every type."""

    name = "cuda_split"
    operator = CrossEntropy
    direction = "forward"

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count scaling, difference and sum; scaling and difference may be one instruction."""
        return part_costs(workload, table, device, row_tensors=1, fma=2.0, sfu=1.0, reductions=2)

    def claims(self, workload: CrossEntropy, config: Config) -> tuple[str, ...]:
        """Return the special-function unit, which computes exponentials."""
        return ("MUFU",)

    def source(self, workload: CrossEntropy, config: Config) -> str:
        """Return both kernels."""
        kernels = kernels_for_rows(helpers("softmax_split", "cross_entropy") + KERNELS, workload, config)
        return helpers("types", "reduce", "row_block", "softmax", "row_split") + kernels

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch a block for each part of a row, then a warp for each row."""
        dtype, cols = ctype(workload.dtype), Scalar("int", workload.cols)
        return (
            self.launch(workload, config, "cross_entropy_part", dtype, "x", "partial"),
            Launch(
                entry=f"cross_entropy_whole<{dtype}>",
                grid=(workload.rows, 1, 1),
                block=(32, 1, 1),
                arguments=("x", "target", "partial", "loss", "lse", cols, Scalar("int", config["split"])),
            ),
        )


VARIANT = CudaSplitCrossEntropy()
