"""rmsnorm in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

The kernel is that of `tunebench.kernels._numba_cuda_norm`, which layernorm shares.
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
from tunebench.space import Config, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Tiling
from tunebench.workloads.operators.rmsnorm import RmsNorm

SPACE = Space(PARAMETERS, CONSTRAINTS)


class NumbaCudaRmsNorm(NumbaCudaVariant[RmsNorm]):
    """Serves every size and prologue in f32 and f16, forward."""

    name = "numba_cuda"
    operator = RmsNorm
    space = SPACE

    def limits(self, workload: RmsNorm, device: Device) -> str | None:
        """Refuse bf16 and gradients."""
        return limits(self, workload)

    def default(self, workload: RmsNorm, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        return Config(default_shape(workload))

    def tiles(self, workload: RmsNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count the sum, square and two products of each element, in case two are done at once."""
        added = 0.5 * (workload.has_bias + workload.has_residual)
        return costs(workload, table, device, fma=1.5 + added, reductions=1)

    def kernel(self, workload: RmsNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for this prologue."""
        return kernel(workload, config["threads"], config["rows"], online=False)

    def launches(self, workload: RmsNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return launches(workload, config)

    def miniature(self, workload: RmsNorm, config: Config) -> RmsNorm:
        """Return one full block and a cut one, with rows of a few elements a thread."""
        return miniature(workload, config)


VARIANT = NumbaCudaRmsNorm()
