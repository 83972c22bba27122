"""rmsnorm on the CPU: rows in parallel, squares summed over chunks that stay in the first cache.

A residual is added on the way. Rows are as in `tunebench.kernels._numba_norm`, which layernorm shares.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels._numba_norm import forward_arguments, forward_kernel, squares
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workloads.operators.rmsnorm import RmsNorm

SPACE = Space(
    (
        Parameter("keep", (0, 1), "1: a row is converted to f32 once and kept; 0: it is read again"),
        Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop handles together"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
    ),
)


class NumbaCpuRmsNorm(NumbaCpuVariant[RmsNorm]):
    """Serves every size, type and prologue, forward."""

    name = "numba_cpu"
    operator = RmsNorm
    space = SPACE

    def limits(self, workload: RmsNorm, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: RmsNorm, device: Device) -> Config:
        """Return chunks of 1 KiB in f32, which are still in the first cache."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4, 8, 16) if b == 1 or b * 2 <= workload.rows)
        return Config({"keep": 0, "chunk": chunk, "row_block": row_block})

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count a square and two products, each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=3 * elements)

    def arguments(self, workload: RmsNorm, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor there may be."""
        return forward_arguments(workload)

    def kernel(self, workload: RmsNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for this type and prologue."""
        return forward_kernel(workload, config, self.fastmath, squares)


VARIANT = NumbaCpuRmsNorm()
