"""Gradients of layernorm in CUDA C++: rows give dx, and blocks that stay add up the gradients of the weights.

What each block has added up of all its rows is a part, and a second kernel adds the parts, so that no atomic
operation decides the order. See `tunebench.kernels._norm_backward` for the parameters; the kernels, which
layernorm and rmsnorm share, are in _norm_backward.cuh.
"""

from __future__ import annotations

from tunebench.device import Device
from tunebench.kernels import _norm_backward as backward
from tunebench.kernels._cuda import helpers
from tunebench.space import Config, Table
from tunebench.variant import Costs, CudaVariant, Launch, Tiling
from tunebench.workload import Tensor
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaBackwardLayerNorm(CudaVariant[LayerNorm]):
    """Serves every size and type, backward."""

    name = "cuda_backward"
    operator = LayerNorm
    space = backward.SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} computes gradients alone"

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return sums in registers where they fit, about 16 elements a thread, some blocks for each SM."""
        return backward.default(workload, device)

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return backward.tiles(workload, config)

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count what is done of each element by the kernel that goes by rows."""
        return backward.costs(workload, table, device)

    def scratch(self, workload: LayerNorm, config: Config) -> tuple[Tensor, ...]:
        """Return the parts of the gradients of the weights."""
        return backward.scratch(workload, config)

    def source(self, workload: LayerNorm, config: Config) -> str:
        """Return all kernels; the entries say which are instantiated."""
        return helpers("types", "reduce", "row_block", "norm", "norm_backward")

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch what goes by rows, perhaps what goes by columns, and what adds the parts up."""
        return backward.launches(workload, config)

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return rows for a second turn of some blocks."""
        return backward.miniature(workload, config)


VARIANT = CudaBackwardLayerNorm()
