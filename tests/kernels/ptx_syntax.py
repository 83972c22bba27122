"""Syntax of PTX instructions, as the ISA gives it, and what a wrapper of kernels/*.cuh must compile to.

A form is the ISA's own syntax: qualifiers after dots and operands in order, by the ISA's names. A wrapper's
statement (`ptx_isa.py`, `ptx_isa_hopper.py`) names the form, its qualifiers, and the argument that is each
operand. No statement copies the text of the wrapper: the compiled PTX is compared with the statements.

Source: PTX ISA 8.7, "Instruction Set": the section that each form names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.kernels.ptx_probe import Operand, Probe

__all__ = ["HEADERS", "Form", "Step", "Wrapper", "listed", "plain"]


HEADERS = ("types", "ptx", "ptx_hopper", "reduce", "epilogue")
"""Files with wrappers, in the order in which one needs another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The syntax of an instruction.

    Attributes:
        section: Its section of the PTX ISA.
        syntax: Opcode with qualifiers, of which those in braces are optional, and operands in order.
        of_registers: Whether it only computes registers from registers: the compiler may move or drop it.
    """

    section: str
    syntax: str
    of_registers: bool = False

    def written(self, qualifiers: Mapping[str, str], operands: Mapping[str, str]) -> str:
        """Return the instruction with these qualifiers and operands.

        A qualifier or operand that is not given is copied from the syntax; an optional one is left out.
        """
        opcode, _, operand_syntax = self.syntax.partition(" ")

        def qualifier(match: re.Match[str]) -> str:
            optional, name = match[1] is not None, match[1] or match[2]
            return "." + qualifiers[name] if name in qualifiers else "" if optional else f".{name}"

        opcode = re.sub(r"\{\.(\w+)\}|\.(\w+(?:::\w+)*)", qualifier, opcode)

        def operand(match: re.Match[str]) -> str:
            return operands.get(match[0], match[0])

        written = [
            re.sub(r"[A-Za-z][\w-]*", operand, operand_text.strip("{}"))
            for operand_text in re.findall(r"\{[^{}]*\}|\[[^\]]*\]|[^,\s]+", operand_syntax)
            if not operand_text.startswith("{") or operand_text.strip("{}") in operands
        ]
        return f"{opcode} {','.join(written)}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction of a wrapper: its form, qualifiers and operands."""

    form: Form
    qualifiers: Mapping[str, str] = field(default_factory=dict)
    operands: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.form.written(self.qualifiers, self.operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """What a wrapper must compile to.

    Attributes:
        name: Name of the wrapper, as `tests.gpu.ptx_wrappers.wrappers` lists it.
        probe: A call of it.
        steps: Its instructions, in order; text for inline assembly without any.
        loops: Whether it repeats them until a condition holds.
        sass: Regular expression of each machine instruction that must be there, in order.
        result_registers: Number of different registers that must hold the results; None for any.
    """

    name: str
    probe: Probe
    steps: tuple[Step | str, ...]
    loops: bool = False
    sass: tuple[str, ...] = ()
    result_registers: int | None = None

    @property
    def instructions(self) -> tuple[str, ...]:
        """Return the expected instructions."""
        return tuple(map(str, self.steps))

    @property
    def orders(self) -> bool:
        """Return whether the compiler must keep memory accesses on their side of the call."""
        return not all(isinstance(step, Step) and step.form.of_registers for step in self.steps)


def listed(name: str, count: int) -> str:
    """Return a vector operand: the elements of a variable in order."""
    return f"{{{','.join(f'{name}[{i}]' for i in range(count))}}}"


# -- forms ---------------------------------------------------------------------------------------------------

MMA = Form(
    section="Multiply-and-Accumulate Instruction: mma",
    syntax="mma.sync.aligned.shape.alayout.blayout.dtype.atype.btype.ctype d, a, b, c",
    of_registers=True,
)
LDMATRIX = Form(
    section="Warp-level matrix load instruction: ldmatrix",
    syntax="ldmatrix.sync.aligned.shape.num{.trans}{.ss}.type r, [p]",
)
PRMT = Form(section="prmt", syntax="prmt.b32 d, a, b, c", of_registers=True)
FMA_F16X2 = Form(
    section="Half Precision Floating Point Instructions: fma",
    syntax="fma.rnd.f16x2 d, a, b, c",
    of_registers=True,
)
CP_ASYNC = Form(section="cp.async", syntax="cp.async.cop{.dst}{.src} [dst], [src], cp-size, {src-size}")
CP_ASYNC_COMMIT = Form(section="cp.async.commit_group", syntax="cp.async.commit_group")
CP_ASYNC_WAIT = Form(section="cp.async.wait_group", syntax="cp.async.wait_group N")
CVT = Form(section="cvt", syntax="cvt{.rnd}{.sat}.dtype.atype d, a", of_registers=True)
CVT_PACK = Form(
    section="cvt: a is the upper half of d, b the lower",
    syntax="cvt.rnd{.sat}.dtype.f32 d, a, b",
    of_registers=True,
)
EX2 = Form(section="ex2", syntax="ex2.approx{.ftz}.f32 d, a", of_registers=True)
RCP = Form(section="rcp", syntax="rcp.approx{.ftz}.f32 d, a", of_registers=True)
RSQRT = Form(section="rsqrt", syntax="rsqrt.approx{.ftz}.f32 d, a", of_registers=True)
SETP = Form(section="setp", syntax="setp.CmpOp.type p, a, b")
SELP = Form(section="selp", syntax="selp.type d, a, b, c")
GUARDED_STORE = Form(section="st; Predicated Execution", syntax="@p.st{.ss}.type [a], b")
MBARRIER_INIT = Form(section="mbarrier.init", syntax="mbarrier.init{.shared}.b64 [addr], count")
MBARRIER_FENCE = Form(section="membar/fence", syntax="fence.mbarrier_init.release.cluster")
PROXY_FENCE = Form(section="membar/fence: fence.proxy", syntax="fence.proxy.proxykind")
MBARRIER_ARRIVE = Form(
    section="mbarrier.arrive",
    syntax="mbarrier.arrive{.expect_tx}{.sem}{.scope}{.space}.b64 _, [addr], {tx-count}",
)
MBARRIER_TRY_WAIT = Form(
    section="mbarrier.test_wait/mbarrier.try_wait",
    syntax="mbarrier.try_wait.parity{.sem}{.scope}{.space}.b64 waitComplete, [addr], phaseParity",
)
BULK_TENSOR = Form(
    section="cp.async.bulk.tensor",
    syntax="cp.async.bulk.tensor.dim.dst.src{.load_mode}.completion_mechanism{.multicast} "
    "[dstMem], [tensorMap,tensorCoords], [mbar], {im2colOffsets}, {ctaMask}",
)
BULK_TENSOR_STORE = Form(
    section="cp.async.bulk.tensor, shared::cta to global",
    syntax="cp.async.bulk.tensor.dim.dst.src{.load_mode}.completion_mechanism "
    "[tensorMap,tensorCoords], [srcMem]",
)
BULK_COMMIT = Form(section="cp.async.bulk.commit_group", syntax="cp.async.bulk.commit_group")
BULK_WAIT = Form(section="cp.async.bulk.wait_group", syntax="cp.async.bulk.wait_group{.read} N")
PREFETCH_MAP = Form(section="prefetch, prefetchu", syntax="prefetch.tensormap [a]")
WGMMA = Form(
    section="Asynchronous Warpgroup-level Matrix Multiply-Accumulate Instruction: wgmma.mma_async",
    syntax="wgmma.mma_async.sync.aligned.shape.dtype.atype.btype "
    "d, a, b-desc, scale-d, imm-scale-a, imm-scale-b, {imm-trans-a}, {imm-trans-b}",
)
WGMMA_OF_INTEGERS = Form(
    section="Asynchronous Warpgroup-level Matrix Multiply-Accumulate Instruction: wgmma.mma_async, integers",
    syntax="wgmma.mma_async.sync.aligned.shape{.satfinite}.dtype.atype.btype d, a, b-desc, scale-d",
)
WGMMA_FENCE = Form(section="wgmma.fence", syntax="wgmma.fence.sync.aligned")
WGMMA_COMMIT = Form(section="wgmma.commit_group", syntax="wgmma.commit_group.sync.aligned")
WGMMA_WAIT = Form(section="wgmma.wait_group", syntax="wgmma.wait_group.sync.aligned N")
RED_VECTOR = Form(section="red", syntax="red{.sem}{.scope}{.global}.add.vec_32_bit.f32 [a], b")
SETMAXNREG = Form(section="setmaxnreg", syntax="setmaxnreg.action.sync.aligned.u32 imm-reg-count")
MOV = Form(section="mov; Special Registers: %cluster_ctarank", syntax="mov.type d, a", of_registers=True)
MAPA = Form(section="mapa", syntax="mapa{.space}.type d, a, b", of_registers=True)
CLUSTER_ARRIVE = Form(section="barrier.cluster", syntax="barrier.cluster.arrive{.sem}{.aligned}")
CLUSTER_WAIT = Form(section="barrier.cluster", syntax="barrier.cluster.wait{.acquire}{.aligned}")

SHARED_CTA, SHARED_CLUSTER = "shared::cta", "shared::cluster"


def plain(
    name: str, call: str, form: Form, sass: str, *arguments: str, **mappings: Mapping[str, str]
) -> Wrapper:
    """One instruction; the arguments of the call are 32-bit registers unless their type follows a colon."""
    operands = tuple(
        Operand(argument.partition(":")[0], argument.partition(":")[2] or "u32") for argument in arguments
    )
    return Wrapper(
        name=name,
        probe=Probe(call=call, operands=operands),
        steps=(Step(form=form, **mappings),),
        sass=(sass,) if sass else (),
    )
