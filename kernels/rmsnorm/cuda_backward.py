"""Gradients of rmsnorm in CUDA C++: rows give dx, and blocks that stay add up the gradients of the weights.

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
from tunebench.workloads.operators.rmsnorm import RmsNorm


class CudaBackwardRmsNorm(CudaVariant[RmsNorm]):
    """Serves every size and type, backward."""

    name = "cuda_backward"
    operator = RmsNorm
    space = backward.SPACE

    def limits(self, workload: RmsNorm, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} computes gradients alone"

    def default(self, workload: RmsNorm, device: Device) -> Config:
        """Return sums in registers where they fit, about 16 elements a thread, some blocks for each SM."""
        return backward.default(workload, device)

    def tiles(self, workload: RmsNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return backward.tiles(workload, config)

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count what is done of each element by the kernel that goes by rows."""
        return backward.costs(workload, table, device)

    def scratch(self, workload: RmsNorm, config: Config) -> tuple[Tensor, ...]:
        """Return the parts of the gradients of the weights."""
        return backward.scratch(workload, config)

    def source(self, workload: RmsNorm, config: Config) -> str:
        """Return all kernels; the entries say which are instantiated."""
        return helpers("types", "reduce", "row_block", "norm", "norm_backward")

    def launches(self, workload: RmsNorm, config: Config) -> tuple[Launch, ...]:
        """Launch what goes by rows, perhaps what goes by columns, and what adds the parts up."""
        return backward.launches(workload, config)

    def miniature(self, workload: RmsNorm, config: Config) -> RmsNorm:
        """Return rows for a second turn of some blocks."""
        return backward.miniature(workload, config)


VARIANT = CudaBackwardRmsNorm()
