"""layernorm of few long rows in CUDA C++: several blocks share a row, in two launches.

See `tunebench.kernels._norm_split` for the parameters; the kernels, which layernorm and rmsnorm share, are in
_norm_split.cuh.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels import _norm_split as split
from tunebench.kernels._cuda import helpers
from tunebench.space import Config, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling
from tunebench.workload import Tensor
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaSplitLayerNorm(CudaVariant[LayerNorm]):
    """Serves long rows where they are few, of every type and prologue, forward."""

    name = "cuda_split"
    operator = LayerNorm
    space = split.SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse gradients, short rows and many rows."""
        return split.limits(self, workload, device)

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return wide accesses, and as many parts as give each SM two blocks whose threads have work."""
        return split.default(workload, device)

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows and their elements."""
        return split.tiles(workload, config)

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count what blocks of both launches do of each element."""
        return split.costs(workload, table, device)

    def scratch(self, workload: LayerNorm, config: Config) -> tuple[Tensor, ...]:
        """Return the moments of each part."""
        return split.scratch(workload, config)

    def source(self, workload: LayerNorm, config: Config) -> str:
        """Return both kernels; the entries say how they are instantiated."""
        return helpers("types", "reduce", "row_block", "norm", "norm_split")

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch a block for each part, twice."""
        return split.launches(workload, config)

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return up to two rows, as long as fills every part."""
        return split.miniature(workload, config)


VARIANT = CudaSplitLayerNorm()
