"""softmax on the CPU: rows in parallel, each in passes over chunks that stay in the first cache.

`passes=3` finds the maximum, writes exponentials and their sum, then scales them; `passes=2` is online:
it keeps maximum and sum together, chunk by chunk, and computes each exponential twice. For the logarithm no
exponential is written, so that there is one an element in either.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, exponential, jitted, load, rank, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.operators.softmax import Softmax

SPACE = Space(
    (
        Parameter("passes", (2, 3), "2: online, nothing is stored twice; 3: exponentials are kept"),
        Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop handles together"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
        Parameter("exp", ("libm", "poly"), "poly: a polynomial, which vectorises; libm: one call an element"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
    ),
)


class NumbaCpuSoftmax(NumbaCpuVariant[Softmax]):
    """Serves every size and type of the forward direction."""

    name = "numba_cpu"
    operator = Softmax
    space = SPACE
    fastmath = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does direction=forward only" if workload.is_backward else None

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return two passes: from slow memory, a power computed twice is cheaper than one kept."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4) if b == 1 or b * 2 <= workload.rows)
        return Config({"passes": 2, "chunk": chunk, "row_block": row_block, "exp": "poly"})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count one subtraction and one addition for each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=elements)

    def arguments(self, workload: Softmax, config: Config) -> tuple[Argument, ...]:
        """Pass 1 for a missing scale, and x for a missing mask (which is then not read)."""
        scale = "scale" if workload.has_scale else Scalar("float", 1.0)
        return ("x", scale, "mask" if workload.has_mask else "x", "y")

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, scale, mask, y)` for this prologue and type."""
        import numba
        import numpy as np

        row, row_block, address_of = _row(workload, config, self.fastmath), config["row_block"], address()

        def softmax(x: Any, scale: Any, mask: Any, y: Any) -> None:
            rows, cols = x.shape
            for block in numba.prange((rows + row_block - 1) // row_block):
                z = np.empty(cols, np.float32)
                for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                    row(address_of(x), scale, address_of(mask), address_of(y), i * cols, cols, address_of(z))

        return softmax


def _row(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return what computes the row of `cols` elements at `begin`; z has room for as many f32."""
    import numpy as np

    power, unit = exponential(config["exp"])
    kept, online, chunk = config["passes"] == 3 and not workload.log, config["passes"] == 2, config["chunk"]
    lowest, zero = np.float32(np.finfo(np.float32).min), np.float32(0)
    arguments = _arguments(workload, unit, fastmath)
    sum_of_powers, keep_powers = _powers(power, fastmath)
    finish = _finish(workload, config, fastmath)

    @jitted(fastmath)
    def row(x: Any, scale: Any, mask: Any, y: Any, begin: int, cols: int, z: Any) -> None:
        top, total = lowest, zero
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
    """Return two sums of powers of `count` arguments: one leaves these, one puts powers in their place."""
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
    """Return what writes a row: powers, kept or computed again, over their sum; or the logarithm of that."""
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
    """Return what stores the arguments of exponentials, times `unit`, and gives the greatest."""
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
