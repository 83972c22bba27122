"""Numba binaries for the CPU: keys, and separate symbols for binaries of several processes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.bytecode import FunctionIdentity

from tunebench.compile.numba_cpu import compile_numba_cpu, fingerprint_of, key_numba_cpu, load_numba_cpu
from tunebench.kernels import load_file, module_name
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=3,cols=5,dtype=f32")


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


def test_key_depends_on_configuration_and_not_on_size(variant: NumbaCpuVariant[Any]) -> None:
    right, wrong = (Config({"fault": fault, "copy": 0}) for fault in ("none", "wrong"))
    key = key_numba_cpu(variant, WORKLOAD, right)
    assert key == key_numba_cpu(variant, parse("softmax:rows=9,cols=9,dtype=f32"), right)
    assert key != key_numba_cpu(variant, WORKLOAD, wrong)


def test_fingerprint_changes_when_file_is_moved() -> None:
    def kernel(x: int) -> int:
        return x

    fingerprint = fingerprint_of(kernel)
    kernel.__module__ = module_name(
        "/elsewhere/variant.py"
    )  # compiled code looks up its globals in this module
    assert fingerprint_of(kernel) != fingerprint
