"""Cost models of the kernels in Kernel Tuner's recorded tuning spaces (cache files), for their lower bounds.

A model applies if the recorded space has the kernel name, the problem size, and only parameters and values
that the model knows. Without a model a recorded space has no lower bound, because an unknown parameter may
change the work of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common.product_execution import INSTRUCTION_BYTES, by_each
from tunebench.kernels.common.warp_access import l1_passes, sectors, shared_passes
from tunebench.variant import Costs, Execution, ceil_div
from tunebench.workload import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Columns = Mapping[str, NDArray[Any]]

__all__ = ["RECORDED_KERNELS", "RecordedKernel", "find_recorded_kernel"]

OTHER_REGISTERS = 20
"""Registers of a thread besides sums and operands: addresses, counters. Fitted to the recorded spaces."""

BANKS = 32
"""Banks of shared memory; each transfers one word of 4 bytes per clock.

Source: CUDA C++ Programming Guide, "Shared Memory".
"""

HARNESS = frozenset(("nvml_pwr_limit", "nvml_gr_clock", "nvml_mem_clock"))
"""Parameters of Kernel Tuner that set clocks and power of the device. They do not change the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedKernel:
    """Cost model of a kernel in a recorded tuning space, derived from the kernel's source.

    Attributes:
        kernel: Name of the kernel.
        parameters: Names of required parameters, of any value.
        known: Parameters that may occur, each with the values that the model covers.
        problem: Problem size that the model covers.
        costs: Function from the columns of configurations and a device to their costs.
        traffic: Compulsory memory traffic, in bytes.
        minimum_cc: Lowest compute capability that `costs` is valid for.
    """

    kernel: str
    parameters: frozenset[str]
    known: Mapping[str, frozenset[Any]]
    problem: tuple[int, ...]
    costs: Callable[[Columns, Device], Costs]
    traffic: Traffic
    minimum_cc: tuple[int, int] = (7, 0)  # from then on, L1 and shared memory are one unit

    def mismatch(self, values: Mapping[str, Sequence[Any]], problem: tuple[int, ...]) -> str | None:
        """Return why the model does not apply to a recorded tuning space, or None if it does.

        Args:
            values: All values of each parameter of the space, by parameter name.
            problem: Problem size of the space; empty if unknown.
        """
        if problem != self.problem:
            expected, actual = _sizes(self.problem), _sizes(problem)
            return f"{self.kernel} has a cost model for problem size {expected}, not {actual}"
        if lacking := sorted(self.parameters - values.keys()):
            return f"the cost model of {self.kernel} needs the parameter {', '.join(lacking)}"
        for name in sorted(values.keys() - HARNESS):
            if name in self.known and (unknown := set(values[name]) - self.known[name]):
                return (
                    f"the cost model of {self.kernel} does not cover "
                    f"{name}={'|'.join(map(str, sorted(unknown)))}"
                )
            if name not in self.known and name not in self.parameters:
                return f"the cost model of {self.kernel} does not cover the parameter {name}"
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
    described = " and ".join(candidate.kernel for candidate in RECORDED_KERNELS)
    reason = f"its kernel has no cost model; {described} have one"
    for candidate in RECORDED_KERNELS:
        if candidate.kernel == kernel:
            mismatch = candidate.mismatch(values, problem)
            if mismatch is None:
                return candidate
            reason = mismatch
    return reason


def _sizes(problem: tuple[int, ...]) -> str:
    return "x".join(map(str, problem)) or "unknown"


SIZE = 4096
"""Matrix size m = n = k of the products; height and width of the results of convolutions."""


# -- Xgemm -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _MatrixReads:
    """Reads of one matrix by a block for each index k of the product, as columns over configurations.

    Attributes:
        loads: Loads of a thread from shared memory or L1, each up to 16 bytes wide.
        load_bytes: Bytes that the loads of a warp transfer, in passes of 128 bytes.
        staged_bytes: Bytes that the block copies to shared memory.
        moves: Lane accesses, loads and stores, of that copy.
    """

    loads: Any
    load_bytes: Any
    staged_bytes: Any
    moves: Any


def _matrix_reads(columns: Columns, letter: str) -> _MatrixReads:
    """Count the reads of A, which differ along the first dimension of a block's threads, or of B."""
    of_a = letter == "A"
    tile, across = columns["MWG" if of_a else "NWG"], columns["MDIMC" if of_a else "NDIMC"]
    vector, inner = columns["VWM" if of_a else "VWN"], columns["MDIMA" if of_a else "NDIMB"]
    strided = columns.get("STRM" if of_a else "STRN", np.zeros_like(tile)) == 1
    staged, per_thread = columns[f"S{letter}"] == 1, tile // across
    lanes = np.minimum(32, columns["MDIMC"])  # lanes of a warp that read different values
    lanes = lanes if of_a else 32 // lanes
    # A vector takes one access, or several of four values each. The compiler aligns shared memory, so that
    # adjacent vectors may become one access there. An argument has only the alignment of its type.
    narrow = np.minimum(4, vector)
    width = np.where(staged & ~strided, np.minimum(4, per_thread), narrow)
    loads = ceil_div(per_thread, width)
    # Lanes read at a constant stride, so that all accesses may fall into few banks.
    apart = np.where(strided, vector, per_thread)
    reached = np.minimum(BANKS, width * (BANKS // np.gcd(apart, BANKS)))
    conflicting = loads * np.maximum(1, lanes * width / reached)
    distinct = np.maximum(loads, lanes * per_thread / BANKS)  # the banks of L1 are not documented
    stores = tile / np.where(strided, narrow, np.minimum(4, tile // inner))
    return _MatrixReads(
        loads=loads,
        load_bytes=4 * BANKS * np.where(staged, conflicting, distinct),
        staged_bytes=4 * staged * tile,
        moves=staged * (tile / narrow + stores),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MatrixAccess:
    """Expected accesses of a block to one matrix, for each index k of the product.

    Attributes:
        requests: Accesses of lanes.
        passes: Passes through shared memory and L1.
        l2_bytes: Bytes that the block reads from L2.
    """

    requests: Any
    passes: Any
    l2_bytes: Any


def _matrix_access(columns: Columns, letter: str) -> _MatrixAccess:
    """Count the accesses to A, whose values differ along the first dimension of a block's threads, or to B.

    Unlike `_matrix_reads`, which counts what no compiler can avoid, an access is as wide as the source says.
    """
    of_a = letter == "A"
    tile, across = columns["MWG" if of_a else "NWG"], columns["MDIMC" if of_a else "NDIMC"]
    vector, copying = columns["VWM" if of_a else "VWN"], columns["MDIMA" if of_a else "NDIMB"]
    strided = columns.get("STRM" if of_a else "STRN", np.zeros_like(tile))
    staged, width = columns[f"S{letter}"] == 1, np.minimum(4, vector)
    threads = columns["MDIMC"] * columns["NDIMC"]
    apart = np.where(strided == 1, vector, tile // across)
    loads = tile // across // width
    by_shared, by_l1 = (
        by_each(count, apart, width, columns["MDIMC"], of_a) for count in (_shared_passes, _l1_passes)
    )
    copied_apart = np.where(strided == 1, vector, tile // copying)
    copy = (copied_apart, width, copying, tile)
    stored, lines, touched = (
        by_each(count, *copy) for count in (_stored_passes, _copied_lines, _copied_sectors)
    )
    copies = staged * tile / (32 * width)  # by warps, each a load and a store
    return _MatrixAccess(
        requests=threads * loads + 2 * 32 * copies,
        passes=threads / 32 * loads * np.where(staged, by_shared, by_l1) + copies * (stored + lines),
        l2_bytes=np.where(staged, 32 * copies * touched, 4 * tile),
    )


def _read_words(apart: int, across: int, of_a: int) -> NDArray[np.int64]:
    """Return the words that the lanes of a warp read: of A along a block's first dimension, or of B."""
    lane = np.arange(32)
    return (lane % across if of_a else lane // across) * apart


def _shared_passes(apart: int, width: int, across: int, of_a: int) -> int:
    return shared_passes(_read_words(apart, across, of_a), width)


def _l1_passes(apart: int, width: int, across: int, of_a: int) -> int:
    return l1_passes(_read_words(apart, across, of_a), width)


def _stored_passes(apart: int, width: int, copying: int, tile: int) -> int:
    return shared_passes(_copied_words(apart, copying, tile), width)


def _copied_lines(apart: int, width: int, copying: int, tile: int) -> int:
    return len(np.unique(_copied_words(apart, copying, SIZE) // 32))


def _copied_sectors(apart: int, width: int, copying: int, tile: int) -> int:
    return sectors(_copied_words(apart, copying, SIZE), width)


def _copied_words(apart: int, copying: int, pitch: int) -> NDArray[np.int64]:
    """Return the words that the lanes of a warp copy: `copying` lanes per line of the tile."""
    lane = np.arange(32)
    return lane % copying * apart + lane // copying * pitch


def _xgemm_execution(columns: Columns) -> Execution:
    """Describe the loop over k: KWI = 2 indices are unrolled, KWG = 32 are staged between barriers."""
    mwg, nwg = columns["MWG"], columns["NWG"]
    threads = columns["MDIMC"] * columns["NDIMC"]
    of_a, of_b = _matrix_access(columns, "A"), _matrix_access(columns, "B")
    staged, unrolled = columns["SA"] + columns["SB"], columns["KWI"]
    sums, steps = mwg * nwg / threads, SIZE // columns["KWG"]
    loop_instructions = 6 * SIZE / unrolled * threads / 32  # counter, branch and addresses
    return Execution(
        registers=sums + mwg / columns["MDIMC"] + nwg / columns["NDIMC"] + OTHER_REGISTERS,
        instructions=SIZE * sums * threads / 32 + loop_instructions,
        accesses=SIZE * (of_a.requests + of_b.requests),
        passes=SIZE * (of_a.passes + of_b.passes),
        l2_bytes=SIZE * (of_a.l2_bytes + of_b.l2_bytes),
        memory_waits=np.where(staged > 0, steps, 0),
        l2_waits=np.where(staged < 2, SIZE / unrolled, 0),
        shared_waits=SIZE / unrolled,
        barriers=np.where(staged > 0, 2 * steps, 0),
        code_bytes=unrolled * sums * INSTRUCTION_BYTES,
        iterations=SIZE,
    )


def _xgemm(columns: Columns, device: Device) -> Costs:
    """Count a product of f32 matrices, C = A^T B, through shared memory (SA, SB) or through L1.

    A thread holds MWI x NWI sums. Each adds its products in the order of k. For each k the thread reads MWI
    and NWI values: adjacent ones, or strided vectors of VWM and VWN values (STRM, STRN).

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
        # Staged values also pass through L1, or bypass it; neither is counted.
        smem_traffic_bytes=SIZE * (warps * (a.load_bytes + b.load_bytes) + staged_bytes),
        accesses=SIZE * (threads * loads + moves),
        instructions=SIZE * (mwg * nwg / 32 + warps * loads + moves / 32),
        chain_clocks=first + SIZE * device.fma_latency,
        execution=_xgemm_execution(columns),
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
        "GEMMK": frozenset((0,)),  # 1 selects another kernel
        "KREG": frozenset((1,)),  # a parameter of that other kernel
    },
    problem=(SIZE, SIZE),
    costs=_xgemm,
    traffic=Traffic(read_bytes=2 * SIZE**2 * 4, write_bytes=SIZE**2 * 4),
)


# -- convolution_kernel ------------------------------------------------------------------------------------


def _bank_passes(width: int, height: int, pitch: int) -> int:
    """Return the bank passes of a block that reads one word per lane, from lines `pitch` words apart."""
    lane = np.arange(width * height)
    bank = (lane // width * pitch + lane % width) % BANKS
    of_warps = np.zeros((ceil_div(len(lane), 32), BANKS), dtype=np.int64)
    np.add.at(of_warps, (lane // 32, bank), 1)
    return int(of_warps.max(axis=1).sum())


def _elements(steps: int, count: int, taps: int) -> int:
    """Return how many elements `count` outputs need along a line, `steps` apart, of `taps` each."""
    return len({tap + step * steps for tap in range(taps) for step in range(count)})


def _convolution_execution(columns: Columns, reads: Any, fma: Any) -> Execution:
    """Describe the copy of a tile, four loads of a thread at a time, and the unrolled loop over taps.

    Without shared memory, outputs of a thread load their elements again, and lanes load from any multiple of
    4 bytes, so that a warp touches two lines.

    Args:
        columns: Configurations.
        reads: Loads of a thread from the tile.
        fma: Multiply-adds of a block.
    """
    bx, by, tx, ty = (
        columns[name] for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y")
    )
    taps_x, taps_y = columns["filter_width"], columns["filter_height"]
    shared, warps = columns.get("use_shmem", np.ones_like(bx)), ceil_div(bx * by, 32)
    wide, high = bx * tx + taps_x // 2 * 2, by * ty + taps_y // 2 * 2
    copies = ceil_div(high, by) * ceil_div(wide, bx)  # of a thread: lanes beyond the edge are idle
    direct, taps = 1 - shared, taps_x * taps_y
    direct_loads = direct * taps * tx * ty
    address_instructions = 8 * shared * copies * warps + direct * taps * warps
    return Execution(
        registers=tx * ty + 4 + OTHER_REGISTERS,
        instructions=warps * fma / (bx * by) + address_instructions,
        accesses=direct_loads * bx * by,
        passes=2 * direct_loads * warps,
        l2_bytes=4 * wide * high,
        memory_waits=shared * copies / 4,
        l2_waits=direct * taps_y,
        shared_waits=taps_y,
        barriers=shared,
        code_bytes=(taps * tx * ty + np.maximum(reads, direct_loads)) * INSTRUCTION_BYTES,
        iterations=taps,
    )


def _convolution(columns: Columns, device: Device) -> Costs:
    """Count a convolution of one f32 image with one filter in constant memory.

    The image passes through shared memory, in lines that padding may lengthen, or through L1 (`use_shmem` 0).
    A thread reads each element that its outputs need once, and no two lanes of a warp read the same element.
    The elements of a thread start at any multiple of 4 bytes, and its outputs are a block apart. An access is
    therefore one element wide, unless the block has one column. A sum adds its taps in their order.

    Source: van Werkhoven et al., "Optimizing convolution operations on GPUs using adaptive tiling", 2014, and
    the kernel in the examples of Kernel Tuner.
    """
    bx, by, tx, ty = (
        columns[name].astype(np.int64)
        for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y")
    )
    taps_x, taps_y = columns["filter_width"], columns["filter_height"]
    out_x, out_y, threads = bx * tx, by * ty, bx * by
    warps, shared = ceil_div(threads, 32), columns.get("use_shmem", np.ones_like(bx))
    wide, high = out_x + taps_x // 2 * 2, out_y + taps_y // 2 * 2
    # Padding columns place the lines of a block narrower than the banks into different banks.
    pads = (columns["use_padding"] == 1) & (bx % BANKS != 0)
    pitch = wide + pads * (-(wide - bx) % BANKS)
    needed = by_each(_elements, bx, tx, taps_x) * by_each(_elements, by, ty, taps_y)
    at_once = np.where(bx == 1, 4, 1)
    passes = np.where(shared == 1, by_each(_bank_passes, bx, by, pitch), warps)
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
        execution=_convolution_execution(columns, reads, fma),
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
    # Without constant memory, loads of the filter come on top and are not counted.
    known={"read_only": SWITCH, "use_padding": SWITCH, "use_shmem": SWITCH, "use_cmem": SWITCH},
    problem=(SIZE, SIZE),
    costs=_convolution,
    traffic=Traffic(read_bytes=SIZE**2 * 4, write_bytes=SIZE**2 * 4),
)

RECORDED_KERNELS = (XGEMM, CONVOLUTION)
"""All cost models."""
