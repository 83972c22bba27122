"""What kernels of other tuners must execute, so that the bound can be held against their recorded spaces.

A description is matched by what a recording tells of itself: kernel, parameters, problem. A kernel that is
not described here has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.variant import Costs, ceil_div
from tunebench.workload import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Columns = Mapping[str, NDArray[Any]]

__all__ = ["FOREIGN", "Foreign", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A kernel of another project, as its source says.

    Attributes:
        kernel: Its name.
        parameters: Names of parameters it must have; it may have more.
        problem: The size that is described.
        costs: What its configurations must execute, from their columns.
        traffic: Bytes that it must move.
    """

    kernel: str
    parameters: frozenset[str]
    problem: tuple[int, ...]
    costs: Callable[[Columns], Costs]
    traffic: Traffic


def describe(kernel: str, parameters: frozenset[str], problem: tuple[int, ...]) -> Foreign | None:
    """Return the description of a kernel, or None if it has none."""
    for foreign in FOREIGN:
        if foreign.kernel == kernel and foreign.parameters <= parameters and foreign.problem == problem:
            return foreign
    return None


SIZE = 4096
"""Rows, columns and terms of the products; height and width of the convolutions' results."""


def _xgemm(columns: Columns) -> Costs:
    """Count a product of f32 matrices, C = A^T B; A and B pass through L1.

    A thread holds MWI x NWI sums, MWI and NWI neighbours apart, and loads at most four neighbours at a time.
    Source: CLBlast, "xgemm" kernels; Nugteren, "CLBlast: a tuned OpenCL BLAS library", 2018.
    """
    mwg, nwg, kwg, mdimc = (columns[name] for name in ("MWG", "NWG", "KWG", "MDIMC"))
    threads = mdimc * columns["NDIMC"]
    warps, mwi, nwi = threads / 32, mwg // mdimc, nwg // columns["NDIMC"]
    loads = ceil_div(mwi, 4), ceil_div(nwi, 4)
    lanes = np.minimum(32, mdimc), np.maximum(1, 32 // mdimc)
    passes = sum(
        np.maximum(128 * load, 4 * lane * width)
        for load, lane, width in zip(loads, lanes, (mwi, nwi), strict=True)
    )
    staged = 4 * (columns["SA"] * mwg + columns["SB"] * nwg)
    blocks = (SIZE // mwg) * (SIZE // nwg)
    return Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=threads,
        smem_bytes=kwg * staged,
        registers=np.minimum(255, mwi * nwi),
        fma=mwg * nwg * SIZE,
        smem_traffic_bytes=SIZE * (warps * passes + staged),
        instructions=SIZE * (mwg * nwg / 32 + warps * sum(loads) + staged / 512),
    )


def _convolution(columns: Columns) -> Costs:
    """Count a convolution of one f32 image with one filter from constant memory; the image passes through L1.

    A thread reads every element its outputs need once, and no two lanes of a warp read the same.
    Source: van Werkhoven et al., "Optimizing convolution operations on GPUs using adaptive tiling", 2014.
    """
    block = columns["block_size_x"], columns["block_size_y"]
    tile = columns["tile_size_x"], columns["tile_size_y"]
    filters = int(columns["filter_width"][0]), int(columns["filter_height"][0])
    out_x, out_y = block[0] * tile[0], block[1] * tile[1]
    needed = np.prod(
        [
            [
                len({i + t * step for i in range(taps) for t in range(count)})
                for step, count in zip(steps, counts, strict=True)
            ]
            for steps, counts, taps in zip(block, tile, filters, strict=True)
        ],
        axis=0,
    )
    warps = block[0] * block[1] // 32
    staged = columns.get("use_shmem", np.ones_like(out_x))
    patch = (out_x + filters[0] - 1) * (out_y + filters[1] - 1) * staged
    fma = out_x * out_y * filters[0] * filters[1]
    return Costs(
        blocks=SIZE**2 / (out_x * out_y),
        full_blocks=(SIZE // out_x) * (SIZE // out_y),
        threads=block[0] * block[1],
        smem_bytes=4 * patch,
        registers=np.minimum(255, tile[0] * tile[1]),
        fma=fma,
        smem_traffic_bytes=128 * warps * needed + 4 * patch,
        instructions=fma / 32 + warps * needed + patch / 128,
    )


FOREIGN = (
    Foreign(
        kernel="Xgemm",
        parameters=frozenset(
            ("MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI", "VWM", "VWN", "SA", "SB")
        ),
        problem=(SIZE, SIZE),
        costs=_xgemm,
        traffic=Traffic(read_bytes=2 * SIZE**2 * 4, write_bytes=SIZE**2 * 4),
    ),
    Foreign(
        kernel="convolution_kernel",
        parameters=frozenset(
            ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "filter_height", "filter_width")
        ),
        problem=(SIZE, SIZE),
        costs=_convolution,
        traffic=Traffic(read_bytes=SIZE**2 * 4, write_bytes=SIZE**2 * 4),
    ),
)
"""Every kernel that is described."""
