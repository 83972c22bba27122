"""layernorm in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

With `passes=3` a thread sums its elements, then their squared deviations from the row's mean, then writes,
and reads its elements each time; with `passes=2` it keeps mean and squared deviations of what it has seen.
The kernel is that of `tunebench.kernels._numba_cuda_norm`, which rmsnorm shares.

Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels._numba_cuda_norm import (
    CONSTRAINTS,
    PARAMETERS,
    costs,
    default_shape,
    kernel,
    launches,
    limits,
    miniature,
    tiles,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Tiling
from tunebench.workloads.operators.layernorm import LayerNorm

SPACE = Space(
    (*PARAMETERS, Parameter("passes", (2, 3), "2: mean and variance together; 3: one after the other")),
    CONSTRAINTS,
)


class NumbaCudaLayerNorm(NumbaCudaVariant[LayerNorm]):
    """Serves every size and prologue in f32 and f16, forward."""

    name = "numba_cuda"
    operator = LayerNorm
    space = SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse bf16 and gradients."""
        return limits(self, workload)

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        return Config({**default_shape(workload), "passes": 3})

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count the sums, deviation, square and affine map of each element, in case two are done at once."""
        added = 0.5 * (workload.has_bias + workload.has_residual)
        return costs(workload, table, device, fma=2.5 + added, reductions=2)

    def kernel(self, workload: LayerNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for this prologue."""
        return kernel(workload, config["threads"], config["rows"], online=config["passes"] == 2)

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return launches(workload, config)

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return one full block and a cut one, with rows of a few elements a thread."""
        return miniature(workload, config)


VARIANT = NumbaCudaLayerNorm()
