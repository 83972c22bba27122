"""Rmsnorm in Numba-CUDA: the threads along x of a block share a row and reduce through shared memory.

`tunebench.kernels.common.numba_cuda_norm` has the kernel, which layernorm shares.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_norm import arguments, kernel
from tunebench.kernels.common.numba_cuda_rows import NumbaCudaRows, row_costs
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch
from tunebench.workloads.operators.rmsnorm import RmsNorm


class NumbaCudaRmsNorm(NumbaCudaRows[RmsNorm]):
    """Forward variant for every size and prologue in f32 and f16."""

    name = "numba_cuda"
    operator = RmsNorm

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count the sum, square and two products of each element, at two per instruction."""
        fma = 1.5 + 0.5 * (workload.has_bias + workload.has_residual)
        tensors = 1 + workload.has_residual
        return row_costs(
            workload,
            table,
            device,
            row_tensors=tensors,
            fma=fma,
            weights=1 + workload.has_bias,
            outputs=tensors,
        )

    def kernel(self, workload: RmsNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for the workload's prologue."""
        return kernel(workload, config["threads"], config["rows"], online=False)

    def launches(self, workload: RmsNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return self.launch(workload, config, *arguments(workload))


VARIANT = NumbaCudaRmsNorm()
