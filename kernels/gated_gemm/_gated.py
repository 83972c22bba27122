"""What variants of gated_gemm share: it is two of gemm's products, computed by the same blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from tunebench.kernels.common import gemm
from tunebench.kernels.common.cuda import ctype
from tunebench.variant import Scalar, Tiling
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm

__all__ = [
    "MATRICES",
    "arguments",
    "blocks",
    "fits",
    "problem",
    "product",
    "shrink",
    "tiles",
    "too_many_blocks",
    "widths",
]

MATRICES = 2
"""Matrices that the rows of a are multiplied by."""


@functools.lru_cache(maxsize=64)
def product(workload: GatedGemm) -> Gemm:
    """Return one of the two products, made once for all that constraints ask of it."""
    return workload.product()


def problem(workload: GatedGemm) -> dict[str, str | bool | int]:
    """Return the constants that the problem decides, whatever the configuration; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "Activation": gemm.ACTIVATIONS[workload.activation],
        "A_K_CONTIGUOUS": True,
        "B_K_CONTIGUOUS": workload.trans == "nt",
    }


def arguments(workload: GatedGemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return what the kernels take: a, b_gate, b_up, c, sizes."""
    sizes = (workload.m, workload.n, workload.k, group_m)
    return ("a", "b_gate", "b_up", "c", *(Scalar("int", size) for size in sizes))


def widths(workload: GatedGemm) -> tuple[int, int, int]:
    """Return the widest aligned access, in elements, to a, to either b and to c."""
    return gemm.widths(product(workload))


def blocks(workload: GatedGemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles of bm x bn (numbers or columns) that cover c."""
    return gemm.blocks(product(workload), bm, bn)


def tiles(workload: GatedGemm, config: Mapping[str, Any]) -> tuple[Tiling, ...]:
    """Return how tiles of bm x bn, in steps of bk, cut either product."""
    return gemm.tiles(product(workload), config)


def fits(bm: Any, bn: Any, workload: GatedGemm) -> Any:
    """Tiles must fit in one grid, and none may be twice as large as the problem if a smaller one exists."""
    return gemm.fits(bm, bn, product(workload))


def too_many_blocks(workload: GatedGemm, tiles: Any) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    return gemm.too_many_blocks(product(workload), tiles)


def shrink(
    workload: GatedGemm,
    config: Mapping[str, Any],
    stages: int,
    affordable_fma: int = gemm.AFFORDABLE_FMA,
) -> GatedGemm:
    """Return a small problem with the same edges, alignment and pipeline (see `gemm.shrink`)."""
    small = gemm.shrink(product(workload), config, stages, affordable_fma // MATRICES)
    return dataclasses.replace(workload, m=small.m, n=small.n, k=small.k)
