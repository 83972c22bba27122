"""Predicted time of this project's own kernels: a model of how blocks execute on the SMs of a device.

A block needs time on each pipe of its SM, and its warps wait: for memory, for shared memory, at barriers. An
SM holds several blocks, whose waits and pipes overlap. Its time for a round of resident blocks is therefore

- the time of the pipes for all of them, or
- the time of one block alone: its pipes, at the rate that its own warps reach, plus its waits,

whichever is longer, and a little more where both are alike. The busiest SM runs as many rounds as it has
blocks; memory traffic of all blocks together is a floor of its own. `Costs` has the work of a block, and
`Execution` what its instructions do besides: registers, bank conflicts, waits.

Source: the two regimes are those of Hong and Kim, "An analytical model for a GPU architecture with
memory-level and thread-level parallelism awareness", ISCA 2009, and of Volkov, "Understanding latency hiding
on GPUs", 2016. The constants are latencies and shares of peak rates, the same for all kernels and devices.
None was fitted to kernels that the model predicts: they are published values, rounded. Fits to five recorded
spaces, each predicted without its kernel and device, ranked no better (`docs/bound.md`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.bound import Bounds, dram_us, resident_blocks
from tunebench.device import Device
from tunebench.outcome import CacheState
from tunebench.variant import Costs, Execution, ceil_div
from tunebench.workload import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "CALL_US",
    "CONSTANTS",
    "INTERVAL",
    "LAUNCH_US",
    "MEMORY_INTERVAL",
    "MEMORY_SHARE",
    "SHORT_TENSOR_INTERVAL",
    "SHORT_US",
    "TENSOR_INTERVAL",
    "ExecutionConstants",
    "expected_execution",
    "interval_us",
    "least_us",
    "predict_us",
]

WARP = 32
MAX_REGISTERS = 255
"""Most registers of a thread. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConstants:
    """Constants of the model of execution: shares of peak rates, latencies in clocks, exponents.

    Attributes:
        fma: Share of the peak rate that multiply-adds reach.
        tensor: The same for tensor cores.
        load_store: The same for the load/store units.
        shared: The same for passes through shared memory and L1.
        asynchronous_shared: The same where units copy and multiply by themselves.
        l2: The same for the port from L2 into an SM.
        dram: The same for memory.
        l2_over_dram: Rate of the whole L2, over the peak bandwidth of memory.
        address_instructions: Instructions that an access needs besides itself.
        memory_clocks: Latency of loads that memory answers, under load.
        l2_clocks: Latency of loads that L2 answers, where warps of the block request the same lines.
        shared_clocks: Latency of loads from shared memory.
        barrier_clocks: Clocks that the warps of a block wait for one another at a barrier.
        code_bytes: Code of a loop that instruction caches supply at full rate.
        code_penalty: Growth of the issue time with the logarithm of larger code.
        pipes: Exponent with which the times of pipes are joined: infinite if the longest hides all others.
        asynchronous_pipes: The same where units copy and multiply by themselves.
        waits: Exponent with which pipes and waits are joined; the same for an SM and memory.
    """

    fma: float = 0.9
    tensor: float = 0.95
    load_store: float = 0.8
    shared: float = 0.8
    asynchronous_shared: float = 0.95
    l2: float = 1.0
    dram: float = 0.83
    l2_over_dram: float = 3.5
    address_instructions: float = 1.0
    memory_clocks: float = 500.0
    l2_clocks: float = 150.0
    shared_clocks: float = 30.0
    barrier_clocks: float = 30.0
    code_bytes: float = 64e3
    code_penalty: float = 0.5
    pipes: float = 3.0
    asynchronous_pipes: float = 8.0
    waits: float = 3.0


CONSTANTS = ExecutionConstants()
"""The constants that predictions use.

Latencies and the rate of L2 are round values between those that microbenchmarks report for Volta to Hopper
(the sources of `devices.toml`; 5,120 bytes per clock of L2 on A100 are 3.5 times its memory bandwidth).
`dram` is the median share of large elementwise operators on A100 (0.83), V100 (0.89) and T4 (0.73). Source:
operator latencies of sitar-lab/NeuSight.

`tensor` is what loops of tensor-core instructions reach alone; what else products spend is counted. Source:
Luo et al., "Dissecting the NVIDIA Hopper architecture through microbenchmarking and multiple level analysis",
2025 (96 % by wgmma of 256 columns).

`asynchronous_shared`: wgmma of 64 columns, whose operands take all 128 bytes that shared memory delivers in a
clock, is reported to reach the rate of wider ones. Source: Luo et al., "Benchmarking and dissecting the
NVIDIA Hopper GPU architecture", 2024.

`asynchronous_pipes` follows from the fastest bf16 library products on H100 SXM, whose tensor cores and shared
memory are both busy for about three quarters of the time. Source: library_gemm_h100_sxm.csv of
ai-dynamo/aiconfigurator.
"""

LAUNCH_US = 2.0
"""Overhead of one launch in microseconds, without the host's share.

bf16 library products of less than 300 kB take 2.8 us on H100, 4.2 on A100, 2.2 on B200 and RTX PRO 6000
(medians), of which blocks take 0.7 to 1.0 by this model. Source: library_gemm_*.csv of
ai-dynamo/aiconfigurator.
"""

CALL_US = 0.8
"""Time in microseconds of one call of a compiled kernel on a processor, with warm caches.

Source: median of 2,000 calls of a Numba kernel with one parallel loop on 15 elements, one or two threads, on
a busy Xeon virtual machine: 0.79 and 0.87 us. The first call after other work, whose code and stack are not
in caches, took 33 to 39 us; that is not part of a prediction.
"""

LEAST_L2_BYTES = 20.0
"""Bytes per clock that L2 supplies to each SM at least, where a large L2 stands before a slow memory.

Source: rates of L2 that microbenchmarks report for RTX 4090 and RTX 5090 (about 5 and 8.5 TB/s), per SM.
"""

INTERVAL = (0.55, 1.7)
"""90 % prediction interval, as multiples of the expected time.

From the errors on what no constant was fitted to: configurations of recorded spaces that reach half of the
optimum's speed, with kernel and device left out, and bf16 library products (shares in docs/bound.md).
"""

MEMORY_INTERVAL = (0.85, 1.3)
"""The same where the memory traffic takes `MEMORY_SHARE` of the time or more.

From elementwise operators of more than 200 MB on P4, P100, V100, T4 and A100, whose bandwidth reaches 0.72 to
0.91 of its peak. Source: operator latencies of sitar-lab/NeuSight.
"""

TENSOR_INTERVAL = (0.83, 1.31)
"""The same for tensor cores, from `SHORT_US` on.

From the fastest published kernel of each of 490 products and attentions, on A100, H100, RTX 4090 and RTX PRO
6000, against the configuration predicted best. 90 % of each device's times lie in the interval that the other
devices give, but for 2 % (docs/bound.md). Source: benchmarks/results/forecast_ranking/published.md.
"""

SHORT_TENSOR_INTERVAL = (0.78, 1.7)
"""The same for shorter times. From 357 products of the same files; the devices differ more."""

SHORT_US = 10.0
"""Time in microseconds below which launches, first waits and last blocks take a large part of it."""

MEMORY_SHARE = 0.7
"""Share of the memory floor in the expected time from which `MEMORY_INTERVAL` applies."""


def expected_execution(costs: Costs, traffic: Traffic) -> Execution:
    """Return how a block is expected to execute: what `costs` declares, or an estimate from its work.

    Args:
        costs: Work of the configurations.
        traffic: Bytes that any implementation must move, divided among the blocks where nothing is declared.
    """
    if costs.execution is not None:
        return costs.execution
    blocks = np.maximum(1.0, np.asarray(costs.blocks, dtype=np.float64))
    threads = np.maximum(1.0, np.asarray(costs.threads, dtype=np.float64))
    block_bytes = np.maximum(costs.fill_bytes, traffic.read_bytes / blocks) + traffic.write_bytes / blocks
    # Compilers start about four independent loads of a loop before they wait for the first.
    loads = np.maximum(np.asarray(costs.accesses) / threads, traffic.read_bytes / (16 * blocks * threads))
    return Execution(
        registers=np.asarray(costs.registers) + 8.0,
        l2_bytes=block_bytes,
        memory_waits=np.ceil(loads / 4),
    )


def predict_us(
    bounds: Bounds,
    costs: Costs,
    device: Device,
    traffic: Traffic | None = None,
    *,
    cache: CacheState = "cold",
    constants: ExecutionConstants = CONSTANTS,
) -> Array:
    """Return the expected time of each row of `bounds`, in microseconds; never below its lower bound.

    `docs/bound.md` says how well configurations are ranked, and how far times are off.

    Args:
        bounds: Lower bounds of the configurations.
        costs: Costs that the lower bounds were computed from.
        device: The device. On a processor the time is that of the longest floor at its measured rates, or at
            a share of its assumed rates, and `CALL_US`.
        traffic: Bytes that any implementation must move; None takes the memory floor of `bounds`.
        cache: Whether the last-level cache is cold or warm at the start.
        constants: Constants of the model.
    """
    if device.kind != "gpu":
        return _processor_us(bounds, device, traffic, constants)
    if traffic is None:
        memory_us = bounds.floors.get("dram", np.zeros(len(bounds))) / constants.dram
        traffic = Traffic(read_bytes=0, write_bytes=0)
    else:
        memory_us = np.full(len(bounds), _memory_us(traffic, device, cache, constants))
    execution = expected_execution(costs, traffic)
    sm_us, drain_us = _sm_us(bounds, costs, execution, device, constants)
    again_bytes = np.maximum(0.0, np.asarray(execution.memory_bytes) - traffic.total_bytes)
    memory_us = memory_us + again_bytes / (device.dram_gb_s * 1e3 * constants.dram)
    # Memory is idle while the first blocks start and the last ones finish.
    memory_us = memory_us + execution.serial_clocks / _clock_mhz(device) + drain_us
    busy_us = _joined(constants.waits, sm_us, memory_us)
    launches = np.asarray(costs.serial_launches, dtype=np.float64)
    expected: Array = np.maximum(busy_us, bounds.us) + launches * LAUNCH_US
    return expected


def _processor_us(
    bounds: Bounds, device: Device, traffic: Traffic | None, constants: ExecutionConstants
) -> Array:
    """Return the longest floor at achieved rates, or at a share of assumed ones, and a call.

    A store reads its line from memory first, unless the kernel writes past caches.
    """
    shares = {"dram": constants.dram, "fma pipe": constants.fma}
    achieved = device.with_meaningful_rates()
    if achieved is not None and achieved is not device:
        shares = {
            "dram": achieved.dram_gb_s / device.dram_gb_s,
            "fma pipe": achieved.max_clock_mhz / device.max_clock_mhz,
        }
    floors = dict(bounds.floors)
    if traffic is not None:
        moved_us = (traffic.read_bytes + 2 * traffic.write_bytes) / (device.dram_gb_s * 1e3)
        floors["dram"] = np.full(len(bounds), moved_us)
    longest = np.maximum.reduce([floor / shares[name] for name, floor in floors.items()])
    expected: Array = np.maximum(longest, bounds.us) + CALL_US
    return expected


def _joined(exponent: float | Array, *times: Array) -> Array:
    """Return the time of activities that overlap: the longest, and a little more where several are long."""
    longest = np.maximum(1e-9, np.maximum.reduce(np.broadcast_arrays(*times)))
    shares = sum((np.asarray(time) / longest) ** exponent for time in times)
    joined: Array = longest * shares ** (1 / exponent)
    return joined


def _memory_us(traffic: Traffic, device: Device, cache: CacheState, constants: ExecutionConstants) -> float:
    """Return the time of the memory traffic.

    Results displace lines of a cold L2, which were written before. A warm one holds all lines if they fit.
    """
    reads = dataclasses.replace(traffic, write_bytes=0)
    written: float = traffic.write_bytes
    if cache == "warm":
        written = min(written, max(0.0, traffic.total_bytes - device.l2_bytes))
    return (dram_us(reads, device, cache) + written / (device.dram_gb_s * 1e3)) / constants.dram


def _sm_us(
    bounds: Bounds, costs: Costs, execution: Execution, device: Device, constants: ExecutionConstants
) -> tuple[Array, Array]:
    """Return the time of the busiest SM, and how long the last blocks leave bandwidth unused, in us."""
    threads = np.maximum(1.0, np.asarray(costs.threads, dtype=np.float64))
    warps = ceil_div(threads, WARP)
    block_registers = device.registers_per_sm / (WARP * warps) // 8 * 8
    allowed = np.minimum(MAX_REGISTERS, block_registers)
    registers = np.minimum(allowed, execution.registers)
    spilled = np.maximum(0.0, execution.registers - allowed) * execution.iterations * threads
    resident = resident_blocks(dataclasses.replace(costs, registers=registers), device)
    all_blocks = np.maximum(costs.blocks, execution.blocks)
    blocks = np.maximum(1.0, np.ceil(all_blocks / device.sm_count))
    launched = np.where(np.asarray(execution.resident_blocks) > 0, execution.resident_blocks, np.inf)
    resident = np.minimum(np.minimum(resident, launched) * execution.at_once, blocks)
    pipe_clocks = _pipe_clocks(costs, execution, spilled, device, constants)
    wait_clocks = (
        (np.asarray(execution.first_waits) + np.asarray(execution.memory_waits)) * constants.memory_clocks
        + np.asarray(execution.l2_waits) * constants.l2_clocks
        + np.asarray(execution.shared_waits) * constants.shared_clocks
        + np.asarray(execution.barriers) * constants.barrier_clocks
        + np.asarray(execution.serial_clocks)
    )
    # Fewer warps than partitions leave units idle.
    own_clocks = pipe_clocks / np.minimum(1.0, warps / device.partitions)
    prefetched = np.asarray(execution.prefetched_waits) * constants.memory_clocks
    # In a warp that uses pipes in turn, they do not overlap; other warps of the block use them meanwhile.
    in_turn = np.asarray(execution.warp_clocks) > 0
    chain_clocks = np.where(in_turn, execution.warp_clocks / constants.tensor, own_clocks)
    alone_clocks = _joined(constants.waits, chain_clocks, prefetched) + wait_clocks
    alone_clocks = np.where(in_turn, _joined(constants.waits, own_clocks, alone_clocks), alone_clocks)

    def round_clocks(count: Array) -> Array:
        # The time alone has the pipes of one block already.
        others = (count**constants.waits - 1) * (pipe_clocks / alone_clocks) ** constants.waits
        together: Array = alone_clocks * (1 + others) ** (1 / constants.waits)
        return together

    rounds = blocks // resident
    rest = blocks - rounds * resident
    clocks = rounds * round_clocks(resident) + np.where(rest > 0, round_clocks(np.maximum(1.0, rest)), 0.0)
    clocks = clocks + execution.further_clocks
    # After the first round, blocks start and end at different times: at the end fewer and fewer are left, for
    # half of a block's time on average. `LAUNCH_US` includes this for blocks that wait once.
    further_rounds = 1 - np.minimum(1.0, resident * device.sm_count / np.maximum(1.0, all_blocks))
    drain_clocks = further_rounds * np.maximum(0.0, alone_clocks - 2 * constants.memory_clocks) / 2
    us = 1 / _clock_mhz(device)
    return np.broadcast_to(clocks * us, len(bounds)), np.broadcast_to(drain_clocks * us, len(bounds))


def _clock_mhz(device: Device) -> float:
    """Return the clock of the datasheet's peaks: the highest that the driver allows is not sustained."""
    return device.boost_clock_mhz or device.max_clock_mhz


def _pipe_clocks(
    costs: Costs,
    execution: Execution,
    spilled: Any,
    device: Device,
    constants: ExecutionConstants,
) -> Array:
    """Return the clocks that a block keeps the pipes of its SM busy."""
    accesses = np.maximum(costs.accesses, execution.accesses) + spilled
    implied = np.asarray(costs.fma) / WARP + np.asarray(costs.sfu) / WARP
    declared = np.maximum(np.maximum(costs.instructions, execution.instructions), implied)
    instructions = declared + (1 + constants.address_instructions) * accesses / WARP
    large_code = np.log(np.maximum(1.0, np.asarray(execution.code_bytes) / constants.code_bytes))
    fetching = 1 + constants.code_penalty * large_code
    passes = np.maximum(np.asarray(costs.smem_traffic_bytes) / device.smem_bytes_per_clock, execution.passes)
    asynchronous = np.asarray(execution.asynchronous) > 0
    shared = np.where(asynchronous, constants.asynchronous_shared, constants.shared)
    busy = [
        instructions / device.issue_per_clock * fetching,
        np.asarray(costs.fma) / (device.fma_per_clock * constants.fma) * fetching,
        np.asarray(costs.sfu) / (device.sfu_per_clock * constants.fma),
        accesses / (device.accesses_per_clock * constants.load_store),
        passes / shared,
    ]
    if np.any(costs.mma_flop):
        rate = device.mma_flop_per_clock[str(costs.mma_dtype)]
        tensor_clocks = np.maximum(np.asarray(costs.mma_flop) / rate, execution.tensor_clocks)
        busy.append(tensor_clocks / constants.tensor)
    # SMs that have blocks share what L2 delivers.
    busy_sms = np.clip(np.maximum(costs.blocks, execution.blocks), 1, device.sm_count)
    l2_share = constants.l2_over_dram * device.dram_gb_s * 1e3 / (busy_sms * _clock_mhz(device))
    l2_rate = np.minimum(device.fill_bytes_per_clock, np.maximum(l2_share, LEAST_L2_BYTES))
    l2_clocks = np.maximum(costs.fill_bytes, execution.l2_bytes) / (l2_rate * constants.l2)
    exponent = np.where(asynchronous, constants.asynchronous_pipes, constants.pipes)
    # Copies from L2 need no warp while they are under way, so that they overlap with all pipes.
    overlapping = np.where(asynchronous, constants.asynchronous_pipes, constants.waits)
    return _joined(overlapping, _joined(exponent, *busy), l2_clocks)


def least_us(traffic: Traffic, device: Device, cache: CacheState) -> float:
    """Return the time in microseconds of a workload's memory traffic in one launch; no prediction is below.

    Args:
        traffic: Bytes that any implementation must read and write.
        device: Device whose memory bandwidth and last-level cache apply.
        cache: Cache state of the predictions.
    """
    if device.kind != "gpu":
        return dram_us(traffic, device, cache) / CONSTANTS.dram + CALL_US
    return _memory_us(traffic, device, cache, CONSTANTS) + LAUNCH_US


def interval_us(expected: Array, bounds: Bounds) -> tuple[Array, Array]:
    """Return both ends of the 90 % prediction interval in microseconds, at least the bound.

    Its width follows from the regime: `MEMORY_INTERVAL` where memory traffic takes most of the time, else
    `TENSOR_INTERVAL` or `SHORT_TENSOR_INTERVAL` on tensor cores, else `INTERVAL`.

    Args:
        expected: Times returned by `predict_us`.
        bounds: Lower bounds of the same configurations.
    """
    memory_us = bounds.floors.get("dram", np.zeros(len(bounds)))
    by_memory = memory_us >= MEMORY_SHARE * expected
    on_tensor_cores = bounds.floors.get("tensor pipe", np.zeros(len(bounds))) > 0
    regimes = [by_memory, on_tensor_cores & (expected < SHORT_US), on_tensor_cores]
    intervals = (MEMORY_INTERVAL, SHORT_TENSOR_INTERVAL, TENSOR_INTERVAL)
    low, high = (
        np.select(regimes, multiples, default)
        for multiples, default in zip(zip(*intervals, strict=True), INTERVAL, strict=True)
    )
    return np.maximum(expected * low, bounds.us), expected * high
