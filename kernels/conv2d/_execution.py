"""How convolutions as matrix products are expected to execute: traffic, division of K, and epilogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common.product_execution import (
    Results,
    chosen,
    line_bytes,
    operand_bytes,
    tile_extent,
)
from tunebench.kernels.conv2d._conv import Product, alignment, along_k
from tunebench.space import Table
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["ADDRESSING", "Traffic", "by_walk", "results_of", "traffic_of"]

ADDRESSING = {"A": 12.0, "B": 4.0}
"""Instructions for the address of an access to A or B: digits of K, sum of places, bounds of the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Expected traffic of the blocks of a convolution, as columns.

    Attributes:
        line_a, line_b: Bytes per element of K that a tile of A, or of B, takes in whole sectors.
        memory_bytes: Bytes that memory delivers and takes.
        sum_clocks: Clocks of an SM in the second kernel, which sums the parts.
    """

    line_a: Any
    line_b: Any
    memory_bytes: Any
    sum_clocks: Any


def traffic_of(
    workload: Conv2d, table: Table, device: Device, whole: Product, *, height: Any, wave: Any
) -> Traffic:
    """Return the expected traffic of tiles of bm x bn.

    Args:
        workload: The convolution.
        table: Configurations with bm, bn, bk and split.
        device: Device that executes it.
        whole: The product of matrices.
        height: Rows of tiles whose columns are computed before those of further rows.
        wave: Blocks that are resident at the same time.
    """
    w, size = workload, itemsize(storage(workload.dtype))
    bm, bn, bk, split = (table[name].astype(np.float64) for name in ("bm", "bn", "bk", "split"))
    tiles_m, tiles_n = np.ceil(whole.m / bm), np.ceil(whole.n / bn)
    a_bytes, b_bytes = (tensor.nbytes for tensor in w.inputs()[:2])
    products = whole.tiles(bm, bn) / (tiles_m * tiles_n)  # groups and residue classes
    read_bytes = products * operand_bytes(
        a_bytes / products,
        b_bytes / products,
        tiles_m,
        tiles_n,
        height=height,
        wave=wave / split,
        device=device,
    )
    out = w.outputs()[0]
    # Lines are channels of a pixel, pixels of a row, or filters.
    pitch_a, pitch_b = (tensor.shape[-1] * size for tensor in w.inputs()[:2])
    along_a, along_b = along_k(w)
    parts_bytes = np.where(split > 1, 4.0 * split * out.size, 0.0)
    again_bytes = 2 * parts_bytes * -np.expm1(-parts_bytes / max(1.0, float(device.l2_bytes)))
    summing = (parts_bytes + out.nbytes) / (device.sm_count * device.fill_bytes_per_clock)
    # Parts are loaded one after the other.
    waits = (1 + split) * device.l2_latency
    return Traffic(
        line_a=line_bytes(tile_extent(whole.m, bm), bm, bk, size, pitch_a, along_a),
        line_b=line_bytes(tile_extent(whole.n, bn), bn, bk, size, pitch_b, along_b),
        memory_bytes=read_bytes + out.nbytes * (1 + w.has_residual) + again_bytes,
        sum_clocks=np.where(split > 1, summing + waits, 0.0),
    )


def by_walk(workload: Conv2d, table: Table, operand: int) -> Any:
    """Return the alignment of an operand (0: A, 1: B, 2: C) as a column, by the order of K."""
    flat, by_tap = (alignment(workload, walk)[operand] for walk in ("flat", "by_tap"))
    return np.where(table["walk"] == "by_tap", by_tap, flat).astype(np.float64)


def results_of(
    workload: Conv2d, table: Table, widest: int, count: Callable[[int, int, bool], Results]
) -> Results:
    """Return the epilogues of configurations: of whole sums, or of parts of K.

    Args:
        workload: The convolution.
        table: Configurations with `split`.
        widest: Results per access.
        count: Function of the bytes of a result, the results per access, and whether there is a residual.
    """
    whole = count(itemsize(storage(workload.dtype)), widest, workload.has_residual)
    part = count(4, min(4, widest), False)
    return chosen(table["split"] == 1, whole, part)
