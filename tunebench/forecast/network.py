"""How long a whole network takes on one device: the sum over its operations, and where the time goes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench.device import Device
from tunebench.forecast.library import predict_all
from tunebench.forecast.library.model import ForecastModel
from tunebench.forecast.prediction import Prediction
from tunebench.workload import Workload
from tunebench.workloads.networks import Network, NetworkRun, Operation

__all__ = [
    "HOST_US",
    "NetworkPrediction",
    "OperationTime",
    "PartTime",
    "interval_widths",
    "predict_network",
    "predict_operations",
]

MIN_KERNEL_US = 2.5
"""Least time of a kernel that stands in a queue behind others.

The fastest rows of vendor libraries' products on H100 and A100. Source: library_gemm_*.csv of
ai-dynamo/aiconfigurator.
"""

MIN_PRODUCT_US = 5.0
"""What the smallest products in f32 need on the device itself, taken to be."""

DISPATCH_US = {False: 13.0, True: 30.0}
"""What an operation costs beside its work where the queue is empty, by whether it is a product.

Medians over seven devices: of the smallest products, and of intercepts of lines through the smallest rows of
five elementwise operators, less what the kernels themselves need. They are 11 to 26 us, and 26 to 46 us.
Source: operator latencies of sitar-lab/NeuSight.
"""

HOST_US = 10.0
"""What the host needs to launch one operation of eager PyTorch: below that a device waits for it.

An elementwise operator that is launched and timed alone takes 14 to 29 us beside the time of its bytes (the
median intercept of five operators on each of seven devices), of which the way to the device, the kernel's own
start and the clock's two marks are a part; 10 us are taken to be the host's. No measured network here is so
small that it waits: this is a belief about small batches. Source: operator latencies of sitar-lab/NeuSight.
"""

ERROR_CORRELATION = 0.5
"""Correlation of the errors of two operations.

What is wrong about a device or an operator is wrong about all of its workloads, so errors do not average out;
nor do they all point the same way.
"""

LIST_ERROR = 0.08
"""How far the operations of a network may be from what really runs, as a share of the time: nine in ten.

So much do sums of measured times over lists of operations differ from measured networks
(`python -m benchmarks.predict_models --measured`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """One operation of a network, and how long it takes.

    Attributes:
        operation: What runs, and how often.
        alone: The prediction of its workload, timed alone.
        each_us: Time of one, in a queue behind others, or on an empty one.
    """

    operation: Operation
    alone: Prediction
    each_us: float

    @property
    def time_us(self) -> float:
        """Time of all."""
        return self.each_us * self.operation.count

    @property
    def bound_us(self) -> float:
        """What no kernels beat, one for each."""
        return self.alone.bound_us * self.operation.count

    @property
    def low_us(self) -> float:
        """Lower end of the interval of all, if all err alike."""
        return self.time_us * self.alone.low_us / self.alone.time_us

    @property
    def high_us(self) -> float:
        """Upper end, likewise."""
        return self.time_us * self.alone.high_us / self.alone.time_us


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTime:
    """A line of the table that says where the time goes.

    Attributes:
        part: Of the network; or a phase.
        launches: Kernels.
        time_us: Time of all of them.
        bound_us: What no kernels beat.
        flops: Floating-point operations.
        traffic_bytes: Bytes read and written.
        share: Of the time of the whole.
    """

    part: str
    launches: int
    time_us: float
    bound_us: float
    flops: int
    traffic_bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrediction:
    """How long a network takes on a device.

    Attributes:
        network: Its name.
        device: Where.
        run: How it is run.
        time_us: Expected time of one pass, or of one training step; never below `bound_us`.
        low_us: Nine of ten real times lie between this and `high_us`.
        high_us: The other end.
        bound_us: Sum of what no kernels for these operations beat.
        host_us: What the host needs to launch all; if it is more than the device needs, it is the time.
        operations: Of what the time is made.
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

    @property
    def device_us(self) -> float:
        """Sum of the times of all operations on the device."""
        return sum(each.time_us for each in self.operations)

    @property
    def waits_for_host(self) -> bool:
        """Whether launching takes longer than what is launched."""
        return self.host_us > self.device_us

    @property
    def launches(self) -> int:
        """Kernels that are launched."""
        return sum(each.operation.count for each in self.operations)

    @property
    def items(self) -> int:
        """Tokens of one pass; samples, if the network has no sequences."""
        return self.run.batch * max(1, self.run.seq)

    @property
    def items_per_s(self) -> float:
        """Tokens, or samples, a second."""
        return self.items / self.time_us * 1e6

    def parts(self) -> tuple[PartTime, ...]:
        """Return where the time goes by part, the longest first."""
        return _table([(each.operation.part, each) for each in self.operations])

    def phases(self) -> tuple[PartTime, ...]:
        """Return where the time goes by phase: forward, backward, optimizer; the longest first."""
        return _table([(each.operation.phase, each) for each in self.operations])


def predict_network(
    network: Network,
    device: Device,
    run: NetworkRun,
    *,
    host_us_per_launch: float = HOST_US,
    model: ForecastModel | None = None,
) -> NetworkPrediction:
    """Predict one pass, or one training step, of a network on one device.

    Operations run one after the other, each as long as if it were alone, less what only one alone costs: the
    way from the host, which a queue hides.

    Args:
        network: What is run.
        device: Where; it need not be here.
        run: Batch, length of sequences, mode, type and so on.
        host_us_per_launch: What the host needs for one launch; 0 for a captured graph.
        model: What was learned of kernels; the shipped model if it is None.

    Raises:
        InputError: if the network cannot be run so.
    """
    times = predict_operations(network.operations(run), device, model=model)
    busy = sum(each.time_us for each in times)
    host = host_us_per_launch * sum(each.operation.count for each in times)
    bound = sum(each.bound_us for each in times)
    less, more = interval_widths(times)
    time = max(busy, host, bound)
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


def predict_operations(
    operations: Sequence[Operation], device: Device, *, model: ForecastModel | None = None
) -> tuple[OperationTime, ...]:
    """Predict operations that follow one another without a gap; alike workloads once.

    Args:
        operations: Of one network, or of a part of it.
        device: Where they run.
        model: What was learned of kernels; the shipped model if it is None.
    """
    problems = tuple(dict.fromkeys(each.workload for each in operations))
    if not problems:
        return ()
    least = tuple(dict.fromkeys(map(_least, problems)))
    predictions = predict_all((*problems, *least), device, model=model)
    costs = dict(zip(least, predictions.time_us[len(problems) :], strict=True))
    alone = dict(zip(problems, predictions, strict=False))
    queued = {problem: _queued_us(alone[problem], costs[_least(problem)]) for problem in problems}
    return tuple(
        OperationTime(
            operation=each,
            alone=alone[each.workload],
            each_us=queued[each.workload] + (DISPATCH_US[_is_product(each.workload)] if each.alone else 0.0),
        )
        for each in operations
    )


def _is_product(work: Workload) -> bool:
    return work.category == "dot product"


def _least(work: Workload) -> Workload:
    """Return next to no work of the same operator and type: how long it takes is what any costs alone."""
    sizes = _LEAST.get(work.operator)
    return work if sizes is None else type(work).from_dimensions({**sizes, "dtype": work.dtype})


_LEAST: dict[str, dict[str, Any]] = {
    "batchnorm_stats": {"rows": 2, "cols": 32},
    "elementwise": {"rows": 1, "cols": 32, "expression": "x"},
    "gemm": {"batch": 4, "m": 32, "n": 32, "k": 32},
    "layernorm": {"rows": 1, "cols": 32},
    "reduction": {"rows": 1, "cols": 32, "expression": "x", "reduce": "sum"},
    "rmsnorm": {"rows": 1, "cols": 32},
    "softmax": {"rows": 1, "cols": 32},
}
"""Sizes of next to no work, by operator. The others take as long in a queue as alone, until more is known."""


def _queued_us(alone: Prediction, least_us: float) -> float:
    """Return a time without what a kernel costs only if it is timed alone.

    Args:
        alone: Of a workload.
        least_us: Time of next to no work of its operator and type.
    """
    if alone.workload.operator not in _LEAST:
        return alone.time_us
    own = MIN_PRODUCT_US if _is_product(alone.workload) else MIN_KERNEL_US
    return max(alone.time_us - max(least_us - own, 0.0), alone.bound_us, MIN_KERNEL_US)


def interval_widths(
    times: Iterable[OperationTime], together: float = ERROR_CORRELATION
) -> tuple[float, float]:
    """Return how far below and above their sum the time of operations may be, in microseconds.

    Half-widths h of intervals add up to ``sqrt(c (sum h)^2 + (1 - c) sum h^2)``, c being the correlation of
    errors; what the list of operations may itself be wrong by is independent of it.

    Args:
        times: Of operations; alike ones err alike.
        together: Correlation of the errors of two operations.
    """
    given = list(times)
    lists = LIST_ERROR * sum(each.time_us for each in given)
    below = _combined([each.time_us - each.low_us for each in given], together)
    above = _combined([each.high_us - each.time_us for each in given], together)
    return math.hypot(below, lists), math.hypot(above, lists)


def _combined(widths: Sequence[float], together: float) -> float:
    return math.sqrt(together * sum(widths) ** 2 + (1 - together) * sum(each**2 for each in widths))


def _table(named: Sequence[tuple[str, OperationTime]]) -> tuple[PartTime, ...]:
    """Return one line a name."""
    total = sum(each.time_us for _, each in named) or 1.0
    groups: dict[str, list[OperationTime]] = {}
    for name, each in named:
        groups.setdefault(name, []).append(each)
    lines = [_line(name, group, total) for name, group in groups.items()]
    return tuple(sorted(lines, key=lambda line: -line.time_us))


def _line(name: str, group: Sequence[OperationTime], total_us: float) -> PartTime:
    time = sum(each.time_us for each in group)
    operations = [each.operation for each in group]
    return PartTime(
        part=name,
        launches=sum(each.count for each in operations),
        time_us=time,
        bound_us=sum(each.bound_us for each in group),
        flops=sum(each.count * each.workload.flops() for each in operations),
        traffic_bytes=sum(each.count * each.workload.traffic().total_bytes for each in operations),
        share=time / total_us,
    )
