"""A user's variant whose forty configurations have bounds of 10, 11, … 49 microseconds; it is never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.softmax import Softmax


class BoundedSoftmax(NumbaCpuVariant[Softmax]):
    """Softmax of f32 rows without a prologue."""

    name = "bounded"
    operator = Softmax
    space = Space((Parameter("copy", tuple(range(40)), "nothing"),))

    def default(self, workload: Softmax, device: Device) -> Config:
        return Config({"copy": 20})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        a_microsecond = device.sm_count * device.fma_per_clock * device.max_clock_mhz
        return Costs(blocks=1, full_blocks=0, threads=1, fma=(10.0 + table["copy"]) * a_microsecond)

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        copy = config["copy"]

        def softmax(x: Any, y: Any) -> None:
            y[0, 0] = x[0, 0] + copy

        return softmax


VARIANT = BoundedSoftmax()
