"""What CUDA C++ kernels of layernorm and rmsnorm share on the Python side: see norm.cuh.

Kernels are templates over the problem, so that an operator's file says which norm it is, and no more.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.row_block import SPACE, batch, default_config, row_costs, smem_bytes, tiles
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workloads.operators._norm import Norm

__all__ = ["CudaBlockNorm", "forward_arguments", "is_centred", "problem", "rows_of"]

N = TypeVar("N", bound=Norm)


def rows_of(workload: N, rows: int) -> N:
    """Return the problem with so many rows at most."""
    return dataclasses.replace(workload, rows=min(workload.rows, rows))


def is_centred(workload: Norm) -> bool:
    """Return whether a mean is taken off: of layernorm, and of what users derive from it."""
    return "mean" in workload.statistics


def problem(workload: Norm) -> str:
    """Return the C++ type that says what is computed (`Norm` of norm.cuh)."""
    flags = (is_centred(workload), workload.has_bias, workload.has_residual, workload.stats)
    return f"Norm<{ctype(workload.dtype)}, {', '.join(str(flag).lower() for flag in flags)}>"


def forward_arguments(workload: Norm) -> tuple[Argument, ...]:
    """Return what forward kernels take: x or y in place of a tensor that there is not, and not touched."""
    there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
    inputs = [name if name in there else "x" for name in ("x", "gamma", "beta", "bias", "residual")]
    outputs = [name if name in there else "y" for name in ("y", "z", "mean", "rstd")]
    sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols), Scalar("float", workload.eps))
    return (*inputs, *outputs, *sizes)


# -- a block, or a part of one, has a row (see _row_block) --------------------------------------------------


def sums_leave_room(cache: Any, row_threads: Any, rows: Any, vector: Any, workload: Norm) -> Any:
    """In blocks of 1024, wide vectors of a sum under way leave registers for 16 elements a thread."""
    roomy = (row_threads * rows < 1024) | (workload.cols <= 16 * row_threads)
    return (cache != "registers") | (not workload.has_residual) | (vector == 1) | roomy


FORWARD_SPACE = dataclasses.replace(SPACE, constraints=(*SPACE.constraints, sums_leave_room))


class CudaBlockNorm(CudaVariant[N]):
    """Serves every size, type and prologue, forward."""

    name = "cuda_block"
    space = FORWARD_SPACE

    def limits(self, workload: N, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: N, device: Device) -> Config:
        """Return wide accesses and about 16 elements a thread; a row waits where there is room."""
        usual = default_config(workload, device)
        elsewhere = ({**usual, "cache": cache} for cache in ("shared", "online"))
        return FORWARD_SPACE.first_valid((usual, *elsewhere), workload=workload, device=device)

    def tiles(self, workload: N, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return tiles(workload, config)

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count what is done of each element, in case two are done by one instruction.

        Of layernorm, the sum, deviation, square and affine map; of rmsnorm, the square and two products.
        """
        added = 0.5 * (workload.has_bias + workload.has_residual)
        once, twice = (2.5, 3.0) if is_centred(workload) else (1.5, 1.5)
        return row_costs(
            workload,
            table,
            device,
            row_tensors=1 + workload.has_residual,
            fma=(once + added, twice + 2 * added),
            sfu=(0.0, 0.0),
            sums=2 if is_centred(workload) else 1,
            row_outputs=1 + workload.has_residual,
            reductions=2 if is_centred(workload) else 1,
        )

    def source(self, workload: N, config: Config) -> str:
        """Return all three kernels; the entry says which is instantiated."""
        return helpers("types", "reduce", "row_block", "norm")

    def launches(self, workload: N, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        row_threads, rows, vector = config["row_threads"], config["rows"], config["vector"]
        shape = f"{row_threads}, {rows}, {vector}, {batch(workload, config)}"
        return (
            Launch(
                entry=f"norm_{config['cache']}<{problem(workload)}, {shape}>",
                grid=(ceil_div(workload.rows, rows), 1, 1),
                block=(row_threads * rows, 1, 1),
                arguments=forward_arguments(workload),
                smem_bytes=smem_bytes(workload, config),
            ),
        )

    def emulation_workload(self, workload: N, config: Config) -> N:
        """Return two full blocks of rows and a cut one; the length of rows decides the unrolling."""
        return rows_of(workload, 2 * config["rows"] + 1)
