"""Defaults of all CUDA C++ variants: compiled without spills and without objections of ptxas.

`nox -s tests` also compiles those for tensor cores with the NVRTC that PyTorch for CUDA 13.0 pins, and
`nox -s exhaustive` all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from benchmarks import compile_matrix, compilers
from benchmarks.compile_matrix import Item
from tests.support import needs_disassembler, needs_nvrtc

pytestmark = [needs_nvrtc, needs_disassembler, pytest.mark.slow]

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_120")


@functools.cache
def items() -> tuple[Item, ...]:
    """Return a default of each CUDA C++ variant for the first architecture it supports.

    Variants that use tensor cores have one for each type.
    """
    variants = compilers.variants(("cuda",))
    plain = [v for v in variants if "mma" not in v.name]
    tensor = [v for v in variants if "mma" in v.name]
    listed = [
        *compile_matrix.defaults(ARCHITECTURES, plain, each_type=False),
        *compile_matrix.defaults(ARCHITECTURES, tensor, each_type=True),
    ]
    first: dict[str, str] = {}
    for item in listed:
        first.setdefault(item.variant, item.architecture)
    return tuple(item for item in listed if item.architecture == first[item.variant])


def cases() -> list[Any]:
    """Return the items; of f16 and bf16, which use the same instructions, one is marked `exhaustive`."""
    covered: set[str] = set()
    chosen = []
    for item in items():
        is_half = any(f"dtype={dtype}" in item.workload for dtype in ("f16", "bf16"))
        marks = [pytest.mark.exhaustive] if is_half and item.variant in covered else []
        covered |= {item.variant} if is_half else set()
        name = f"{item.variant}-{item.architecture}-{item.workload}"
        chosen.append(pytest.param(item, id=name, marks=marks))
    return chosen


@pytest.mark.parametrize("item", cases())
def test_default_compiles_without_problems(item: Item) -> None:
    assert compile_matrix.examine(item)["problems"] == []


def test_every_variant_is_compiled() -> None:
    assert {item.variant for item in items()} == {variant.key for variant in compilers.variants(("cuda",))}


def test_page_counts_problems_and_notes_by_family() -> None:
    plain = {
        "compiler": "13.0.88",
        "architecture": "sm_90",
        "workload": "w",
        "spill_bytes": 0,
        "seconds": 1.0,
    }
    noted = plain | {"variant": "attention/cuda_wgmma", "problems": [], "notes": ["arrive"]}
    problem = "costly note of ptxas: serialized"
    costly = plain | {"variant": "gemm/cuda_wgmma", "problems": [problem], "notes": ["serialized"]}
    failed = {"variant": "gemm/cuda_mma", "problems": ["does not compile: x"]}
    failed |= {name: plain[name] for name in ("compiler", "architecture", "workload")}
    page = compilers.page([noted, costly, failed], ["--arch", "sm_90", "--out", "x.md"])
    assert "benchmarks.compilers --arch sm_90`" in page
    assert "| 13.0.88 | wgmma and TMA | sm_90 | 2 | 2 | 0 | 0 | 1 | 1 |" in page
    assert "| 13.0.88 | mma.sync | sm_90 | 1 | 0 | 0 | 0 | 0 | 0 |" in page
    assert f"gemm/cuda_wgmma on sm_90, `w`: {problem}" in page
