"""Compiled PTX and machine code of every wrapper against an independent statement of the PTX ISA."""

from __future__ import annotations

import functools
import re

import pytest

from tests.gpu.ptx_wrappers import files, wrappers
from tests.kernels.ptx_isa import STATEMENTS
from tests.kernels.ptx_probe import CompiledProbe, compile_probes, half_ordered
from tests.kernels.ptx_syntax import HEADERS, Wrapper
from tests.support import needs_disassembler, needs_nvrtc
from tunebench.binary.disassembly import sass
from tunebench.kernels.common.cuda import helpers

IDS = [statement.probe.call for statement in STATEMENTS]


@functools.cache
def compiled() -> tuple[list[CompiledProbe], bytes]:
    return compile_probes(helpers(*HEADERS), [statement.probe for statement in STATEMENTS], "sm_90a")


@functools.cache
def machine_code() -> dict[str, str]:
    """Return the disassembled instructions of each probe, by its kernel."""
    parts = re.split(r"^\.text\.(probe\d+):$", sass(compiled()[1]), flags=re.MULTILINE)
    codes = [
        "\n".join(re.findall(r"^\s+/\*\w{4}\*/\s+(.*);", part.partition("EXIT")[0], re.M)) for part in parts
    ]
    return dict(zip(parts[1::2], codes[2::2], strict=True))


def test_every_wrapper_has_a_statement() -> None:
    stated = {statement.name for statement in STATEMENTS}
    assert stated == set(wrappers()), "state it in tests/kernels/ptx_isa.py, from the PTX ISA"
    assert {file.removesuffix(".cuh") for file in wrappers().values()} == set(HEADERS) <= files()


def test_assembly_is_volatile_if_and_only_if_it_clobbers_memory() -> None:
    assert half_ordered(helpers(*HEADERS)) == []


@needs_nvrtc
@pytest.mark.parametrize(("at", "statement"), list(enumerate(STATEMENTS)), ids=IDS)
def test_compiled_ptx_is_the_instruction_of_the_isa(at: int, statement: Wrapper) -> None:
    statement_compiled = compiled()[0][at]
    assert statement_compiled.instructions == statement.instructions
    assert statement_compiled.loops == statement.loops
    assert statement_compiled.orders == statement.orders
    assert statement.result_registers in (None, statement_compiled.result_registers)


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize(("at", "statement"), list(enumerate(STATEMENTS)), ids=IDS)
def test_machine_code_has_the_instruction_with_its_modifiers(at: int, statement: Wrapper) -> None:
    code = machine_code()[f"probe{at}"]
    for pattern in statement.sass:
        match = re.search(pattern, code)
        assert match, f"no {pattern} in:\n{code}"
        code = code[match.end() :]
