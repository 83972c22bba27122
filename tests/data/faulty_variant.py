"""A user's variant whose parameter chooses what goes wrong; two of its configurations are right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.softmax import Softmax


class FaultySoftmax(NumbaCpuVariant[Softmax]):
    """Softmax of f32 rows without a prologue."""

    name = "faulty"
    operator = Softmax
    space = Space(
        (
            Parameter("fault", ("none", "crash", "hang", "wrong", "refuse"), "what goes wrong"),
            Parameter("copy", (0, 1), "nothing"),
        )
    )

    def default(self, workload: Softmax, device: Device) -> Config:
        return Config({"fault": "none", "copy": 0})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1, fma=1.0)

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        import numpy as np

        fault = config["fault"]
        libc = ctypes.CDLL(None)
        stop, sleep = libc.abort, libc.sleep
        stop.argtypes, stop.restype = [], None
        sleep.argtypes, sleep.restype = [ctypes.c_uint], ctypes.c_uint

        def softmax(x: Any, y: Any) -> None:
            for i in range(x.shape[0]):
                top = x[i].max()
                e = np.exp(x[i] - top)
                y[i] = e / e.sum()
            y[0, 0] *= np.float32(1.01)

        if fault == "wrong":
            return softmax

        def right(x: Any, y: Any) -> None:
            for i in range(x.shape[0]):
                top = x[i].max()
                e = np.exp(x[i] - top)
                y[i] = e / e.sum()

        if fault == "crash":

            def crash(x: Any, y: Any) -> None:
                stop()

            return crash
        if fault == "hang":

            def hang(x: Any, y: Any) -> None:
                sleep(1000)

            return hang
        if fault == "refuse":

            def refuse(x: Any, y: Any) -> None:
                y.no_such_method()

            return refuse
        return right


VARIANT = FaultySoftmax()
