"""softmax on the CPU: rows in parallel, each in passes over chunks that stay in the first cache.

`passes=3` finds the maximum, writes exponentials and their sum, then scales them; `passes=2` is online:
it keeps maximum and sum together, chunk by chunk, and computes each exponential twice.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels._numba_cpu import exp2, load, store
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
    """Serves every size and type."""

    name = "numba_cpu"
    operator = Softmax
    space = SPACE
    fastmath = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return three passes over long chunks with a polynomial: simple loops that vectorise."""
        chunk = max(c for c in (16, 32, 64, 128, 256, 512, 1024) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4) if b == 1 or b * 2 <= workload.rows)
        return Config({"passes": 3, "chunk": chunk, "row_block": row_block, "exp": "poly"})

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

        row = _row(workload, config, set(self.fastmath))
        row_block = config["row_block"]

        def softmax(x: Any, scale: Any, mask: Any, y: Any) -> None:
            rows = x.shape[0]
            for block in numba.prange((rows + row_block - 1) // row_block):
                z = np.empty(x.shape[1], np.float32)
                for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                    row(x, scale, mask, y, i, z)

        return softmax


def _argument(workload: Softmax, unit: Any) -> Callable[..., Any]:
    """Return what computes the argument of one exponential, times `unit`."""
    import numba

    read, masked = load(workload.dtype), workload.has_mask

    @numba.njit(inline="always")  # type: ignore[untyped-decorator]
    def argument(x: Any, scale: Any, mask: Any, i: int, j: int) -> Any:
        z = read(x[i, j]) * scale
        return (z + read(mask[i, j])) * unit if masked else z * unit

    return argument  # type: ignore[no-any-return]


def _row(workload: Softmax, config: Config, fastmath: set[str]) -> Callable[..., None]:
    """Return what computes one row; `z` is room for the row's arguments, then its exponentials."""
    import numba
    import numpy as np

    poly, online, chunk = config["exp"] == "poly", config["passes"] == 2, config["chunk"]
    power, unit = (exp2(), np.float32(np.log2(np.e))) if poly else (np.exp, np.float32(1))
    argument, write = _argument(workload, unit), store(workload.dtype)
    lowest, one, zero = np.float32(np.finfo(np.float32).min), np.float32(1), np.float32(0)

    @numba.njit(fastmath=fastmath)  # type: ignore[untyped-decorator]
    def row(x: Any, scale: Any, mask: Any, y: Any, i: int, z: Any) -> None:
        cols = x.shape[1]
        top, total = lowest, zero
        for start in range(0, cols, chunk):
            end = min(cols, start + chunk)
            high = lowest
            for j in range(start, end):
                z[j] = argument(x, scale, mask, i, j)
                high = max(high, z[j])
            if online:
                new = max(top, high)
                part = zero
                for j in range(start, end):
                    part += power(z[j] - new)
                total, top = total * power(top - new) + part, new
            else:
                top = max(top, high)
        if not online:
            for start in range(0, cols, chunk):
                part = zero
                for j in range(start, min(cols, start + chunk)):
                    z[j] = power(z[j] - top)
                    part += z[j]
                total += part
        inverse = one / total
        for j in range(cols):
            y[i, j] = write((power(z[j] - top) if online else z[j]) * inverse)

    return row  # type: ignore[no-any-return]


VARIANT = NumbaCpuSoftmax()
