"""Does every instruction do on the GPU what its emulated twin does? A tiny kernel a wrapper, random operands.

The kernels of this package are proved by emulation, and emulation rests on our reading of the PTX ISA. Here
each wrapper around inline assembly runs on the GPU and, from the same file, on the host; every element of
every lane must agree. What differs is told by wrapper, lane and register, so that a wrong lane map needs no
search.

`wrappers` finds the wrappers by parsing the .cuh files; `CASES` says what is to be done with each. A
wrapper without a case is a problem, here and in a test.

    python benchmarks/gpu/_conformance.py      # lists the cases, and what they cover
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, Literal

import _checkout  # noqa: F401
import numpy as np
from _items import Session, child

from tunebench.compile.emulate import emulate, find_compiler
from tunebench.device import Device
from tunebench.errors import DeviceError, TunebenchError
from tunebench.kernels._cuda import helpers
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, strip_comments
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload

__all__ = ["CASES", "Case", "CaseVariant", "Run", "Words", "conform", "differences", "uncovered", "wrappers"]

STARTING_S, SECONDS_EACH = 30.0, 5.0
"""Time that a process gets to start, and on top of it for each case: compiled twice, run twice."""
NOT_STARTED = "before any case"
DRAWS = 4
"""Blocks of a case, each with operands of its own."""
TOLD = 3
"""Elements that are told of a case that differs."""
SEED = 1

# -- what there is ------------------------------------------------------------------------------------------


def wrappers() -> dict[str, str]:
    """Return every function of the .cuh files around inline assembly, with its file.

    A function is named as it is called: `mma_m16n8k16_f16`, a specialisation with its arguments
    (`from_float<half_t>`), one of several of a name with the type of its first parameter
    (`to_float(half_t)`).
    """
    found: dict[str, str] = {}
    for path in sorted(resources.files("tunebench.kernels").iterdir(), key=lambda p: p.name):
        if path.name.endswith(".cuh"):
            found |= dict.fromkeys(wrappers_in(path.read_text(encoding="utf-8")), path.name)
    return found


_FUNCTION = re.compile(
    r"\b(?:__device__|__host__|__forceinline__|inline)\s+(?:[\w:]+(?:<[^;{}()]*?>)?[\s&*]+)+?"
    r"(\w+(?:<[\w:, ]+>)?)\s*\(([^;{}]*?)\)\s*(?:const\s*)?\{"
)


def wrappers_in(source: str) -> list[str]:
    """Return the functions of a source whose body has inline assembly, by themselves or through a macro."""
    source = strip_comments(source)
    macros = _assembling_macros(source)
    code = re.sub(r"^#.*(?:(?<=\\)\n.*)*", "", source, flags=re.MULTILINE)
    assembling = re.compile(rf"\b(?:{'|'.join(['asm', *macros])})\b")
    every = [(match[1], match[2], _body(code, match.end())) for match in _FUNCTION.finditer(code)]
    count = len(assembling.findall(code))
    seen = sum(len(assembling.findall(body)) for _, _, body in every)
    if count != seen:
        raise ValueError(f"{count - seen} uses of inline assembly are in no function that this can read")
    names = [name for name, _, _ in every]
    return [
        f"{name}({_type(parameters)})" if names.count(name) > 1 and "<" not in name else name
        for name, parameters, body in every
        if assembling.search(body)
    ]


def _assembling_macros(source: str) -> list[str]:
    """Return the macros that expand to inline assembly."""
    macros = re.findall(r"^#\s*define (\w+)((?:.*\\\n)*.*)", source, flags=re.MULTILINE)
    found: list[str] = []
    for _ in macros:  # a macro may use one that is defined later
        for name, text in macros:
            if name not in found and re.search(rf"\b(?:{'|'.join(['asm', *found])})\b", text):
                found.append(name)
    return found


def _body(code: str, start: int) -> str:
    """Return what stands between an opening brace, just before `start`, and its closing one."""
    depth, at = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        at += 1
    return code[start:at]


def _type(parameters: str) -> str:
    first = parameters.split(",")[0].split()
    return " ".join(first[:-1])


# -- what is done with it -----------------------------------------------------------------------------------

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
        threads: Of a block.
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
    threads: int = 32
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


def _mma(name: str, kind: Kind, sums: Kind = "f32", **more: Any) -> Case:
    d, a, b = Operand("d", 4, sums), Operand("a", 4, kind), Operand("b", 2, kind)
    return Case(name, (d, a, b), f"{name}(d, a, b);", (d,), **more)


def _ldmatrix(name: str, registers: int) -> Case:
    # Lane r's row is wherever it likes, so that the lanes whose addresses count are told apart.
    body = f"""__shared__ __align__(16) u32 rows[32 * 4];
  for (int i = 0; i < 4; ++i) rows[4 * threadIdx.x + i] = m[i];
  __syncthreads();
  {name}(d, rows + 4 * row[0]);"""
    takes = (Operand("m", 4), Operand("row", 1, "rows"))
    return Case(name, takes, body, (Operand("d", registers),), minimum_cc=(7, 5))


def _cp_async(call: str, name: str, size: int) -> Case:
    """Copy from the thread's own operands, with the rest zeroed, in two groups that are awaited in turn."""
    body = f"""__shared__ __align__(16) u32 copied[2][32][4];
  const u32* const here = taken + at * IN_WORDS;
  const int asked = min(int(bytes[0]), {size});
  for (int i = 0; i < 4; ++i) copied[0][threadIdx.x][i] = copied[1][threadIdx.x][i] = ~0u;
  {call}(copied[0][threadIdx.x], here, asked);
  cp_async_commit();
  {call}(copied[1][threadIdx.x], here + 4);
  cp_async_commit();
  cp_async_wait<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) first[i] = copied[0][31 - threadIdx.x][i];
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) second[i] = copied[1][31 - threadIdx.x][i];"""
    # Padded to a multiple of 16 bytes a thread, which the copies are aligned to.
    takes = (Operand("m", 4), Operand("n", 4), Operand("bytes", 1, "bytes"), Operand("unused", 3))
    covers = (name, "cp_async_commit", "cp_async_wait")
    return Case(f"{call}, {size} bytes", takes, body, (Operand("first", 4), Operand("second", 4)), covers)


def _convert(name: str, takes: Operand, body: str, gives: Operand, **more: Any) -> Case:
    return Case(name, (takes,), body, (gives,), files=("types",), **more)


def _from_float(element: str, kind: Kind, **more: Any) -> Case:
    name = f"from_float<{element}>"
    return _convert(
        name, Operand("x", 8, "floats"), f"EACH(8) r[i] = {name}(x[i]).bits;", Operand("r", 8, kind), **more
    )


def _pack2(element: str, kind: Kind) -> Case:
    name = f"pack2<{element}>"
    body = f"EACH(4) r[i] = {name}(x[2 * i], x[2 * i + 1]);"
    return _convert(name, Operand("x", 8, "floats"), body, Operand("r", 4, kind))


def _approximate(name: str, argument: str) -> Case:
    body = f"EACH(8) r[i] = {name}({argument});"
    takes, gives = (Operand("x", 8, "numbers"),), (Operand("r", 8, "approx"),)
    return Case(name, takes, body, gives, minimum_cc=(7, 5), files=("types", "reduce"))


FLOATS_8 = Operand("x", 8, "floats")

CASES: tuple[Case, ...] = (
    _mma("mma_m16n8k16_f16", "f16"),
    _mma("mma_m16n8k16_bf16", "bf16"),
    _mma("mma_m16n8k8_tf32", "tf32"),
    _mma("mma_m16n8k32_e4m3", "e4m3", minimum_cc=(8, 9)),
    _mma("mma_m16n8k32_s8", "i8", "i32"),
    _ldmatrix("ldmatrix_x4", 4),
    _ldmatrix("ldmatrix_x4_trans", 4),
    _ldmatrix("ldmatrix_x2", 2),
    _ldmatrix("ldmatrix_x2_trans", 2),
    *(_cp_async(f"cp_async_ca<{size}>", "cp_async_ca", size) for size in (4, 8, 16)),
    _cp_async("cp_async_cg", "cp_async_cg", 16),
    _from_float("half_t", "f16", minimum_cc=(7, 5)),
    _from_float("bf16_t", "bf16"),
    _pack2("half_t", "f16"),
    _pack2("bf16_t", "bf16"),
    _convert("to_tf32", FLOATS_8, "EACH(8) r[i] = to_tf32(x[i]);", Operand("r", 8, "floats")),
    _convert(
        "to_float(half_t)",
        Operand("h", 8),
        "EACH(8) r[i] = to_float(half_t{u16(h[i])});",
        Operand("r", 8, "floats"),
        minimum_cc=(7, 5),
    ),
    _convert(
        "to_float(e4m3_t)",
        Operand("h", 8),
        "EACH(8) r[i] = to_float(e4m3_t{u8(h[i])});",
        Operand("r", 8, "floats"),
        minimum_cc=(8, 9),
    ),
    _from_float("e4m3_t", "e4m3", minimum_cc=(8, 9)),
    _approximate("fast_exp2", "x[i]"),
    _approximate("fast_rsqrt", "fabsf(x[i])"),
)
"""One line a wrapper, or a few where it has several forms."""


def uncovered() -> list[str]:
    """Return the wrappers that no case calls, and what cases call that is no wrapper."""
    there, called = set(wrappers()), {name for case in CASES for name in case.wrappers}
    missing = [f"{name} has no case" for name in sorted(there - called)]
    return [*missing, *(f"{name} is called by a case and is no wrapper" for name in sorted(called - there))]


# -- as a variant, so that all that compiles, emulates and launches kernels does it with these, too ----------


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
__global__ void __launch_bounds__({threads}) conform(const u32* taken, u32* given) {{
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
        text = SOURCE.format(
            takes=workload.takes,
            gives=workload.gives,
            threads=case.threads,
            before=case.before,
            body=case.body,
            load="\n".join([*_moves(case.takes, load=True), *new]),
            store="\n".join(_moves(case.gives, load=False)),
        )
        return helpers(*case.files) + text

    def launches(self, workload: Words, config: Config) -> tuple[Launch, ...]:
        """Return one launch of a block a draw."""
        arguments: tuple[Argument, ...] = ("taken", "given")
        block = (self.case.threads, 1, 1)
        return (Launch(entry="conform", grid=(DRAWS, 1, 1), block=block, arguments=arguments),)

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


# -- operands -----------------------------------------------------------------------------------------------


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


# -- what came of it ----------------------------------------------------------------------------------------

Run = Callable[[CaseVariant, Words, Config, Mapping[str, Any]], Mapping[str, Any]]
"""Runs a case: on the GPU, or, in tests, on an emulator."""


def on_host(
    variant: CaseVariant, workload: Words, config: Config, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Run a case by emulation."""
    return emulate(variant, workload, config, inputs)


def on_device(device: Device) -> Run:
    """Return what runs cases on a GPU of this machine."""
    from tunebench.compile.nvrtc import compile_cuda
    from tunebench.measure._device_memory import DeviceMemory
    from tunebench.measure._gpu import open_gpu
    from tunebench.measure.cuda import kernel_arguments
    from tunebench.measure.verify import InputSet

    gpu = open_gpu(device)
    memory = DeviceMemory(gpu)

    def run(
        variant: CaseVariant, workload: Words, config: Config, inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        binary = compile_cuda(variant, workload, config, device)
        read, written = workload.inputs(), workload.outputs()
        addresses = memory.hold(read, written)
        memory.upload(InputSet(workload=workload, seed=SEED, inputs=inputs))
        memory.poison(written)
        tensors = {tensor.name: tensor for tensor in (*read, *written)}
        (kernel,) = gpu.load(binary.payload, binary.entries)
        (launch,) = variant.launches(workload, config)
        arguments = kernel_arguments(variant, launch.arguments, tensors, addresses, inputs)
        gpu.launch([gpu.prepare(kernel, launch, arguments)])
        gpu.synchronize()
        return {tensor.name: memory.download(tensor) for tensor in written}

    return run


def conform(case: Case, run: Run) -> str | None:
    """Run a case, hold it against its emulation, and return what differs, or None."""
    variant = CaseVariant(case)
    workload, config, inputs = variant.workload, Config({"unused": 0}), draw(case)
    right = on_host(variant, workload, config, inputs)["given"]
    return differences(case, run(variant, workload, config, inputs)["given"], right)


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


def by_name() -> dict[str, Case]:
    """Return the cases by name."""
    return {case.name: case for case in CASES}


# -- the step of an acceptance run ---------------------------------------------------------------------------


def answers(names: Sequence[str], run: Run) -> Iterator[dict[str, Any]]:
    """Run cases by name; yield which one is running, and what was found of those before it."""
    found: dict[str, str | None] = {}
    for name in names:
        yield {"running": name, "found": found}
        try:
            found[name] = conform(by_name()[name], run)
        except TunebenchError as error:
            found[name] = f"{type(error).__name__}: {error}"
            if isinstance(error, DeviceError):  # the device may be lost to this process: another goes on
                yield {"found": found}
                return
    yield {"found": found}


def conformance(session: Session) -> None:
    """Run every case in processes of their own: one that hangs or crashes is named, and the others go on."""
    report = session.report
    if find_compiler() is None:
        report.say("conformance: no C++ compiler, which the emulated twins need")
        report.put("conformance", complete=True, skipped="no C++ compiler for the emulated twins")
        return
    pending = [case.name for case in CASES if case.runs_on(session.device)]
    others = [case.name for case in CASES if case.name not in pending]
    found: dict[str, str | None] = {}
    problems = uncovered()
    while pending and session.left_s > 1:
        limit_s = min(session.left_s, STARTING_S + SECONDS_EACH * len(pending))
        now = _found(child(["conformance", *pending], timeout_s=limit_s))
        found |= now
        problems += [f"{name}: {text}" for name, text in now.items() if text is not None]
        pending = [name for name in pending if name not in now]
        report.put("conformance", cases=found, problems=problems, undone=pending, not_here=others)
        if NOT_STARTED in now:
            break
    for problem in problems:
        report.say(f"conformance: WRONG: {problem}"[:400])
    passed = sum(text is None for text in found.values())
    report.say(f"conformance: {passed} cases do as their emulation does; not done: {len(pending)}")
    report.put("conformance", cases=found, problems=problems, undone=pending, complete=not pending)


def _found(answer: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what a process found of each case; the one it ended in did not pass."""
    found = dict(answer.get("found", {}))
    if "problem" in answer:
        found[answer.get("running", NOT_STARTED)] = str(answer["problem"])
    return found


def main() -> None:
    """List the cases, and what they cover."""
    files = wrappers()
    for case in CASES:
        print(f"{case.name}: {', '.join(f'{name} ({files.get(name)})' for name in case.wrappers)}")
    for problem in uncovered():
        print(f"WRONG: {problem}")


if __name__ == "__main__":
    main()
