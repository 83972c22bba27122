"""This machine's processor as a device of a cluster: probes, and the price of a plan's step.

`calibrate` measures matrix products, elementwise operations, collectives of Gloo, and what DTensor adds to
a collective, and fits ``fixed + units / rate`` to each. No step of a model is measured. `ProcessorPricer`
prices a step as `tunebench plan cluster` does, from these laws.

All times are processor times of one process, threads of Gloo included: a process that waits for another one
uses no core, and other processes of the machine do not count. Probes run in as many processes as a plan has
at once, so that they share caches and memory as the processes of a step do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from benchmarks.plan_cluster_gpt import DIVISION
from benchmarks.rank_processes import run_ranks
from tunebench import device
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.forecast.network import OperationTime
from tunebench.forecast.prediction import Prediction
from tunebench.training.cluster import ClusterPlan, LayerTimes, StepPricer, TrainingCluster, TrainingJob
from tunebench.training.cluster.layer_time import LayerDivision, LayerRun
from tunebench.training.interconnect.collective import Collective
from tunebench.workload import Workload
from tunebench.workloads.networks import Operation
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["Calibration", "Law", "calibrate", "predicted_us"]

PRODUCTS = (
    (1, 256, 768, 256),
    (1, 256, 1024, 256),
    (1, 256, 256, 1024),
    (1, 256, 128, 256),
    (1, 128, 256, 64),
    (1, 1024, 256, 256),
    (16, 128, 128, 32),
    (8, 128, 32, 128),
)
"""Batch, m, n and k of the probed products."""

ELEMENTS = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)
"""Bytes of the probed collectives."""

SIZES = (2, 4, 8)
"""Numbers of processes of the probed collectives."""

PROCESSES = 8
"""Processes that run the probes of kernels at once: those of the plans that are timed."""


@dataclass(frozen=True, slots=True)
class Law:
    """Processor time of an operation: ``fixed_us + units / rate``.

    Attributes:
        fixed_us: Time without any work.
        per_us: Units in a microsecond: floating-point operations or bytes.
    """

    fixed_us: float
    per_us: float

    def us(self, units: float) -> float:
        """Return the time of some units."""
        return self.fixed_us + units / self.per_us

    @classmethod
    def fitted(cls, units: Sequence[float], times_us: Sequence[float]) -> Law:
        """Return the law with the least squares of relative errors; the fixed time is at least 0."""
        x, y = np.array(units, float), np.array(times_us, float)
        (fixed, slope), *_ = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones_like(y), rcond=None)
        if fixed < 0:
            fixed, slope = 0.0, float(np.sum(x / y) / np.sum((x / y) ** 2))
        return cls(float(fixed), 1 / max(float(slope), 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Laws of this machine.

    Attributes:
        product: Matrix products, by floating-point operations.
        moved: Elementwise operations, by bytes.
        wide: Elementwise operations with exponentials, and softmax, by bytes.
        collectives: Collectives by kind and number of processes, by bytes.
        divided_us: What DTensor adds to each all-reduce of a divided layer, by number of processes.
        send: Sends between two processes, by bytes.
    """

    product: Law
    moved: Law
    wide: Law
    collectives: dict[tuple[str, int], Law]
    divided_us: dict[int, float]
    send: Law

    def rows(self) -> Iterator[str]:
        """Yield rows of a table of the laws."""
        yield f"matrix products | {self.product.fixed_us:.1f} | {self.product.per_us / 1e3:.1f} GFLOP/s"
        for name, law in (("elementwise", self.moved), ("elementwise with exponentials", self.wide)):
            yield f"{name} | {law.fixed_us:.1f} | {law.per_us / 1e3:.2f} GB/s"
        for (kind, size), law in self.collectives.items():
            yield f"{kind}, {size} processes | {law.fixed_us:.0f} | {law.per_us / 1e3:.2f} GB/s"
        yield f"send | {self.send.fixed_us:.0f} | {self.send.per_us / 1e3:.2f} GB/s"
        for size, us in self.divided_us.items():
            yield f"DTensor, for each all-reduce of a layer on {size} processes | {us:.0f} | "


def _processor_us(run: Callable[[], Any], repeats: int = 5, batches: int = 5) -> float:
    """Return the processor time of a call in this process: the median of batches, of a mean over repeats."""
    run()
    times = []
    for _ in range(batches):
        began = time.process_time()
        for _ in range(repeats):
            run()
        times.append((time.process_time() - began) * 1e6 / repeats)
    return statistics.median(times)


def calibrate(progress: Callable[[str], None]) -> Calibration:
    """Return the laws of this machine, measured now.

    Args:
        progress: Receives what is being measured.
    """
    progress(f"calibration: products and elementwise operations in {PROCESSES} processes")
    kernels = _means(run_ranks(PROCESSES, lambda folder: _probed_kernels()))
    collectives: dict[tuple[str, int], Law] = {}
    divided: dict[int, float] = {}
    progress("calibration: sends")
    sends = _means(run_ranks(2, lambda folder: _probed_sends()))["send"]
    for size in SIZES:
        progress(f"calibration: collectives of {size} processes")
        times = _means(run_ranks(size, lambda folder: _probed_collectives()))
        (divided[size],) = times.pop("divided")
        for kind, times_us in times.items():
            collectives[kind, size] = Law.fitted(MESSAGES, times_us)
    return Calibration(
        product=Law.fitted([2.0 * batch * m * n * k for batch, m, n, k in PRODUCTS], kernels["product"]),
        moved=Law.fitted([12.0 * count for count in ELEMENTS], kernels["moved"]),
        wide=Law.fitted([8.0 * count for count in ELEMENTS] * 2, kernels["gelu"] + kernels["softmax"]),
        collectives=collectives,
        divided_us=divided,
        send=Law.fitted(MESSAGES, sends),
    )


def _means(ranks: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the mean over processes of each time."""
    return {
        name: [statistics.mean(times_us) for times_us in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
    }


def _probed_kernels() -> dict[str, list[float]]:
    """Return the times of products and elementwise operations in this process."""
    samples: dict[str, list[float]] = {"product": [], "moved": [], "gelu": [], "softmax": []}
    dist.barrier()
    for batch, m, n, k in PRODUCTS:
        a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
        samples["product"].append(_processor_us(lambda a=a, b=b: a @ b))
    for count in ELEMENTS:
        x, y = torch.randn(count // 128, 128), torch.randn(count // 128, 128)
        samples["moved"].append(_processor_us(lambda x=x, y=y: x + y))
        samples["gelu"].append(_processor_us(lambda x=x: functional.gelu(x, approximate="tanh")))
        samples["softmax"].append(_processor_us(lambda x=x: x.softmax(-1)))
    return samples


def _probed_collectives() -> dict[str, list[float]]:
    """Return the times of collectives and of a divided layer in this process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    samples: dict[str, list[float]] = {"all-reduce": [], "all-gather": [], "reduce-scatter": []}
    for nbytes in MESSAGES:
        whole = torch.zeros(nbytes // 4)
        part = whole.chunk(ranks)[rank].clone()
        parts = list(whole.chunk(ranks))
        samples["all-reduce"].append(_processor_us(lambda x=whole: dist.all_reduce(x)))
        samples["all-gather"].append(_processor_us(lambda xs=parts, x=part: dist.all_gather(xs, x)))
        samples["reduce-scatter"].append(_processor_us(lambda xs=parts, x=part: dist.reduce_scatter(x, xs)))
    return {**samples, "divided": [_divided_us(ranks)]}


def _probed_sends() -> dict[str, list[float]]:
    """Return the time of each side of a send: half of a send and a receive."""
    rank = dist.get_rank()
    messages = [torch.zeros(nbytes // 4) for nbytes in MESSAGES]
    return {"send": [_processor_us(lambda x=x: _there_and_back(x, rank)) / 2 for x in messages]}


def _there_and_back(x: torch.Tensor, rank: int) -> None:
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x, 1)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)


class _Tiny(nn.Module):
    """Two products as tensor parallelism divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after both products."""
        return self.down(self.up(x))


def _divided_us(ranks: int) -> float:
    """Return what dividing two small products adds to each of their two all-reduces, beyond a plain one."""
    x, module = torch.randn(1, 4, 16), _Tiny()

    def step() -> None:
        module(x.requires_grad_()).sum().backward()

    alone = _processor_us(step)
    chosen = {name: DIVISION[name]() for name in ("up", "down")}
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), chosen)
    small = torch.zeros(16)
    return (_processor_us(step) - alone) / 2 - _processor_us(lambda: dist.all_reduce(small))


# ------------------------------------------------------------------------------------------------ prices


class ProcessorPricer(StepPricer):
    """Times of a plan's step by processes with a core each, with collectives and sends of Gloo."""

    def __init__(self, calibration: Calibration, plan: ClusterPlan, **arguments: Any) -> None:
        self.calibration, self.plan = calibration, plan
        super().__init__(**arguments)

    def _collective_us(
        self, collective: Collective, nbytes: int, nodes: int, size: int, stride: int
    ) -> float:
        if size == 1:
            return 0.0
        us = self.calibration.collectives[collective, size].us(nbytes)
        if size == self.plan.tensor and stride == 1:
            us += self.calibration.divided_us[size]
        return us

    def _stage_ends(
        self,
        exchange_key: tuple[LayerDivision, int, tuple[int, int], Collective | None, bool],
        layers: tuple[int, int],
        passes_us: tuple[float, float],
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the sum of gradients, which lie in one buffer, and the gather of parameters."""
        division, nodes, (copies, _), summed_by, gathers = exchange_key
        nbytes = sum(self.job.network.held_parameters(division, layers)) * itemsize(self.job.dtype)

        def twice(collective: Collective | None) -> tuple[float, float]:
            if collective is None:
                return 0.0, 0.0
            us = self._collective(collective, nbytes, nodes, copies, division.tensor)
            return us, us

        return twice(summed_by), twice("all-gather" if gathers else None)

    def _send_us(self, nbytes: int, *where: int) -> float:
        return self.calibration.send.us(nbytes * self.plan.tensor)


def _operation_times(
    calibration: Calibration, operations: Sequence[Operation], on: Device
) -> list[OperationTime]:
    return [
        OperationTime(operation=operation, alone=_prediction(calibration, operation.workload, on), each_us=us)
        for operation in operations
        for us in (_kernel_us(calibration, operation.workload),)
    ]


def _kernel_us(calibration: Calibration, work: Workload) -> float:
    if isinstance(work, Gemm):
        return calibration.product.us(work.flops())
    traffic = work.traffic()
    wide = work.operator == "softmax" or any(name in str(work) for name in ("gelu", "exp(", "tanh"))
    return (calibration.wide if wide else calibration.moved).us(traffic.total_bytes)


def _prediction(calibration: Calibration, work: Workload, on: Device) -> Prediction:
    us = _kernel_us(calibration, work)
    return Prediction(
        workload=work,
        device=on,
        time_us=us,
        low_us=us,
        high_us=us,
        bound_us=0.0,
        utilisation=0.0,
        binding="dram",
        basis="interpolated",
        because="fitted to probes of this machine",
    )


def predicted_us(calibration: Calibration, job: TrainingJob, plan: ClusterPlan) -> tuple[float, float]:
    """Return the predicted step: with a fixed share of a core for each process, and with shared cores.

    In the first time, each process has as much of a core as cores are there for each process, also while it
    waits for another stage. In the second one, a process that waits leaves its core to others: the step takes
    the processor time of all processes divided by the cores, and at least the time with a core for each
    process.
    """
    cores = min(os.cpu_count() or 1, plan.devices)
    machine = TrainingCluster.parse(f"{plan.devices} x l4, {plan.devices} a node, 1.0, 8GB")
    layers = LayerTimes(
        network=job.network,
        device=device.find("cpu"),
        seq=job.seq,
        dtype=job.dtype,
        predictor=lambda operations, on: _operation_times(calibration, operations, on),
        host_us=0.0,
    )
    pricer = ProcessorPricer(calibration, plan, job=job, machine=machine, layers=layers)
    layers.predict([LayerRun.of(plan)])
    step = pricer.step(plan)
    shared_us = (step.time_us - step.bubble_us) * plan.devices / cores
    return step.time_us * plan.devices / cores, max(step.time_us, shared_us)
