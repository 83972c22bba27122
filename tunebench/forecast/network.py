"""Predicted time of a whole network on one device: the sum over its operations, and each part's share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tunebench._dataframe import Tabular, columns_of
from tunebench._figure import duration
from tunebench._notebook import html_grid, html_table
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast.library import predict_all
from tunebench.forecast.library.attention_backend import AttentionBackend, find_backend
from tunebench.forecast.library.kernel import library_kernels
from tunebench.forecast.library.model import ForecastModel
from tunebench.forecast.library.roofline_model import relative_attention_time
from tunebench.forecast.library.workload import MOST_GROUPED, equal_products
from tunebench.forecast.prediction import Prediction
from tunebench.workload import Workload
from tunebench.workloads.networks import Network, NetworkRun, Operation, Phase
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

__all__ = [
    "EAGER_HOST_SPREAD",
    "EAGER_HOST_US",
    "HOST_US",
    "LOOP_LAUNCH_US",
    "MEGATRON_HOST_US",
    "NetworkPrediction",
    "OperationTime",
    "PartTime",
    "attention_of",
    "host_launches",
    "host_us",
    "interval_widths",
    "predict_kernels",
    "predict_network",
    "predict_operations",
    "queued_us",
    "require_fp8",
]

DISPATCH_US = {False: 14.0, True: 27.0}
"""Time of the host before an operation starts on an idle device, in microseconds, by whether it is a matrix
product.

Medians over the devices of the public f32 operators: 11 to 23 us for elementwise operators, 26 to 48 us for
products (mean of batched products and linear layers). Source: `python -m benchmarks.host_time`.
"""

HOST_US = 10.0
"""Host time to launch one operation of eager PyTorch, in microseconds. The device waits if its work is
shorter.

An elementwise operator that is launched and timed alone takes 14 to 29 us more than its memory traffic
(median intercept of five operators on each of seven devices). That includes the way to the device, the start
of the kernel and two timing events; 10 us are assumed to be the host's share. No measured network is small
enough to be limited by the host, so this is an assumption about small batches. Source: operator latencies of
sitar-lab/NeuSight.
"""

EAGER_HOST_US = 42.0
"""Host time per kernel launch of inference in eager PyTorch, in microseconds: modules of Python, dispatcher,
allocation and launch.

Geometric mean of seven published times of small batches, which do not grow with the batch, per launch of the
network: ResNet-50 on A100 (two PyTorch versions), V100, T4 and RTX 3090 (34 to 47 us), ViT-base on A100 and
V100 (47 and 53). From one of the networks alone, the other is predicted 17 to 26 % too low, or 7 to 45 % too
high. Source: huggingface/transformers, `docs/source/en/perf_torch_compile.md`; jjblogs.com/threads/217728.
Backward passes are launched from C++, and their host time was not published: training has `HOST_US`.
"""

EAGER_HOST_SPREAD = 1.4
"""Factor from `EAGER_HOST_US` to the ends of its 90 % interval: Student's t over the seven times."""

MEGATRON_HOST_US = 53.0
"""Host time per kernel launch of Megatron-LM, in microseconds: layers are Python modules that also check,
recompute and communicate.

Fitted to the steps of one model (hidden 1024, 24 layers) of `vtrain_single.csv` whose kernels take less than
0.6 of the time: 51 to 54 us in the median of each kind of parallelism. The other four models, not used, show
50 to 56 us. Another host differs. Source: VIA-Research/vTrain; `python -m benchmarks.predict_training`.
"""

LOOP_LAUNCH_US = 3.8
"""Host time per kernel that a loop of C++ launches, after the first kernel of the loop, in microseconds.

Time per kernel of 2.9 us launched back to back on a V100, so an upper estimate of one launch. What a
library does besides (heuristics of cuBLAS, allocations) is not included. Source: Gray, "Getting started
with CUDA graphs", NVIDIA technical blog, 2019.
"""

HOST_ERROR = 0.13
"""Half-width of the 90 % interval of the host time, as a share: 90 % quantile of errors of these steps."""

BACKWARD_ATTENTION = 73 / 63
"""Time of the gradient of fused attention, relative to that of as many FLOPs forward.

No gradient was measured, so its kernels are predicted at the rate of forward ones. Forward passes reach up to
73 % of the peak of an A100, gradients up to 63 %. Source: Dao, "FlashAttention-2: faster attention with
better parallelism and work partitioning", 2023, section 4.1.
"""

PYTORCH_ATTENTION = {9: "flash-attention-2"}
"""Implementation of attention in PyTorch by major compute capability, where it is not the one that serving
frameworks choose, which the model is trained with.

`scaled_dot_product_attention` chooses FlashAttention-2 on Hopper, and so do programs that call the package
`flash_attn`. Training shapes take 1.7 to 2.3 times as long as with cuDNN there. Sources: pytorch/torchtitan,
pull request 1196; huggingface/transformers, pull request 48163.
"""

ERROR_CORRELATION = 0.5
"""Correlation between the errors of two operations.

An error in the model of a device or an operator affects all of its workloads, so errors do not average out
completely. They do not all have the same sign either.
"""

LIST_ERROR = 0.08
"""Assumed 90 % interval of the error of the list of operations itself, as a share of the total time.

On V100 and P100, which have measured times of these networks' own products, sums of measured operator times
differ from measured networks by at most 6.4 % (`python -m benchmarks.predict_models --measured`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """Predicted time of one operation of a network.

    Attributes:
        operation: The operation and its count.
        alone: Prediction of its workload when it is timed alone.
        each_us: Time of one execution in the network.
    """

    operation: Operation
    alone: Prediction
    each_us: float

    @property
    def time_us(self) -> float:
        """Time of all executions, in microseconds."""
        return self.each_us * self.operation.count

    @property
    def bound_us(self) -> float:
        """Lower bound of all executions, in microseconds."""
        return self.alone.bound_us * self.operation.count

    @property
    def low_us(self) -> float:
        """Lower end of the 90 % interval of all executions, if their errors are the same."""
        return self.time_us * self.alone.low_us / self.alone.time_us

    @property
    def high_us(self) -> float:
        """Upper end of the 90 % interval of all executions, if their errors are the same."""
        return self.time_us * self.alone.high_us / self.alone.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """One row of the breakdown of a network's time.

    Attributes:
        part: Part of the network, or phase.
        launches: Number of kernel launches.
        time_us: Predicted time of the part.
        bound_us: Lower bound of the part.
        flops: Floating-point operations.
        traffic_bytes: Bytes read and written.
        share: Share of the network's time, 0 to 1.
    """

    part: str
    launches: int
    time_us: float
    bound_us: float
    flops: int
    traffic_bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrediction(Tabular):
    """Predicted time of a network on one device.

    Attributes:
        network: Name of the network.
        device: The device.
        run: How the network runs.
        time_us: Predicted time of one forward pass or one training step; never below `bound_us`.
        low_us: Lower end of the 90 % prediction interval.
        high_us: Upper end of the 90 % prediction interval.
        bound_us: Sum of the lower bounds of all operations.
        host_us: Host time to launch all kernels. If it exceeds the device time, the step waits for it.
        operations: Predicted time of each operation.
        software_us: Part of `time_us` that the software adds to kernels and launches; 0 for other runs than
            training steps in 16 bits (`tunebench.stack`).
    """

    network: str
    device: Device
    run: NetworkRun
    time_us: float
    low_us: float
    high_us: float
    bound_us: float
    host_us: float
    operations: tuple[OperationTime, ...]
    software_us: float = 0.0

    @property
    def device_us(self) -> float:
        """Time of all operations on the device, in microseconds."""
        return sum(time.time_us for time in self.operations)

    def phase_us(self, phase: Phase) -> float:
        """Return the time of the operations of one phase on the device, in microseconds."""
        return sum(time.time_us for time in self.operations if time.operation.phase == phase)

    def phase_host_us(self, phase: Phase) -> float:
        """Return the host time to launch the kernels of one phase, in microseconds."""
        launches = host_launches(time for time in self.operations if time.operation.phase == phase)
        return self.host_us * launches / host_launches(self.operations)

    @property
    def waits_for_host(self) -> bool:
        """Whether the host needs longer to launch the kernels than the device to run them."""
        return self.host_us > self.device_us

    @property
    def launches(self) -> int:
        """Number of kernel launches."""
        return sum(time.operation.count for time in self.operations)

    @property
    def items(self) -> int:
        """Tokens of one pass; samples if the network has no sequences."""
        return self.run.batch * max(1, self.run.seq)

    @property
    def items_per_s(self) -> float:
        """Throughput in tokens or samples per second."""
        return self.items / self.time_us * 1e6

    def _columns(self) -> Mapping[str, Sequence[object]]:
        return columns_of(
            {
                "operation": str(time.operation.workload),
                "part": time.operation.part,
                "phase": time.operation.phase,
                "count": time.operation.count,
                **{
                    name: getattr(time, name)
                    for name in ("each_us", "time_us", "low_us", "high_us", "bound_us")
                },
            }
            for time in self.operations
        )

    def _repr_html_(self) -> str:
        """Return the time and its parts for notebooks."""
        interval = f"90 % prediction interval {duration(self.low_us)} to {duration(self.high_us)}"
        facts = (
            ("time", f"{duration(self.time_us)}, {interval}"),
            ("lower bound", duration(self.bound_us)),
            ("items per second", f"{self.items_per_s:,.0f}"),
            ("kernel launches", self.launches),
        )
        rows = (
            (part.part, part.launches, duration(part.time_us), f"{part.share:.1%}", duration(part.bound_us))
            for part in self.parts()
        )
        columns = ("part", ">launches", ">time", ">share", ">lower bound")
        return html_table(f"{self.network} on {self.device.name}", facts) + html_grid(*columns, rows=rows)

    def parts(self) -> tuple[PartTime, ...]:
        """Return the time of each part of the network, longest first."""
        return _table([(time.operation.part, time) for time in self.operations])

    def phases(self) -> tuple[PartTime, ...]:
        """Return the time of each phase (forward, backward, optimizer), longest first."""
        return _table([(time.operation.phase, time) for time in self.operations])


def predict_network(
    network: Network,
    device: Device,
    run: NetworkRun,
    *,
    host_us_per_launch: float | None = None,
    model: ForecastModel | None = None,
) -> NetworkPrediction:
    """Predict one forward pass or one training step of a network on one device.

    Operations run one after the other without a gap, unless the host needs longer to launch them. Training
    steps in 16 bits take longer by the efficiency of their software (`tunebench.stack`).

    Args:
        network: The network.
        device: The device; it does not have to be present.
        run: Batch, sequence length, mode, dtype and so on.
        host_us_per_launch: Host time per kernel launch in microseconds; 0 for a captured CUDA graph, None for
            that of the run's stack.
        model: Model of the library kernels; None for the bundled one.

    Raises:
        InputError: if the network or the device does not support this run.
    """
    prediction = predict_kernels(network, device, run, host_us_per_launch=host_us_per_launch, model=model)
    if run.efficiency is None:
        return prediction
    low_us, time_us, high_us = run.efficiency.apply(prediction.low_us, prediction.time_us, prediction.high_us)
    return replace(
        prediction,
        low_us=max(prediction.bound_us, low_us),
        time_us=max(prediction.bound_us, time_us),
        high_us=high_us,
        software_us=time_us - prediction.time_us,
    )


def predict_kernels(
    network: Network,
    device: Device,
    run: NetworkRun,
    *,
    host_us_per_launch: float | None = None,
    model: ForecastModel | None = None,
) -> NetworkPrediction:
    """Predict the kernels and launches of a network, without what its software adds.

    Args:
        network: The network.
        device: The device; it does not have to be present.
        run: Batch, sequence length, mode, dtype and so on.
        host_us_per_launch: Host time per kernel launch in microseconds; 0 for a captured CUDA graph, None for
            that of the run's stack.
        model: Model of the library kernels; None for the bundled one.

    Raises:
        InputError: if the network or the device does not support this run.
    """
    require_fp8(device, run.fp8)
    times = predict_operations(
        _operations(network, run), device, model=model, attention=attention_of(run, device)
    )
    busy = sum(operation_time.time_us for operation_time in times)
    if host_us_per_launch is None:
        host_us_per_launch = host_us(run)
    host = host_us_per_launch * host_launches(times)
    bound = sum(operation_time.bound_us for operation_time in times)
    less, more = interval_widths(times)
    time = max(queued_us(run, busy, host), bound)
    if host > busy or run.launch_blocking:
        # The errors of host and kernels are independent.
        host_less, host_more = _host_errors(host_us_per_launch)
        less, more = math.hypot(less, host_less * host), math.hypot(more, host_more * host)
    return NetworkPrediction(
        network=network.name,
        device=device,
        run=run,
        time_us=time,
        low_us=max(bound, time - less),
        high_us=time + more,
        bound_us=bound,
        host_us=host,
        operations=times,
    )


def _operations(network: Network, run: NetworkRun) -> tuple[Operation, ...]:
    """Return the operations of a run, or raise InputError that names the batch if a batch of 1 would run."""
    try:
        return network.operations(run)
    except InputError as error:
        if run.batch == 1:
            raise
        network.operations(replace(run, batch=1))  # raises the same error if the batch is not its cause
        raise InputError(
            f"{network.name} cannot run a batch of {run.batch} on a device: {error}; expected a smaller "
            "batch (--batch)"
        ) from error


def queued_us(run: NetworkRun, device_us: float, host_us: float) -> float:
    """Return the time of a queue of kernels with their launches.

    Launches are asynchronous: host and device overlap, and the slower of both counts, unless each launch
    waits for its kernel.

    Args:
        run: How the network runs.
        device_us: Time of the kernels.
        host_us: Time of the host to launch them.
    """
    return device_us + host_us if run.launch_blocking else max(device_us, host_us)


def host_launches(times: Iterable[OperationTime]) -> float:
    """Return the number of launches that take the host as much time as all launches of these operations.

    A launch in a loop of C++ counts as the share `LOOP_LAUNCH_US` of one of Megatron-LM, whose layers have
    these loops.
    """
    share = LOOP_LAUNCH_US / MEGATRON_HOST_US
    listed = (time.operation for time in times)
    return sum(operation.count if operation.loop == 1 else _looped(operation, share) for operation in listed)


def _looped(operation: Operation, share: float) -> float:
    return operation.count // operation.loop * (1 + share * (operation.loop - 1))


def host_us(run: NetworkRun) -> float:
    """Return the host time per kernel launch of a run, in microseconds."""
    if run.cuda_graphs:
        return 0.0
    if run.kernels == "megatron":
        return MEGATRON_HOST_US
    return EAGER_HOST_US if run.stack == "eager" and not run.trains else HOST_US


def _host_errors(host_us_per_launch: float) -> tuple[float, float]:
    """Return how far the host time may be below and above its estimate, as shares of it."""
    if host_us_per_launch == EAGER_HOST_US:
        return 1 - 1 / EAGER_HOST_SPREAD, EAGER_HOST_SPREAD - 1
    return HOST_ERROR, HOST_ERROR


def require_fp8(device: Device, fp8: str) -> None:
    """Raise InputError if a run multiplies 8-bit floats and the device has no tensor cores for them."""
    if fp8 != "none" and "e4m3" not in device.mma_flop_per_clock:
        raise InputError(
            f"{device.name} has no tensor cores for 8-bit floats: expected fp8=none, or sm_89 and later, got "
            f"fp8={fp8}"
        )


def predict_operations(
    operations: Sequence[Operation],
    device: Device,
    *,
    model: ForecastModel | None = None,
    sustained: bool = True,
    attention: str = "default",
) -> tuple[OperationTime, ...]:
    """Predict operations that run one after the other without a gap. Equal workloads are predicted once.

    Args:
        operations: Operations of a network or of a part of it.
        device: The device.
        model: Model of the library kernels; None for the bundled one.
        sustained: Whether the clock is that of the power limit (see `forecast.library.power`), instead of
            that of a short measurement.
        attention: Implementation of attention of many queries in 16 bits; `default` for the one that serving
            frameworks choose for the device.

    Raises:
        InputError: if the device cannot run the implementation.
    """
    # Layers repeat their workloads; distinct ones are predicted as one batch.
    workloads = tuple(dict.fromkeys(operation.workload for operation in operations))
    separate = {
        work: equal_products(work)
        for work in workloads
        if isinstance(work, GroupedGemm) and work.skew != "one"
    }
    problems = tuple(dict.fromkeys((*workloads, *separate.values())))
    predictions = predict_all(problems, device, model=model, sustained=sustained)
    alone = dict(zip(problems, predictions, strict=True))
    # Not also by products in sequence, as `predict` of one workload: a published step of Qwen3 30B
    # (`benchmarks/results/plan_problems.md`), predicted 0.95 of its time, would be 0.89 of it.
    most_us: dict[Workload, float] = {
        work: MOST_GROUPED * alone[products].time_us for work, products in separate.items()
    }
    backend = None if attention == "default" else find_backend(attention, device)
    return tuple(
        OperationTime(
            operation=operation,
            alone=alone[operation.workload],
            each_us=min(
                _each_us(operation, alone[operation.workload], backend),
                most_us.get(operation.workload, math.inf),
            ),
        )
        for operation in operations
    )


def attention_of(run: NetworkRun, device: Device) -> str:
    """Return the implementation of attention of a run: its own, or that of its stack."""
    if run.attention != "default" or run.kernels == "megatron":
        return run.attention
    return PYTORCH_ATTENTION.get(device.compute_capability[0], "default")


def _each_us(operation: Operation, alone: Prediction, backend: AttentionBackend | None) -> float:
    """Return the time of one execution in a network, with another implementation of attention if given."""
    work = operation.workload
    us = alone.time_us + (DISPATCH_US[_is_product(work)] if operation.alone else 0.0)
    if not isinstance(work, Attention):
        return us
    if backend and work.seq_q > 1 and work.dtype != "f32":
        (kernel,) = library_kernels(work, alone.device)
        us *= relative_attention_time(kernel, alone.device, backend)
    return us * (BACKWARD_ATTENTION if work.direction == "backward" else 1.0)


def _is_product(work: Workload) -> bool:
    return work.category == "dot product"


def interval_widths(
    times: Iterable[OperationTime], together: float = ERROR_CORRELATION
) -> tuple[float, float]:
    """Return the distances from the total time to both ends of its 90 % interval, in microseconds.

    Half-widths h of the operations' intervals add up to ``sqrt(c (sum h)^2 + (1 - c) sum h^2)``, where c is
    the correlation of errors. The error of the list of operations is independent of it.

    Args:
        times: Predicted time of each operation.
        together: Correlation between the errors of two operations.
    """
    operation_times = list(times)
    lists = LIST_ERROR * sum(time.time_us for time in operation_times)
    below = _combined([time.time_us - time.low_us for time in operation_times], together)
    above = _combined([time.high_us - time.time_us for time in operation_times], together)
    return math.hypot(below, lists), math.hypot(above, lists)


def _combined(widths: Sequence[float], together: float) -> float:
    return math.sqrt(together * sum(widths) ** 2 + (1 - together) * sum(width**2 for width in widths))


def _table(named: Sequence[tuple[str, OperationTime]]) -> tuple[PartTime, ...]:
    """Return one row per name, longest time first."""
    total = sum(time.time_us for _, time in named) or 1.0
    groups: dict[str, list[OperationTime]] = {}
    for name, time in named:
        groups.setdefault(name, []).append(time)
    lines = [_line(name, group, total) for name, group in groups.items()]
    return tuple(sorted(lines, key=lambda line: -line.time_us))


def _line(name: str, group: Sequence[OperationTime], total_us: float) -> PartTime:
    time = sum(operation_time.time_us for operation_time in group)
    operations = [operation_time.operation for operation_time in group]
    return PartTime(
        part=name,
        launches=sum(operation.count for operation in operations),
        time_us=time,
        bound_us=sum(operation_time.bound_us for operation_time in group),
        flops=sum(operation.count * operation.workload.flops() for operation in operations),
        traffic_bytes=sum(
            operation.count * operation.workload.traffic().total_bytes for operation in operations
        ),
        share=time / total_us,
    )
