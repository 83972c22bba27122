"""This machine's processor as a device of a cluster: probes, and the price of a plan's step.

`calibrate` measures matrix products, elementwise operations, collectives of Gloo, and what DTensor adds to
a collective, and fits ``fixed + units / rate`` to each. No step of a model is measured. `ProcessorPricer`
prices a step as `tunebench plan cluster` does, from these laws.
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
from tunebench.forecast.network import OperationTime
from tunebench.forecast.parallel.collective import Collective
from tunebench.forecast.prediction import Prediction
from tunebench.plan.cluster import ClusterPlan, LayerTimes, Slowdown, StepPricer, TrainingCluster, TrainingJob
from tunebench.plan.cluster.layer_time import LayerRun
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

ELEMENTS = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of the probed collectives."""

SIZES = (2, 4, 8)
"""Numbers of processes of the probed collectives."""


@dataclass(frozen=True, slots=True)
class Law:
    """Time of an operation: ``fixed_us + units / rate``.

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


def _median_us(run: Callable[[], Any], repeats: int = 15) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def calibrate(progress: Callable[[str], None]) -> Calibration:
    """Return the laws of this machine, measured now.

    Args:
        progress: Receives what is being measured.
    """
    progress("calibration: products and elementwise operations")
    products, moved, wide = [], [], []
    for batch, m, n, k in PRODUCTS:
        a, b = torch.randn(batch, m, k), torch.randn(batch, k, n)
        products.append((2.0 * batch * m * n * k, _median_us(lambda a=a, b=b: a @ b)))
    for count in ELEMENTS:
        x, y = torch.randn(count // 128, 128), torch.randn(count // 128, 128)
        moved.append((12.0 * count, _median_us(lambda x=x, y=y: x + y)))
        wide.append((8.0 * count, _median_us(lambda x=x: functional.gelu(x, approximate="tanh"))))
        wide.append((8.0 * count, _median_us(lambda x=x: x.softmax(-1))))
    collectives: dict[tuple[str, int], Law] = {}
    divided, sends = {}, None
    for size in SIZES:
        progress(f"calibration: collectives of {size} processes")
        ranks = run_ranks(size, lambda folder: _probed())
        for kind in ranks[0]["collectives"]:
            slowest = [max(each) for each in zip(*(rank["collectives"][kind] for rank in ranks), strict=True)]
            collectives[kind, size] = Law.fitted(MESSAGES, slowest)
        divided[size] = max(rank["divided"] for rank in ranks)
        if size == 2:
            sends = Law.fitted(
                MESSAGES, [max(each) for each in zip(*(r["sends"] for r in ranks), strict=True)]
            )
    assert sends is not None
    return Calibration(
        product=Law.fitted(*zip(*products, strict=True)),
        moved=Law.fitted(*zip(*moved, strict=True)),
        wide=Law.fitted(*zip(*wide, strict=True)),
        collectives=collectives,
        divided_us=divided,
        send=sends,
    )


def _probed() -> dict[str, Any]:
    """Return the times of collectives, sends and divided layers in this process."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, list[float]] = {"all-reduce": [], "all-gather": [], "reduce-scatter": []}
    sends = []
    for nbytes in MESSAGES:
        whole = torch.zeros(nbytes // 4)
        part = whole.chunk(ranks)[rank].clone()
        parts = list(whole.chunk(ranks))
        found["all-reduce"].append(_median_us(lambda x=whole: dist.all_reduce(x)))
        found["all-gather"].append(_median_us(lambda xs=parts, x=part: dist.all_gather(xs, x)))
        found["reduce-scatter"].append(_median_us(lambda xs=parts, x=part: dist.reduce_scatter(x, xs)))
        sends.append(_median_us(lambda x=whole: _there_and_back(x, rank)) / 2 if ranks == 2 else 0.0)
    return {"collectives": found, "sends": sends, "divided": _divided_us(ranks)}


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

    alone = _median_us(step)
    chosen = {name: DIVISION[name]() for name in ("up", "down")}
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), chosen)
    small = torch.zeros(16)
    return (_median_us(step) - alone) / 2 - _median_us(lambda: dist.all_reduce(small))


# ------------------------------------------------------------------------------------------------ prices


class ProcessorPricer(StepPricer):
    """Times of a plan's step, with collectives and sends of Gloo."""

    def __init__(self, calibration: Calibration, plan: ClusterPlan, **given: Any) -> None:
        self.calibration, self.plan = calibration, plan
        super().__init__(**given)

    def _collective_us(
        self, collective: Collective, nbytes: int, nodes: int, size: int, stride: int
    ) -> float:
        if size == 1:
            return 0.0
        us = self.calibration.collectives[collective, size].us(nbytes)
        if size == self.plan.tensor and stride == 1:
            us += self.calibration.divided_us[size]
        return us * self.plan.devices / size

    def _send_us(self, nbytes: int, *where: int) -> float:
        return self.calibration.send.us(nbytes * self.plan.tensor)


def _operation_times(
    calibration: Calibration, operations: Sequence[Operation], on: Device
) -> list[OperationTime]:
    return [
        OperationTime(operation=each, alone=_prediction(calibration, each.workload, on), each_us=us)
        for each in operations
        for us in (_kernel_us(calibration, each.workload),)
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
    """Return the predicted step: of plan cluster, and of processes that share the cores.

    Kernels are slower by the number of processes for each core. In the second time, no process waits for
    another stage, because another process uses the core.
    """
    cores = os.cpu_count() or 1
    machine = TrainingCluster.parse(f"{plan.devices} x l4, {plan.devices} a node, 1.0, 8GB")
    layers = LayerTimes(
        network=job.network,
        device=device.find("cpu"),
        seq=job.seq,
        dtype=job.dtype,
        predictor=lambda operations, on: _operation_times(calibration, operations, on),
        host_us=0.0,
    )
    pricer = ProcessorPricer(
        calibration,
        plan,
        job=job,
        machine=machine,
        layers=layers,
        slowdown=Slowdown(kernels=max(1.0, plan.devices / cores)),
    )
    layers.predict([LayerRun.of(plan)])
    step = pricer.step(plan)
    return step.time_us, step.time_us - step.bubble_us
