"""What compiled code is made of, to be read: machine code and PTX as text, and its instructions counted.

Machine code of a GPU is disassembled by NVIDIA's nvdisasm or cuobjdump; a processor's comes from LLVM.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tunebench.binary.binary import CompileError
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.device import Device
from tunebench.errors import InputError, MissingDependency
from tunebench.space import Config
from tunebench.variant import CudaVariant, NumbaCpuVariant, NumbaCudaVariant, Variant
from tunebench.workload import Workload

__all__ = ["count_instructions", "find_disassembler", "machine_code", "ptx", "sass", "unmet_claims"]

_TIMEOUT_S = 120.0
_OPTIONS = {"nvdisasm": "--print-code", "cuobjdump": "-sass"}
"""What makes each disassembler print the code and nothing else."""

# A line of SASS: an offset, perhaps a predicate, then the instruction with its modifiers.
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE)
_ASSEMBLY = re.compile(r"^\t([a-z]\w*)", re.MULTILINE)


def find_disassembler() -> str | None:
    """Return the path of nvdisasm or cuobjdump, of a package or on the PATH, or None if neither is here.

    That of a package comes first: it is of the compiler's release, and an older one may not know the code.
    """
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        packaged = None
    else:
        packaged = find_nvidia_binary_utility("nvdisasm")
    return packaged or shutil.which("nvdisasm") or shutil.which("cuobjdump")


def sass(cubin: bytes) -> str:
    """Return the machine code of a cubin as text.

    Raises:
        MissingDependency: if there is no disassembler.
        CompileError: if it cannot read this cubin.
    """
    tool = find_disassembler()
    if tool is None:
        raise MissingDependency("nvdisasm", "cuda")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, _OPTIONS[Path(tool).stem], file.name]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise CompileError(f"{tool} did not finish with this binary in {_TIMEOUT_S:g} s") from None
    if ran.returncode != 0:
        words = " ".join((ran.stderr or ran.stdout).replace(file.name, "the cubin").split())[:500]
        raise CompileError(f"{tool} cannot read this binary; is it of an older release? It says: {words}")
    return ran.stdout


def machine_code(
    variant: Variant[Any], workload: Workload, config: Config, device: Device, cache: BinaryCache
) -> str:
    """Return the machine code of one configuration as text: SASS, or the assembly of this processor.

    Raises:
        MissingDependency: if it is a GPU's and there is no disassembler.
        CompileError: if the disassembler, or the compiler, refuses it.
    """
    if isinstance(variant, NumbaCpuVariant):
        from tunebench.compile.numba_cpu import assembly_of_numba_cpu

        return assembly_of_numba_cpu(variant, workload, config)
    return sass(compile_config(variant, workload, config, device, cache).payload)


def ptx(variant: Variant[Any], workload: Workload, config: Config, device: Device) -> str:
    """Return the PTX of one configuration.

    Raises:
        InputError: if it is compiled for a processor, which has none.
        CompileError: if the compiler refuses it.
        MissingDependency: if the compiler is not installed.
    """
    if isinstance(variant, CudaVariant):
        from tunebench.compile.nvrtc import ptx_of_cuda

        return ptx_of_cuda(variant, workload, config, device)
    if isinstance(variant, NumbaCudaVariant):
        from tunebench.compile.numba_cuda import ptx_of_numba_cuda

        return ptx_of_numba_cuda(variant, workload, config, device)
    raise InputError(f"{variant.key} is compiled for a processor and has no PTX; --sass shows its assembly")


def count_instructions(code: str) -> dict[str, int]:
    """Return how often each instruction stands in machine code, the most frequent first.

    How often it runs is another matter.

    Modifiers do not count: ``HMMA.16816.F32`` is an ``HMMA``.
    """
    counts = Counter([name for name, _ in _SASS.findall(code)] or _ASSEMBLY.findall(code))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def unmet_claims(variant: CudaVariant[Any], workload: Workload, config: Config, code: str) -> tuple[str, ...]:
    """Return the instructions that a variant claims its machine code has, and that are not in it."""
    there = {(name, *modifiers[1:].split(".")) for name, modifiers in _SASS.findall(code)}

    def is_met(claim: str) -> bool:
        name, *modifiers = claim.split(".")
        return any(found[0] == name and {*modifiers} <= {*found} for found in there)

    return tuple(claim for claim in variant.claims(workload, config) if not is_met(claim))
