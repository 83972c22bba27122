"""Test case of a PTX wrapper: a small kernel with random operands, and the comparison of its results.

A case is a variant of a test operator, so that the usual code compiles, emulates and launches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tunebench.device import Device
from tunebench.dtype import numpy_dtype
from tunebench.kernels.common.cuda import helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, PixelBox, TensorMap
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload

__all__ = ["SEED", "Operand", "WrapperCase", "WrapperVariant", "WrapperWorkload", "differences", "draw"]

DRAWS = 4
"""Blocks of a case; each block has different operands."""
MOST_QUOTED = 3
"""Most differing elements that a report lists per case."""
SEED = 1

Kind = Literal[
    "u32",
    "i32",
    "f32",
    "tf32",
    "f16",
    "bf16",
    "e4m3",
    "i8",
    "floats",
    "numbers",
    "approx",
    "rows",
    "bytes",
    "stored",
]
"""How operand words are drawn and result words are compared.

random bits                     u32, i32
integers, exact in the dtype    f32, tf32 (as bits), f16, bf16, e4m3, i8, packed into words; their
                                products and sums are exact in any order. Any two NaN results are equal.
f32                             floats: any, special values included; numbers: between -125 and 125; approx:
                                results within `APPROXIMATE`
integers used by the body       rows: a permutation of the block's threads; bytes: 0 to 16
random bits                     stored: results that the body itself stores, by a tensor map
"""

PER_WORD = {"f32": 1, "tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "i8": 4}
FLOATS = ("f32", "floats", "numbers", "approx")
APPROXIMATE = 2.0**-21
"""Allowed relative error of `.approx` instructions: two units in the last place, host error included."""


@dataclass(frozen=True)
class Operand:
    """An array of 32-bit words of each thread.

    Attributes:
        name: Name of the C++ array.
        count: Number of words.
        kind: How words are drawn and compared.
    """

    name: str
    count: int
    kind: Kind = "u32"

    @property
    def ctype(self) -> str:
        """Return the C++ type of an element."""
        return "float" if self.kind in FLOATS else "i32" if self.kind == "i32" else "u32"


@dataclass(frozen=True)
class WrapperCase:
    """A small kernel that calls one or more wrappers.

    Attributes:
        name: Unique name, usually that of the wrapper.
        inputs: Input arrays, drawn for each thread; `body` may change them.
        body: C++ code between loading the inputs and storing the results.
        outputs: Result arrays: inputs or new arrays.
        covers: Names of the wrappers called, as in `ptx_wrappers.wrappers`; default: `name`.
        before: C++ code before the kernel.
        boxes: Box height of each tensor map argument (`map0`, ...), in lines. A line is the input of one
            thread: 64 elements of 16 bits. The dimensions of a map are element, thread and block.
        result_box: The same of a last tensor map, of the results; 0 for none.
        rank: Dimensions of the maps: 3, or 2 if the threads of all blocks form one dimension.
        pixel_box: Set if the maps are im2col maps: a line is a pixel, the threads of a block are an image
            with rows of 8 pixels, and `boxes` counts pixels.
        threads: Threads per block.
        blocks_per_sm: Second argument of `__launch_bounds__`, which limits registers.
        cluster: Blocks per cluster.
        smem_bytes: Dynamic shared memory, in bytes.
        minimum_cc: Lowest compute capability with the instruction.
        maximum_cc: Highest compute capability with the instruction.
        files: Names of the helper files that the source includes.
    """

    name: str
    inputs: tuple[Operand, ...]
    body: str
    outputs: tuple[Operand, ...]
    covers: tuple[str, ...] = ()
    before: str = ""
    boxes: tuple[int, ...] = ()
    result_box: int = 0
    rank: Literal[2, 3] = 3
    pixel_box: PixelBox | None = None
    threads: int = 32
    blocks_per_sm: int = 1
    cluster: int = 1
    smem_bytes: int = 0
    minimum_cc: tuple[int, int] = (8, 0)
    maximum_cc: tuple[int, int] = (99, 9)
    files: tuple[str, ...] = ("types", "ptx")

    @property
    def wrappers(self) -> tuple[str, ...]:
        """Return the wrappers this case calls."""
        return self.covers or (self.name,)

    def runs_on(self, device: Device) -> bool:
        """Return whether the device has the instruction."""
        return self.minimum_cc <= device.compute_capability <= self.maximum_cc


# -- the case as a variant ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WrapperWorkload(Workload):
    """Input and output words of each thread; the kernel defines the operation."""

    operator: ClassVar[str] = "conformance"

    threads: Size
    in_words: Size
    out_words: Size
    dtype: Literal["i32"] = "i32"

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the input words of all threads."""
        return (Tensor(name="inputs", shape=(self.threads, self.in_words), dtype="i32"),)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the output words of all threads."""
        return (Tensor(name="outputs", shape=(self.threads, self.out_words), dtype="i32"),)

    def flops(self) -> int:
        """Return 0; the case has no cost model."""
        return 0

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        """Return no reference; results are compared with the emulated wrapper."""
        return {}

    def tolerance(self) -> Tolerance:
        """Return zero tolerance."""
        return Tolerance(eps_out=0.0, eps_acc=0.0, reason="the same instruction on the same operands")


SOURCE = """
#define EACH(n) for (int i = 0; i < n; ++i)
static constexpr int IN_WORDS = {in_words}, OUT_WORDS = {out_words};
{before}
__global__ void __launch_bounds__({threads}, {blocks_per_sm}) conform({parameters}) {{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
{load}
  {body}
{store}
}}
"""


class WrapperVariant(CudaVariant[WrapperWorkload]):
    """Variant that runs the kernel of a case.

    Args:
        case: The case to run.
    """

    name = "case"
    operator = WrapperWorkload
    space = Space((Parameter("unused", (0,), "nothing"),))

    def __init__(self, case: WrapperCase) -> None:
        self.case = case

    def default(self, workload: WrapperWorkload, device: Device) -> Config:
        """Return the only configuration."""
        return Config({"unused": 0})

    def costs(self, workload: WrapperWorkload, table: Table, device: Device) -> Costs:
        """Count nothing."""
        return Costs(blocks=DRAWS, full_blocks=DRAWS, threads=self.case.threads)

    def target(self, device: Device) -> str:
        """Return the architecture, with the suffix `a` on Hopper."""
        return "sm_90a" if device.architecture == "sm_90" else device.architecture

    def source(self, workload: WrapperWorkload, config: Config) -> str:
        """Return the kernel source: load inputs, run the body, store results."""
        case = self.case
        loaded = {operand.name for operand in case.inputs}
        new = [
            f"  {operand.ctype} {operand.name}[{operand.count}];"
            for operand in case.outputs
            if operand.name not in loaded
        ]
        maps = [f"const __grid_constant__ TensorMap map{i}" for i in range(len(self._maps()))]
        text = SOURCE.format(
            in_words=workload.in_words,
            out_words=workload.out_words,
            threads=case.threads,
            blocks_per_sm=case.blocks_per_sm,
            parameters=", ".join(["const u32* inputs", "u32* outputs", *maps]),
            before=case.before,
            body=case.body,
            load="\n".join([*_moves(case.inputs, load=True), *new]),
            store="\n".join(_moves(case.outputs, load=False)),
        )
        return helpers(*case.files) + text

    def launches(self, workload: WrapperWorkload, config: Config) -> tuple[Launch, ...]:
        """Return one launch with a block per draw."""
        arguments: tuple[Argument, ...] = ("inputs", "outputs", *self._maps())
        shape: dict[str, Any] = {"grid": (DRAWS, 1, 1), "block": (self.case.threads, 1, 1)}
        shape["smem_bytes"] = self.case.smem_bytes
        if self.case.cluster > 1:
            shape["cluster"] = self.case.cluster
        return (Launch(entry="conform", arguments=arguments, **shape),)

    def _maps(self) -> tuple[Any, ...]:
        """Return the tensor maps over the inputs of all threads, and over the results."""
        threads, rank, pixels = self.case.threads, self.case.rank, self.case.pixel_box
        extents: tuple[int, ...] = (64, threads, DRAWS) if rank == 3 else (64, threads * DRAWS)
        strides: tuple[int, ...] = (128, 128 * threads)[: rank - 1]
        if pixels:
            extents, strides, rank = (64, 8, threads // 8, DRAWS), (128, 1024, 128 * threads), 2
        mapped = [("inputs", lines) for lines in self.case.boxes]
        mapped += [("outputs", self.case.result_box)] if self.case.result_box else []
        return tuple(
            TensorMap(
                tensor=tensor,
                dtype="f16",
                extents=extents,
                strides_bytes=strides,
                box=(64, lines, 1)[:rank],
                pixel_box=pixels,
            )
            for tensor, lines in mapped
        )

    @property
    def workload(self) -> WrapperWorkload:
        """Return the workload with the word counts of the case."""
        case = self.case
        in_words, out_words = (sum(o.count for o in side) for side in (case.inputs, case.outputs))
        return WrapperWorkload(threads=DRAWS * case.threads, in_words=in_words, out_words=out_words)


def _moves(operands: Sequence[Operand], *, load: bool) -> Iterator[str]:
    """Yield the C++ code that loads a thread's words into arrays, or stores them."""
    first = 0
    for operand in operands:
        name, floats = operand.name, operand.ctype == "float"
        if load:
            word = f"inputs[at * IN_WORDS + {first} + i]"
            value = f"__uint_as_float({word})" if floats else f"{operand.ctype}({word})"
            yield f"  {operand.ctype} {name}[{operand.count}];"
            yield f"  EACH({operand.count}) {name}[i] = {value};"
        elif operand.kind != "stored":
            value = f"__float_as_uint({name}[i])" if floats else f"u32({name}[i])"
            yield f"  EACH({operand.count}) outputs[at * OUT_WORDS + {first} + i] = {value};"
        first += operand.count


# -- operands ------------------------------------------------------------------------------------------------


def draw(case: WrapperCase, seed: int = SEED) -> dict[str, Any]:
    """Return random inputs of all threads of all blocks."""
    rng = np.random.default_rng(seed)
    parts = [_drawn(operand, case.threads, rng) for operand in case.inputs]
    return {"inputs": np.ascontiguousarray(np.concatenate(parts, axis=1)).view(np.int32)}


def _drawn(operand: Operand, threads: int, rng: np.random.Generator) -> Any:
    shape = (DRAWS * threads, operand.count)
    if operand.kind in PER_WORD:
        per_word = PER_WORD[operand.kind]
        least, beyond = (-128, 128) if operand.kind == "i8" else (-8, 9)
        values = rng.integers(least, beyond, (shape[0], shape[1] * per_word)).astype(np.float32)
        return np.ascontiguousarray(values.astype(numpy_dtype(operand.kind))).view(np.uint32)
    if operand.kind == "rows":
        return np.concatenate([rng.permutation(threads) for _ in range(DRAWS)]).astype(np.uint32)[:, None]
    if operand.kind == "bytes":
        return rng.integers(0, 17, shape).astype(np.uint32)
    if operand.kind == "numbers":
        return rng.uniform(-125, 125, shape).astype(np.float32).view(np.uint32)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return _special(bits, rng) if operand.kind == "floats" else bits


def _special(bits: Any, rng: np.random.Generator) -> Any:
    """Return f32 values that are hard to convert: in range of 16- and 8-bit types, ties, special values."""
    exponent = rng.integers(127 - 28, 127 + 20, bits.shape).astype(np.uint32)
    usual = (bits & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)
    # Ties when 3, 7 or 10 bits of the fraction are kept: a one followed by zeros.
    cut = rng.choice(np.array([20, 16, 13], np.uint32), bits.shape)
    ties = usual >> cut << cut | np.uint32(1) << (cut - np.uint32(1))
    nothing = rng.choice(
        np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x43E00000], np.uint32), bits.shape
    )
    nothing |= bits & np.uint32(0x80000000)
    return np.choose(rng.integers(0, 4, bits.shape), [usual, ties, nothing, bits])


# -- results -------------------------------------------------------------------------------------------------


def differences(case: WrapperCase, got: Any, right: Any) -> str | None:
    """Return the differing registers by wrapper and lane, or None."""
    wrong: list[str] = []
    first = 0
    for operand in case.outputs:
        part = slice(first, first + operand.count)
        unlike = ~_same(got[:, part].view(np.uint32), right[:, part].view(np.uint32), operand.kind)
        wrong += [
            f"lane {thread % case.threads}, {operand.name}[{i}]: "
            f"{_word(got[thread, first + i], operand.kind)}, "
            f"expected {_word(right[thread, first + i], operand.kind)}"
            for thread, i in zip(*map(np.ndarray.tolist, np.nonzero(unlike)), strict=True)
        ]
        first += operand.count
    if not wrong:
        return None
    quoted = "; ".join(wrong[:MOST_QUOTED])
    return f"{', '.join(case.wrappers)}: {len(wrong)} of {right.size} registers differ: {quoted}"


def _same(got: Any, right: Any, kind: Kind) -> Any:
    """Return which words are equal: same bits, or NaN of any payload."""
    if kind in ("u32", "i32", "i8", "rows", "bytes", "stored"):
        return got == right
    a, b = (np.ascontiguousarray(words).view(_element(kind)) for words in (got, right))
    if kind == "approx":  # subnormal numbers are flushed to zero
        a, b = (np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x).astype(np.float64) for x in (a, b))
        return (a == b) | (np.abs(a - b) <= APPROXIMATE * np.abs(b)) | (np.isnan(a) & np.isnan(b))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = (a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))
    return same.reshape(*got.shape, -1).all(axis=-1)


def _element(kind: Kind) -> Any:
    return numpy_dtype("f32" if kind in FLOATS else kind)


def _word(word: Any, kind: Kind) -> str:
    """Return a register's bits in hexadecimal and its values."""
    word = np.asarray(word).reshape(1).view(np.uint32)
    text = f"{int(word[0]):#010x}"
    if kind in ("u32", "rows", "bytes", "stored"):
        return text
    if kind == "i32":
        return f"{text} ({int(word.view(np.int32)[0])})"
    return f"{text} ({', '.join(f'{float(x):g}' for x in word.view(_element(kind)))})"
