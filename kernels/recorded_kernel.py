"""What kernels of other tuners must execute, so that the bound can be held against their recorded spaces.

A description is matched by what a recording tells of itself: kernel, parameters and their values, problem. A
kernel that is not described here has no bound, and neither has one with a parameter or a value that the
description does not know: it might do something else under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.variant import Costs, ceil_div
from tunebench.workload import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Columns = Mapping[str, NDArray[Any]]

__all__ = ["RECORDED_KERNELS", "RecordedKernel", "find_recorded_kernel"]

BANKS = 32
"""Banks of shared memory, each of which gives one word of 4 bytes a clock.

Source: CUDA C++ Programming Guide, "Shared Memory".
"""

HARNESS = frozenset(("nvml_pwr_limit", "nvml_gr_clock", "nvml_mem_clock"))
"""Parameters of Kernel Tuner that set the device, not the kernel, and within the device's limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedKernel:
    """A kernel of another project, as its source says.

    Attributes:
        kernel: Its name.
        parameters: Names of parameters it must have, of any value.
        known: Parameters it may have, each with the values that are described.
        problem: The size that is described.
        costs: What its configurations must execute on a device, from their columns.
        traffic: Bytes that it must move.
        minimum_cc: Lowest compute capability that `costs` holds for.
    """

    kernel: str
    parameters: frozenset[str]
    known: Mapping[str, frozenset[Any]]
    problem: tuple[int, ...]
    costs: Callable[[Columns, Device], Costs]
    traffic: Traffic
    minimum_cc: tuple[int, int] = (7, 0)  # from then on L1 and shared memory are one

    def mismatch(self, values: Mapping[str, Sequence[Any]], problem: tuple[int, ...]) -> str | None:
        """Return in what a space of this kernel is not as described, or None if it is."""
        if problem != self.problem:
            return f"{self.kernel} is described for problem {_sizes(self.problem)}, not {_sizes(problem)}"
        if lacking := sorted(self.parameters - values.keys()):
            return f"{self.kernel} is described with {', '.join(lacking)}"
        for name in sorted(values.keys() - HARNESS):
            if name in self.known and (unknown := set(values[name]) - self.known[name]):
                return f"{self.kernel} is not described with {name}={'|'.join(map(str, sorted(unknown)))}"
            if name not in self.known and name not in self.parameters:
                return f"{self.kernel} is not described with {name}"
        return None


def find_recorded_kernel(
    kernel: str, values: Mapping[str, Sequence[Any]], problem: tuple[int, ...]
) -> RecordedKernel | str:
    """Return the cost model of a kernel, or the reason why it has none.

    Args:
        kernel: Name of the kernel in the recorded tuning space.
        values: All values of each parameter of the space, by parameter name.
        problem: Problem size of the space; empty if unknown.
    """
    reason = f"its kernel is not described; {' and '.join(known.kernel for known in RECORDED_KERNELS)} are"
    for known in RECORDED_KERNELS:
        if known.kernel == kernel:
            mismatch = known.mismatch(values, problem)
            if mismatch is None:
                return known
            reason = mismatch
    return reason


def _sizes(problem: tuple[int, ...]) -> str:
    return "x".join(map(str, problem)) or "untold"


SIZE = 4096
"""Rows, columns and terms of the products; height and width of the convolutions' results."""


# -- Xgemm -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _MatrixReads:
    """What a block does with one matrix for each of the terms: columns.

    Attributes:
        loads: Loads of a thread, each at most 16 bytes wide, from shared memory or L1.
        load_bytes: Bytes that those of a warp take there: passes of 128.
        staged_bytes: Bytes that the block puts into shared memory.
        moves: Lanes of the loads and stores by which it does so.
    """

    loads: Any
    load_bytes: Any
    staged_bytes: Any
    moves: Any


def _matrix_reads(columns: Columns, letter: str) -> _MatrixReads:
    """Count the reads of A, whose values differ along the first dimension of a block's threads, or of B."""
    of_a = letter == "A"
    tile, across = columns["MWG" if of_a else "NWG"], columns["MDIMC" if of_a else "NDIMC"]
    vector, inner = columns["VWM" if of_a else "VWN"], columns["MDIMA" if of_a else "NDIMB"]
    strided = columns.get("STRM" if of_a else "STRN", np.zeros_like(tile)) == 1
    staged, each = columns[f"S{letter}"] == 1, tile // across
    lanes = np.minimum(32, columns["MDIMC"])  # of a warp, with different values
    lanes = lanes if of_a else 32 // lanes
    # A vector is one access, or several of four values. In shared memory, where the compiler chooses the
    # alignment, neighbouring vectors may become one; of an argument it knows no more than its type's.
    narrow = np.minimum(4, vector)
    width = np.where(staged & ~strided, np.minimum(4, each), narrow)
    loads = ceil_div(each, width)
    # Lanes read the same part of what is theirs, which lies so many words apart: few banks have all of it.
    apart = np.where(strided, vector, each)
    reached = np.minimum(BANKS, width * (BANKS // np.gcd(apart, BANKS)))
    conflicting = loads * np.maximum(1, lanes * width / reached)
    distinct = np.maximum(loads, lanes * each / BANKS)  # nothing is known of the banks of L1
    stores = tile / np.where(strided, narrow, np.minimum(4, tile // inner))
    return _MatrixReads(
        loads=loads,
        load_bytes=4 * BANKS * np.where(staged, conflicting, distinct),
        staged_bytes=4 * staged * tile,
        moves=staged * (tile / narrow + stores),
    )


def _xgemm(columns: Columns, device: Device) -> Costs:
    """Count a product of f32 matrices, C = A^T B, through shared memory (SA, SB) or through L1.

    A thread holds MWI x NWI sums, each of which adds up all terms in their order, and reads MWI and NWI
    values for each term: neighbours, or vectors of VWM and VWN that are strided (STRM, STRN).

    Source: CLBlast, "xgemm" kernels; Nugteren, "CLBlast: a tuned OpenCL BLAS library", 2018.
    """
    mwg, nwg, mdimc = (columns[name] for name in ("MWG", "NWG", "MDIMC"))
    threads = mdimc * columns["NDIMC"]
    a, b = _matrix_reads(columns, "A"), _matrix_reads(columns, "B")
    warps, loads, moves = threads / 32, a.loads + b.loads, a.moves + b.moves
    staged_bytes = a.staged_bytes + b.staged_bytes
    blocks = (SIZE // mwg) * (SIZE // nwg)
    first = device.l1_latency + device.smem_latency * (staged_bytes > 0)
    return Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=threads,
        smem_bytes=columns["KWG"] * staged_bytes,
        registers=np.minimum(255, mwg * nwg / threads),
        fma=mwg * nwg * SIZE,
        # What is staged passes L1 too, or may be handed on by it: that is not counted.
        smem_traffic_bytes=SIZE * (warps * (a.load_bytes + b.load_bytes) + staged_bytes),
        accesses=SIZE * (threads * loads + moves),
        instructions=SIZE * (mwg * nwg / 32 + warps * loads + moves / 32),
        chain_clocks=first + SIZE * device.fma_latency,
    )


XGEMM = RecordedKernel(
    kernel="Xgemm",
    parameters=frozenset(
        ("MWG", "NWG", "KWG", "MDIMC", "NDIMC", "MDIMA", "NDIMB", "KWI", "VWM", "VWN", "SA", "SB")
    ),
    known={
        "STRM": frozenset((0, 1)),
        "STRN": frozenset((0, 1)),
        "PRECISION": frozenset((32,)),
        "GEMMK": frozenset((0,)),  # 1 is another kernel
        "KREG": frozenset((1,)),  # of the other kernel
    },
    problem=(SIZE, SIZE),
    costs=_xgemm,
    traffic=Traffic(read_bytes=2 * SIZE**2 * 4, write_bytes=SIZE**2 * 4),
)


# -- convolution_kernel ------------------------------------------------------------------------------------


def _bank_passes(width: int, height: int, pitch: int) -> int:
    """Return the passes in which the warps of a block read one word a lane from lines `pitch` words apart."""
    lane = np.arange(width * height)
    bank = (lane // width * pitch + lane % width) % BANKS
    of_warps = np.zeros((ceil_div(len(lane), 32), BANKS), dtype=np.int64)
    np.add.at(of_warps, (lane // 32, bank), 1)
    return int(of_warps.max(axis=1).sum())


def _elements(steps: int, count: int, taps: int) -> int:
    """Return how many elements `count` outputs need along a line, `steps` apart, of `taps` each."""
    return len({tap + step * steps for tap in range(taps) for step in range(count)})


def _each(function: Callable[..., int], *columns: Any) -> NDArray[np.float64]:
    """Return a function of some columns, computed once for each combination of their values."""
    rows, which = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    found: NDArray[np.float64] = np.array([function(*map(int, row)) for row in rows], dtype=np.float64)
    return found[which.reshape(-1)]


def _convolution(columns: Columns, device: Device) -> Costs:
    """Count a convolution of one f32 image with one filter from constant memory.

    The image passes through shared memory, in lines that padding may make longer, or through L1
    (`use_shmem` 0). A thread reads every element that its outputs need once, and no two lanes of a warp read
    the same. A thread's elements begin at any multiple of 4 bytes and its outputs lie a block apart, so that
    an access is of one element, unless the block has one column. A sum adds up all taps in their order.

    Source: van Werkhoven et al., "Optimizing convolution operations on GPUs using adaptive tiling", 2014; its
    kernel as the examples of Kernel Tuner have it.
    """
    bx, by, tx, ty = (
        columns[name].astype(np.int64)
        for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y")
    )
    taps_x, taps_y = columns["filter_width"], columns["filter_height"]
    out_x, out_y, threads = bx * tx, by * ty, bx * by
    warps, shared = ceil_div(threads, 32), columns.get("use_shmem", np.ones_like(bx))
    wide, high = out_x + taps_x // 2 * 2, out_y + taps_y // 2 * 2
    # Padding columns put lines of a block that is narrower than the banks side by side in them.
    pads = (columns["use_padding"] == 1) & (bx % BANKS != 0)
    pitch = wide + pads * (-(wide - bx) % BANKS)
    needed = _each(_elements, bx, tx, taps_x) * _each(_elements, by, ty, taps_y)
    at_once = np.where(bx == 1, 4, 1)
    passes = np.where(shared == 1, _each(_bank_passes, bx, by, pitch), warps)
    passes = np.where(bx == 1, threads / 32, passes)
    fma, staged = out_x * out_y * taps_x * taps_y, wide * high * shared
    moves = 2 * staged / at_once  # each element is loaded and stored
    reads, results = needed / at_once, tx * ty / at_once
    return Costs(
        blocks=SIZE**2 / (out_x * out_y),
        full_blocks=(SIZE // out_x) * (SIZE // out_y),
        threads=threads,
        smem_bytes=4 * pitch * high * shared,
        registers=np.minimum(255, tx * ty),
        fma=fma,
        smem_traffic_bytes=4 * BANKS * passes * needed + 4 * staged,
        accesses=threads * (reads + results) + moves,
        instructions=warps * (fma / threads + reads + results) + moves / 32,
        chain_clocks=device.l1_latency + device.smem_latency * shared + taps_x * taps_y * device.fma_latency,
    )


SWITCH = frozenset((0, 1))

CONVOLUTION = RecordedKernel(
    kernel="convolution_kernel",
    parameters=frozenset(
        (
            *("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"),
            *("filter_height", "filter_width", "use_padding"),
        )
    ),
    # Without constant memory, the filter is loaded too: more, and not counted.
    known={"read_only": SWITCH, "use_padding": SWITCH, "use_shmem": SWITCH, "use_cmem": SWITCH},
    problem=(SIZE, SIZE),
    costs=_convolution,
    traffic=Traffic(read_bytes=SIZE**2 * 4, write_bytes=SIZE**2 * 4),
)

RECORDED_KERNELS = (XGEMM, CONVOLUTION)
"""Every kernel that is described."""
