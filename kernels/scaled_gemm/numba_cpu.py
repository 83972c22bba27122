"""scaled_gemm for Numba on the CPU, by the blocked product of `numba_product`.

Quantised elements become scaled f32 as they are packed, group by group, and are multiplied in f32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.dtype import DType
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, store
from tunebench.kernels.common.numba_product import (
    Blocking,
    NumbaCpuProduct,
    Operand,
    expert,
    stored_line,
    walker,
)
from tunebench.kernels.scaled_gemm import _scaled
from tunebench.space import Config
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.scaled_gemm import ScaledGemm


class NumbaCpuScaledGemm(NumbaCpuProduct[Any]):
    """Any size, type and kind of scales."""

    operator = ScaledGemm

    def limits(self, workload: ScaledGemm, device: Device) -> str | None:
        """Return None: all types are converted to f32."""
        return None

    def default(self, workload: ScaledGemm, device: Device) -> Config:
        """Return near-square tiles, with rows packed in the order in which they are stored."""
        return expert((workload.m, workload.n, workload.k), device, "rows")

    def arguments(self, workload: ScaledGemm, config: Config) -> tuple[Argument, ...]:
        """Return all tensors, with c for a missing one, which is not read; then the tile."""
        arguments = _scaled.arguments(workload, 1)
        tensors = (argument for argument in arguments if not isinstance(argument, Scalar))
        return (*tensors, *Blocking(**config).arguments)

    def kernel(self, workload: ScaledGemm, config: Config) -> Callable[..., None]:
        """Return the kernel `(a, b, scale_a, scale_b, shift, bias, c, mc, nc)` for these types and scales."""
        import numba
        import numpy as np

        blocking = Blocking(**config)
        walk = walker(
            blocking,
            Operand(line=_line_of_a(workload), along="depth"),
            Operand(line=_line_of_b(workload), along="depth"),
            _write(workload),
            self.fastmath,
        )
        size, address_of = blocking.buffer_size(), address()
        # A query inside the kernel would put an address of this process into the machine code.
        workers = np.int64(numba.config.NUMBA_NUM_THREADS)

        def scaled_gemm(
            a: Any,
            b: Any,
            scale_a: Any,
            scale_b: Any,
            shift: Any,
            bias: Any,
            c: Any,
            mc: int,
            nc: int,
        ) -> None:
            m, n, k = c.shape[0], c.shape[1], a.shape[1]
            sizes = np.empty(3, np.int64)
            sizes[0], sizes[1], sizes[2] = m, n, k
            buffers = np.empty((workers, size(mc, nc)), np.float32)
            for worker in numba.prange(workers):
                matrices = address_of(a), address_of(b), address_of(c)
                numbers = address_of(scale_a), address_of(scale_b), address_of(shift), address_of(bias)
                operands = (matrices, numbers, n, k)
                buffer = address_of(buffers[worker])
                walk(operands, address_of(sizes), 1, (mc, nc), buffer, np.int64(worker), workers)

        return scaled_gemm


def _line_of_a(workload: ScaledGemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a (see `Operand`), scaled if it is quantised."""

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        matrices, _, _, k = operands
        return matrices[0], fixed * k

    if not workload.is_quantized:
        return stored_line(workload.dtype, place)

    @inlined
    def numbers(operands: Any) -> Any:
        _, numbers, _, _ = operands
        return numbers[0], numbers[0]

    kind = "group" if workload.scales == "block" else workload.scales
    return _scaled_line(workload, place, numbers, (workload.dtype, "f32"), kind)


def _line_of_b(workload: ScaledGemm) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of b (see `Operand`), scaled and shifted."""
    per_byte = _scaled.PACKED if workload.weight == "i4" else 1

    @inlined
    def place(operands: Any, z: int, fixed: int) -> Any:
        matrices, _, _, k = operands
        return matrices[1], fixed * (k // per_byte)

    @inlined
    def numbers(operands: Any) -> Any:
        _, numbers, _, _ = operands
        return numbers[1], numbers[2]

    return _scaled_line(workload, place, numbers, (workload.weight, workload.scale_type), workload.scales)


def _scaled_line(
    workload: ScaledGemm,
    place: Callable[..., Any],
    numbers: Callable[..., Any],
    types: tuple[Any, DType],
    kind: str,
) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of a quantised matrix, whose elements are scaled group by group.

    Args:
        workload: The product.
        place: As for `stored_line`; the offset counts stored elements.
        numbers: `inlined` function `(operands)` that returns the addresses of scales and shifts.
        types: Types of the elements and of the scales.
        kind: Kind of scales: those of `ScaledGemm.scales`.
    """
    import numpy as np

    read, group, has_shift = load(types[1]), workload.group, workload.shift
    by_block = group if kind == "block" else 1
    length = group if kind in ("group", "block") else 0
    zero = np.float32(0)

    @inlined
    def place_of(fixed: int, start: int, k: int) -> Any:
        if kind == "tensor":
            return 0
        if kind == "row":
            return fixed
        return fixed // by_block * ((k + group - 1) // group) + start // group

    def line(stride: int) -> Callable[..., None]:
        pack = _packed(stride) if types[0] == "i4" else _converted(types[0], stride)

        @jitted()
        def pack_line(
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            source, of_line = place(operands, z, fixed)
            scales, shifts = numbers(operands)
            _, _, _, k = operands
            at, end = start, start + count
            while at < end:
                until = min(end, (at // length + 1) * length) if length else end
                number = place_of(fixed, at, k)
                shift = read(shifts[number]) if has_shift else zero
                to = offset + (at - start) * stride
                pack(source, of_line, at, until - at, read(scales[number]), shift, panel, to)
                at = until

        return pack_line

    return line


def _converted(dtype: DType, stride: int) -> Callable[..., None]:
    """Return the function that packs scaled elements of one stored element each."""
    read = _load(dtype)

    @jitted(frozenset({"contract"}))
    def pack(
        source: Any, of_line: int, at: int, count: int, scale: Any, shift: Any, panel: Any, offset: int
    ) -> None:
        begin = of_line + at
        for t in range(count):
            panel[offset + t * stride] = read(source[begin + t]) * scale + shift

    return pack


def _load(dtype: DType) -> Callable[..., Any]:
    """Return the jitted function that converts a stored element to f32; 8-bit types too."""
    import numpy as np

    if dtype == "e4m3":
        return _load_e4m3()
    if dtype != "i8":
        return load(dtype)

    @inlined
    def load_i8(value: Any) -> Any:
        return np.float32(value)

    return load_i8


def _load_e4m3() -> Callable[..., Any]:
    """Return the jitted function that converts the byte of an e4m3 to f32, without branches."""
    import numpy as np

    magnitude, nan, least_normal = np.uint32(0x7F), np.uint32(0x7FC00000), np.uint32(8)
    least, further_bias = np.float32(2.0**-9), np.uint32(120 << 23)

    @inlined
    def load_e4m3(byte: Any) -> Any:
        bits = np.uint32(byte)
        rest = np.uint32(bits & magnitude)
        # The exponent's bias is 7, that of f32 is 127; subnormal numbers are multiples of 2**-9.
        normal = np.uint32((rest << np.uint32(20)) + further_bias)
        normal = nan if rest == magnitude else normal
        subnormal = np.float32(np.float32(rest) * least).view(np.uint32)
        chosen = np.uint32(subnormal if rest < least_normal else normal)
        return np.uint32(chosen | np.uint32((bits & np.uint32(0x80)) << np.uint32(24))).view(np.float32)

    return load_e4m3


def _packed(stride: int) -> Callable[..., None]:
    """Return the function that packs scaled elements of 4 bits; the first one and their number are even."""
    import numpy as np

    lower, sign = np.int32(15), np.int32(8)

    @jitted(frozenset({"contract"}))
    def pack(
        source: Any, of_line: int, at: int, count: int, scale: Any, shift: Any, panel: Any, offset: int
    ) -> None:
        begin = of_line + at // 2
        for t in range(count // 2):
            both = np.int32(source[begin + t])
            even = np.float32(np.int32((both & lower) ^ sign) - sign)
            odd = np.float32(both >> np.int32(4))
            panel[offset + 2 * t * stride] = even * scale + shift
            panel[offset + (2 * t + 1) * stride] = odd * scale + shift

    return pack


def _write(workload: ScaledGemm) -> Callable[..., None]:
    """Return the function that adds the bias to a part of a row of c, and stores it."""
    rounded, read, has_bias = store(workload.out), load(workload.out), workload.bias

    @jitted(frozenset({"contract", "nsz"}))
    def write(operands: Any, z: int, i: int, j: int, count: int, sums: Any, offset: int) -> None:
        matrices, numbers, n, _ = operands
        c, bias, begin = matrices[2], numbers[3], i * n + j
        for t in range(count):
            total = sums[offset + t]
            if has_bias:
                total = total + read(bias[j + t])
            c[begin + t] = rounded(total)

    return write


VARIANT = NumbaCpuScaledGemm()
