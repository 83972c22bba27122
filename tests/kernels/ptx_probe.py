"""Instructions that NVRTC emits for a call of a PTX wrapper, with names of operands in place of registers.

A probe is a kernel that loads each operand behind a comment that names its register, calls the wrapper, and
stores the results behind such comments. Registers are traced through copies and conversions between the
comments and the instruction, so that the order of operands in the compiled PTX is known by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tunebench.compile.nvrtc import compile_source
from tunebench.emulate.host_source import closing_parenthesis
from tunebench.variant import strip_comments

__all__ = ["EMPTY", "CompiledProbe", "Operand", "Probe", "compile_probes", "half_ordered"]

_TYPES = {  # C++ type: constraint of inline assembly, and type of loads and stores
    "u16": ("h", "u16"),
    "u32": ("r", "u32"),
    "i32": ("r", "u32"),
    "u64": ("l", "u64"),
    "float": ("f", "f32"),
}
EMPTY = "// no instruction"
"""What the instructions of a probe list for inline assembly without any."""

_REGISTER = re.compile(r"%(?:tmp|[a-z]+\d+)\b")
_PASSES_ON = re.compile(r"(?:mov|cvta|cvt|and|setp\.ne|selp)\.")
"""Instructions that pass on an operand as it is, in a register of another width, or as a truth value."""


class Operand(NamedTuple):
    """An array of registers: its name, its C++ type, and its number of elements (0: a scalar)."""

    name: str
    ctype: str = "u32"
    count: int = 0

    def elements(self) -> tuple[str, ...]:
        """Return the C++ expression of each element, which is also its name in the compiled instructions."""
        return tuple(f"{self.name}[{i}]" for i in range(self.count)) if self.count else (self.name,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A call to compile.

    Attributes:
        call: C++ statements; `map` is a tensor map.
        operands: What is loaded before.
        results: What is stored after: operands or new variables.
    """

    call: str
    operands: tuple[Operand, ...] = ()
    results: tuple[Operand, ...] = ()

    def source(self, entry: str) -> str:
        """Return the kernel."""
        loaded = {operand.name for operand in self.operands}
        body = [
            _declared(operand)
            for operand in (*self.operands, *(r for r in self.results if r.name not in loaded))
        ]
        for operand in self.operands:
            body += [_marked("operand", operand, element) for element in operand.elements()]
        # A store that the next one overwrites stays only if the call may read memory.
        body += ["extern __shared__ u32 kept[];", "kept[0] = 1;", self.call, "kept[0] = 2;"]
        for operand in self.results:
            body += [_marked("result", operand, element) for element in operand.elements()]
        parameters = "u64* memory, const __grid_constant__ TensorMap map"
        code = "\n  ".join(body)
        return f"__global__ void __launch_bounds__(128, 1) {entry}({parameters}) {{\n  {code}\n}}\n"


def _declared(operand: Operand) -> str:
    return f"{operand.ctype} {operand.name}{f'[{operand.count}]' if operand.count else ''};"


def _marked(kind: str, operand: Operand, element: str) -> str:
    letter, suffix = _TYPES[operand.ctype]
    if kind == "operand":
        text, registers = f"ld.global.{suffix} %0, [%1];", f': "={letter}"({element}) : "l"(memory++)'
    else:
        text, registers = f"st.global.{suffix} [%1], %0;", f':: "{letter}"({element}), "l"(memory++)'
    return f'asm volatile("// {kind} %0 is {element}\\n\\t{text}" {registers});'


class CompiledProbe(NamedTuple):
    """The compiled call.

    Attributes:
        instructions: Inline assembly of the call, with operands by name.
        loops: Whether the call repeats until a condition holds.
        result_registers: Number of different registers that hold the results.
        orders: Whether the compiler keeps stores on both sides of the call.
    """

    instructions: tuple[str, ...]
    loops: bool
    result_registers: int
    orders: bool


def compile_probes(helpers: str, probes: Sequence[Probe], target: str) -> tuple[list[CompiledProbe], bytes]:
    """Compile probes in one program.

    Args:
        helpers: Text of the header files that hold the wrappers.
        probes: Calls to compile.
        target: Architecture for NVRTC, such as ``"sm_90a"``.

    Returns:
        The compiled calls in the same order, and the cubin, whose kernels are `probe0`, `probe1`, ….
    """
    entries = tuple(f"probe{i}" for i in range(len(probes)))
    kernels = "".join(probe.source(entry) for probe, entry in zip(probes, entries, strict=True))
    made = compile_source(f'{helpers}\nextern "C" {{\n{kernels}}}\n', entries, target)
    texts = dict(re.findall(r"\.entry (\w+)\(.*?\n\{\n(.*?)(?=\.visible|\Z)", made.ptx, re.DOTALL))
    return [_read(texts[entry]) for entry in entries], made.cubin


def half_ordered(source: str) -> list[str]:
    """Return the inline assembly that is volatile but clobbers no memory, or the reverse.

    NVRTC takes each to imply the other; other compilers need both where memory must be ordered. setmaxnreg
    changes registers only.
    """
    code, lines = strip_comments(source), []
    for match in re.finditer(r"\basm( volatile)?\s*\(", code):
        text = code[match.start() : closing_parenthesis(code, match.end() - 1)]
        if bool(match[1]) != ('"memory"' in text) and "setmaxnreg" not in text:
            lines.append(" ".join(text.split()))
    return lines


# -- PTX -----------------------------------------------------------------------------------------------------


def _read(text: str) -> CompiledProbe:
    """Return the inline assembly of a kernel's PTX, with a name in place of every register.

    Operands have their names, results that of the variable they are stored to, and registers between two
    instructions `t0`, `t1`, ….
    """
    names: dict[str, str] = dict(re.findall(r"// operand (%\w+) is (\S+)", text))
    results = dict(re.findall(r"// result (%\w+) is (\S+)", text))
    result_registers = len(results)
    lines = list(_lines(text))
    for inline, line in reversed(lines):  # a result is named where it is stored, after its conversions
        if not inline:
            _propagate_back(line, results)
    between: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        register = match[0]
        known_name = names.get(register) or results.get(register)
        return known_name or between.setdefault(register, f"t{len(between)}")

    instructions = []
    for inline, line in lines:
        if inline:
            instructions.append(_REGISTER.sub(name, _spaced(line)))
        else:
            _propagate(line, names, lambda source: _REGISTER.sub(name, source))
    loops = bool(re.search(r"^(\$\w+):.*^\s*@!?%p\d+\s+bra(?:\.uni)?\s+\1;", text, re.DOTALL | re.MULTILINE))
    orders = sum(line.startswith("st.shared.u32") for inline, line in lines if not inline) == 2
    return CompiledProbe(tuple(instructions), loops, result_registers, orders)


def _lines(text: str) -> Iterator[tuple[bool, str]]:
    """Yield each instruction, and whether it is inline assembly of the wrapper rather than of a marker."""
    blocks = re.split(r"^\t// (begin|end) inline asm\n", text, flags=re.MULTILINE)
    for boundary, block in zip(["end", *blocks[1::2]], blocks[::2], strict=True):
        inline = boundary == "begin"
        if inline and re.match(r"\s*// (?:operand|result) ", block):
            continue
        if inline and not block.strip():
            yield inline, EMPTY
        for part in block.replace("\n{\n", "\n").removeprefix("\t{\n").split(";"):
            line = part.strip().lstrip("}").strip()
            line = re.sub(r"^\$\w+:\s*", "", line)
            if line and not line.startswith(".reg"):
                yield inline, line


def _parts(line: str) -> tuple[str, list[str]]:
    opcode, _, operands = " ".join(line.split()).partition(" ")
    return opcode, [operand.strip() for operand in operands.split(",")]


def _propagate(line: str, names: dict[str, str], rendered: Callable[[str], str]) -> None:
    """Name the destination of a copy after its source, and that of arithmetic after its operation."""
    opcode, (target, *sources) = _parts(line)
    if not target.startswith("%"):
        return
    if opcode.startswith("selp") and sources[:2] == ["1", "0"]:
        sources = sources[2:]  # of a truth value
    if _PASSES_ON.match(opcode) and re.match(r"\w+_param_1$", sources[0]):
        names[target] = "map"
    elif _PASSES_ON.match(opcode) and (len(sources) == 1 or sources[1:] in (["0"], ["255"])):
        names[target] = rendered(sources[0])
    elif opcode in ("mul.f32", "add.f32"):
        names[target] = f"{opcode[:3]}({','.join(map(rendered, sources))})"


def _propagate_back(line: str, results: dict[str, str]) -> None:
    """Name the source of a copy after its destination."""
    opcode, (target, *sources) = _parts(line)
    if target in results and _PASSES_ON.match(opcode) and (len(sources) == 1 or sources[1:] == ["255"]):
        results.setdefault(sources[0], results[target])


def _spaced(line: str) -> str:
    """Return an instruction without optional spaces."""
    opcode, *operands = line.split(maxsplit=2 if line.startswith("@") else 1)
    if opcode.startswith("@"):
        opcode, operands = f"{opcode} {operands[0]}", operands[1:]
    return " ".join([opcode, *(re.sub(r"\s*,\s*", ",", " ".join(o.split())) for o in operands)])
