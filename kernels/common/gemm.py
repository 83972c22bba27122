"""Host side of gemm kernels in CUDA C++: types, alignment, epilogue, arguments, grids, division of k."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.kernels.common import cuda_expression, prologue
from tunebench.kernels.common.cuda import ctype
from tunebench.space import Config, Table, takes_config
from tunebench.variant import Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.gemm import Gemm

__all__ = [
    "MATRICES",
    "MAX_BLOCKS",
    "SPLITS",
    "STREAMS",
    "Division",
    "Share",
    "added",
    "alignment",
    "arguments",
    "blocks",
    "constants",
    "divided",
    "divided_launches",
    "division",
    "finish_launch",
    "fits",
    "grid",
    "injected",
    "keep_remainder",
    "most_blocks",
    "parts_are_few",
    "scratch",
    "shares",
    "shrink",
    "split_is_useful",
    "stream_is_useful",
    "tiles",
    "too_many_blocks",
    "usual_blocks",
    "widths",
    "workload_constants",
]

MATRICES = 1
"""Number of matrices b that the rows of a are multiplied by."""

MAX_BLOCKS = 2**31 - 1
"""Most blocks along x of a grid. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

AFFORDABLE_FMA = 10_000_000
"""Most multiply-adds of an emulation workload: emulation does them in a fraction of a second."""


def constants(name: str, **values: str | bool | int) -> str:
    """Return a C++ struct of compile-time constants.

    Args:
        name: Name of the struct.
        values: Constants by name. A string becomes a type alias.
    """
    lines = []
    for key, value in values.items():
        kind = "bool" if isinstance(value, bool) else "int"
        declared = f"using {key} =" if isinstance(value, str) else f"static constexpr {kind} {key} ="
        lines.append(f"  {declared} {value if isinstance(value, str) else int(value)};")
    return "\n".join([f"struct {name} {{", *lines, "};"]) + "\n"


def workload_constants(workload: Gemm) -> dict[str, str | bool | int]:
    """Return the compile-time constants that depend on the workload only; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "Activation": (
            cuda_expression.functor(workload.activation)
            if workload.act == IDENTITY
            else cuda_expression.INJECTED
        ),
        "HAS_BIAS": workload.has_bias,
        "HAS_RESIDUAL": workload.has_residual,
        "A_K_CONTIGUOUS": workload.trans[0] == "n",
        "B_K_CONTIGUOUS": workload.trans[1] == "t",
    }


def injected(workload: Gemm) -> str:
    """Return the source of an activation that is generated, or "" for one of `epilogue.cuh`."""
    if workload.act == IDENTITY:
        return cuda_expression.functor_source(workload.activation)
    return cuda_expression.injected(workload.act)


def arguments(workload: Gemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return the kernel's arguments: a, b, bias, residual, c, then sizes."""
    sizes = (workload.m, workload.n, workload.k, group_m)
    return ("a", "b", *added(workload), "c", *(Scalar("int", size) for size in sizes))


def added(workload: Gemm) -> tuple[str, str]:
    """Return the names of bias and residual, or c for a missing one, which is not read."""
    return ("bias" if workload.has_bias else "c", "residual" if workload.has_residual else "c")


def alignment(extent: int, dtype: DType) -> int:
    """Return the widest aligned access to lines of `extent` elements, in elements; at most 16 bytes."""
    return min(extent & -extent, 16 // itemsize(dtype))


def widths(workload: Gemm) -> tuple[int, int, int]:
    """Return the widest aligned access to a, b and c, in elements. The tensors themselves are aligned."""
    a = workload.k if workload.trans[0] == "n" else workload.m
    b = workload.k if workload.trans[1] == "t" else workload.n
    return (
        alignment(a, workload.dtype),
        alignment(b, workload.dtype),
        alignment(workload.n, workload.out),
    )


def blocks(workload: Gemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles of bm x bn (numbers or columns) that cover c, over the whole batch."""
    return workload.batch * ceil_div(workload.m, bm) * ceil_div(workload.n, bn)


usual_blocks = most_blocks = blocks


def grid(workload: Gemm, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the grid in x, y and z: one block per tile."""
    return (int(blocks(workload, config["bm"], config["bn"])), 1, 1)


def tiles(workload: Any, config: Mapping[str, Any]) -> tuple[Tiling, ...]:
    """Return the tiling of m, n and k by bm, bn and bk."""
    return tuple(
        Tiling(dimension=name, extent=getattr(workload, name), tile=config[f"b{name}"]) for name in "mnk"
    )


# -- division along k (see gemm_parts.cuh) -----------------------------------------------------------------

SPLITS = (1, 2, 4, 8, 16, 32)

SM_COUNTS = (20, 24, 30, 36, 40, 46, 58, 68, 72, 80, 82, 84, 108, 114, 128, 132, 142, 144, 148, 160, 188)
"""SM counts of GPUs, approximately."""

STREAMS = (0, *sorted({*SM_COUNTS, *(2 * count for count in SM_COUNTS)}))
"""Grid sizes of stream-K: one or two blocks per SM."""

LEAST_STEPS = 2
"""Fewest steps of k per block where k is divided."""

MAX_SCRATCH_BYTES = 2**30
"""Most memory for partial sums."""

FINISH_THREADS, FINISH_ROWS = 128, 16
"""Threads per block of `finish_tiles`, and rows of a tile per block."""


def split_is_useful(bm: Any, bn: Any, bk: Any, split_k: Any, workload: Gemm, device: Device) -> Any:
    """Split-K is for few tiles, with some steps per part, and partial sums that fit in the scratch."""
    tiles = blocks(workload, 1.0 * bm, 1.0 * bn)
    few = tiles * (split_k // 2) < 2 * device.sm_count
    long = ceil_div(workload.k, bk) >= LEAST_STEPS * split_k
    small = 4.0 * tiles * split_k * bm * bn <= MAX_SCRATCH_BYTES
    return (split_k == 1) | (few & long & small)


@takes_config("bm", "bn", "bk", "split_k", "stream_k")
def stream_is_useful(config: Mapping[str, Any], workload: Gemm, device: Device) -> Any:
    """A stream must have about one or two blocks per SM, each with several steps and up to 4 tiles."""
    bm, bn, bk, split_k, stream_k = config.values()
    each = max((count for count in SM_COUNTS if count <= device.sm_count), default=0)
    tiles = blocks(workload, 1.0 * bm, 1.0 * bn)
    worthwhile = (tiles <= 4 * stream_k) & (tiles * ceil_div(workload.k, bk) >= LEAST_STEPS * stream_k)
    # A stream that divides tiles evenly equals whole tiles or split-K.
    uneven = tiles % np.maximum(1, stream_k) != 0
    return (stream_k == 0) | (np.isin(stream_k, (each, 2 * each)) & (split_k == 1) & worthwhile & uneven)


def parts_are_few(split_k: Any, stream_k: Any, group_m: Any, min_blocks: Any) -> Any:
    """Where k is divided, tiles are few: their order does not matter, and min_blocks must be 1."""
    return ((split_k == 1) & (stream_k == 0)) | ((group_m == 1) & (min_blocks == 1))


def division(config: Mapping[str, Any]) -> str:
    """Return the C++ type that assigns steps of k to blocks: "WholeTiles", "SplitK" or "StreamK"."""
    if config.get("stream_k", 0):
        return "StreamK"
    return "SplitK" if config["split_k"] > 1 else "WholeTiles"


def _parts(workload: Gemm, config: Mapping[str, Any]) -> int:
    """Return the blocks that share the work: all blocks of a stream, or those of one tile."""
    if not config.get("stream_k", 0):
        return int(config["split_k"])
    steps = blocks(workload, config["bm"], config["bn"]) * ceil_div(workload.k, config["bk"])
    # Small workloads get fewer blocks than configured, so that each block has some steps.
    return max(1, min(int(config["stream_k"]), int(steps) // LEAST_STEPS))


def scratch(workload: Gemm, config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Return the scratch for partial sums, if k is divided."""
    kind, parts = division(config), _parts(workload, config)
    if kind == "WholeTiles":
        return ()
    bm, bn = config["bm"], config["bn"]
    slots = 2 * parts if kind == "StreamK" else parts * blocks(workload, bm, bn)
    return (Tensor(name="partial", shape=(slots, bm, bn), dtype="i32" if workload.dtype == "i8" else "f32"),)


def divided_launches(workload: Gemm, config: Config, product: Launch) -> tuple[Launch, ...]:
    """Return the launch of the product, and that of the sum of its parts if k is divided.

    Args:
        workload: The product.
        config: A configuration with `bm`, `bn`, `bk`, `group_m`, `split_k` and optionally `stream_k`.
        product: Entry, threads and shared memory of the product. Its grid and arguments are replaced.
    """
    kind, parts = division(config), _parts(workload, config)
    tiles = blocks(workload, config["bm"], config["bn"])
    sizes = (workload.m, workload.n, workload.k, config["group_m"], tiles, parts)
    numbers = tuple(Scalar("int", size) for size in sizes)
    partial = "c" if kind == "WholeTiles" else "partial"  # not written
    ahead = prologue.operands(workload) if workload.has_pre else ()
    first = dataclasses.replace(
        product,
        grid=(parts if kind == "StreamK" else tiles * parts, 1, 1),
        arguments=("a", "b", *added(workload), *ahead, "c", partial, *numbers),
    )
    return (first,) if kind == "WholeTiles" else (first, finish_launch(workload, config, numbers))


def finish_launch(workload: Gemm, config: Config, numbers: tuple[Scalar, ...]) -> Launch:
    """Return the launch of the sum of parts (`finish_tiles` of gemm_parts.cuh).

    Args:
        workload: The product.
        config: A configuration with `bm` and `bn`.
        numbers: m, n, k, group_m, number of tiles, number of parts.
    """
    tiles = blocks(workload, config["bm"], config["bn"])
    return Launch(
        entry="finish_tiles<Choice>",
        grid=(int(tiles) * config["bm"] // FINISH_ROWS, 1, 1),
        block=(FINISH_THREADS, 1, 1),
        arguments=("partial", *added(workload), "c", *numbers),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of a product that the busiest blocks compute, as columns.

    Attributes:
        length: Elements of k that such a block multiplies, over all its tiles, in whole steps.
        used_length: Lower bound of the elements of k within the matrices, over all its tiles.
        edge_rows: Rows of the smallest tile.
        full_blocks: Number of such blocks.
        blocks: All work, as a number of such blocks; may be a fraction.
        launches: Kernels that run one after the other.
        special_per_element: Special-function results that the prologue takes per element of a.
    """

    length: Any
    used_length: Any
    edge_rows: Any
    full_blocks: Any
    blocks: Any
    launches: Any = 1
    special_per_element: int = 0


def shares(workload: Gemm, table: Table, device: Device) -> Share:
    """Return the share of the product that the busiest blocks compute, for each configuration.

    Args:
        workload: The product.
        table: Configurations with bm, bn and bk, and split_k and stream_k if the space has them.
        device: Not used: a block has the same share on all devices.
    """
    bm, bn, bk = (table[name].astype(np.float64) for name in ("bm", "bn", "bk"))
    names = table.space.names
    split = table["split_k"].astype(np.float64) if "split_k" in names else 1.0 + 0.0 * bm
    stream = table["stream_k"].astype(np.float64) if "stream_k" in names else 0.0 * bm
    tiles, of_tile = blocks(workload, bm, bn), ceil_div(workload.k, bk)
    # `steps` steps are divided among `parts` blocks, `times` times.
    steps = np.where(stream > 0, tiles * of_tile, of_tile)
    parts = np.where(stream > 0, stream, split)
    times = np.where(stream > 0, 1.0, tiles)
    most = ceil_div(steps, parts)
    # The last step of a tile may be short. A block's share may include several last steps.
    missing = of_tile * bk - workload.k
    return Share(
        length=most * bk,
        used_length=most * bk - ceil_div(most, of_tile) * missing,
        edge_rows=workload.m - (ceil_div(workload.m, bm) - 1) * bm,
        full_blocks=times * np.where(steps % parts == 0, parts, steps % parts),
        blocks=times * steps / most,
        launches=1 + ((stream > 0) | (split > 1)),
        special_per_element=prologue.special_of_element(workload),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What dividing k adds to a product, as columns.

    Attributes:
        segments: Tiles, or parts of them, that a block computes one after the other.
        parts: Those of them that are partial sums.
        parts_bytes: Bytes of all partial sums.
        finish_clocks: Clocks of an SM in the second kernel, which sums the parts.
        blocks_a_tile: Blocks that share a tile.
    """

    segments: Any
    parts: Any
    parts_bytes: Any
    finish_clocks: Any
    blocks_a_tile: Any

    def memory_bytes(self, device: Device) -> Any:
        """Return the bytes of partial sums that memory takes and delivers: those that L2 does not hold.

        Args:
            device: Device whose L2 holds them.
        """
        return 2 * self.parts_bytes * -np.expm1(-self.parts_bytes / max(1.0, float(device.l2_bytes)))


def divided(table: Table, tiles: Any, out_size: int, device: Device) -> Division:
    """Return what dividing k adds, for each configuration of a table with or without split_k and stream_k.

    Args:
        table: Configurations with bm and bn.
        tiles: Tiles of each configuration.
        out_size: Bytes of a result.
        device: Device that executes it.
    """
    bm, bn = (table[name].astype(np.float64) for name in ("bm", "bn"))
    names = table.space.names
    split = table["split_k"].astype(np.float64) if "split_k" in names else 1.0 + 0.0 * bm
    stream = table["stream_k"].astype(np.float64) if "stream_k" in names else 0.0 * bm
    # A stream is cut where blocks and where tiles end; a block has two parts of tiles at most.
    segments = np.where(stream > 0, stream + tiles, split * tiles)
    parts = np.where(stream > 0, np.minimum(segments, 2 * stream), np.where(split > 1, segments, 0.0))
    parts_bytes = 4 * parts * bm * bn
    read_bytes = parts_bytes + (parts > 0) * tiles * bm * bn * out_size
    # Four parts of a result are loaded at the same time; they are still in L2.
    waits = 1 + np.ceil(parts / tiles / 4)
    reading = read_bytes / (device.sm_count * device.fill_bytes_per_clock) + waits * device.l2_latency
    blocks = np.where(stream > 0, stream, split * tiles)
    return Division(
        segments=segments / blocks,
        parts=parts / blocks,
        parts_bytes=parts_bytes,
        finish_clocks=np.where(parts > 0, reading, 0.0),
        blocks_a_tile=np.maximum(1.0, blocks / tiles),
    )


def fits(bm: Any, bn: Any, workload: Gemm) -> Any:
    """Tiles must fit in one grid, and be less than twice as large as c unless no smaller one exists."""
    worthwhile = ((bm < 2 * workload.m) | (bm <= 16)) & ((bn < 2 * workload.n) | (bn <= 16))
    # As floats: the product of three dimensions may exceed 64 bits.
    return worthwhile & (blocks(workload, 1.0 * bm, 1.0 * bn) <= MAX_BLOCKS)


def too_many_blocks(workload: Gemm, tiles: Iterable[tuple[int, int]]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    if any(fits(bm, bn, workload) for bm, bn in tiles):
        return None
    return f"c ({workload.batch}, {workload.m}, {workload.n}) takes more than {MAX_BLOCKS} blocks"


def keep_remainder(extent: int, tile: int, tiles: int) -> int:
    """Return the extent of `tiles` tiles plus the remainder of `extent`, or `extent` if that is smaller."""
    # A multiple of 16 elements stays aligned: it is 16 bytes or more of any type.
    tile, tiles = max(16, tile), ceil_div(tile * tiles, max(16, tile))
    return min(extent, tile * tiles + extent % tile)


def shrink(
    workload: Gemm, config: Mapping[str, Any], stages: int, affordable_fma: int = AFFORDABLE_FMA
) -> Gemm:
    """Return a small workload with the same edges, alignment and pipeline.

    Every dimension keeps its remainder by the tile, so that edge tiles and access widths stay the same. m and
    n keep up to two full tiles, as many as emulation can afford; k keeps enough steps to use each buffer
    twice.

    Args:
        workload: The workload to emulate.
        config: A configuration with `bm`, `bn` and `bk`.
        stages: Buffers of the pipeline.
        affordable_fma: Most multiply-adds.
    """
    for tiles_m, tiles_n, batch in ((2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1)):
        small = dataclasses.replace(
            workload,
            m=keep_remainder(workload.m, config["bm"], tiles_m),
            n=keep_remainder(workload.n, config["bn"], tiles_n),
            k=keep_remainder(workload.k, config["bk"], stages + 1),
            batch=min(workload.batch, batch),
        )
        if small.flops() <= 2 * affordable_fma:
            break
    return small
