"""Lower bounds: a time that no execution of a configuration can beat, and the resource that sets it.

The lower bound is the maximum of several floors, one for each hardware resource. A floor is either the work
that must be done divided by the highest rate of the hardware, or a chain of dependent instructions times
their minimum latency. Overlap can hide the smaller floors but never the largest. The lower bound is therefore
sound: pruning by it never discards the optimum. `docs/bound.md` derives the floors and lists what they leave
out.

Source: the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009), per resource; pruning by a
bound after DeepCuts (Jung, Dao and Lee, PLDI 2021), whose product of ratios is here a maximum of floors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.outcome import CacheState, Resources
from tunebench.space import Config, Table
from tunebench.variant import Costs, GpuVariant, Variant, ceil_div
from tunebench.workload import Traffic, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "RESOURCES",
    "Bound",
    "Bounds",
    "Resource",
    "bound",
    "dram_us",
    "refine",
    "refined_us",
    "resident_blocks",
]

Resource = Literal[
    "dram",
    "fma pipe",
    "tensor pipe",
    "special functions",
    "issue",
    "load/store",
    "shared",
    "fill port",
    "latency",
]
"""Resources that may set a lower bound: memory, the pipes, the schedulers, the load/store units, shared
memory, the port from L2 into an SM, and the latency of dependent instructions.
"""

RESOURCES: tuple[Resource, ...] = get_args(Resource)

WARP = 32
SMEM_BYTES_PER_INSTRUCTION = 16 * WARP
"""Maximum bytes that one warp instruction moves through shared memory: 16 bytes per lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The lower bound of one configuration.

    Attributes:
        us: Lower bound, in microseconds.
        binding: Resource with the highest floor, which sets the bound.
        floors: Floor of each resource that has work, in microseconds, highest first.
        assumed: Whether the device's rates rest on an assumption.
    """

    us: float
    binding: Resource
    floors: dict[Resource, float]
    assumed: bool

    def describe(self) -> str:
        """Return one line such as ``12.3 us: tensor pipe 12.3, dram 8.1, shared 3.0``."""
        floors = ", ".join(f"{name} {_figure(us)}" for name, us in self.floors.items())
        return f"{_figure(self.us)} us: {floors or 'nothing binds'}" + (
            " (rates assumed)" if self.assumed else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The lower bounds of all rows of a table.

    Attributes:
        us: Lower bound of each row, in microseconds.
        floors: Floor of each resource that has work in some row: one value per row, in microseconds.
        assumed: Whether the device's rates, and therefore the optimality gaps, rest on an assumption.
    """

    us: Array
    floors: dict[Resource, Array]
    assumed: bool

    def __len__(self) -> int:
        return len(self.us)

    @property
    def binding(self) -> NDArray[np.str_]:
        """The resource that sets each row's lower bound: the one with the highest floor."""
        names = list(self.floors)
        best, which = self.floors[names[0]], np.zeros(len(self), dtype=np.int8)
        for i, name in enumerate(names[1:], start=1):
            which[self.floors[name] > best] = i
            best = np.maximum(best, self.floors[name])
        return np.array(names)[which]

    def row(self, row: int) -> Bound:
        """Return the lower bound of one row."""
        floors = {name: float(floor[row]) for name, floor in self.floors.items()}
        binding = max(floors, key=floors.__getitem__)
        ordered = sorted(floors, key=floors.__getitem__, reverse=True)
        return Bound(
            us=float(self.us[row]),
            binding=binding,
            floors={name: floors[name] for name in ordered if floors[name] > 0},
            assumed=self.assumed,
        )

    def describe(self, row: int) -> str:
        """Return the lower bound of one row as one line of text (see `Bound.describe`)."""
        return self.row(row).describe()


def bound(
    costs: Costs, traffic: Traffic, device: Device, *, cache: CacheState = "cold", rows: int | None = None
) -> Bounds:
    """Return the lower bound of every configuration of a table, before anything is compiled.

    Launch overhead is not counted. Floors of kernels that run one after the other are not added, which
    is sound but loose: `costs` already holds the work of all of them.

    Args:
        costs: Work that each configuration must execute: columns of one length, or single numbers.
        traffic: Bytes that any implementation must move.
        device: Device whose rates and limits apply.
        cache: Whether the last-level cache holds no input at the start (cold) or may hold inputs (warm).
        rows: Number of configurations; required if every column of `costs` is a single number.

    Returns:
        The lower bound of each row in microseconds, with the floors that it is the maximum of.

    Raises:
        InputError: A column is negative or not finite, or columns differ in length.
        UnknownName: The device has no tensor-core instruction for the type in `costs`.
    """
    columns = _columns(costs)
    length = _length(columns, rows)
    floors: dict[Resource, Any] = {"dram": dram_us(traffic, device, cache)}
    if device.kind == "cpu":
        per_us = device.sm_count * device.fma_per_clock * device.max_clock_mhz
        floors["fma pipe"] = columns["blocks"] * columns["fma"] / per_us
    else:
        floors |= _sm_floors(columns, costs.mma_dtype, device)
    spread = {name: np.broadcast_to(floor, length) for name, floor in floors.items() if np.any(floor)}
    spread = spread or {"dram": np.zeros(length)}
    return Bounds(us=functools.reduce(np.maximum, spread.values()), floors=spread, assumed=device.assumed)


def refine(
    costs: Costs,
    traffic: Traffic,
    device: Device,
    resources: Resources,
    *,
    cache: CacheState = "cold",
    rows: int | None = None,
) -> Bounds:
    """Return the lower bounds again, with the registers and shared memory that the compiler allocated.

    Spilled bytes raise no floor: the compiler counts instructions, and those may be on a path not taken.

    Args:
        costs: As for `bound`, usually of the one configuration that was compiled.
        traffic: As for `bound`.
        device: As for `bound`.
        resources: Resource usage of the binary; the values of `costs` are kept where it is None.
        cache: As for `bound`.
        rows: As for `bound`.

    Returns:
        Lower bounds at least as high as those before compilation.

    Raises:
        InputError: As for `bound`.
        UnknownName: As for `bound`.
    """
    static = resources.static_smem_bytes or 0
    smem_bytes = np.maximum(costs.smem_bytes, static + (resources.dynamic_smem_bytes or 0))
    registers = costs.registers if resources.registers is None else float(resources.registers)
    refined = dataclasses.replace(costs, smem_bytes=smem_bytes, registers=registers)
    return bound(refined, traffic, device, cache=cache, rows=rows)


def refined_us(
    variant: Variant[Any],
    workload: Workload,
    config: Config,
    device: Device,
    resources: Resources,
    *,
    cache: CacheState = "cold",
) -> float:
    """Return the lower bound of one compiled configuration, in microseconds (see `refine`).

    A binary reports the largest usage of all its kernels. If the configuration launches several kernels, the
    largest usage may belong to a kernel that the costs do not describe. The lower bound then stays the one
    from before compilation.

    Args:
        variant: Variant that the configuration belongs to.
        workload: Workload that the configuration computes.
        config: Configuration that was compiled.
        device: Device whose rates and limits apply.
        resources: Resource usage of the binary.
        cache: Whether the last-level cache is cold or warm at the start.

    Returns:
        The lower bound, in microseconds.

    Raises:
        ConfigError: The configuration is not in the variant's search space.
    """
    table = Table(variant.space, np.array([variant.space.ordinals(config)], dtype=np.int16))
    costs = variant.costs(workload, table, device)
    alone = isinstance(variant, GpuVariant) and len(variant.launches(workload, config)) == 1
    allocated = resources if alone else Resources()
    return float(refine(costs, workload.traffic(), device, allocated, cache=cache, rows=1).us[0])


def resident_blocks(costs: Costs, device: Device) -> Array:
    """Return how many blocks one SM can hold at a time (at least 1), per row or as one value for all rows.

    A device limit of 0 is unknown and not applied. Shared memory and registers of `costs` are minimums, so
    the result is an upper limit.

    Args:
        costs: Threads, registers and shared memory of a block.
        device: Device whose limits per SM apply.

    Returns:
        Maximum number of resident blocks per SM.

    Source: CUDA C++ Programming Guide, "Multiprocessor Level"; registers are allocated in units of 8 per
    thread, for whole warps, from the file of one partition (occupancy calculator of Nsight Compute).
    """
    return _resident_blocks(_columns(costs), device)


def _resident_blocks(columns: dict[str, Array], device: Device) -> Array:
    warps = _warps(columns)
    blocks = np.asarray(device.blocks_per_sm or math.inf)
    if device.threads_per_sm:
        blocks = np.minimum(blocks, device.threads_per_sm // (WARP * warps))
    if device.smem_per_sm_bytes:
        smem_per_block = np.maximum(1.0, columns["smem_bytes"] + device.smem_reserved_bytes)
        blocks = np.minimum(blocks, device.smem_per_sm_bytes // smem_per_block)
    unit = 8 if device.compute_capability != (0, 0) else 1
    per_warp = WARP * unit * np.maximum(1.0, ceil_div(columns["registers"], unit))
    file = device.registers_per_sm / device.partitions
    blocks = np.minimum(blocks, device.partitions * (file // per_warp) // warps)
    at_least_one: Array = np.maximum(1.0, blocks)
    return at_least_one


def _warps(columns: dict[str, Array]) -> Array:
    warps: Array = np.maximum(1.0, ceil_div(columns["threads"], WARP))
    return warps


def dram_us(traffic: Traffic, device: Device, cache: CacheState) -> float:
    """Return the minimum time of the memory traffic that caches cannot hold, in microseconds.

    Outputs may still be in the last-level cache when the kernel ends. Inputs may be in it when the kernel
    starts, unless the cache was flushed.

    Args:
        traffic: Bytes that any implementation must read and write.
        device: Device whose memory bandwidth and last-level cache apply.
        cache: Whether the last-level cache is cold or warm at the start.

    Returns:
        Time at peak memory bandwidth, in microseconds.
    """
    reads = float(traffic.read_bytes)
    if cache == "warm":
        reads = max(0.0, reads - device.l2_bytes)
    writes = max(0.0, float(traffic.write_bytes) - device.l2_bytes)
    return (reads + writes) / (device.dram_gb_s * 1e3)


def _sm_floors(columns: dict[str, Array], mma_dtype: str | None, device: Device) -> dict[Resource, Array]:
    """Return the floors of the resources that every SM has separately, in microseconds."""
    resident = _resident_blocks(columns, device)
    whole, parted = _blocks_of_busiest(columns, resident, device)
    work: dict[Resource, tuple[Array, Array, float]] = {
        "fma pipe": (columns["fma"], parted, device.fma_per_clock),
        "special functions": (columns["sfu"], parted, device.sfu_per_clock),
        "issue": (_instructions(columns, device), parted, device.issue_per_clock),
        "load/store": (columns["accesses"], whole, device.accesses_per_clock),
        "shared": (columns["smem_traffic_bytes"], whole, device.smem_bytes_per_clock),
        "fill port": (columns["fill_bytes"], whole, device.fill_bytes_per_clock),
    }
    if np.any(columns["chain_clocks"]):
        work["latency"] = (columns["chain_clocks"], _rounds(columns, resident, device), 1.0)
    if np.any(columns["mma_flop"]):
        rates, dtype = device.mma_flop_per_clock, str(mma_dtype)
        if dtype not in rates:
            raise UnknownName(f"tensor-core type of {device.name}", dtype, rates)
        # From sm_100 on one thread drives the tensor core of the whole SM; on sm_120 warps drive their own.
        blocks = whole if device.compute_capability[0] in (10, 11) else parted
        work["tensor pipe"] = (columns["mma_flop"], blocks, rates[dtype])
    return {
        name: amount * (blocks / (rate * device.max_clock_mhz))
        for name, (amount, blocks, rate) in work.items()
        if np.any(amount)
    }


def _blocks_of_busiest(columns: dict[str, Array], resident: Array, device: Device) -> tuple[Array, Array]:
    """Return how many blocks' work the busiest SM executes in sequence, at the full rate of the SM.

    The first array is for units that serve the whole SM: at least the mean, and at least
    ``ceil(full_blocks / SMs)`` full blocks, since some SM runs that many. The second array is for units that
    belong to a partition. A warp uses the units of its own partition only, so `b` blocks of `w` warps reach
    at most ``min(1, b * w / partitions)`` of the SM's rate, and an SM that holds `r` blocks at a time
    needs ``ceil(n / r)`` times the time of one block alone.
    """
    mean = columns["blocks"] / device.sm_count
    busiest_blocks = np.ceil(columns["full_blocks"] / device.sm_count)
    alone = _warps(columns) / device.partitions
    if np.all(alone >= 1):
        whole = np.maximum(mean, busiest_blocks)
        return whole, whole
    together = np.maximum(1.0, np.minimum(resident, busiest_blocks))
    parted = np.maximum(
        mean / np.minimum(1.0, resident * alone), busiest_blocks / np.minimum(1.0, together * alone)
    )
    waves = np.ceil(busiest_blocks / resident) / np.minimum(1.0, alone)
    return np.maximum(mean, busiest_blocks), np.maximum(parted, waves)


def _rounds(columns: dict[str, Array], resident: Array, device: Device) -> Array:
    """Return how many full blocks run one after the other on the busiest SM, with `resident` at a time.

    Some SM runs ``ceil(full_blocks / SMs)`` blocks in `resident` slots. One slot therefore runs
    ``ceil(that / resident)`` of them, one after the other.
    """
    rounds: Array = np.ceil(np.ceil(columns["full_blocks"] / device.sm_count) / resident)
    return rounds


def _instructions(columns: dict[str, Array], device: Device) -> Array:
    """Return the warp instructions per block: the declared count, or what its work implies if higher."""
    major = device.compute_capability[0]
    if major == 0:
        return columns["instructions"]  # the instruction widths of other vendors are unknown
    lanes = WARP * (2 if major >= 10 else 1)  # packed f32 instructions came with sm_100
    implied = columns["fma"] / lanes + columns["sfu"] / WARP
    if major < 9:  # later, tensor cores and bulk copies access shared memory directly
        implied = implied + columns["smem_traffic_bytes"] / SMEM_BYTES_PER_INSTRUCTION
    return np.maximum(implied, columns["instructions"])


def _columns(costs: Costs) -> dict[str, Array]:
    """Return the columns of `costs` as float arrays, after a check that they are finite and not negative."""
    columns = {}
    for field in dataclasses.fields(costs):
        if field.name in ("mma_dtype", "serial_launches", "execution"):
            continue
        column = np.asarray(getattr(costs, field.name), dtype=np.float64)
        if column.size and not (column.min() >= 0 and column.max() < math.inf):
            raise InputError(
                f"costs: {field.name} must be finite and not negative, "
                f"got {significant(column.min(), 6)} to {significant(column.max(), 6)}"
            )
        columns[field.name] = column
    return columns


def _length(columns: dict[str, Array], rows: int | None) -> int:
    """Return the common length of the columns, or `rows` if all columns are single numbers."""
    lengths = {len(column) for column in columns.values() if column.ndim}
    if rows is not None:
        lengths.add(rows)
    if len(lengths) > 1:
        raise InputError(f"costs: columns must have one length, got lengths {sorted(lengths)}")
    return lengths.pop() if lengths else 1


def _figure(us: float) -> str:
    """Format a time: no decimals from 100 us, one decimal from 1 us, two significant digits below."""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 1 else f"{significant(us, 2)}"
