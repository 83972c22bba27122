"""Rows that do not start at multiples of an access: vectors, and single elements before and after them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.kernels.kernel_checks import (
    A100,
    H100,
    assert_fault_is_found,
    assert_right,
    assert_right_in_every_order,
    compiled,
    planted,
)
from tests.kernels.test_costs import chains, excesses
from tests.support import needs_compiler, needs_nvrtc
from tunebench import kernels
from tunebench.compile.nvrtc import ptx_of_cuda
from tunebench.device import Device
from tunebench.emulate.emulator import watch
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

OPERATORS = (
    ("cross_entropy", ""),
    ("softmax", ""),
    ("softmax", ",prologue=scale+mask"),
    ("softmax", ",prologue=mask,log=true"),
)
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 127, 129, 255, 257, 1023)


def block(operator: str) -> CudaVariant[Any]:
    variant = kernels.variant(f"{operator}/cuda_block")
    assert isinstance(variant, CudaVariant)
    return variant


def with_edges(
    variant: CudaVariant[Any], workload: Any, device: Device, vector: int, count: int = 1
) -> Iterator[Config]:
    """Yield configurations with this vector for each cache, the same ones in every run."""
    table = variant.configs(workload, device)
    generator = random.Random(f"edges {variant.key} {workload} {vector}")
    for cache in ("registers", "shared", "online"):
        rows = np.flatnonzero((table["cache"] == cache) & (table["vector"] == vector))
        for row in generator.sample(list(rows), min(count, len(rows))):
            yield table.config(row)


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(("operator", "options"), OPERATORS)
def test_every_row_length_is_right(
    operator: str, options: str, dtype: str, pytestconfig: pytest.Config
) -> None:
    """The rows begin at every element of an access, and nothing beyond the tensors is accessed."""
    variant = block(operator)
    # A few lengths of each case, all of them in `--configs 20`.
    everything = pytestconfig.getoption("configs") >= 20
    generator = random.Random(f"{operator} {options} {dtype}")
    for cols in LENGTHS if everything else generator.sample(LENGTHS, 3):
        workload = parse(f"{operator}:rows={generator.randint(1, 5)},cols={cols},dtype={dtype}{options}")
        vectors = set(variant.configs(workload, H100)["vector"])
        widest = 4 if dtype == "f32" else 8
        assert vectors == {v for v in (1, 2, 4, 8) if v <= widest and (cols % v == 0 or cols >= 2 * v)}
        for vector in vectors if everything else [max(vectors)]:
            for config in with_edges(variant, workload, H100, int(vector)):
                assert_right_in_every_order(variant, workload, config, sanitize=True)


@needs_compiler
@pytest.mark.parametrize(("operator", "options"), OPERATORS[::2])
def test_vocabulary_is_right(operator: str, options: str) -> None:
    workload = parse(f"{operator}:rows=3,cols=50257,dtype=bf16{options}")
    variant = block(operator)
    assert variant.default(workload, H100)["vector"] == 8
    assert_right_in_every_order(variant, workload, variant.default(workload, H100), sanitize=True)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "text", ["cross_entropy:{},cols=257,dtype=f16", "softmax:{},cols=129,dtype=f32,log=true"]
)
def test_costs_are_floors_and_nothing_races(text: str, rows: int, pytestconfig: pytest.Config) -> None:
    workload: Workload = parse(text.format(f"rows={rows}"))
    variant = block(workload.operator)
    inputs = workload.draw(np.random.default_rng(0))
    table = variant.configs(workload, H100)
    for vector in (2, 4):
        for config in with_edges(variant, workload, H100, vector, -(-pytestconfig.getoption("configs") // 4)):
            seen = watch(variant, workload, config, inputs)
            assert_right(workload, inputs, seen.outputs, str(config))
            only = table.take(np.array([table.row(config)]))
            assert not list(excesses(variant.costs(workload, only, H100), seen.counts)), config
            assert not list(chains(variant, workload, only, H100, seen.counts)), config


WIDE = {"row_threads": 32, "rows": 2, "vector": 8, "unroll": 1}
FAULTS = (
    ("cols - before) / V", "cols) / V", "registers"),  # a vector beyond the end of the row
    ("before = (V - int(Base::offset % V)) % V", "before = 0", "online"),  # vectors that are not aligned
    ("edge < before ? edge - before : ", "", "shared"),  # the elements before the first vector
    ("edges = exists ? ", "edges = true ? ", "online"),  # rows beyond the end
)


@needs_compiler
@pytest.mark.parametrize(("right", "wrong", "cache"), FAULTS)
def test_planted_faults_are_found(right: str, wrong: str, cache: str) -> None:
    workload = parse("softmax:rows=5,cols=257,dtype=f16,prologue=mask")
    config = Config({"cache": cache, **WIDE})
    assert_fault_is_found(planted(block("softmax"), right, wrong), workload, config, sanitize=True)


@needs_nvrtc
@pytest.mark.parametrize("device", [A100, H100], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("operator", "options"), OPERATORS)
def test_binaries_do_not_spill(operator: str, options: str, dtype: str, device: Device) -> None:
    variant = block(operator)
    for cols in (257, 50257):
        workload = parse(f"{operator}:rows=64,cols={cols},dtype={dtype}{options}")
        compiled(variant, workload, device)
    longest = parse(f"{operator}:rows=64,cols=30001,dtype={dtype}{options}")
    for config in with_edges(variant, longest, device, 16 // (4 if dtype == "f32" else 2)):
        compiled(variant, longest, device, config)


def test_rows_without_edges_have_the_same_source_for_every_length() -> None:
    for operator, dtype in (("softmax", "bf16"), ("cross_entropy", "f32")):
        variant = block(operator)
        sources = set()
        for cols in (1024, 50257):
            workload = parse(f"{operator}:rows=64,cols={cols},dtype={dtype}")
            for vector in (1, 2):
                config = next(with_edges(variant, workload, H100, vector))
                source = variant.source(workload, config)
                has_edges = cols % vector != 0
                assert ("EdgedShare" in source) == ("// edges" in source) == has_edges
                sources.add(source)
        assert len(sources) == 2


def test_norms_still_start_at_multiples_of_an_access() -> None:
    """Weights of rows with edges would not be aligned."""
    workload = parse("layernorm:rows=64,cols=131,dtype=f16")
    assert set(block("layernorm").configs(workload, H100)["vector"]) == {1}


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("operator", "options"), OPERATORS)
def test_only_edges_are_accessed_one_by_one(operator: str, options: str, dtype: str) -> None:
    """The compiler could split the access of a vector."""
    variant = block(operator)
    workload = parse(f"{operator}:rows=64,cols=5003,dtype={dtype}{options}")
    # An edge of each matrix. Cross entropy also reads an index and a logit, and stores two numbers in f32.
    loads, stores = (2 if "mask" in options else 1), 1
    if operator == "cross_entropy":
        loads, stores = (3, 2) if dtype == "f32" else (2, 0)
    table = variant.configs(workload, H100)
    for cache, vector in itertools.product(("registers", "shared", "online"), (2, 4, 8)):
        chosen = (table["cache"] == cache) & (table["vector"] == vector) & (table["row_threads"] == 256)
        for row in np.flatnonzero(chosen)[-1:]:
            ptx = ptx_of_cuda(variant, workload, table.config(row), H100)
            single = "[fub]32" if dtype == "f32" else "[ub]16"
            counts = [
                len(re.findall(rf"{name}\.{single}\b", ptx)) for name in (r"ld\.global\.nc", r"st\.global")
            ]
            assert counts == [loads, stores], table.config(row)
