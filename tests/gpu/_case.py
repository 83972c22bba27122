"""A tiny kernel around one instruction: its operands, its source, and what of its results counts as the same.

A case is a variant of an operator of its own, so that all that compiles, emulates and launches kernels does
it with cases, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from tunebench.device import Device
from tunebench.kernels.common.cuda import helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, PixelBox, TensorMap
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload

__all__ = ["SEED", "Case", "CaseVariant", "Operand", "Words", "differences", "draw"]

DRAWS = 4
"""Blocks of a case, each with operands of its own."""
TOLD = 3
"""Elements that are told of a case that differs."""
SEED = 1

Kind = Literal[
    "u32", "i32", "f32", "tf32", "f16", "bf16", "e4m3", "i8", "floats", "numbers", "approx", "rows", "bytes"
]
"""What words are drawn as, and what of them counts as the same.

any bits                        u32, i32
whole numbers, exact in a type  f32, tf32 (as bits), f16, bf16, e4m3, i8: as many as a word holds; products
                                and sums of them are exact in any order. Of results, any NaN is one.
f32                             floats: any, special ones among them; numbers: between -125 and 125; approx:
                                results that agree to `APPROXIMATE`
numbers for the body to use     rows: a permutation of the block's threads; bytes: 0 to 16
"""

PER_WORD = {"f32": 1, "tf32": 1, "f16": 2, "bf16": 2, "e4m3": 4, "i8": 4}
FLOATS = ("f32", "floats", "numbers", "approx")
APPROXIMATE = 2.0**-21
"""Relative error that `.approx` instructions may have: two units in the last place, the host's included."""


@dataclass(frozen=True)
class Operand:
    """An array of 32-bit words that each thread has.

    Attributes:
        name: Of the C++ array.
        count: Words of it.
        kind: What they are drawn as, and what of them counts as the same.
    """

    name: str
    count: int
    kind: Kind = "u32"

    @property
    def ctype(self) -> str:
        """Return the C++ type of an element."""
        return "float" if self.kind in FLOATS else "i32" if self.kind == "i32" else "u32"


@dataclass(frozen=True)
class Case:
    """A tiny kernel.

    Attributes:
        name: Unique; the wrapper's, as a rule.
        takes: Operands, drawn for each thread; arrays that `body` may change.
        body: C++ between loading the operands and storing the results.
        gives: Results: operands, or new arrays.
        covers: Wrappers it calls, as `wrappers` names them; by default the one it is named as.
        before: C++ in front of the kernel.
        boxes: Lines of the box of each tensor map that the kernel takes, `map0` and so on: a line is 64
            elements of 16 bits, a thread's operands, which must be 32 words. Its dimensions are element,
            thread and block.
        rank: Dimensions of the maps: 3, or 2 where threads of all blocks follow each other.
        pixel_box: If the maps are of pixels: a thread's line is one, a block's threads are an image of rows
            of 8, and a box has as many pixels as `boxes` says.
        threads: Of a block.
        blocks_per_sm: For `__launch_bounds__`, where registers are what is looked at.
        cluster: Blocks of a cluster.
        smem_bytes: Dynamic shared memory.
        minimum_cc: Lowest compute capability that has the instruction.
        maximum_cc: Highest.
        files: Helpers its source needs, by name.
    """

    name: str
    takes: tuple[Operand, ...]
    body: str
    gives: tuple[Operand, ...]
    covers: tuple[str, ...] = ()
    before: str = ""
    boxes: tuple[int, ...] = ()
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


# -- as a variant --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Words(Workload):
    """Words that each thread takes and gives; the kernel decides what becomes of them."""

    operator: ClassVar[str] = "conformance"

    threads: Size
    takes: Size
    gives: Size
    dtype: Literal["i32"] = "i32"

    def inputs(self) -> tuple[Tensor, ...]:
        """Return what threads take."""
        return (Tensor(name="taken", shape=(self.threads, self.takes), dtype="i32"),)

    def outputs(self) -> tuple[Tensor, ...]:
        """Return what they give."""
        return (Tensor(name="given", shape=(self.threads, self.gives), dtype="i32"),)

    def flops(self) -> int:
        """Count nothing."""
        return 0

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        """Return nothing: what is right is what the emulated twin says."""
        return {}

    def tolerance(self) -> Tolerance:
        """Allow nothing."""
        return Tolerance(eps_out=0.0, eps_acc=0.0, reason="the same instruction on the same operands")


SOURCE = """
#define EACH(n) for (int i = 0; i < n; ++i)
static constexpr int IN_WORDS = {takes}, OUT_WORDS = {gives};
{before}
__global__ void __launch_bounds__({threads}, {blocks_per_sm}) conform({parameters}) {{
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
{load}
  {body}
{store}
}}
"""


class CaseVariant(CudaVariant[Words]):
    """Runs the kernel of a case.

    Args:
        case: Which.
    """

    name = "case"
    operator = Words
    space = Space((Parameter("unused", (0,), "nothing"),))

    def __init__(self, case: Case) -> None:
        self.case = case

    def default(self, workload: Words, device: Device) -> Config:
        """Return the only configuration."""
        return Config({"unused": 0})

    def costs(self, workload: Words, table: Table, device: Device) -> Costs:
        """Count nothing."""
        return Costs(blocks=DRAWS, full_blocks=DRAWS, threads=self.case.threads)

    def target(self, device: Device) -> str:
        """Return the device's architecture, with what only Hopper has."""
        return "sm_90a" if device.architecture == "sm_90" else device.architecture

    def source(self, workload: Words, config: Config) -> str:
        """Return the kernel: load, do, store."""
        case = self.case
        taken = {operand.name for operand in case.takes}
        new = [
            f"  {operand.ctype} {operand.name}[{operand.count}];"
            for operand in case.gives
            if operand.name not in taken
        ]
        maps = [f"const __grid_constant__ TensorMap map{i}" for i in range(len(case.boxes))]
        text = SOURCE.format(
            takes=workload.takes,
            gives=workload.gives,
            threads=case.threads,
            blocks_per_sm=case.blocks_per_sm,
            parameters=", ".join(["const u32* taken", "u32* given", *maps]),
            before=case.before,
            body=case.body,
            load="\n".join([*_moves(case.takes, load=True), *new]),
            store="\n".join(_moves(case.gives, load=False)),
        )
        return helpers(*case.files) + text

    def launches(self, workload: Words, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block a draw."""
        arguments: tuple[Argument, ...] = ("taken", "given", *self._maps())
        shape: dict[str, Any] = {"grid": (DRAWS, 1, 1), "block": (self.case.threads, 1, 1)}
        shape["smem_bytes"] = self.case.smem_bytes
        if self.case.cluster > 1:
            shape["cluster"] = self.case.cluster
        return (Launch(entry="conform", arguments=arguments, **shape),)

    def _maps(self) -> tuple[Any, ...]:
        """Return the operands of all threads as the copy engine sees them."""
        if not self.case.boxes:
            return ()
        threads, rank, pixels = self.case.threads, self.case.rank, self.case.pixel_box
        extents: tuple[int, ...] = (64, threads, DRAWS) if rank == 3 else (64, threads * DRAWS)
        strides: tuple[int, ...] = (128, 128 * threads)[: rank - 1]
        if pixels:
            extents, strides, rank = (64, 8, threads // 8, DRAWS), (128, 1024, 128 * threads), 2
        return tuple(
            TensorMap(
                tensor="taken",
                dtype="f16",
                extents=extents,
                strides_bytes=strides,
                box=(64, lines, 1)[:rank],
                pixel_box=pixels,
            )
            for lines in self.case.boxes
        )

    @property
    def workload(self) -> Words:
        """Return how many words there are."""
        takes, gives = (sum(operand.count for operand in side) for side in (self.case.takes, self.case.gives))
        return Words(threads=DRAWS * self.case.threads, takes=takes, gives=gives)


def _moves(operands: Sequence[Operand], *, load: bool) -> Iterator[str]:
    """Yield the C++ that moves a thread's words into arrays, or out of them."""
    first = 0
    for operand in operands:
        name, floats = operand.name, operand.ctype == "float"
        if load:
            word = f"taken[at * IN_WORDS + {first} + i]"
            value = f"__uint_as_float({word})" if floats else f"{operand.ctype}({word})"
            yield f"  {operand.ctype} {name}[{operand.count}];"
            yield f"  EACH({operand.count}) {name}[i] = {value};"
        else:
            value = f"__float_as_uint({name}[i])" if floats else f"u32({name}[i])"
            yield f"  EACH({operand.count}) given[at * OUT_WORDS + {first} + i] = {value};"
        first += operand.count


# -- operands ------------------------------------------------------------------------------------------------


def draw(case: Case, seed: int = SEED) -> dict[str, Any]:
    """Draw the operands of all threads of all blocks."""
    rng = np.random.default_rng(seed)
    parts = [_drawn(operand, case.threads, rng) for operand in case.takes]
    return {"taken": np.ascontiguousarray(np.concatenate(parts, axis=1)).view(np.int32)}


def _drawn(operand: Operand, threads: int, rng: np.random.Generator) -> Any:
    shape = (DRAWS * threads, operand.count)
    if operand.kind in PER_WORD:
        per_word = PER_WORD[operand.kind]
        least, beyond = (-128, 128) if operand.kind == "i8" else (-8, 9)
        whole = rng.integers(least, beyond, (shape[0], shape[1] * per_word)).astype(np.float32)
        return np.ascontiguousarray(whole.astype(_numpy(operand.kind))).view(np.uint32)
    if operand.kind == "rows":
        return np.concatenate([rng.permutation(threads) for _ in range(DRAWS)]).astype(np.uint32)[:, None]
    if operand.kind == "bytes":
        return rng.integers(0, 17, shape).astype(np.uint32)
    if operand.kind == "numbers":
        return rng.uniform(-125, 125, shape).astype(np.float32).view(np.uint32)
    bits = rng.integers(0, 2**32, shape, dtype=np.uint32)
    return _special(bits, rng) if operand.kind == "floats" else bits


def _numpy(kind: str) -> Any:
    import ml_dtypes

    types = {
        "f32": np.float32,
        "tf32": np.float32,
        "f16": np.float16,
        "bf16": ml_dtypes.bfloat16,
        "i8": np.int8,
    }
    return np.dtype(types.get(kind, ml_dtypes.float8_e4m3fn))


def _special(bits: Any, rng: np.random.Generator) -> Any:
    """Make most of random f32 such as conversions are hard for: in range of 16 and 8 bits, ties, specials."""
    exponent = rng.integers(127 - 28, 127 + 20, bits.shape).astype(np.uint32)
    usual = (bits & np.uint32(0x807FFFFF)) | exponent << np.uint32(23)
    # A tie of a conversion that keeps 3, 7 or 10 bits of the fraction: a one, then zeros.
    cut = rng.choice(np.array([20, 16, 13], np.uint32), bits.shape)
    ties = usual >> cut << cut | np.uint32(1) << (cut - np.uint32(1))
    nothing = rng.choice(
        np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x43E00000], np.uint32), bits.shape
    )
    nothing |= bits & np.uint32(0x80000000)
    return np.choose(rng.integers(0, 4, bits.shape), [usual, ties, nothing, bits])


# -- results -------------------------------------------------------------------------------------------------


def differences(case: Case, got: Any, right: Any) -> str | None:
    """Return what differs, by wrapper, lane and register, or None."""
    wrong: list[str] = []
    first = 0
    for operand in case.gives:
        part = slice(first, first + operand.count)
        unlike = ~_same(got[:, part].view(np.uint32), right[:, part].view(np.uint32), operand.kind)
        wrong += [
            f"lane {thread % case.threads}, {operand.name}[{i}]: "
            f"{_word(got[thread, first + i], operand.kind)}, "
            f"must be {_word(right[thread, first + i], operand.kind)}"
            for thread, i in zip(*map(np.ndarray.tolist, np.nonzero(unlike)), strict=True)
        ]
        first += operand.count
    if not wrong:
        return None
    told = "; ".join(wrong[:TOLD])
    return f"{', '.join(case.wrappers)}: {len(wrong)} of {right.size} registers differ: {told}"


def _same(got: Any, right: Any, kind: Kind) -> Any:
    """Return which words are the same: the same bits, or NaN of any payload in the same places."""
    if kind in ("u32", "i32", "i8", "rows", "bytes"):
        return got == right
    a, b = (np.ascontiguousarray(words).view(_element(kind)) for words in (got, right))
    if kind == "approx":  # subnormal numbers are flushed to zero
        a, b = (np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x).astype(np.float64) for x in (a, b))
        return (a == b) | (np.abs(a - b) <= APPROXIMATE * np.abs(b)) | (np.isnan(a) & np.isnan(b))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    same = (a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))
    return same.reshape(*got.shape, -1).all(axis=-1)


def _element(kind: Kind) -> Any:
    return _numpy("f32" if kind in FLOATS else kind)


def _word(word: Any, kind: Kind) -> str:
    """Return a register's bits, and the numbers they are."""
    word = np.asarray(word).reshape(1).view(np.uint32)
    text = f"{int(word[0]):#010x}"
    if kind in ("u32", "rows", "bytes"):
        return text
    if kind == "i32":
        return f"{text} ({int(word.view(np.int32)[0])})"
    return f"{text} ({', '.join(f'{float(x):g}' for x in word.view(_element(kind)))})"
