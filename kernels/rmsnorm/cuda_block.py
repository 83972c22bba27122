"""rmsnorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

A residual is added on the way, and the sum is written beside the result. See `tunebench.kernels._row_block`
for the parameters; the kernels, which layernorm shares, are in _norm.cuh.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels._cuda import helpers
from tunebench.kernels._norm import (
    FORWARD_SPACE,
    forward_costs,
    forward_default,
    forward_launch,
    rows_of,
)
from tunebench.kernels._row_block import tiles
from tunebench.space import Config, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling
from tunebench.workloads.operators.rmsnorm import RmsNorm


class CudaBlockRmsNorm(CudaVariant[RmsNorm]):
    """Serves every size, type and prologue, forward."""

    name = "cuda_block"
    operator = RmsNorm
    space = FORWARD_SPACE

    def limits(self, workload: RmsNorm, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: RmsNorm, device: Device) -> Config:
        """Return wide accesses and about 16 elements a thread."""
        return forward_default(workload, device)

    def tiles(self, workload: RmsNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count the sum, square and two products of each element."""
        return forward_costs(workload, table, device)

    def source(self, workload: RmsNorm, config: Config) -> str:
        """Return all three kernels; the entry says which is instantiated."""
        return helpers("types", "reduce", "row_block", "norm")

    def launches(self, workload: RmsNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return (forward_launch(workload, config),)

    def miniature(self, workload: RmsNorm, config: Config) -> RmsNorm:
        """Return two full blocks of rows and a cut one; the length of rows decides the unrolling."""
        return rows_of(workload, 2 * config["rows"] + 1)


VARIANT = CudaBlockRmsNorm()
