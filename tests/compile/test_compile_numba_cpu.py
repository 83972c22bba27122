"""Numba binaries for the CPU: keys, and separate symbols for binaries of several processes."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.bytecode import FunctionIdentity
from numba.core.codegen import CPUCodeLibrary

from tunebench import kernels
from tunebench.compile import numba_cpu
from tunebench.compile.numba_cpu import compile_numba_cpu, fingerprint_of, key_numba_cpu, load_numba_cpu
from tunebench.compile.numba_linking import linked_once
from tunebench.device import local_cpu
from tunebench.kernels import load_file, module_name
from tunebench.kernels.common.numba_cpu import jitted
from tunebench.kernels.common.numba_product import strided_product
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=3,cols=5,dtype=f32")

KEYED = (
    "gemm:m=8,n=8,k=16,dtype=f32",
    "gated_gemm:m=8,n=8,k=16,dtype=f16",
    "conv2d:n=1,c=3,h=5,w=5,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc",
    "attention:batch=1,heads=2,seq_q=64,head_dim=64,dtype=f32",
    "softmax:rows=4,cols=16,dtype=bf16",
    "elementwise:rows=4,cols=16,dtype=f32,expression=gelu(x)",
)
"""Workloads with one variant for processors each, of which some use intrinsics."""


@pytest.fixture(scope="module")
def variant() -> NumbaCpuVariant[Any]:
    loaded = load_file(Path(__file__).parents[1] / "data" / "faulty_variant.py")
    assert isinstance(loaded, NumbaCpuVariant)
    return loaded


def test_binaries_of_two_processes_do_not_share_symbols(variant: NumbaCpuVariant[Any]) -> None:
    compiled = []
    for fault in ("none", "wrong"):
        config = Config({"fault": fault, "copy": 0})
        FunctionIdentity._unique_ids = itertools.count(1)  # same state as in a new process
        compiled.append((compile_numba_cpu(variant, WORKLOAD, config), config))
    x = np.random.default_rng(0).standard_normal((3, 5), dtype=np.float32)
    results = []
    for binary, config in compiled:
        y = np.empty_like(x)
        load_numba_cpu(binary, variant, WORKLOAD, config)(x, y)
        results.append(float(y[0].sum()))
    assert abs(results[0] - 1) < 1e-6
    assert results[1] > 1.0005


def test_binaries_of_one_kernel_do_not_share_symbols(variant: NumbaCpuVariant[Any]) -> None:
    """Numba numbers the functions of a kernel differently in each: equal symbols may be other functions."""
    config = Config({"fault": "none", "copy": 0})
    numbers = []
    for _ in range(2):
        binary = compile_numba_cpu(variant, WORKLOAD, config)
        numbers.append(set(re.findall(rb"%bB\d+v(\d+)" % binary.entries[0].encode(), binary.payload)))
    assert len(numbers[0]) == 1
    assert numbers[0] != numbers[1]


def test_functions_of_a_kernel_are_translated_as_parts_of_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function stays callable, and errors of functions are raised with their objects."""

    @numba.njit  # type: ignore[untyped-decorator]
    def entered(value: float) -> float:
        return value + 1

    @jitted()
    def checked(value: float) -> float:
        if value < 0:
            raise ValueError("negative", "value")
        return value * 2

    def kernel(x: Any) -> None:
        checked(x[0])
        for i in numba.prange(len(x)):
            x[i] = checked(entered(x[i]))

    compiled: list[str] = []
    translate = CPUCodeLibrary._finalize_final_module

    def counted(library: Any) -> None:
        compiled.append(library.name.rpartition(".")[2])
        translate(library)

    monkeypatch.setattr(CPUCodeLibrary, "_finalize_final_module", counted)
    dispatcher = numba.njit(parallel=True, error_model="numpy")(kernel)
    with linked_once(dispatcher.targetctx.codegen(), kernel.__qualname__):
        dispatcher.compile("void(float64[::1])")
    assert sorted({*compiled} - {"nrt"}) == ["entered", "kernel"]  # the first in a process compiles nrt
    assert entered(1.0) == 2.0
    assert dispatcher.overloads[dispatcher.signatures[0]].library._finalized
    dispatcher(x := np.array([1.0, 2.0]))
    assert x.tolist() == [4.0, 6.0]
    with pytest.raises(ValueError, match="negative"):
        dispatcher(np.array([-3.0]))


def test_strips_of_a_tile_are_arguments_of_one_binary() -> None:
    workload = parse("conv2d:n=1,c=64,h=8,w=8,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc")
    for variant in kernels.variants(workload):
        if isinstance(variant, NumbaCpuVariant) and variant.refuses(workload, local_cpu()) is None:
            default = variant.default(workload, local_cpu())
            more = Config({**default, "m_panels": 2 * default["m_panels"]})
            assert key_numba_cpu(variant, workload, default) == key_numba_cpu(variant, workload, more)
            assert variant.arguments(workload, default) != variant.arguments(workload, more)


def test_fingerprint_depends_on_what_an_intrinsic_generates() -> None:
    products = [strided_product(2, 16, a_strides=(1, 2), b_pitch=pitch) for pitch in (16, 32, 16)]
    first, wider, same = map(fingerprint_of, products)
    assert first == same != wider


def test_keys_are_the_same_in_every_process() -> None:
    script = (
        "from tunebench import kernels\n"
        "from tunebench.compile.numba_cpu import key_numba_cpu\n"
        "from tunebench.device import local_cpu\n"
        "from tunebench.variant import NumbaCpuVariant\n"
        "from tunebench.workloads import parse\n"
        f"for text in {KEYED}:\n"
        "    workload = parse(text)\n"
        "    for variant in kernels.variants(workload):\n"
        "        is_numba = isinstance(variant, NumbaCpuVariant)\n"
        "        if is_numba and variant.refuses(workload, local_cpu()) is None:\n"
        "            config = variant.default(workload, local_cpu())\n"
        "            print(variant.key, key_numba_cpu(variant, workload, config))\n"
    )
    first, second = (
        subprocess.run(
            [sys.executable, "-P", "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second
    assert first.count("\n") == len(KEYED)


def test_key_depends_on_configuration_and_not_on_size(variant: NumbaCpuVariant[Any]) -> None:
    right, wrong = (Config({"fault": fault, "copy": 0}) for fault in ("none", "wrong"))
    key = key_numba_cpu(variant, WORKLOAD, right)
    assert key == key_numba_cpu(variant, parse("softmax:rows=9,cols=9,dtype=f32"), right)
    assert key != key_numba_cpu(variant, WORKLOAD, wrong)


@pytest.mark.parametrize(("setting", "value"), [("OPT", 0), ("BOUNDSCHECK", 1), ("LOOP_VECTORIZE", 0)])
def test_key_depends_on_settings_that_change_machine_code(
    variant: NumbaCpuVariant[Any], monkeypatch: pytest.MonkeyPatch, setting: str, value: int
) -> None:
    config = Config({"fault": "none", "copy": 0})
    key = key_numba_cpu(variant, WORKLOAD, config)
    monkeypatch.setattr(numba_cpu, "_processor", numba_cpu._processor.__wrapped__)
    assert key_numba_cpu(variant, WORKLOAD, config) == key
    monkeypatch.setattr(f"numba.core.config.{setting}", value)
    assert key_numba_cpu(variant, WORKLOAD, config) != key


def test_fingerprint_changes_when_file_is_moved() -> None:
    def kernel(x: int) -> int:
        return x

    fingerprint = fingerprint_of(kernel)
    kernel.__module__ = module_name(
        "/elsewhere/variant.py"
    )  # compiled code looks up its globals in this module
    assert fingerprint_of(kernel) != fingerprint


def test_fingerprint_depends_on_every_element_of_an_array() -> None:
    def kernel_with(table: Any) -> Any:
        def kernel(x: int) -> Any:
            return table[x]

        return kernel

    table = np.arange(10_000, dtype=np.float64)
    changed = table.copy()
    changed[5_000] += 1e-9
    assert fingerprint_of(kernel_with(table)) == fingerprint_of(kernel_with(table.copy()))
    assert fingerprint_of(kernel_with(table)) != fingerprint_of(kernel_with(changed))
    assert fingerprint_of(kernel_with((table,))) != fingerprint_of(kernel_with((changed,)))


def test_fingerprint_depends_on_the_modules_that_a_kernel_names() -> None:
    helper = ModuleType("helper_of_a_kernel")
    exec("FACTOR = 2\nUNUSED = 1\ndef scale(x):\n    return FACTOR * x\n", vars(helper))

    def kernel(x: int) -> Any:
        return kernel(helper.scale(x)) if x else helper

    fingerprint = fingerprint_of(kernel)
    helper.UNUSED = 3  # type: ignore[attr-defined]
    assert fingerprint_of(kernel) == fingerprint
    helper.FACTOR = 3  # type: ignore[attr-defined]
    assert fingerprint_of(kernel) != fingerprint
