"""Gradients of rmsnorm on the CPU: parts of the rows in parallel, each with sums of its own for weights.

A row is read for its sums, and again, from a cache, for dx. See `tunebench.kernels._numba_norm`.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.device import Device
from tunebench.kernels._numba_norm import backward_kernel
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workload import Tensor
from tunebench.workloads.operators.rmsnorm import RmsNorm

PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SPACE = Space(
    (Parameter("parts", PARTS, "parts of the rows, each a thread's turn"),),
    (lambda parts, workload: (parts == 1) | (parts <= workload.rows),),
)


class NumbaCpuBackwardRmsNorm(NumbaCpuVariant[RmsNorm]):
    """Serves every size and type, backward."""

    name = "numba_cpu_backward"
    operator = RmsNorm
    space = SPACE

    def limits(self, workload: RmsNorm, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} computes gradients alone"

    def default(self, workload: RmsNorm, device: Device) -> Config:
        """Return two parts for each core: more cost more sums, fewer leave cores waiting."""
        most = min(workload.rows, 2 * device.sm_count)
        return Config({"parts": max(parts for parts in PARTS if parts <= most)})

    def costs(self, workload: RmsNorm, table: Table, device: Device) -> Costs:
        """Count the normal form, g and its mean, dx, and the gradient of gamma, each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=5 * elements)

    def scratch(self, workload: RmsNorm, config: Config) -> tuple[Tensor, ...]:
        """Return a line of sums for each part."""
        return (Tensor(name="partial", shape=(config["parts"], 1, workload.cols), dtype="f32"),)

    def arguments(self, workload: RmsNorm, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor."""
        return ("x", "gamma", "rstd", "rstd", "dy", "dx", "dgamma", "dgamma", "partial")

    def kernel(self, workload: RmsNorm, config: Config) -> Callable[..., None]:
        """Return the kernel for this type."""
        return backward_kernel(workload, config, self.fastmath)


VARIANT = NumbaCpuBackwardRmsNorm()
