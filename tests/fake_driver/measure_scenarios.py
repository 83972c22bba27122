"""Runs of `CudaRunner` on the driver of `fake_driver.cpp`; prints the outcomes as JSON.

It runs in a separate process that finds this driver before the system's, since a process loads its driver
only once.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tunebench.binary.compiled import Binary
from tunebench.device import Device, local_gpus
from tunebench.errors import DeviceError
from tunebench.executor.process import ProcessStage, call_once
from tunebench.measure import worker
from tunebench.measure._gpu import open_gpu
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.outcome import to_json
from tunebench.space import Config, Parameter, Space, Table
from tunebench.task import Task
from tunebench.variant import (
    Argument,
    Costs,
    CudaVariant,
    Launch,
    NumbaCudaVariant,
    PixelBox,
    Scalar,
    TensorMap,
)
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload


@dataclass(frozen=True, kw_only=True)
class Scaling(Workload):
    """y (n,) = factor () * x (n,)."""

    operator: ClassVar[str] = "scaling"

    n: Size
    dtype: Literal["f32"] = "f32"

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.n,), dtype="f32"), Tensor(name="factor", shape=(), dtype="f32"))

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="y", shape=(self.n,), dtype="f32"),)

    def flops(self) -> int:
        return self.n

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        value = inputs["x"] * inputs["factor"]
        return {"y": Reference(value=value, scale=np.abs(value))}

    def tolerance(self) -> Tolerance:
        return Tolerance(eps_out=1e-6, eps_acc=1e-6, reason="one product")


class Cuda(CudaVariant[Scaling]):
    """Launches the fake driver's kernel `entry`, twice if asked."""

    name = "cuda"
    operator = Scaling
    space = Space((Parameter("unused", (0,), "nothing"),))

    def __init__(
        self, entry: str, *, block: int = 64, smem_bytes: int = 0, scratch: bool = False, long: bool = False
    ) -> None:
        self.entry, self._block, self._smem_bytes, self._scratch = entry, block, smem_bytes, scratch
        self._count: Any = "long long" if long else "int"

    def default(self, workload: Scaling, device: Device) -> Config:
        return Config({"unused": 0})

    def costs(self, workload: Scaling, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=1, threads=self._block)

    def source(self, workload: Scaling, config: Config) -> str:
        return ""

    def scratch(self, workload: Scaling, config: Config) -> tuple[Tensor, ...]:
        return (Tensor(name="half", shape=(workload.n,), dtype="f32"),) if self._scratch else ()

    def launches(self, workload: Scaling, config: Config) -> tuple[Launch, ...]:
        arguments: tuple[Argument, ...] = ("x", "y", "factor", Scalar(self._count, workload.n))
        one = {"grid": (1, 1, 1), "block": (self._block, 1, 1), "smem_bytes": self._smem_bytes}
        launch = Launch(entry=self.entry, arguments=arguments, **one)
        if not self._scratch:
            return (launch,)
        return (Launch(entry=self.entry, arguments=("x", "half", *arguments[2:]), **one), launch)


class Mapped(Cuda):
    """Passes x by a tensor map, to clusters of two blocks that stay; `tensor` is what the map is of."""

    def __init__(self, entry: str = "mapped", tensor: str = "x") -> None:
        super().__init__(entry)
        self._tensor = tensor

    def launches(self, workload: Scaling, config: Config) -> tuple[Launch, ...]:
        (launch,) = super().launches(workload, config)
        lines = TensorMap(
            tensor=self._tensor,
            dtype="f32",
            extents=(8, workload.n // 8),
            strides_bytes=(32,),
            box=(8, 5),
            swizzle_bytes=32,
        )
        arguments = (lines, *launch.arguments[1:])
        shape: dict[str, Any] = {"grid": (1000, 1, 1), "cluster": 2, "blocks_per_sm": 2}
        return (dataclasses.replace(launch, arguments=arguments, **shape),)


class MappedPixels(Mapped):
    """Passes x by a map of pixels: one image of 5 x 25, with 8 channels."""

    def launches(self, workload: Scaling, config: Config) -> tuple[Launch, ...]:
        (launch,) = super().launches(workload, config)
        pixels = TensorMap(
            tensor=self._tensor,
            dtype="f32",
            extents=(8, 25, 5, workload.n // 1000),
            strides_bytes=(32, 800, 4000),
            box=(8, 300),
            swizzle_bytes=32,
            pixel_box=PixelBox(lower=(-1, -2), upper=(1, -3), strides=(2, 3)),
        )
        return (dataclasses.replace(launch, arguments=(pixels, *launch.arguments[1:])),)


class Numba(NumbaCudaVariant[Scaling]):
    """Launches the fake driver's kernel with arrays passed as Numba passes them."""

    name = "numba"
    operator = Scaling
    space = Cuda.space
    entry = "numba"

    def default(self, workload: Scaling, device: Device) -> Config:
        return Config({"unused": 0})

    def costs(self, workload: Scaling, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=1, threads=64)

    def kernel(self, workload: Scaling, config: Config) -> Callable[..., None]:
        raise AssertionError("it is compiled elsewhere")

    def launches(self, workload: Scaling, config: Config) -> tuple[Launch, ...]:
        return (Launch(grid=(1, 1, 1), block=(64, 1, 1), arguments=("x", "y", "factor")),)


DEVICE = local_gpus()[0]
COLD = Protocol(min_samples=3, max_samples=5)
WARM = Protocol(cache="warm", min_samples=3, max_samples=5)
WORKLOAD = Scaling(n=1000)


def binary(variant: Any, payload: bytes = b"fake") -> Binary:
    launches = variant.launches(WORKLOAD, Config({"unused": 0}))
    entries = (variant.entry,) * len(launches)
    return Binary(key="", language=variant.language, target="sm_90", payload=payload, entries=entries)


def task(variant: Any, *, thorough: bool = False, workload: Scaling = WORKLOAD) -> Task:
    return Task(
        variant=variant,
        workload=workload,
        config=Config({"unused": 0}),
        device=DEVICE,
        seed=7,
        thorough=thorough,
    )


class Session:
    """One CUDA runner, as in a worker process."""

    def __init__(self, protocol: Protocol) -> None:
        self.runner = CudaRunner(protocol, DEVICE)

    def run(self, variant: Any, abort_above_us: float | None = None, **how: Any) -> dict[str, Any]:
        """Return the outcome of one task as JSON; a device error is returned with its type and reason."""
        payload = how.pop("payload", b"fake")
        try:
            outcome, _ = self.runner.run(task(variant, **how), binary(variant, payload), abort_above_us)
        except DeviceError as error:
            return {"kind": type(error).__name__, "reason": str(error)}
        return to_json(outcome)


def scenarios() -> dict[str, Any]:
    cold, warm = Session(COLD), Session(WARM)
    seen: dict[str, Any] = {
        "before": dict(cold.runner.conditions()),
        "cold": cold.run(Cuda("right")),
        "cold short": cold.run(Cuda("short")),
        "warm": warm.run(Cuda("right")),
        "warm short": warm.run(Cuda("short")),
        "numba": cold.run(Numba()),
        "mapped": cold.run(Mapped()),
        "mapped in a graph": warm.run(Mapped("mapped_short")),
        "mapped pixels": cold.run(MappedPixels("pixels")),
        "mapped elsewhere": cold.run(Mapped(tensor="y")),
        "map of another kernel": cold.run(Mapped("right")),
        "two launches": cold.run(Cuda("right", scratch=True)),
        "shared memory": cold.run(Cuda("large", smem_bytes=100_000)),
        "too much shared memory": cold.run(Cuda("large", smem_bytes=240_000)),
        "thorough": cold.run(Cuda("right"), 0.001, thorough=True),
        "hopeless": cold.run(Cuda("right"), 1.0),
        "wrong": cold.run(Cuda("wrong")),
        "unwritten": cold.run(Cuda("unwritten")),
        "past the end": cold.run(Cuda("past_the_end")),
        "overwrites its input": cold.run(Cuda("overwrites_input")),
        "after that": cold.run(Cuda("right")),
        "block too large": cold.run(Cuda("right", block=2048)),
        "wrong parameter": cold.run(Cuda("right", long=True)),
        "no such kernel": cold.run(Cuda("nowhere")),
        "no cubin": cold.run(Cuda("right"), payload=b"text"),
        "another size": cold.run(Cuda("right"), workload=Scaling(n=77)),
        "conditions": dict(cold.runner.conditions()),
    }
    elsewhere = Device(**{name: getattr(DEVICE, name) for name in DEVICE.__slots__} | {"name": "v100"})
    try:
        open_gpu(elsewhere)
    except DeviceError as error:
        seen["another device"] = str(error)
    seen["fault"] = cold.run(Cuda("illegal"))
    seen["after the fault"] = cold.run(Cuda("right"))
    setup = Setup(runner="cuda", device=DEVICE, protocol=COLD)
    stage = ProcessStage(function=worker.measure, start=worker.start, start_arguments=(setup,))
    died = call_once(stage, task(Cuda("illegal")), binary(Cuda("illegal")), None)
    seen["worker"] = to_json(died)
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scenarios()))
