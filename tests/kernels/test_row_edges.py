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
    assert_emulates_right,
    assert_fault_is_found,
    assert_faults_have_a_place,
    assert_right,
    assert_right_in_every_order,
    compiled,
    planted,
    sampled_faults,
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

CASES = (
    ("cross_entropy/cuda_block", ""),
    ("softmax/cuda_block", ""),
    ("softmax/cuda_block", ",prologue=scale+mask"),
    ("softmax/cuda_block", ",prologue=mask,log=true"),
    ("softmax/cuda_block_backward", ",direction=backward"),
    ("softmax/cuda_block_backward", ",direction=backward,log=true"),
    ("layernorm/cuda_block", ",prologue=bias+residual,stats=true"),
    ("rmsnorm/cuda_block", ""),
    ("layernorm/cuda_backward", ",direction=backward"),
    ("rmsnorm/cuda_backward", ",direction=backward"),
    ("reduction/cuda_row", ",expression=alpha*x*r+b,vectors=b,columns=r,scalars=alpha,reduce=sum"),
)
"""Variants in which threads share a row, and options of their workloads."""
SPLIT_CASES = (
    ("cross_entropy/cuda_split", ""),
    ("softmax/cuda_split", ",prologue=scale+mask"),
    ("softmax/cuda_split", ",log=true"),
    ("softmax/cuda_split_backward", ",direction=backward"),
    ("softmax/cuda_split_backward", ",direction=backward,log=true"),
    ("layernorm/cuda_split", ",prologue=bias+residual,stats=true"),
    ("rmsnorm/cuda_split", ""),
)
"""Variants in which blocks share a row."""
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 127, 129, 255, 257, 1023)
SPLIT_LENGTHS = (2049, 2051, 2054, 2063, 3000, 4109)


def cuda(key: str) -> CudaVariant[Any]:
    variant = kernels.variant(key)
    assert isinstance(variant, CudaVariant)
    return variant


def workload_of(key: str, sizes: str, options: str) -> Workload:
    return parse(f"{key.partition('/')[0]}:{sizes}{options}")


def with_edges(
    variant: CudaVariant[Any], workload: Any, device: Device, vector: int, count: int = 1
) -> Iterator[Config]:
    """Yield configurations with this vector for each place of a row or sums, the same in every run."""
    table = variant.configs(workload, device)
    generator = random.Random(f"edges {variant.key} {workload} {vector}")
    kinds = [table[name] for name in ("cache", "sums", "reads") if name in variant.space.names]
    keys = np.array([" ".join(map(str, row)) for row in zip(*kinds, strict=True)] or [""] * len(table))
    for key in sorted(set(keys)):
        rows = np.flatnonzero((keys == key) & (table["vector"] == vector))
        for row in generator.sample(list(rows), min(count, len(rows))):
            yield table.config(int(row))


@needs_compiler
@pytest.mark.parametrize(("key", "options"), CASES)
def test_every_row_length_is_right(key: str, options: str, pytestconfig: pytest.Config) -> None:
    """The rows begin at every element of an access, and nothing beyond the tensors is accessed."""
    variant = cuda(key)
    # A length, a type and a configuration, all of them in `--configs 20`.
    everything = pytestconfig.getoption("configs") >= 20
    generator = random.Random(f"{key} {options}")
    types = (("f32", 4), ("f16", 8), ("bf16", 8))
    for dtype, widest in types if everything else generator.sample(types, 1):
        for cols in LENGTHS if everything else generator.sample(LENGTHS, 1):
            # With eight blocks and more, some process several groups of rows.
            rows = 35 if "cuda_backward" in key else generator.randint(1, 5)
            workload = workload_of(key, f"rows={rows},cols={cols},dtype={dtype}", options)
            vectors = set(variant.configs(workload, H100)["vector"])
            assert vectors == {v for v in (1, 2, 4, 8) if v <= widest and (cols % v == 0 or cols >= 2 * v)}
            for vector in vectors if everything else [max(vectors)]:
                configs = list(with_edges(variant, workload, H100, int(vector)))
                for config in configs if everything else generator.sample(configs, 1):
                    assert_right_in_every_order(variant, workload, config, sanitize=True)


@needs_compiler
@pytest.mark.parametrize(("key", "options"), SPLIT_CASES)
def test_every_length_of_split_rows_is_right(key: str, options: str, pytestconfig: pytest.Config) -> None:
    variant = cuda(key)
    everything = pytestconfig.getoption("configs") >= 20
    generator = random.Random(f"{key} {options}")
    dtypes = ("f32", "f16", "bf16")
    for dtype in dtypes if everything else generator.sample(dtypes, 1):
        for cols in SPLIT_LENGTHS if everything else generator.sample(SPLIT_LENGTHS, 1):
            workload = workload_of(key, f"rows=3,cols={cols},dtype={dtype}", options)
            for vector in (4 if dtype == "f32" else 8, 2)[: 2 if everything else 1]:
                for config in with_edges(variant, workload, H100, vector):
                    assert_right_in_every_order(variant, workload, config, sanitize=True)


@needs_compiler
@pytest.mark.parametrize("key", ["rmsnorm/cuda_split", "layernorm/cuda_split"])
def test_the_last_part_of_some_rows_is_empty(key: str) -> None:
    """A row that starts one element after a multiple of an access has a vector less than others."""
    workload = workload_of(key, "rows=2,cols=2049,dtype=f16", "")
    config = Config({"threads": 64, "parts": 256, "vector": 8, "unroll": 1})
    assert {launch.grid[0] for launch in cuda(key).launches(workload, config)} == {2 * 256}
    assert_emulates_right(cuda(key), workload, config, sanitize=True)


@needs_compiler
@pytest.mark.parametrize(("key", "options"), [CASES[0], CASES[2], CASES[4], CASES[7], SPLIT_CASES[5]])
def test_vocabulary_is_right(key: str, options: str) -> None:
    workload = workload_of(key, "rows=3,cols=50257,dtype=bf16", options)
    variant = cuda(key)
    assert variant.default(workload, H100)["vector"] == 8
    assert_right_in_every_order(variant, workload, variant.default(workload, H100), sanitize=True)


@needs_compiler
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cross_entropy/cuda_block", "rows=1,cols=257,dtype=f16"),
        ("softmax/cuda_block", "rows=5,cols=129,dtype=f32,log=true"),
        ("softmax/cuda_block_backward", "rows=5,cols=259,dtype=bf16,direction=backward"),
        ("layernorm/cuda_block", "rows=1,cols=133,dtype=f16,prologue=bias+residual"),
        ("layernorm/cuda_backward", "rows=9,cols=131,dtype=f32,direction=backward"),
        ("rmsnorm/cuda_backward", "rows=3,cols=263,dtype=bf16,direction=backward"),
        ("softmax/cuda_split", "rows=2,cols=1031,dtype=f16,prologue=mask"),
        ("softmax/cuda_split_backward", "rows=3,cols=1029,dtype=bf16,direction=backward,log=true"),
        ("layernorm/cuda_split", "rows=2,cols=2055,dtype=bf16"),
        ("reduction/cuda_row", "rows=3,cols=1031,dtype=f16,expression=x*b,vectors=b,reduce=max"),
    ],
)
def test_costs_are_floors_and_nothing_races(key: str, text: str, pytestconfig: pytest.Config) -> None:
    workload, variant = workload_of(key, text, ""), cuda(key)
    inputs = workload.draw(np.random.default_rng(0))
    table = variant.configs(workload, H100)
    for vector in (2, 4) if pytestconfig.getoption("configs") > 1 else (4,):
        for config in with_edges(variant, workload, H100, vector, -(-pytestconfig.getoption("configs") // 4)):
            seen = watch(variant, workload, config, inputs)
            assert_right(workload, inputs, seen.outputs, str(config))
            only = table.take(np.array([table.row(config)]))
            assert not list(excesses(variant.costs(workload, only, H100), seen.counts)), config
            assert not list(chains(variant, workload, only, H100, seen.counts)), config


WIDE = {"row_threads": 32, "rows": 2, "vector": 8, "unroll": 1}
SPLIT = {"threads": 64, "vector": 8, "unroll": 1}
SUMMED = {
    "sums": "registers",
    "reads": 2,
    "row_threads": 16,
    "rows": 2,
    "blocks": 8,
    "vector": 4,
    "unroll": 1,
}
REDUCED = {"row_threads": 64, "rows": 1, "vector": 8, "unroll": 1, "split": 2}
FAULTS = (
    # A vector beyond the end of the row.
    ("softmax/cuda_block", {"cache": "registers", **WIDE}, "cols - before) / V", "cols) / V"),
    # Vectors that are not aligned.
    ("softmax/cuda_block", {"cache": "online", **WIDE}, "before = (V - int(row % V)) % V", "before = 0"),
    # The elements before the first vector.
    ("softmax/cuda_block", {"cache": "shared", **WIDE}, "edge < before ? edge - before : ", ""),
    # Rows beyond the end.
    ("softmax/cuda_block", {"cache": "online", **WIDE}, "cols, Base::count > 0)", "cols, true)"),
    # The sum lacks the edges.
    ("layernorm/cuda_backward", SUMMED, "along = multiply_add(one_g[0], one_normal[0], along);", ""),
    # Each block of a row has its edges.
    ("softmax/cuda_split", {"split": 4, **SPLIT}, "cols, blockIdx.y == 0)", "cols, true)"),
    # No part begins after the first vectors of its row.
    (
        "softmax/cuda_split",
        {"split": 4, **SPLIT},
        "size_t(blockIdx.x) * cols, begin)",
        "size_t(blockIdx.x) * cols)",
    ),
    # Weights of other columns.
    ("rmsnorm/cuda_block", {"cache": "online", **WIDE}, "words[i] >> 16 | words[i + 1] << 16", "words[i]"),
    ("rmsnorm/cuda_block", {"cache": "online", **WIDE}, "if (shift & step * PER_WORD)", ""),
    # Memory beyond the end of the weights.
    ("rmsnorm/cuda_block", {"cache": "online", **WIDE}, "first + 2 * V > source.count", "false"),
    # Statistics without the edges.
    ("layernorm/cuda_split", {"parts": 4, **SPLIT}, "seen.see<P::CENTRED>(edge[n]);  // edges\n  });", "});"),
    # Sums of another column, or of rows beyond the end.
    ("layernorm/cuda_backward", SUMMED, "(LEADS ? lead<V>(part, cols) : 0)", "0"),
    ("layernorm/cuda_backward", SUMMED, "if (!there) of_row.edges = 0;", ""),
    ("layernorm/cuda_backward", SUMMED, "edge_sums.add(0, n, one_normal, one_g)", ""),
    # Each block of a row has its edges.
    ("reduction/cuda_row", REDUCED, "row < rows && blockIdx.y == 0", "row < rows"),
)


def faulty(key: str, config: dict[str, Any], right: str, wrong: str) -> tuple[Any, Workload, Config]:
    options = ",direction=backward" if "backward" in key else ",prologue=mask" if "softmax" in key else ""
    options = ",expression=square(x),reduce=sum" if config is REDUCED else options
    rows = 19 if config is SUMMED else 5
    workload = workload_of(key, f"rows={rows},cols={2051 if 'split' in key else 257},dtype=f16", options)
    return planted(cuda(key), right, wrong), workload, Config(config)


def test_planted_faults_have_a_place() -> None:
    assert_faults_have_a_place(itertools.starmap(faulty, FAULTS))


@needs_compiler
@pytest.mark.parametrize("fault", sampled_faults(FAULTS))
def test_planted_faults_are_found(fault: tuple[str, dict[str, Any], str, str]) -> None:
    key, config, _, _ = fault
    wrong, workload, chosen = faulty(*fault)
    inputs = workload.draw(np.random.default_rng(2))
    if "layernorm" in key or config is REDUCED:
        inputs["x"][:, [0, -1]] += np.float16(100)
    assert_fault_is_found(wrong, workload, chosen, inputs, sanitize=True)


@needs_nvrtc
@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=[pytest.mark.exhaustive] if index // 2 % 2 else [])
        for index in range(len(CASES) + len(SPLIT_CASES))
    ],
)
def test_binaries_do_not_spill(index: int) -> None:
    """Each case has one type; the compile matrix has the others, and more devices."""
    key, options = (*CASES, *SPLIT_CASES)[index]
    dtype, device = (("f32", A100), ("bf16", H100))[index % 2]
    variant = cuda(key)
    for cols in (257, 50257) if key in {"softmax/cuda_block", "cross_entropy/cuda_block"} else (50257,):
        compiled(variant, workload_of(key, f"rows=64,cols={cols},dtype={dtype}", options), device)
    longest = workload_of(key, f"rows=64,cols=30001,dtype={dtype}", options)
    configs = with_edges(variant, longest, device, 16 // (4 if dtype == "f32" else 2))
    for config in configs if "cuda_block" in key else itertools.islice(configs, 1):
        compiled(variant, longest, device, config)


def test_rows_without_edges_have_the_same_source_for_every_length() -> None:
    for key, options in (*CASES, *SPLIT_CASES):
        variant, sources = cuda(key), set()
        for cols in (4096, 50257):
            workload = workload_of(key, f"rows=64,cols={cols},dtype=bf16", options)
            for vector in (1, 2):
                config = next(with_edges(variant, workload, H100, vector))
                source = variant.source(workload, config)
                has_edges = cols % vector != 0
                assert ("struct Edges" in source) == ("  // edges\n" in source) == has_edges
                assert ("// aligned" in source) <= (not has_edges)
                sources.add(source)
        assert len(sources) == 2


@needs_nvrtc
@pytest.mark.parametrize(
    ("key", "options", "dtype", "loads", "stores"),
    [
        # An edge of each matrix. Cross entropy also reads an index and a logit, and stores two f32.
        (*CASES[0], "bf16", 2, 0),
        (*CASES[0], "f32", 3, 2),
        (*CASES[2], "bf16", 2, 1),
        (*CASES[3], "f32", 2, 1),
        (*CASES[4], "bf16", 2, 1),
        (*CASES[5], "f32", 2, 1),
        # Weights at the end of a row are loaded one by one, so that loads are not counted.
        (*CASES[6], "bf16", None, 2),
        (*CASES[7], "bf16", None, 1),
        # Gradients of weights are stored one by one.
        (*CASES[8], "bf16", None, 3),
        (*CASES[9], "bf16", None, 2),
        (*CASES[10], "bf16", None, 1),
        (*SPLIT_CASES[0], "bf16", 2, 0),
        (*SPLIT_CASES[1], "bf16", 4, 1),
        (*SPLIT_CASES[4], "bf16", 3, 1),
        (*SPLIT_CASES[5], "bf16", None, 2),
        (*SPLIT_CASES[6], "bf16", None, 1),
    ],
)
def test_only_edges_are_accessed_one_by_one(
    key: str, options: str, dtype: str, loads: int | None, stores: int
) -> None:
    """The compiler could split the access of a vector."""
    variant = cuda(key)
    workload = workload_of(key, f"rows=64,cols=5003,dtype={dtype}", options)
    table = variant.configs(workload, H100)
    threads = "threads" if "threads" in table.space.names else "row_threads"
    table = table.take(np.flatnonzero(table[threads] == 256))
    for vector in (2, 4 if dtype == "f32" else 8):
        for row in np.flatnonzero(table["vector"] == vector)[-1:]:
            ptx = ptx_of_cuda(variant, workload, table.config(row), H100)
            single = "[fub]32" if dtype == "f32" else "[ub]16"
            counts = [
                len(re.findall(rf"{name}\.{single}\b", ptx)) for name in (r"ld\.global\.nc", r"st\.global")
            ]
            assert counts == [counts[0] if loads is None else loads, stores], table.config(row)
            if vector == 8:
                assert not re.search(r"(ld|st)\.global(\.nc)?\.v2\.[ub]16", ptx), table.config(row)
