"""Layernorm in Numba-CUDA: the threads along x of a block share a row and reduce through shared memory.

With `passes=3` a thread sums its elements, then their squared deviations from the mean of the row, then
writes, and reads its elements each time. With `passes=2` it updates the mean and the squared deviations of
the elements read so far. `tunebench.kernels.common.numba_cuda_norm` has the kernel, which rmsnorm shares.

Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_norm import arguments, kernel
from tunebench.kernels.common.numba_cuda_rows import NumbaCudaRows, passes_space, row_costs
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch
from tunebench.workloads.operators.layernorm import LayerNorm


class NumbaCudaLayerNorm(NumbaCudaRows[LayerNorm]):
    """Forward variant for every size and prologue in f32 and f16."""

    name = "numba_cuda"
    operator = LayerNorm
    space = passes_space("mean and variance")
    more: ClassVar[dict[str, Any]] = {"passes": 3}

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count the sums, deviation, square and affine map of each element, at two per instruction."""
        fma = 2.5 + 0.5 * (workload.has_bias + workload.has_residual)
        tensors = 1 + workload.has_residual
        return row_costs(
            workload,
            table,
            device,
            row_tensors=tensors,
            fma=fma,
            reductions=2,
            reads=table["passes"],
            instructions=16.0,
            weights=2 + workload.has_bias,
            outputs=tensors,
        )

    def kernel(self, workload: LayerNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for the workload's prologue."""
        return kernel(workload, config["threads"], config["rows"], online=config["passes"] == 2)

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return self.launch(workload, config, *arguments(workload))


VARIANT = NumbaCudaLayerNorm()
