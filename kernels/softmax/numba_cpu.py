"""Softmax on the CPU: rows in parallel, each in passes over chunks that stay in the first cache.

`passes=3` computes the maximum, then exponentials and their sum, then scales them. `passes=2` is online: it
updates maximum and sum together, chunk by chunk, and computes each exponential twice. Log-softmax stores no
exponentials, and computes one per element in either case.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import exponential, jitted, load, rank, store
from tunebench.kernels.common.numba_cpu_rows import (
    CHUNK,
    CONSTRAINTS,
    EXP,
    ROW_BLOCK,
    NumbaCpuRows,
    default_chunk,
    default_row_block,
    row_kernel,
)
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.softmax import Softmax

SPACE = Space(
    (
        Parameter("passes", (2, 3), "2: online, exponentials are computed twice; 3: exponentials are stored"),
        *(CHUNK, ROW_BLOCK, EXP),
    ),
    CONSTRAINTS,
)


class NumbaCpuSoftmax(NumbaCpuRows[Softmax]):
    """Forward variant for every size and type."""

    name = "numba_cpu"
    operator = Softmax
    direction = "forward"
    space = SPACE
    fma = 1.0  # a subtraction and an addition, two per instruction

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return two passes: with slow memory, computing an exponential twice is cheaper than storing it."""
        chunk, row_block = default_chunk(workload), default_row_block(workload, most=4)
        return Config({"passes": 2, "chunk": chunk, "row_block": row_block, "exp": "poly"})

    def arguments(self, workload: Softmax, config: Config) -> tuple[Argument, ...]:
        """Pass 1 for a missing scale, and x for a missing mask, which is not read."""
        scale = "scale" if workload.has_scale else Scalar("float", 1.0)
        return ("x", scale, "mask" if workload.has_mask else "x", "y")

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, scale, mask, y)` for the workload's prologue and type."""
        row = _row(workload, config, self.fastmath)
        return row_kernel(("x", "scale", "mask", "y"), row, config["row_block"], numbers=("scale",))


def _row(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that computes a row (see `row_kernel`)."""
    import numpy as np

    power, unit = exponential(config["exp"])
    kept, online, chunk = config["passes"] == 3 and not workload.log, config["passes"] == 2, config["chunk"]
    lowest, zero = np.float32(np.finfo(np.float32).min), np.float32(0)
    arguments = _arguments(workload, unit, fastmath)
    sum_of_powers, keep_powers = _powers(power, fastmath)
    finish = _finish(workload, config, fastmath)

    @jitted(fastmath)
    def row(tensors: Any, i: int, cols: int, z: Any) -> None:
        x, scale, mask, y = tensors
        begin, top, total = i * cols, lowest, zero
        for start in range(0, cols, chunk):
            count = min(cols - start, chunk)
            high = max(top, arguments(x, scale, mask, begin + start, count, z, start))
            if online:
                total = total * power(top - high) + sum_of_powers(z, start, count, high)
            top = high
        if not online:
            for start in range(0, cols, chunk):
                count = min(cols - start, chunk)
                total += keep_powers(z, start, count, top) if kept else sum_of_powers(z, start, count, top)
        finish(z, y, begin, cols, top, total)

    return row


def _powers(power: Callable[..., Any], fastmath: frozenset[str]) -> tuple[Callable[..., Any], ...]:
    """Return two functions that sum powers of `count` arguments; the second replaces arguments by powers."""
    import numpy as np

    zero = np.float32(0)

    @jitted(fastmath)
    def sum_of_powers(z: Any, begin: int, count: int, top: Any) -> Any:
        total = zero
        for j in range(count):
            total += power(z[begin + j] - top)
        return total

    @jitted(fastmath)
    def keep_powers(z: Any, begin: int, count: int, top: Any) -> Any:
        total = zero
        for j in range(count):
            value = power(z[begin + j] - top)
            z[begin + j] = value
            total += value
        return total

    return sum_of_powers, keep_powers


def _finish(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that writes a row: powers over their sum, or the logarithm of that quotient."""
    import numpy as np

    write, online, (power, unit) = store(workload.dtype), config["passes"] == 2, exponential(config["exp"])
    one = np.float32(1)
    in_nats = one / unit

    @jitted(fastmath)
    def probabilities(z: Any, y: Any, begin: int, cols: int, top: Any, total: Any) -> None:
        inverse = one / total
        for j in range(cols):
            y[begin + j] = write((power(z[j] - top) if online else z[j]) * inverse)

    @jitted(fastmath)
    def logarithms(z: Any, y: Any, begin: int, cols: int, top: Any, total: Any) -> None:
        lse = top * in_nats + np.log(total)
        for j in range(cols):
            y[begin + j] = write(z[j] * in_nats - lse)

    return logarithms if workload.log else probabilities


def _arguments(workload: Softmax, unit: Any, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return the function that stores arguments of exponentials times `unit`, and returns the maximum."""
    import numpy as np

    read, masked, lowest = load(workload.dtype), workload.has_mask, np.float32(-np.inf)
    rank_of, value_of = rank()

    @jitted(fastmath)
    def arguments(x: Any, scale: Any, mask: Any, begin: int, count: int, z: Any, to: int) -> Any:
        high = rank_of(lowest)
        for j in range(count):
            value = read(x[begin + j]) * scale
            value = (value + read(mask[begin + j])) * unit if masked else value * unit
            z[to + j] = value
            high = max(high, rank_of(value))
        return value_of(high)

    return arguments


VARIANT = NumbaCpuSoftmax()
