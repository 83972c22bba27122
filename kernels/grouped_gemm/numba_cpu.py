"""grouped_gemm for Numba on the CPU, by the blocked product of `numba_product`.

The groups are products of different heights. Threads take the tiles of all groups in one round, so that
uneven groups leave no thread idle. f16 and bf16 are converted to f32 as they are packed; tf32 is computed in
f32, more exactly than required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, store
from tunebench.kernels.common.numba_product import (
    Blocking,
    NumbaCpuProduct,
    Operand,
    expert,
    stored_line,
    walker,
)
from tunebench.space import Config
from tunebench.variant import Argument, ceil_div
from tunebench.workloads.operators.grouped_gemm import GroupedGemm


class NumbaCpuGroupedGemm(NumbaCpuProduct[GroupedGemm]):
    """f32, tf32, f16 and bf16 of any size, layout of b and split of rows."""

    operator = GroupedGemm

    def default(self, workload: GroupedGemm, device: Device) -> Config:
        """Return the default for groups of equal size, with rows packed as they are stored."""
        rows = ceil_div(workload.m, workload.most_filled)
        return expert((rows, workload.n, workload.k), device, "rows")

    def arguments(self, workload: GroupedGemm, config: Config) -> tuple[Argument, ...]:
        """Return a, b, offsets, c, and the tile."""
        return ("a", "b", "offsets", "c", *Blocking(**config).arguments)

    def kernel(self, workload: GroupedGemm, config: Config) -> Callable[..., None]:
        """Return the kernel `(a, b, offsets, c, mc, nc)` for these types and this layout of b."""
        import numba
        import numpy as np

        blocking = Blocking(**config)
        walk = walker(
            blocking,
            Operand(line=_line_of_a(workload), along="depth"),
            Operand(line=_line_of_b(workload), along="free" if workload.trans == "nn" else "depth"),
            _write(workload),
            self.fastmath,
        )
        size, address_of = blocking.buffer_size(), address()
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def grouped_gemm(a: Any, b: Any, offsets: Any, c: Any, mc: int, nc: int) -> None:
            groups, n, k = b.shape[0], c.shape[1], a.shape[1]
            lines, length = b.shape[1], b.shape[2]
            sizes = np.empty((groups, 3), np.int64)
            for z in range(groups):
                sizes[z, 0], sizes[z, 1], sizes[z, 2] = offsets[z + 1] - offsets[z], n, k
            buffers = np.empty((workers, size(mc, nc)), np.float32)
            for worker in numba.prange(workers):
                arrays = address_of(a), address_of(b), address_of(c)
                operands = (arrays, address_of(offsets), n, k, lines, length)
                buffer = address_of(buffers[worker])
                walk(operands, address_of(sizes), groups, (mc, nc), buffer, np.int64(worker), workers)

        return grouped_gemm


def _line_of_a(workload: GroupedGemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a (see `Operand`); rows are counted from the first of the group."""
    import numpy as np

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        arrays, offsets, _, k, _, _ = operands
        return arrays[0], (np.int64(offsets[z]) + fixed) * k

    return stored_line(workload.inputs()[0].dtype, place)


def _line_of_b(workload: GroupedGemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a group's matrix b (see `Operand`)."""

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        arrays, _, _, _, lines, length = operands
        return arrays[1], (z * lines + fixed) * length

    return stored_line(workload.inputs()[1].dtype, place)


def _write(workload: GroupedGemm) -> Callable[..., None]:
    """Return the function that rounds and stores a part of a row of c; rows count from the group's first."""
    import numpy as np

    rounded = store(workload.out)

    @jitted(frozenset({"contract", "nsz"}))
    def write(operands: Any, z: int, i: int, j: int, count: int, sums: Any, offset: int) -> None:
        arrays, offsets, n, _, _, _ = operands
        c, begin = arrays[2], (np.int64(offsets[z]) + i) * n + j
        for t in range(count):
            c[begin + t] = rounded(sums[offset + t])

    return write


VARIANT = NumbaCpuGroupedGemm()
