"""A user's variant with a dozen configurations, each of which takes a tenth of a second."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.softmax import Softmax


class SlowSoftmax(NumbaCpuVariant[Softmax]):
    """Softmax of f32 rows without a prologue."""

    name = "slow"
    operator = Softmax
    space = Space((Parameter("copy", tuple(range(12)), "nothing"),))

    def default(self, workload: Softmax, device: Device) -> Config:
        return Config({"copy": 0})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1, fma=1.0)

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        import numpy as np

        sleep = ctypes.CDLL(None).usleep
        sleep.argtypes, sleep.restype = [ctypes.c_uint], ctypes.c_int

        def softmax(x: Any, y: Any) -> None:
            sleep(10_000)
            for i in range(x.shape[0]):
                e = np.exp(x[i] - x[i].max())
                y[i] = e / e.sum()

        return softmax


VARIANT = SlowSoftmax()
