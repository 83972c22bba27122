"""Forward variant of layernorm and rmsnorm in CUDA C++ (norm.cuh): threads share a row.

The kernels are templates over the norm, so that the file of an operator only names the workload.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.row_block import (
    CudaRowBlock,
    RowWork,
    default_config,
    kernels_for_rows,
    most_held,
    row_costs,
    row_space,
)
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.common.norm import Norm

__all__ = ["CudaBlockNorm", "forward_arguments", "is_centred", "norm_type", "shifts_fit"]

N = TypeVar("N", bound=Norm)


def is_centred(workload: Norm) -> bool:
    """Return whether the mean is subtracted, as in layernorm and in operators derived from it."""
    return "mean" in workload.statistics


def norm_type(workload: Norm) -> str:
    """Return the C++ type `Norm` of norm.cuh, which selects what is computed."""
    flags = (is_centred(workload), workload.has_bias, workload.has_residual, workload.stats)
    return f"Norm<{ctype(workload.dtype)}, {', '.join(str(flag).lower() for flag in flags)}>"


def forward_arguments(workload: Norm) -> tuple[Argument, ...]:
    """Return the arguments of forward kernels; x or y replaces a missing tensor and is not accessed."""
    present = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
    inputs = [name if name in present else "x" for name in ("x", "gamma", "beta", "bias", "residual")]
    outputs = [name if name in present else "y" for name in ("y", "z", "mean", "rstd")]
    sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols), Scalar("float", workload.eps))
    return (*inputs, *outputs, *sizes)


# -- a block, or a part of it, has a row (see row_block) ----------------------------------------------------


def sums_leave_room(cache: Any, row_threads: Any, rows: Any, vector: Any, workload: Norm) -> Any:
    """In blocks of 1024 threads, wide vectors of a sum leave registers for 16 elements per thread."""
    roomy = (row_threads * rows < 1024) | (workload.cols <= 16 * row_threads)
    return (cache != "registers") | (not workload.has_residual) | (vector == 1) | roomy


SHIFT_REGISTERS = 16
"""Registers that shift weights: the words of two accesses, and their addresses."""


def shifts_fit(threads: Any, vector: Any, unroll: Any, workload: Norm, device: Device) -> Any:
    """Return whether vectors in flight leave registers to shift weights, for numbers or columns.

    Args:
        threads: Threads of a block.
        vector: Elements of an access.
        unroll: Vectors that a thread has in flight.
        workload: The workload.
        device: The device, for its registers.
    """
    held = vector * unroll * (1 + workload.has_residual)
    room = most_held(threads, vector, device) - SHIFT_REGISTERS
    return (workload.cols % vector == 0) | (unroll == 1) | (held <= room)


def shifts_leave_room(
    row_threads: Any, rows: Any, vector: Any, unroll: Any, workload: Norm, device: Device
) -> Any:
    """Weights of rows with edges start anywhere."""
    return shifts_fit(row_threads * rows, vector, unroll, workload, device)


SPACE = row_space(edges=True)
FORWARD_SPACE = dataclasses.replace(
    SPACE, constraints=(*SPACE.constraints, sums_leave_room, shifts_leave_room)
)


class CudaBlockNorm(CudaRowBlock[N]):
    """Forward variant for every size, type and prologue."""

    name = "cuda_block"
    direction = "forward"
    edges = True
    space = FORWARD_SPACE

    def default(self, workload: N, device: Device) -> Config:
        """Return wide accesses and about 16 elements per thread; the row is kept where there is room."""
        usual = default_config(workload, device, edges=True)
        elsewhere = (
            {**usual, "cache": cache, "unroll": unroll}
            for unroll in (usual["unroll"], 1)
            for cache in ("shared", "online")
        )
        return FORWARD_SPACE.first_valid((usual, *elsewhere), workload=workload, device=device)

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the operations of an element, at two per instruction.

        For layernorm: sum, deviation, square and affine map. For rmsnorm: square and two products.
        """
        added = 0.5 * (workload.has_bias + workload.has_residual)
        once, twice = (2.5, 3.0) if is_centred(workload) else (1.5, 1.5)
        work = RowWork(
            row_tensors=1 + workload.has_residual,
            fma=(once + added, twice + 2 * added),
            sfu=(0.0, 0.0),
            sums=2 if is_centred(workload) else 1,
            row_outputs=1 + workload.has_residual,
            reductions=2 if is_centred(workload) else 1,
            weights=1 + is_centred(workload) + workload.has_bias,
        )
        return row_costs(workload, table, device, work)

    def source(self, workload: N, config: Config) -> str:
        """Return all three kernels; the entry selects the one that is instantiated."""
        return helpers("types", "reduce", "row_block") + kernels_for_rows(helpers("norm"), workload, config)

    def launches(self, workload: N, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return self.launch(workload, config, "norm", norm_type(workload), forward_arguments(workload))
