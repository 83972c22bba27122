"""Cross entropy on the CPU: rows in parallel, each read once, in chunks that stay in the first cache.

Maximum and sum are updated together, chunk by chunk. If there are few rows, several threads share one: the
row is split into `parts`, which are merged at the end.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, exponential, jitted, load, rank
from tunebench.kernels.common.numba_cpu_rows import CHUNK, CONSTRAINTS, EXP, NumbaCpuRows, default_chunk
from tunebench.space import Config, Parameter, Space
from tunebench.workload import Tensor
from tunebench.workloads.operators.cross_entropy import CrossEntropy

SPACE = Space(
    (
        CHUNK,
        Parameter("parts", (1, 2, 4, 8, 16, 32, 64), "parts of a row, which threads share"),
        EXP,
    ),
    (
        CONSTRAINTS[1],
        lambda chunk, parts, workload: (parts == 1) | (parts * chunk <= workload.cols),
        lambda parts, workload: (parts == 1) | (workload.rows < 256),
    ),
)


class NumbaCpuCrossEntropy(NumbaCpuRows[CrossEntropy]):
    """Forward variant for every size and type."""

    name = "numba_cpu"
    operator = CrossEntropy
    direction = "forward"
    space = SPACE
    fma = 1.0  # a subtraction and an addition, two per instruction

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return chunks of 1 KiB in f32, and parts if there are few rows."""
        chunk = default_chunk(workload)
        parts = max(
            p for p in (1, 2, 4, 8, 16) if p == 1 or (workload.rows * p <= 64 and p * chunk <= workload.cols)
        )
        return Config({"chunk": chunk, "parts": parts, "exp": "poly"})

    def scratch(self, workload: CrossEntropy, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the maximum and the sum of each part of each row."""
        return (Tensor(name="partial", shape=(workload.rows, config["parts"], 2), dtype="f32"),)

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, loss, lse, partial)` for the workload's type."""
        import numba
        import numpy as np

        part_of, whole = _part(workload, config, self.fastmath), _whole(config)
        read, address_of, parts, chunk = load(workload.dtype), address(), config["parts"], config["chunk"]

        def cross_entropy(x: Any, target: Any, loss: Any, lse: Any, partial: Any) -> None:
            rows, cols = x.shape
            for index in numba.prange(rows * parts):
                i, part = index // parts, index % parts
                begin, end = cols * part // parts, cols * (part + 1) // parts
                z = np.empty(chunk, np.float32)
                top, total = part_of(address_of(x), i * cols + begin, end - begin, address_of(z))
                partial[i, part, 0] = top
                partial[i, part, 1] = total
            for i in range(rows):
                lse[i] = whole(partial, i)
                loss[i] = lse[i] - read(x[i, target[i]])

        return cross_entropy


def _part(workload: CrossEntropy, config: Config, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return the function for the maximum of `count` arguments, and their sum of exponentials."""
    import numpy as np

    read, chunk, (power, unit) = load(workload.dtype), config["chunk"], exponential(config["exp"])
    lowest, least, zero = np.float32(np.finfo(np.float32).min), np.float32(-np.inf), np.float32(0)
    rank_of, value_of = rank()

    @jitted(fastmath)
    def arguments(x: Any, begin: int, count: int, z: Any) -> Any:
        high = rank_of(least)
        for j in range(count):
            value = read(x[begin + j]) * unit
            z[j] = value
            high = max(high, rank_of(value))
        return value_of(high)

    @jitted(fastmath)
    def sum_of_powers(z: Any, count: int, top: Any) -> Any:
        total = zero
        for j in range(count):
            total += power(z[j] - top)
        return total

    @jitted(fastmath)
    def part(x: Any, begin: int, count: int, z: Any) -> Any:
        top, total = lowest, zero
        for start in range(0, count, chunk):
            size = min(count - start, chunk)
            high = max(top, arguments(x, begin + start, size, z))
            total = total * power(top - high) + sum_of_powers(z, size, high)
            top = high
        return top, total

    return part


def _whole(config: Config) -> Callable[..., Any]:
    """Return the function that merges the parts of a row into the logarithm of its sum of exponentials."""
    import numpy as np

    (power, unit), parts = exponential(config["exp"]), config["parts"]
    in_nats, zero = np.float32(1) / unit, np.float32(0)

    @jitted()
    def whole(partial: Any, i: int) -> Any:
        top = partial[i, 0, 0]
        for part in range(1, parts):
            top = max(top, partial[i, part, 0])
        total = zero
        for part in range(parts):
            total += partial[i, part, 1] * power(partial[i, part, 0] - top)
        return top * in_nats + np.log(total)

    return whole


VARIANT = NumbaCpuCrossEntropy()
