"""gated_gemm for Numba on the CPU: one blocked product with the columns of b_gate and b_up interleaved.

The columns alternate in strips of `nr`, the width of the micro-kernel of `numba_product`. In a complete tile,
the sums of both products are neighbours, and rows of a are packed once for both. f16 and bf16 are converted
to f32 as they are packed; tf32 is computed in f32, more exactly than required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, store
from tunebench.kernels.common.numba_expression import on_cpu
from tunebench.kernels.common.numba_product import (
    LANES,
    PARAMETERS,
    Blocking,
    NumbaCpuProduct,
    Operand,
    constraints,
    expert,
    stored_line,
    walker,
)
from tunebench.space import Config, Space
from tunebench.variant import ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm


def strips_come_in_pairs(n_panels: Any) -> Any:
    """A tile must have as many strips of b_gate as of b_up."""
    return n_panels % 2 == 0


def _extents(workload: GatedGemm) -> tuple[int, int, int]:
    """Return the rows, the columns of both matrices in whole vectors, and the terms."""
    return workload.m, 2 * LANES * ceil_div(workload.n, LANES), workload.k


SPACE = Space(PARAMETERS, (strips_come_in_pairs, *constraints(_extents)))


class NumbaCpuGatedGemm(NumbaCpuProduct[GatedGemm]):
    """f32, tf32, f16 and bf16 of any size, layout and activation."""

    operator = GatedGemm
    space = SPACE

    def default(self, workload: GatedGemm, device: Device) -> Config:
        """Return the default of the product of both matrices, in pairs of strips."""
        config = expert(_extents(workload), device, "rows")
        nr = LANES if workload.n <= LANES else config["nr"]
        return Config({**config, "nr": nr, "n_panels": max(2, config["n_panels"])})

    def kernel(self, workload: GatedGemm, config: Config) -> Callable[..., None]:
        """Return the kernel `(a, b_gate, b_up, c, mc, nc)` for these types, this layout and activation."""
        import numba
        import numpy as np

        blocking = Blocking(**config)
        along: Literal["depth", "free"] = "free" if workload.trans == "nn" else "depth"
        walk = walker(
            blocking,
            Operand(line=_line_of_a(workload), along="depth"),
            Operand(line=_line_of_b(workload, blocking.nr), along=along),
            _write(workload, blocking.nr),
            self.fastmath,
        )
        nr, size, address_of = blocking.nr, blocking.buffer_size(), address()
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def gated_gemm(a: Any, b_gate: Any, b_up: Any, c: Any, mc: int, nc: int) -> None:
            m, n, k = c.shape[0], c.shape[1], a.shape[1]
            sizes = np.empty(3, np.int64)
            sizes[0], sizes[1], sizes[2] = m, (n + nr - 1) // nr * 2 * nr, k
            buffers = np.empty((workers, size(mc, nc)), np.float32)
            for worker in numba.prange(workers):
                operands = (address_of(a), (address_of(b_gate), address_of(b_up)), address_of(c), n, k)
                buffer = address_of(buffers[worker])
                walk(operands, address_of(sizes), 1, (mc, nc), buffer, np.int64(worker), workers)

        return gated_gemm


# Operands that `walker` passes on: a, (b_gate, b_up), c, n, k. Column j of both matrices is in strip j // nr;
# even strips belong to b_gate, odd ones to b_up.


def _line_of_a(workload: GatedGemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a (see `Operand`)."""

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        source, _, _, _, k = operands
        return source, fixed * k

    return stored_line(workload.inputs()[0].dtype, place)


def _line_of_b(workload: GatedGemm, nr: int) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of b_gate and b_up (see `Operand`): one strip of either, with zeros beyond n."""
    import numpy as np

    read, zero = load(workload.inputs()[1].dtype), np.float32(0)

    def line(stride: int) -> Callable[..., None]:
        @inlined
        def pack(source: Any, begin: int, count: int, used: int, panel: Any, offset: int) -> None:
            for t in range(used):
                panel[offset + t * stride] = read(source[begin + t])
            for t in range(used, count):
                panel[offset + t * stride] = zero

        @jitted()
        def pack_columns(  # from column `start` on, at term `fixed`
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            _, (gate, up), _, n, _ = operands
            strip, column = start // nr, start // nr // 2 * nr
            source = up if strip % 2 else gate
            pack(source, fixed * n + column, count, max(0, min(count, n - column)), panel, offset)

        @jitted()
        def pack_terms(  # from term `start` on, of column `fixed`
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            _, (gate, up), _, n, k = operands
            strip, column = fixed // nr, fixed // nr // 2 * nr + fixed % nr
            source = up if strip % 2 else gate
            pack(source, column * k + start, count, count if column < n else 0, panel, offset)

        return pack_columns if workload.trans == "nn" else pack_terms

    return line


def _write(workload: GatedGemm, nr: int) -> Callable[..., None]:
    """Return the function that gates a part of a row, and stores it."""
    rounded, activate = store(workload.out), on_cpu(workload.activation)

    @jitted(frozenset({"contract", "nsz"}))
    def write_strip(c: Any, begin: int, count: int, sums: Any, gate: int) -> None:
        for t in range(count):
            c[begin + t] = rounded(activate(sums[gate + t]) * sums[gate + nr + t])

    @jitted()
    def write(operands: Any, z: int, i: int, j: int, count: int, sums: Any, offset: int) -> None:
        _, _, c, n, _ = operands
        for at in range(0, count, 2 * nr):
            column = (j + at) // 2
            write_strip(c, i * n + column, min(nr, n - column), sums, offset + at)

    return write


VARIANT = NumbaCpuGatedGemm()
