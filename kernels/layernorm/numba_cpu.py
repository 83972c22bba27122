"""layernorm on the CPU: rows in parallel, statistics in passes over chunks that stay in the first cache.

`statistics=two_pass` sums a whole row for its mean, then squares of deviations for its variance.
`statistics=merged` takes both of a chunk in one pass, about the mean of what came before it, and merges them
into those of the row. Bias and residual are added on the way. Rows are as in `tunebench.kernels._numba_norm`,
which rmsnorm shares.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels._numba_norm import forward_arguments, forward_kernel, merged, two_pass
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workloads.operators.layernorm import LayerNorm

SPACE = Space(
    (
        Parameter("statistics", ("two_pass", "merged"), "how mean and variance of a row are found"),
        Parameter("keep", (0, 1), "1: a row is converted to f32 once and kept; 0: it is read again"),
        Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop handles together"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
    ),
)


class NumbaCpuLayerNorm(NumbaCpuVariant[LayerNorm]):
    """Serves every size, type and prologue, forward."""

    name = "numba_cpu"
    operator = LayerNorm
    space = SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return statistics merged from chunks of 1 KiB in f32, which are still in the first cache."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4, 8, 16) if b == 1 or b * 2 <= workload.rows)
        return Config({"statistics": "merged", "keep": 0, "chunk": chunk, "row_block": row_block})

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count a sum, a deviation with its square, and a multiply-add for gamma and beta, each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=3 * elements)

    def arguments(self, workload: LayerNorm, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor there may be."""
        return forward_arguments(workload)

    def kernel(self, workload: LayerNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for this type and prologue."""
        statistics = merged if config["statistics"] == "merged" else two_pass
        return forward_kernel(workload, config, self.fastmath, statistics)


VARIANT = NumbaCpuLayerNorm()
