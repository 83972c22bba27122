"""gemm for Numba on the CPU, by the blocked product of `numba_product`.

f16 and bf16 are converted to f32 as they are packed; tf32 is computed in f32, more exactly than required.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.gemm import added
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, store
from tunebench.kernels.common.numba_expression import on_cpu
from tunebench.kernels.common.numba_product import (
    Blocking,
    NumbaCpuProduct,
    Operand,
    expert,
    stored_line,
    walker,
)
from tunebench.kernels.common.numba_prologue import line_ahead
from tunebench.kernels.common.prologue import operands
from tunebench.space import Config
from tunebench.variant import Argument
from tunebench.workloads.operators.gemm import Gemm


class NumbaCpuGemm(NumbaCpuProduct[Gemm]):
    """f32, tf32, f16 and bf16 of any size, transpose, batch and epilogue."""

    operator = Gemm

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return near-square tiles, with rows packed in the order in which they are stored."""
        extents = (workload.m, workload.n, workload.k)
        return expert(extents, device, "rows" if workload.trans[0] == "n" else "columns")

    def arguments(self, workload: Gemm, config: Config) -> tuple[Argument, ...]:
        """Return all tensors: c for a missing bias or residual, a for scale or shift; then the tile."""
        tensors = ("a", "b", *added(workload), *operands(workload), "c")
        return (*tensors, *Blocking(**config).arguments)

    def kernel(self, workload: Gemm, config: Config) -> Callable[..., None]:
        """Return the kernel `(a, b, bias, residual, scale, shift, c, mc, nc)` for types and transposes."""
        import numba
        import numpy as np

        blocking = Blocking(**config)
        walk = walker(
            blocking,
            Operand(line=_line(0, workload), along="depth" if workload.trans[0] == "n" else "free"),
            Operand(line=_line(1, workload), along="free" if workload.trans[1] == "n" else "depth"),
            _write(workload),
            self.fastmath,
        )
        a_depth, size, address_of = 2 if workload.trans[0] == "n" else 1, blocking.buffer_size(), address()
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def gemm(
            a: Any, b: Any, bias: Any, residual: Any, scale: Any, shift: Any, c: Any, mc: int, nc: int
        ) -> None:
            batch, m, n, k = c.shape[0], c.shape[1], c.shape[2], a.shape[a_depth]
            a_lines, b_lines, a_length, b_length = a.shape[1], b.shape[1], a.shape[2], b.shape[2]
            sizes = np.empty((batch, 3), np.int64)
            for z in range(batch):
                sizes[z, 0], sizes[z, 1], sizes[z, 2] = m, n, k
            buffers = np.empty((workers, size(mc, nc)), np.float32)
            for worker in numba.prange(workers):
                arrays = address_of(a), address_of(b), address_of(c), address_of(scale), address_of(shift)
                added = address_of(bias), address_of(residual)
                operands = (arrays, added, (a_lines, b_lines), (a_length, b_length), m, n)
                buffer = address_of(buffers[worker])
                walk(operands, address_of(sizes), batch, (mc, nc), buffer, np.int64(worker), workers)

        return gemm


def _line(which: int, workload: Gemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a or b (see `Operand`)."""

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        arrays, _, lines, lengths, _, _ = operands
        return arrays[which], (z * lines[which] + fixed) * lengths[which]

    dtype = workload.inputs()[which].dtype
    if which == 1 or not workload.has_pre:
        return stored_line(dtype, place)

    @inlined
    def numbers(operands: Any) -> Any:
        arrays, _, _, _, _, _ = operands
        return arrays[3], arrays[4]

    return line_ahead(workload, place, numbers, along_depth=workload.trans[0] == "n")


def _write(workload: Gemm) -> Callable[..., None]:
    """Return the function that applies the epilogue to a part of a row of c, and stores it."""
    rounded, read = store(workload.out), load(workload.out)

    @inlined
    def plus(total: Any, stored: Any, at: int) -> Any:
        return total + read(stored[at])

    @inlined
    def as_it_is(total: Any, stored: Any, at: int) -> Any:
        return total

    add_bias = plus if workload.has_bias else as_it_is
    add_residual = plus if workload.has_residual else as_it_is
    activate = on_cpu(workload.activation)

    @jitted(frozenset({"contract", "nsz"}))
    def write(operands: Any, z: int, i: int, j: int, count: int, sums: Any, offset: int) -> None:
        arrays, added, _, _, m, n = operands
        (bias, residual), c, begin = added, arrays[2], (z * m + i) * n + j
        for t in range(count):
            activated = activate(add_bias(sums[offset + t], bias, j + t))
            c[begin + t] = rounded(add_residual(activated, residual, begin + t))

    return write


VARIANT = NumbaCpuGemm()
