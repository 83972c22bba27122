"""Host side of scaled_gemm kernels: alignment, arguments and emulation workloads.

Implements `tunebench.kernels.common.gemm_variant.GemmOperation`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm
from tunebench.kernels.common.cuda import ctype
from tunebench.space import Table
from tunebench.variant import Scalar
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.scaled_gemm import ScaledGemm

MATRICES = 1
"""Number of matrices b that the rows of a are multiplied by."""

PACKED = 2
"""Elements of i4 in a byte."""


@functools.lru_cache(maxsize=64)
def product(workload: ScaledGemm) -> Gemm:
    """Return the product without scales; cached, because every constraint asks for it."""
    return workload.product()


def workload_constants(workload: ScaledGemm) -> dict[str, str | bool | int]:
    """Return the compile-time constants that depend on the workload only; sizes are arguments."""
    return {
        "InA": ctype(workload.dtype),
        "InB": ctype(workload.stored_weight),
        "Scale": ctype(workload.scale_type),
        "Out": ctype(workload.out),
        "SCALES": ScaledGemm.choices("scales").index(workload.scales),
        "GROUP": workload.group,
        "A_HAS_SCALE": workload.is_quantized,
        "B_IS_PACKED": workload.weight == "i4",
        "HAS_SHIFT": workload.shift,
        "HAS_BIAS": workload.bias,
    }


def injected(workload: ScaledGemm) -> str:
    """Return "": there is no activation."""
    return ""


def arguments(workload: ScaledGemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return the kernel's arguments: tensors, with c for a missing one, which is not read, then sizes."""
    present = {tensor.name for tensor in workload.inputs()}
    names = ("a", "b", "scale_a", "scale_b", "shift", "bias")
    tensors = (name if name in present else "c" for name in names)
    sizes = (workload.m, workload.n, workload.k, group_m)
    return (*tensors, "c", *(Scalar("int", size) for size in sizes))


def widths(workload: ScaledGemm) -> tuple[int, int, int]:
    """Return the widest aligned access to a, b and c, in stored elements."""
    stored = workload.k // PACKED if workload.weight == "i4" else workload.k
    return (
        gemm.alignment(workload.k, workload.dtype),
        gemm.alignment(stored, workload.stored_weight),
        gemm.alignment(workload.n, workload.out),
    )


def usual_blocks(workload: ScaledGemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles of bm x bn (numbers or columns) that cover c."""
    return gemm.blocks(product(workload), bm, bn)


most_blocks = usual_blocks


def grid(workload: ScaledGemm, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the grid in x, y and z: one block per tile."""
    return gemm.grid(product(workload), config)


def shares(workload: ScaledGemm, table: Table, device: Device) -> gemm.Share:
    """Return the share of the product that a block computes, for each configuration."""
    return gemm.shares(product(workload), table, device)


def fits(bm: Any, bn: Any, workload: ScaledGemm) -> Any:
    """Tiles must fit in one grid, and be less than twice as large as c unless no smaller one exists."""
    return gemm.fits(bm, bn, product(workload))


def too_many_blocks(workload: ScaledGemm, tiles: Iterable[tuple[int, int]]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    return gemm.too_many_blocks(product(workload), tiles)


def bytes_share(workload: ScaledGemm) -> float:
    """Return the bytes of all tensors as a share of those of a product whose b has the type of a."""
    plain = product(workload).traffic().total_bytes
    size_of_a = itemsize(workload.dtype) - itemsize(product(workload).dtype)
    plain += size_of_a * (workload.m + workload.n) * workload.k
    return workload.traffic().total_bytes / plain


def shrink(
    workload: ScaledGemm, config: Mapping[str, Any], stages: int, affordable_fma: int = gemm.AFFORDABLE_FMA
) -> ScaledGemm:
    """Return a small workload with the same edges, alignment and pipeline, and three groups if it has them.

    Args:
        workload: The workload to emulate.
        config: A configuration with `bm`, `bn` and `bk`.
        stages: Buffers of the pipeline.
        affordable_fma: Most multiply-adds.
    """
    small = gemm.shrink(product(workload), config, stages, affordable_fma)
    k = small.k
    if workload.is_grouped:
        k = gemm.keep_remainder(workload.k, max(config["bk"], workload.group), 2)
        small = dataclasses.replace(
            small,
            m=gemm.keep_remainder(workload.m, config["bm"], 1),
            n=gemm.keep_remainder(workload.n, config["bn"], 1),
        )
    return dataclasses.replace(workload, m=small.m, n=small.n, k=k)
