"""gemm on the CPU: tiles in parallel, operands packed, sums in vector registers (see `_numba_product`).

f16 and bf16 become f32 as they are packed; tf32 is computed as f32, which is more exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels._numba_cpu import address, inlined, jitted, load, store
from tunebench.kernels._numba_product import PARAMETERS, Blocking, Operand, constraints, expert, walker
from tunebench.space import Config, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workloads.operators.gemm import Gemm

SPACE = Space(PARAMETERS, constraints(lambda workload: (workload.m, workload.n, workload.k)))


class NumbaCpuGemm(NumbaCpuVariant[Gemm]):
    """Serves every size, transpose, batch and epilogue of f32, tf32, f16 and bf16."""

    name = "numba_cpu"
    operator = Gemm
    space = SPACE

    def limits(self, workload: Gemm, device: Device) -> str | None:
        """Return what keeps this problem out, or None: sums are kept in f32, where those of i8 do not fit."""
        if workload.dtype in ("e4m3", "i8"):
            return f"{self.key} takes f32, tf32, f16 and bf16, not {workload.dtype}"
        return None

    def default(self, workload: Gemm, device: Device) -> Config:
        """Return square-ish tiles, with rows packed in the order in which they are stored."""
        extents = (workload.m, workload.n, workload.k)
        return expert(extents, device, "rows" if workload.trans[0] == "n" else "columns")

    def costs(self, workload: Gemm, table: Table, device: Device) -> Costs:
        """Count the multiply-adds of the product, without those on padding."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(workload.flops() // 2))

    def arguments(self, workload: Gemm, config: Config) -> tuple[Argument, ...]:
        """Pass c for a missing bias (which is then not read)."""
        return ("a", "b", "bias" if workload.has_bias else "c", "c")

    def kernel(self, workload: Gemm, config: Config) -> Callable[..., None]:
        """Return the kernel `(a, b, bias, c)` for these types, transposes and epilogue."""
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
        a_depth, size, address_of = 2 if workload.trans[0] == "n" else 1, blocking.buffer_size, address()
        # Asking while the kernel runs would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def gemm(a: Any, b: Any, bias: Any, c: Any) -> None:
            batch, m, n, k = c.shape[0], c.shape[1], c.shape[2], a.shape[a_depth]
            a_lines, b_lines, a_length, b_length = a.shape[1], b.shape[1], a.shape[2], b.shape[2]
            sizes = np.empty((batch, 3), np.int64)
            for z in range(batch):
                sizes[z, 0], sizes[z, 1], sizes[z, 2] = m, n, k
            buffers = np.empty((workers, size), np.float32)
            for worker in numba.prange(workers):
                arrays = address_of(a), address_of(b), address_of(bias), address_of(c)
                operands = (arrays, (a_lines, b_lines), (a_length, b_length), m, n)
                buffer = address_of(buffers[worker])
                walk(operands, address_of(sizes), batch, buffer, np.int64(worker), workers)

        return gemm


def _line(which: int, workload: Gemm) -> Callable[[int], Callable[..., None]]:
    """Return what packs a part of a row of a or b, as it is stored."""
    read = load(workload.inputs()[which].dtype)

    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def pack_line(
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            arrays, lines, lengths, _, _ = operands
            source, begin = arrays[which], (z * lines[which] + fixed) * lengths[which] + start
            for t in range(count):
                panel[offset + t * stride] = read(source[begin + t])

        return pack_line

    return line


def _write(workload: Gemm) -> Callable[..., None]:
    """Return what applies the epilogue to a part of a row of c, and stores it."""
    import numpy as np

    rounded, read = store(workload.out), load(workload.out)
    zero, activation = np.float32(0), workload.activation

    @inlined
    def with_bias(total: Any, bias: Any, j: int) -> Any:
        return total + read(bias[j])

    @inlined
    def without_bias(total: Any, bias: Any, j: int) -> Any:
        return total

    @inlined
    def relu(total: Any) -> Any:
        return max(total, zero)

    @inlined
    def identity(total: Any) -> Any:
        return total

    add = with_bias if workload.has_bias else without_bias
    activate = {"relu": relu, "none": identity}[activation] if activation != "gelu" else _gelu()

    @jitted(frozenset({"contract", "nsz"}))
    def write(operands: Any, z: int, i: int, j: int, count: int, sums: Any, offset: int) -> None:
        arrays, _, _, m, n = operands
        bias, c, begin = arrays[2], arrays[3], (z * m + i) * n + j
        for t in range(count):
            c[begin + t] = rounded(activate(add(sums[offset + t], bias, j + t)))

    return write


# erf(x) / x as a quotient of polynomials in x**2 on |x| <= 4, beyond which erf is 1 in f32. Source: our own
# fit, by iterated weighted least squares on Chebyshev nodes; relative error below 4e-7 evaluated in f32.
_ERF_P = (1.12837911, 0.193510875, 0.0530972034, 0.00388188474, 0.000284533802, 1.98704333e-06)
_ERF_Q = (1.0, 0.504827142, 0.115335852, 0.0152043132, 0.00118521973, 3.74212286e-05)


def _gelu() -> Callable[..., Any]:
    """Return gelu in f32, without calls, so that loops over it vectorise."""
    import numpy as np

    p0, p1, p2, p3, p4, p5 = map(np.float32, _ERF_P)
    q0, q1, q2, q3, q4, q5 = map(np.float32, _ERF_Q)
    half, one, root, limit = np.float32(0.5), np.float32(1), np.float32(0.5**0.5), np.float32(4)

    @inlined
    def gelu(x: Any) -> Any:
        z = min(max(x * root, -limit), limit)
        t = z * z
        numerator = ((((p5 * t + p4) * t + p3) * t + p2) * t + p1) * t + p0
        denominator = ((((q5 * t + q4) * t + q3) * t + q2) * t + q1) * t + q0
        return half * x * (one + z * numerator / denominator)

    return gelu


VARIANT = NumbaCpuGemm()
