"""Transposed operands through tiles in shared memory, with vectors on both sides."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from tests.kernels.kernel_checks import (
    GENERATIONS,
    H100,
    assert_fault_is_found,
    assert_right,
    assert_right_in_every_order,
    compiled,
    planted,
)
from tests.kernels.test_costs import excesses
from tests.support import needs_compiler, needs_disassembler, needs_nvrtc
from tunebench import kernels
from tunebench.binary.disassembly import sass
from tunebench.device import Device
from tunebench.emulate.emulator import watch
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workloads import parse

TRANSPOSES = {
    "bf16": "shape=72x136,dtype=bf16,expression=x+y,operands=x.bf16.1_72+y.bf16.136_1",
    "f32": "shape=72x132,dtype=f32,expression=x*y,operands=x.f32.1_72+y.bf16.0_1",
    "three axes": "shape=3x40x80,dtype=f16,expression=x-y,operands=x.f16.3200_1_40+y.f32.0_0_1",
    "bool": "shape=48x64,dtype=bool,expression=lt(c,x),operands=c.bool.1_48+x.bf16.64_1",
    "unaligned": "shape=40x72,dtype=f16,expression=x+y,operands=x.f16.1_41+y.f16.73_1",
    "odd": "shape=37x131,dtype=f16,expression=x,operands=x.f16.1_37",
}
WIDEST = {"bf16": 8, "f32": 4, "three axes": 4, "bool": 8, "unaligned": 8, "odd": 1}


def tiled() -> CudaVariant[Any]:
    variant = kernels.variant("strided_elementwise/cuda_tiled")
    assert isinstance(variant, CudaVariant)
    return variant


@needs_compiler
@pytest.mark.parametrize("name", TRANSPOSES)
def test_vectors_of_every_width_are_right(name: str, pytestconfig: pytest.Config) -> None:
    """Also: costs are floors, and nothing races."""
    workload = parse(f"strided_elementwise:{TRANSPOSES[name]}")
    table = tiled().configs(workload, H100)
    generator = random.Random(name)
    widths = sorted(set(map(int, table["vector"])))
    assert widths == [width for width in (1, 2, 4, 8) if width <= WIDEST[name]]
    assert tiled().default(workload, H100)["vector"] == WIDEST[name]
    everything = pytestconfig.getoption("configs") >= 20
    for vector in widths if everything else widths[-1:]:
        row = generator.choice(list(np.flatnonzero(table["vector"] == vector)))
        config = table.config(int(row))
        assert_right_in_every_order(tiled(), workload, config, sanitize=True)
        inputs = workload.draw(np.random.default_rng(0))
        seen = watch(tiled(), workload, config, inputs)
        assert_right(workload, inputs, seen.outputs, str(config))
        costs = tiled().costs(workload, table.take(np.array([row])), H100)
        assert not list(excesses(costs, seen.counts)), config


CONFIG = Config({"last": 32, "second": 32, "threads": 64, "vector": 8})


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "__syncthreads();\n#pragma unroll\n  for (int n = 0; n < LAST",
            "#pragma unroll\n  for (int n = 0; n < LAST",
        ),
        ("along + i", "along"),  # the same row of the tile for all elements of a vector
        ("column / V ^ row / V % (SECOND / V)", "column / V ^ column % V"),  # not the place that was stored
        ("const int along = place % (LAST / V) * V", "const int along = place % (LAST / V)"),
    ],
)
def test_planted_faults_are_found(right: str, wrong: str) -> None:
    workload = parse(f"strided_elementwise:{TRANSPOSES['bf16']}")
    assert_fault_is_found(planted(tiled(), right, wrong), workload, CONFIG, sanitize=True)


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize("device", GENERATIONS, ids=[device.architecture for device in GENERATIONS])
@pytest.mark.parametrize("shape", ["1024x1024", "16x1024x1024"])
def test_both_sides_of_a_transpose_are_accessed_by_16_bytes(shape: str, device: Device) -> None:
    """The compiler could split the store of a vector."""
    strides = "1_1024" if shape == "1024x1024" else "1048576_1_1024"
    workload = parse(f"strided_elementwise:shape={shape},dtype=bf16,expression=x,operands=x.bf16.{strides}")
    code = sass(compiled(tiled(), workload, device).payload)
    for name in ("LDG", "STG", "STS"):
        accesses = re.findall(rf"\b{name}(?:\.\w+)*", code)
        assert accesses
        assert all(".128" in access for access in accesses), accesses


def test_reads_of_tiles_have_no_bank_conflicts_by_default() -> None:
    """Passes beyond those of global memory: a store of the tile and a read of it, one pass for each warp."""
    for dtype, stride in (("bf16", 2), ("f32", 4)):
        text = f"strided_elementwise:shape=1024x1024,dtype={dtype},expression=x,operands=x.{dtype}.1_1024"
        workload, device = parse(text), H100
        config = tiled().default(workload, device)
        table = tiled().configs(workload, device)
        execution = tiled().costs(workload, table.take(np.array([table.row(config)])), device).execution
        assert execution is not None
        warps = config["last"] * config["second"] / 32
        assert float(np.max(execution.passes)) / warps == pytest.approx(3 * stride / 4 + 1)
