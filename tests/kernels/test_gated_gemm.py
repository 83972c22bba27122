"""gated_gemm: spaces, and each path of its kernels at sizes that cut every tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import A100, GPUS, H100, parser
from tests.support import needs_compiler, needs_nvrtc
from tunebench.device import local_cpu
from tunebench.kernels.gated_gemm.cuda_mma import VARIANT as MMA
from tunebench.kernels.gated_gemm.cuda_simt import VARIANT as SIMT
from tunebench.kernels.gated_gemm.cuda_wgmma import VARIANT as WGMMA
from tunebench.kernels.gated_gemm.numba_cpu import VARIANT as CPU
from tunebench.kernels.gated_gemm.numba_cuda import VARIANT as NUMBA
from tunebench.measure.sampled import Sampled, is_sampled
from tunebench.measure.verify import draw
from tunebench.space import Config
from tunebench.workloads.operators.gated_gemm import GatedGemm

gated = parser(GatedGemm)

extents = st.sampled_from([1, 2, 7, 16, 17, 48, 100, 128, 1000, 4096, 14336])
drawn_workloads = st.builds(
    GatedGemm,
    m=extents,
    n=extents,
    k=extents,
    dtype=st.sampled_from(GatedGemm.choices("dtype")),
    trans=st.sampled_from(GatedGemm.choices("trans")),
    activation=st.sampled_from(GatedGemm.choices("activation")),
    out=st.sampled_from(GatedGemm.choices("out")),
)


@given(workload=drawn_workloads, device=st.sampled_from(GPUS))
@example(workload=GatedGemm(m=1, n=1, k=17, dtype="tf32"), device=A100)
def test_the_default_is_a_valid_configuration(workload: GatedGemm, device: Any) -> None:
    checks.assert_default_is_valid((MMA, SIMT, WGMMA, NUMBA), workload, device)
    assert SIMT.refuses(workload, device) is None or device.compute_capability < SIMT.minimum_cc


@given(workload=drawn_workloads)
def test_the_default_is_valid_on_a_processor_too(workload: GatedGemm) -> None:
    config = CPU.default(workload, local_cpu())
    assert CPU.space.check(config, workload=workload, device=local_cpu()) == config
    assert config["n_panels"] % 2 == 0


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    assert "f32" in str(MMA.refuses(gated("m=64,n=64,k=64,dtype=f32"), A100))
    assert "4 bytes" in str(MMA.refuses(gated("m=64,n=63,k=64,dtype=f16"), A100))
    assert MMA.refuses(gated("m=63,n=63,k=64,dtype=f16,trans=nt"), A100) is None
    assert "f16 and bf16" in str(WGMMA.refuses(gated("m=64,n=64,k=64,dtype=tf32"), H100))
    assert "16 bytes" in str(WGMMA.refuses(gated("m=64,n=68,k=64,dtype=f16"), H100))
    assert "f32" in str(NUMBA.refuses(gated("m=8,n=8,k=8,dtype=f16"), A100))


def test_a_large_workload_has_a_thousand_configurations_or_more() -> None:
    for variant, dtype in ((MMA, "f16"), (SIMT, "f32"), (WGMMA, "bf16")):
        assert 1000 <= len(variant.configs(gated(f"m=2048,n=14336,k=4096,dtype={dtype}"), H100)) <= 20_000


CASES = [
    # variant, workload, choices: paths that the cases of the contract tests may leave out
    (SIMT, "m=67,n=130,k=72,dtype=bf16,trans=nt,out=f32", {"bm": 64, "tm": 8, "tn": 4, "stages": 1}),
    (MMA, "m=67,n=88,k=200,dtype=bf16,trans=nt,activation=gelu,out=f32", {"stages": 4, "staged": 0}),
    (MMA, "m=37,n=66,k=70,dtype=f16,activation=relu", {"stages": 2, "staged": 1}),
    (WGMMA, "m=200,n=200,k=136,dtype=f16,out=f32", {"bm": 64, "bn": 192, "consumers": 1, "staged": 1}),
    (WGMMA, "m=264,n=72,k=264,dtype=bf16,trans=nt", {"bm": 64, "bn": 64, "pingpong": 1, "cluster_m": 2}),
    (WGMMA, "m=136,n=136,k=72,dtype=f16,activation=gelu", {"bm": 128, "bn": 64, "cluster_n": 2, "staged": 0}),
    (WGMMA, "m=136,n=136,k=200,dtype=bf16,trans=nt", {"bm": 128, "bn": 128, "bk": 128, "consumers": 2}),
]
JOINED = CASES[-1]
SMALL = {"bm": 32, "bn": 32, "group_m": 1, "min_blocks": 1}


def configured(variant: Any, workload: GatedGemm, choices: dict[str, int]) -> Config:
    """Return a valid configuration with the given choices, with small tiles otherwise."""
    return checks.pick(variant, workload, {**SMALL, **choices}, H100)


@needs_compiler
@pytest.mark.parametrize(("variant", "text", "choices"), CASES)
def test_results_of_each_path_are_right(variant: Any, text: str, choices: dict[str, int]) -> None:
    workload = gated(text)
    config = configured(variant, workload, choices)
    checks.assert_emulates_right(variant, workload, config, order="reverse", seed=2)


FAULTS = {
    "panels of one matrix": ("K_CONTIGUOUS ? JOINED * PANEL_BYTES : PANEL_BYTES", "PANEL_BYTES"),
    "tiles one after the other": ("K_CONTIGUOUS && JOINED > 1 ? PANEL_BYTES : BYTES", "BYTES"),
    "the gate twice": ("JOINED ? sums[i][0][IN_N + j][e]", "JOINED ? sums[i][0][j][e]"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_joined_tiles_are_found(fault: str) -> None:
    variant, text, choices = JOINED
    workload = gated(text)
    wrong = checks.planted(variant, *FAULTS[fault])
    checks.assert_fault_is_found(wrong, workload, configured(variant, workload, choices))


@needs_nvrtc
@pytest.mark.parametrize("trans", ["nn", "nt"])
def test_one_instruction_multiplies_both_matrices_where_it_can(trans: str) -> None:
    workload = gated(f"m=2048,n=14336,k=4096,dtype=bf16,trans={trans}")
    config = WGMMA.default(workload, H100)
    for changes, instructions in (({}, 1), ({"bn": 192, "cluster_m": 1, "stages": 2}, 2)):
        chosen = WGMMA.space.check(Config({**config, **changes}), workload=workload, device=H100)
        made = checks.compiled_for_hopper(WGMMA, workload, chosen)
        steps = chosen["bk"] * 2 // 32 * chosen["bm"] // chosen["consumers"] // 64
        assert checks.opcodes(made.cubin, 9)[checks.HGMMA] == instructions * steps
        costs = checks.costs_of(WGMMA, workload, chosen, H100)
        assert costs.instructions == instructions * 4 * chosen["bm"] / 64 * 4096 / 16


@needs_nvrtc
@pytest.mark.parametrize(
    ("variant", "text", "choices"),
    [
        (WGMMA, "m=4096,n=4096,k=4096,dtype=bf16,trans=nt", {"bm": 128, "bn": 192, "pingpong": 0}),
        (
            MMA,
            "m=4096,n=4096,k=4096,dtype=f16,activation=gelu",
            {"bm": 128, "bn": 128, "staged": 1, "bk": 32},
        ),
    ],
)
def test_as_many_sums_as_there_are_registers_for_are_not_spilled(
    variant: Any, text: str, choices: dict[str, int]
) -> None:
    workload = gated(text)
    checks.compiled(variant, workload, H100, configured(variant, workload, choices))


def test_a_large_result_is_checked_in_parts() -> None:
    assert is_sampled(gated("m=2048,n=14336,k=4096,dtype=bf16,trans=nt"))
    workload = gated("m=130,n=150,k=40,dtype=f16,trans=nt")
    inputs = draw(workload, 1)
    c = inputs.references["c"].value.astype(np.float16)
    check = Sampled(inputs)
    assert check.worst({"c": c}) <= 1
    c[-1, -1] += np.float16(1)
    assert check.worst({"c": c}) > 1
