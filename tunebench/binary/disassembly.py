"""Disassembly of cubins by NVIDIA's nvdisasm or cuobjdump, and instruction counts of machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tunebench._child import WORKING_FOLDER, find_program
from tunebench._figure import significant
from tunebench.binary.compiled import CompileError
from tunebench.errors import MissingDependency
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workload import Workload

__all__ = ["count_instructions", "find_disassembler", "sass", "unmet_claims"]

_TIMEOUT_S = 120.0
_OPTIONS = {"nvdisasm": "--print-code", "cuobjdump": "-sass"}
"""Option with which each disassembler prints the code only."""

# A line of SASS: an offset, an optional predicate, then the instruction with its modifiers.
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE)
_ASSEMBLY = re.compile(r"^\t([a-z]\w*)", re.MULTILINE)


def find_disassembler() -> str | None:
    """Return the path of nvdisasm or cuobjdump, or None if neither is installed.

    The Python package is preferred over the PATH: it has the release of the compiler. An older
    disassembler may not know the code.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        packaged = None
    else:
        packaged = find_nvidia_binary_utility("nvdisasm")
    return packaged or find_program("nvdisasm") or find_program("cuobjdump")


def sass(cubin: bytes) -> str:
    """Return the machine code of a cubin as text.

    Raises:
        MissingDependency: No disassembler is installed.
        CompileError: The disassembler cannot read this cubin.
    """
    tool = find_disassembler()
    if tool is None:
        raise MissingDependency("nvdisasm", "cuda")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, _OPTIONS[Path(tool).stem], file.name]
        try:
            ran = subprocess.run(
                command,
                capture_output=True,
                text=True,
                cwd=WORKING_FOLDER,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"{tool} did not finish with this binary in {significant(_TIMEOUT_S)} s"
            ) from None
    if ran.returncode != 0:
        words = " ".join((ran.stderr or ran.stdout).replace(file.name, "the cubin").split())[:500]
        raise CompileError(
            f"{tool} cannot read this binary, perhaps because it is older than the compiler: {words}"
        )
    return ran.stdout


def count_instructions(code: str) -> dict[str, int]:
    """Return the number of occurrences of each instruction in machine code, most frequent first.

    These are static counts: they do not say how often an instruction runs. Modifiers are ignored:
    ``HMMA.16816.F32`` counts as ``HMMA``.
    """
    counts = Counter([name for name, _ in _SASS.findall(code)] or _ASSEMBLY.findall(code))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def unmet_claims(variant: CudaVariant[Any], workload: Workload, config: Config, code: str) -> tuple[str, ...]:
    """Return the instructions that a variant claims for its machine code and that the code lacks.

    Args:
        variant: The kernel variant; see `CudaVariant.claims`.
        workload: The workload it was compiled for.
        config: The configuration it was compiled for.
        code: Machine code from `sass`.
    """
    instructions = {(name, *modifiers[1:].split(".")) for name, modifiers in _SASS.findall(code)}

    def is_met(claim: str) -> bool:
        name, *modifiers = claim.split(".")
        return any(instruction[0] == name and {*modifiers} <= {*instruction} for instruction in instructions)

    return tuple(claim for claim in variant.claims(workload, config) if not is_met(claim))
