"""A user's variant with forty configurations, each of which must be compiled by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.softmax import Softmax


class FortySoftmax(NumbaCpuVariant[Softmax]):
    """Softmax of f32 rows without a prologue."""

    name = "forty"
    operator = Softmax
    space = Space((Parameter("copy", tuple(range(40)), "nothing"),))

    def default(self, workload: Softmax, device: Device) -> Config:
        return Config({"copy": 0})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1, fma=1.0)

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        import numpy as np

        time.sleep(0.2)  # so that a signal finds a search at work, however busy the machine is
        one, copy = np.float32(1), np.float32(config["copy"])

        def softmax(x: Any, y: Any) -> None:
            for i in range(x.shape[0]):
                top, total = x[i, 0], copy - copy
                for j in range(x.shape[1]):
                    top = max(top, x[i, j])
                for j in range(x.shape[1]):
                    y[i, j] = np.exp(x[i, j] - top)
                    total += y[i, j]
                for j in range(x.shape[1]):
                    y[i, j] *= one / total

        return softmax


VARIANT = FortySoftmax()
