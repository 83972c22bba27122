"""Blocked matrix product for Numba on the CPU, used by gemm, gated_gemm, grouped_gemm, conv2d and attention.

One thread computes a tile of the result: it packs strips of both operands into contiguous f32 panels, and a
micro-kernel keeps mr x nr elements of the result in vector registers while it runs along the depth. An
operand need not be a matrix in memory: the function that packs a line decides where its elements come from.

Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; Van Zee and
van de Geijn, "BLIS: A Framework for Rapidly Instantiating BLAS Functionality", 2015.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from tunebench.device import Device
from tunebench.dtype import DType
from tunebench.kernels.common.numba_cpu import inlined, jitted, load
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar, ceil_div
from tunebench.workloads.operators.gated_gemm import GatedGemm
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

__all__ = [
    "BUFFER_BYTES",
    "LANES",
    "PARAMETERS",
    "Blocking",
    "NumbaCpuProduct",
    "Operand",
    "Vectors",
    "constraints",
    "dot_product",
    "expert",
    "registers_hold",
    "stored_line",
    "strided_product",
    "usual_sums",
    "walker",
]

W = TypeVar("W", bound=Gemm | GatedGemm | GroupedGemm)

LANES = 16
"""f32 elements per vector of the micro-kernel; LLVM splits it on targets with shorter registers."""

_REGISTERS = {"x86_64-v4": (32, 16), "x86_64-v3": (16, 8), "aarch64": (32, 4), "arm64": (32, 4)}
"""Vector registers, and f32 lanes of each, by architecture; SSE for others. Source: vendors' manuals."""

BUFFER_BYTES = 2 << 20
"""Most memory for the panels and tile of a thread: a second-level cache has 1 or 2 MiB."""

PARAMETERS = (
    Parameter("mr", (1, 2, 4, 6, 8, 12), "rows of the result in registers"),
    Parameter("nr", (16, 32, 48), "columns of the result in registers"),
    Parameter("m_panels", (1, 2, 4, 8, 16, 32), "strips of mr rows in a tile"),
    Parameter("n_panels", (1, 2, 4, 8, 16), "strips of nr columns in a tile"),
    Parameter("depth", (64, 128, 256, 512), "terms packed together"),
    Parameter("a_panel", ("rows", "columns"), "order of elements in a packed strip of rows"),
    Parameter("unroll", (1, 4), "terms per iteration of the innermost loop"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Block sizes of a configuration.

    `mc` and `nc` are arguments of kernels, so that configurations that differ only in the number of strips
    share machine code. The others are constants of it.
    """

    mr: int
    nr: int
    m_panels: int
    n_panels: int
    depth: int
    a_panel: Literal["rows", "columns"]
    unroll: int

    @property
    def mc(self) -> int:
        """Rows of a tile."""
        return self.mr * self.m_panels

    @property
    def nc(self) -> int:
        """Columns of a tile."""
        return self.nr * self.n_panels

    @property
    def a_strides(self) -> tuple[int, int]:
        """Strides in a packed strip of rows: across, and along the depth."""
        return (1, self.mr) if self.a_panel == "columns" else (self.depth, 1)

    @property
    def arguments(self) -> tuple[Scalar, Scalar]:
        """The last arguments of a kernel: `mc` and `nc`."""
        return Scalar("long long", self.mc), Scalar("long long", self.nc)

    def buffer_size(self) -> Callable[[int, int], int]:
        """Return the inlined function of `mc` and `nc` for the size of a worker's buffer, in f32 elements."""
        depth = self.depth

        @inlined
        def size(mc: int, nc: int) -> int:
            return (mc + nc) * depth + mc * nc

        return size


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """Reader of one operand, by lines that are contiguous, or nearly so, in memory.

    Attributes:
        line: Function of the stride of packed elements that returns a `jitted` function
            `(operands, z, fixed, start, count, panel, offset)`, which packs `count` elements from `start` on.
        along: Direction of a line: ``"depth"`` at a fixed row or column, or ``"free"`` at a fixed term.
    """

    line: Callable[[int], Callable[..., None]]
    along: Literal["depth", "free"]


def stored_line(dtype: DType, place: Callable[..., Any]) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of an operand whose lines are contiguous in memory.

    Args:
        dtype: Type of its elements.
        place: `inlined` function `(operands, z, fixed)` that returns the address of a tensor, and the offset
            of the line in it.
    """
    read = load(dtype)

    @functools.cache
    def line(stride: int) -> Callable[..., None]:
        @jitted()
        def pack_line(
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            source, of_line = place(operands, z, fixed)
            begin = of_line + start
            for t in range(count):
                panel[offset + t * stride] = read(source[begin + t])

        return pack_line

    return line


def registers_hold(mr: Any, nr: Any, device: Device) -> Any:
    """Sums (mr * nr), one row of nr elements and one factor must fit in the vector registers."""
    count, lanes = _REGISTERS.get(device.architecture, (16, 4))
    return mr * (nr // lanes) + nr // lanes + 1 <= count


def usual_sums(device: Device) -> tuple[int, int]:
    """Return the rows and columns of sums that use the vector registers best."""
    found = {"x86_64-v4": (8, 32), "x86_64-v3": (6, 16), "aarch64": (4, 16), "arm64": (4, 16)}
    return found.get(device.architecture, (2, 16))


def constraints(extents: Callable[[Any], tuple[int, int, int]]) -> tuple[Constraint, ...]:
    """Return the constraints of `PARAMETERS`.

    Args:
        extents: Function that returns the rows, columns and terms of a workload's product.
    """

    def buffers(mr: Any, m_panels: Any, nr: Any, n_panels: Any, depth: Any) -> Any:
        """Two packed panels and the tile must fit in the second-level cache."""
        mc, nc = mr * m_panels, nr * n_panels
        return 4 * ((mc + nc) * depth + mc * nc) <= BUFFER_BYTES

    return (
        registers_hold,
        buffers,
        lambda mr, workload: (mr == 1) | (mr < 2 * extents(workload)[0]),
        lambda nr, workload: (nr == LANES) | (nr < 2 * extents(workload)[1]),
        lambda mr, m_panels, workload: (m_panels == 1) | (mr * m_panels < 2 * extents(workload)[0]),
        lambda nr, n_panels, workload: (n_panels == 1) | (nr * n_panels < 2 * extents(workload)[1]),
        lambda depth, workload: (depth == 64) | (depth < 2 * extents(workload)[2]),
    )


def expert(extents: tuple[int, int, int], device: Device, a_panel: Literal["rows", "columns"]) -> Config:
    """Return a default: full registers, tiles near 128 x 256, and several tiles per core.

    Args:
        extents: Rows, columns and terms of the product.
        device: The processor.
        a_panel: Order of elements in a packed strip of rows.
    """
    m, n, k = extents
    mr, nr = usual_sums(device)
    mr = max(value for value in (1, 2, 4, 6, 8) if value == 1 or (value <= mr and value < 2 * m))
    nr = nr if nr < 2 * n else 16
    fitting_m = [value for value in (1, 2, 4, 8, 16) if value == 1 or value * mr < 2 * m]
    fitting_n = [value for value in (1, 2, 4, 8) if value == 1 or value * nr < 2 * n]
    m_panels, n_panels = fitting_m[-1], fitting_n[-1]
    while ceil_div(m, mr * m_panels) * ceil_div(n, nr * n_panels) < 2 * device.sm_count:
        if n_panels * nr >= m_panels * mr and n_panels > 1:
            n_panels //= 2
        elif m_panels > 1:
            m_panels //= 2
        else:
            break
    depth = max(value for value in (64, 128, 256) if value == 64 or value < 2 * k)
    sizes = {"mr": mr, "nr": nr, "m_panels": m_panels, "n_panels": n_panels, "depth": depth}
    return Config({**sizes, "a_panel": a_panel, "unroll": 1})


class NumbaCpuProduct(NumbaCpuVariant[W]):
    """A matrix product of f32, tf32, f16 and bf16, walked by `walker`."""

    name = "numba_cpu"
    space = Space(PARAMETERS, constraints(lambda workload: (workload.m, workload.n, workload.k)))

    def limits(self, workload: W, device: Device) -> str | None:
        """Return why the input type is not supported, or None. f32 sums cannot hold those of i8."""
        if workload.dtype in ("e4m3", "i8"):
            return f"{self.key} multiplies f32, tf32, f16 and bf16, not {workload.dtype}"
        return None

    def arguments(self, workload: W, config: Config) -> tuple[Argument, ...]:
        """Return all tensors, and the rows and columns of a tile."""
        return (*self.tensors(workload, config), *Blocking(**config).arguments)

    def costs(self, workload: W, table: Table, device: Device) -> Costs:
        """Count the multiply-adds of the product, without those on padding."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(workload.flops() // 2))


def walker(
    blocking: Blocking, a: Operand, b: Operand, write: Callable[..., None], fastmath: frozenset[str]
) -> Callable[..., None]:
    """Return the jitted function that computes a worker's share of the tiles.

    Its arguments are `(operands, sizes, products, block, buffer, worker, workers)`: `operands` is passed to
    lines and `write`, `sizes` is the address of m, n, k of each product (int64), `block` the rows and columns
    of a tile (`mc` and `nc` of `Blocking`), and `buffer` the address of the worker's `buffer_size` elements.

    Args:
        blocking: Block sizes.
        a: Reader of rows.
        b: Reader of columns.
        write: `jitted` function `(operands, z, i, j, count, sums, offset)` that finishes and stores `count`
            sums of row i, from column j on.
        fastmath: LLVM flags.
    """
    tile = _tile(blocking, a, b, write)

    @jitted(fastmath)
    def walk(
        operands: Any, sizes: Any, products: int, block: Any, buffer: Any, worker: int, workers: int
    ) -> None:
        turn, mc, nc = 0, block[0], block[1]
        for z in range(products):
            m, n, k = sizes[3 * z], sizes[3 * z + 1], sizes[3 * z + 2]
            for i in range(0, m, mc):
                for j in range(0, n, nc):
                    if turn % workers == worker:
                        tile(operands, z, i, j, min(mc, m - i), min(nc, n - j), k, block, buffer)
                    turn += 1

    return walk


def _tile(blocking: Blocking, a: Operand, b: Operand, write: Callable[..., None]) -> Callable[..., None]:
    """Return the inlined function that computes and stores one tile."""
    import numpy as np

    mr, nr, depth = blocking.mr, blocking.nr, blocking.depth
    pack_a = _pack(a, mr, blocking.a_strides, blocking)
    pack_b = _pack(b, nr, (1, nr), blocking)
    multiply = strided_product(mr, nr, a_strides=blocking.a_strides, b_pitch=nr, unroll=blocking.unroll)
    zero = np.float32(0)

    @inlined
    def tile(
        operands: Any, z: int, i: int, j: int, rows: int, cols: int, k: int, block: Any, buffer: Any
    ) -> None:
        mc, nc = block
        b_origin, sums_origin = mc * depth, (mc + nc) * depth  # packed rows start at 0
        m_panels, n_panels = (rows + mr - 1) // mr, (cols + nr - 1) // nr
        for at in range(sums_origin, sums_origin + m_panels * mr * nc):
            buffer[at] = zero
        for start in range(0, k, depth):
            terms = min(depth, k - start)
            pack_b(operands, z, j, cols, start, terms, buffer, b_origin)
            padded = pack_a(operands, z, i, rows, start, terms, buffer, 0)
            for n_panel in range(n_panels):
                for m_panel in range(m_panels):
                    a_at, b_at = m_panel * mr * depth, b_origin + n_panel * nr * depth
                    sums_at = sums_origin + m_panel * mr * nc + n_panel * nr
                    multiply(padded, buffer, a_at, buffer, b_at, buffer, sums_at, nc)
        for row in range(rows):
            write(operands, z, i + row, j, cols, buffer, sums_origin + row * nc)

    return tile


def _pack(operand: Operand, width: int, strides: tuple[int, int], blocking: Blocking) -> Callable[..., int]:
    """Return the inlined function that packs strips of `width` rows or columns, from `origin` of a buffer on.

    It returns the number of terms, rounded up with zeros to a multiple of what the micro-kernel adds
    together.

    Args:
        operand: Reader of the operand.
        width: Rows or columns of a strip.
        strides: Distances between neighbours in a strip, across and along the depth.
        blocking: Block sizes.
    """
    import numpy as np

    across, along = strides
    by_depth = operand.along == "depth"
    line = operand.line(along if by_depth else across)
    depth, unroll, zero = blocking.depth, blocking.unroll, np.float32(0)

    @inlined
    def pack(
        operands: Any, z: int, first: int, extent: int, start: int, terms: int, buffer: Any, origin: int
    ) -> int:
        padded = (terms + unroll - 1) // unroll * unroll
        for strip in range((extent + width - 1) // width):
            base, begin = origin + strip * width * depth, strip * width
            used = min(width, extent - begin)
            if used < width or terms < padded:
                for at in range(base, base + width * depth):
                    buffer[at] = zero
            if by_depth:
                for i in range(used):
                    line(operands, z, first + begin + i, start, terms, buffer, base + i * across)
            else:
                for p in range(terms):
                    line(operands, z, start + p, first + begin, used, buffer, base + p * along)
        return padded

    return pack


class Vectors:
    """Vectors of `LANES` f32 in memory and in registers, as LLVM instructions."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir
        from numba.core import cgutils

        self.builder, self.kind = builder, ir.VectorType(ir.FloatType(), LANES)
        self.zero = ir.Constant(self.kind, None)
        self._undefined, self._first = ir.Constant(self.kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        self._spread = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(self.kind, [self.kind] * 3), f"llvm.fma.v{LANES}f32"
        )

    def _at(self, base: Any, offset: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(base, [offset]), self.kind.as_pointer())

    def load(self, base: Any, offset: Any) -> Any:
        """Return f32 elements."""
        return self.builder.load(self._at(base, offset), align=4)

    def load_half(self, dtype: DType, base: Any, offset: Any) -> Any:
        """Return f16 or bf16 elements, which arrays hold as 16-bit integers, in f32."""
        from llvmlite import ir

        bits_kind, wide_kind = (ir.VectorType(ir.IntType(bits), LANES) for bits in (16, 32))
        at = self.builder.bitcast(self.builder.gep(base, [offset]), bits_kind.as_pointer())
        bits = self.builder.load(at, align=2)
        if dtype == "f16":
            return self.builder.fpext(
                self.builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), self.kind
            )
        high = self.builder.shl(self.builder.zext(bits, wide_kind), ir.Constant(wide_kind, [16] * LANES))
        return self.builder.bitcast(high, self.kind)

    def store(self, value: Any, base: Any, offset: Any) -> None:
        """Store f32 elements."""
        self.builder.store(value, self._at(base, offset), align=4)

    def spread(self, base: Any, offset: Any) -> Any:
        """Return one element in all lanes."""
        element = self.builder.load(self.builder.gep(base, [offset]))
        lowest = self.builder.insert_element(self._undefined, element, self._first)
        return self.builder.shuffle_vector(lowest, self._undefined, self._spread)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return self.builder.call(self._fma, [a, b, c])

    def multiply_add(self, a: Any, b: Any, slot: Any) -> None:
        """Add a product to a stack slot, which LLVM turns into a register."""
        self.builder.store(self.fma(a, b, self.builder.load(slot)), slot)


def dot_product(dtype: DType, terms: int) -> Callable[..., Any]:
    """Return the intrinsic `(a, a_at, b, b_at)` for the sum of products of two lines of `terms` elements.

    Operands are addresses, and offsets from there. LLVM unrolls a loop of 16 to 48 terms before it could
    vectorise it, and then computes it element by element.

    Args:
        dtype: Type of the second operand: f32, f16 or bf16. The first one is f32.
        terms: Number of products.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b = (builder.gep(arguments[i], [arguments[i + 1]]) for i in (0, 2))
        vectors, number, index = Vectors(builder), ir.FloatType(), ir.IntType(64)
        total, sums = ir.Constant(number, 0.0), [vectors.zero] * min(4, terms // LANES)
        for part in range(terms // LANES):
            at, accumulator = index(part * LANES), part % len(sums)
            factor = vectors.load(b, at) if dtype == "f32" else vectors.load_half(dtype, b, at)
            sums[accumulator] = vectors.fma(vectors.load(a, at), factor, sums[accumulator])
        if sums:
            whole = functools.reduce(builder.fadd, sums)
            add = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(number, [number, vectors.kind]),
                f"llvm.vector.reduce.fadd.v{LANES}f32",
            )
            total = builder.call(add, [total, whole], fastmath=("reassoc", "nsz"))
        return total

    @intrinsic  # type: ignore[untyped-decorator]
    def dot(_typing: Any, a: Any, a_at: Any, b: Any, b_at: Any) -> Any:
        return types.float32(a, types.int64, b, types.int64), generate

    return dot  # type: ignore[no-any-return]


def strided_product(
    mr: int,
    nr: int,
    *,
    a_strides: tuple[int, int],
    b_pitch: int,
    unroll: int = 1,
    adds: bool = True,
) -> Callable[..., None]:
    """Return the intrinsic `(terms, a, a_at, b, b_at, sums, sums_at, pitch)` for a product of mr x nr sums.

    Operands and sums are f32: an address, and an offset from there; rows of sums are `pitch` apart. The code
    is LLVM vectors, because LLVM does not reliably keep the sums of a loop over arrays in registers.

    Args:
        mr: Rows.
        nr: Columns, a multiple of `LANES`.
        a_strides: Strides of the left operand: across, and along the terms.
        b_pitch: Distance between terms in the right operand, whose columns are contiguous.
        unroll: Terms per iteration; `terms` must be a multiple of it.
        adds: Whether the product is added to the sums, or replaces them.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    index = ir.IntType(64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        a, b, sums = (builder.gep(arguments[i], [arguments[i + 1]]) for i in (1, 3, 5))
        vectors, pitch = Vectors(builder), arguments[7]
        places = {
            (i, j): builder.add(builder.mul(pitch, index(i)), index(j * LANES))
            for i in range(mr)
            for j in range(nr // LANES)
        }

        def add_term(p: Any) -> None:
            """Add the outer product of column p of the rows and row p of the columns."""
            at = builder.mul(p, index(b_pitch))
            columns = [vectors.load(b, builder.add(at, index(j * LANES))) for j in range(nr // LANES)]
            at = builder.mul(p, index(a_strides[1]))
            for i in range(mr):
                factors = vectors.spread(a, builder.add(at, index(i * a_strides[0])))
                for j, column in enumerate(columns):
                    vectors.multiply_add(factors, column, registers[i, j])

        registers = {place: cgutils.alloca_once(builder, vectors.kind) for place in places}
        for place, offset in places.items():
            builder.store(vectors.load(sums, offset) if adds else vectors.zero, registers[place])
        loop = cgutils.for_range_slice(builder, index(0), arguments[0], index(unroll), index)
        with loop as (p, _):
            for ahead in range(unroll):
                add_term(builder.add(p, index(ahead)))
        for place, offset in places.items():
            vectors.store(builder.load(registers[place]), sums, offset)
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def multiply(
        _typing: Any, terms: Any, a: Any, a_at: Any, b: Any, b_at: Any, sums: Any, sums_at: Any, pitch: Any
    ) -> Any:
        at = types.int64
        return types.void(at, a, at, b, at, sums, at, at), generate

    return multiply  # type: ignore[no-any-return]
