"""Defaults of all CUDA C++ variants: compiled without spills and without objections of ptxas.

`nox -s tests` also runs this file with the NVRTC that PyTorch for CUDA 13.0 pins.
"""

from __future__ import annotations

import functools

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
    found = [
        *compile_matrix.defaults(ARCHITECTURES, plain, each_type=False),
        *compile_matrix.defaults(ARCHITECTURES, tensor, each_type=True),
    ]
    first: dict[str, str] = {}
    for item in found:
        first.setdefault(item.variant, item.architecture)
    return tuple(item for item in found if item.architecture == first[item.variant])


@pytest.mark.parametrize(
    "item", items(), ids=lambda item: f"{item.variant}-{item.architecture}-{item.workload}"
)
def test_default_compiles_without_problems(item: Item) -> None:
    assert compile_matrix.examine(item)["problems"] == []


def test_every_variant_is_compiled() -> None:
    assert {item.variant for item in items()} == {variant.key for variant in compilers.variants(("cuda",))}
