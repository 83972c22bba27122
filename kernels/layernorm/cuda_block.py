"""layernorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

Where the row is kept, its mean is found first and its variance about the mean after. Where it is read twice,
both are found together: each thread merges the mean and the squared deviations of its vectors into its own,
and the threads of a row merge theirs, so that no large sum of squares cancels. Bias and residual are added on
the way, and the sum is written beside the result. See `tunebench.kernels._row_block` for the parameters; the
kernels, which rmsnorm shares, are in _norm.cuh.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979.
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
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaBlockLayerNorm(CudaVariant[LayerNorm]):
    """Serves every size, type and prologue, forward."""

    name = "cuda_block"
    operator = LayerNorm
    space = FORWARD_SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return wide accesses and about 16 elements a thread."""
        return forward_default(workload, device)

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count the sums, deviation, square and affine map of each element."""
        return forward_costs(workload, table, device)

    def source(self, workload: LayerNorm, config: Config) -> str:
        """Return all three kernels; the entry says which is instantiated."""
        return helpers("types", "reduce", "row_block", "norm")

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return (forward_launch(workload, config),)

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return two full blocks of rows and a cut one; the length of rows decides the unrolling."""
        return rows_of(workload, 2 * config["rows"] + 1)


VARIANT = CudaBlockLayerNorm()
