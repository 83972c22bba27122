"""Checks that must find planted faults (`planted_faults.py`)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from tests.emulate import test_emulate_hopper as hopper
from tests.emulate import test_watch_hopper as watch_hopper
from tests.emulate.kernel_text import Faulty
from tests.gpu import test_gpu_conformance as conformance
from tests.kernels.kernel_checks import H100, assert_right
from tests.kernels.ptx_isa import STATEMENTS
from tests.kernels.ptx_probe import compile_probes, half_ordered
from tests.kernels.ptx_syntax import HEADERS
from tunebench import kernels, workloads
from tunebench.emulate import host_compiler
from tunebench.emulate.emulator import EmulationFailed, watch
from tunebench.errors import TunebenchError
from tunebench.kernels.common.cuda import helpers
from tunebench.space import Config

__all__ = ["PlantedFault", "found"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """A wrong text in place of a right one.

    Attributes:
        name: What is wrong.
        right: Text to replace, once in a wrapper's or header's source.
        wrong: Its replacement.
        check: Name of the check that must find it: a key of `CHECKS`.
        subject: What the check runs: the name of a wrapper, a variant, or a header of the emulator.
        tests: With check ``"tables"``, the tests to run.
        missed_before: Whether every earlier check missed it.
        quick: Whether the suite plants it.
    """

    name: str
    right: str
    wrong: str
    check: str
    subject: str
    tests: tuple[Callable[[], object], ...] = ()
    missed_before: bool = False
    quick: bool = False


def _replaced(text: str, fault: PlantedFault) -> str:
    if fault.right not in text:
        raise ValueError(f"expected {fault.right!r} in the source of {fault.subject}")
    return text.replace(fault.right, fault.wrong)


def _golden(fault: PlantedFault) -> str | None:
    """Compare the compiled PTX of a wrapper with its statements, form by form."""
    text = _replaced(helpers(*HEADERS), fault)
    if alone := half_ordered(text):
        return f"volatile without a clobber of memory, or the reverse: {alone[0]}"
    for statement in STATEMENTS:
        if statement.name != fault.subject:
            continue
        ((made,), _) = compile_probes(text, [statement.probe], "sm_90a")
        if made.instructions != statement.instructions:
            return _difference(made.instructions, statement.instructions)
        if made.loops != statement.loops:
            return "no loop"
        if made.orders != statement.orders:
            return "the compiler moves memory accesses across it"
        if statement.result_registers not in (None, made.result_registers):
            return f"results in {made.result_registers} registers, expected {statement.result_registers}"
    return None


def _difference(actual: tuple[str, ...], expected: tuple[str, ...]) -> str:
    """Return the first different instruction, with long lists of registers shortened."""
    for got, wanted_text in zip(actual, expected, strict=False):
        if got != wanted_text:
            short = (
                re.sub(r"\{(\w+\[0\])(?:,\w+\[\d+\]){7,}\}", r"{\1,...}", text) for text in (got, wanted_text)
            )
            return ", expected ".join(short)
    return f"{len(actual)} instructions, expected {len(expected)}"


GEMM = {**watch_hopper.ALONE, "bm": 128, "consumers": 2}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemm/cuda_wgmma": ("gemm:m=192,n=128,k=320,dtype=f16", GEMM),
    "gemm/cuda_wgmma, pingpong": ("gemm:m=192,n=128,k=320,dtype=f16", {**GEMM, "bm": 64, "pingpong": 1}),
    "gemm/cuda_wgmma, prologue": ("gemm:m=192,n=128,k=640,dtype=f16,pre=relu(x)", GEMM),
    "gemm/cuda_wgmma, tf32": ("gemm:m=192,n=128,k=256,dtype=tf32", {**GEMM, "bk": 32}),
    "gemm/cuda_wgmma, bulk stores": ("gemm:m=192,n=192,k=128,dtype=f16", {**GEMM, "staged": 2}),
    "gemm/cuda_mma": ("gemm:m=64,n=64,k=256,dtype=f16", {}),
    "attention/cuda_wgmma": ("attention:batch=1,heads=8,seq_q=128,seq_k=320,head_dim=64,dtype=f16", {}),
    "attention/cuda_wgmma_backward": (
        "attention:batch=1,heads=1,seq_q=200,seq_k=300,head_dim=64,dtype=f16,direction=backward",
        {},
    ),
    "conv2d/cuda_wgmma": (
        "conv2d:n=1,c=64,h=9,w=8,k=64,r=3,s=2,stride=1,pad=1,dtype=f16,layout=nhwc",
        {},
    ),
}
"""Workload and configuration (default: the variant's) with which a variant is watched.

Persistent blocks take several tiles each: faults between tiles show in no other case.
"""


def _watched(fault: PlantedFault) -> str | None:
    """Watch a variant and compare its results with the reference."""
    text, values = WORKLOADS[fault.subject]
    variant: Any = kernels.variant(fault.subject.partition(",")[0])
    workload = workloads.parse(text)
    config = Config(values) if values else variant.default(workload, H100)
    inputs = workload.draw(np.random.default_rng(0))
    _replaced(variant.source(workload, config), fault)
    faulty: Any = Faulty(variant, fault.right, fault.wrong)
    try:
        assert_right(workload, inputs, watch(faulty, workload, config, inputs, order="reverse").outputs)
    except EmulationFailed as error:
        return str(error)
    except AssertionError as error:
        return f"wrong results: {error}"
    return None


@contextlib.contextmanager
def _planted_header(fault: PlantedFault) -> Iterator[None]:
    """Replace the text in a header of the emulator."""
    headers = dict(host_compiler.shim_headers())
    headers[fault.subject] = _replaced(headers[fault.subject], fault)
    host_compiler.key_parts.cache_clear()
    try:
        with mock.patch.object(host_compiler, "shim_headers", return_value=headers):
            yield
    finally:
        host_compiler.key_parts.cache_clear()


@contextlib.contextmanager
def _planted_wrapper(fault: PlantedFault) -> Iterator[None]:
    """Replace the text in the wrappers that tests of the emulator use."""
    source = conformance.WrapperVariant.source
    planted = _replaced(hopper.HELPERS, fault)

    def faulty(self: Any, workload: Any, config: Any) -> str:
        return source(self, workload, config).replace(fault.right, fault.wrong)

    with (
        mock.patch.object(conformance.WrapperVariant, "source", faulty),
        mock.patch.object(hopper, "HELPERS", planted),
    ):
        yield


def _tables(fault: PlantedFault) -> str | None:
    """Run tests that compare emulation with the tables of the PTX ISA."""
    plant = _planted_header if fault.subject.endswith(".h") else _planted_wrapper
    with plant(fault):
        for test in fault.tests:
            try:
                test()
            except (AssertionError, TunebenchError) as error:
                return " ".join(str(error).split()) or "another place than the ISA states"
    return None


CHECKS: dict[str, Callable[[PlantedFault], str | None]] = {
    "golden PTX": _golden,
    "watched emulation": _watched,
    "tables": _tables,
}


def found(fault: PlantedFault) -> str | None:
    """Return what the fault's check reports, or None if it misses the fault."""
    return CHECKS[fault.check](fault)
