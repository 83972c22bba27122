"""Forward attention in CUDA C++: combinations that small workloads and random configurations rarely reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.kernel_checks import H100, assert_emulates_right, assert_right, parser
from tests.support import needs_compiler, needs_disassembler, needs_nvrtc
from tunebench import kernels
from tunebench.binary.disassembly import sass
from tunebench.emulate.emulator import watch
from tunebench.space import Config
from tunebench.variant import CudaVariant
from tunebench.workloads.operators.attention import Attention

attention = parser(Attention)


def variant(name: str) -> CudaVariant[Any]:
    (named,) = (v for v in kernels.variants("attention") if v.name == name)
    assert isinstance(named, CudaVariant)
    return named


@needs_compiler
@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        # Two warpgroups that alternate, a ring that is always full, persistent blocks with several tiles
        # each.
        (
            "cuda_wgmma",
            "batch=1,heads=3,seq_q=200,head_dim=40,dtype=f16,seq_k=330,causal=true",
            {"bn": 64, "consumers": 2, "stages": 2, "pingpong": 1, "group_heads": 1},
        ),
        # Rows of three heads in a tile, keys split among blocks and warps, rows without keys in some part.
        (
            "cuda_mma",
            "batch=1,heads=3,seq_q=30,head_dim=24,dtype=bf16,seq_k=140,heads_k=1,causal=true",
            {
                "bm": 32,
                "bn": 32,
                "row_warps": 2,
                "key_warps": 2,
                "stages": 3,
                "hold_q": 1,
                "pack_heads": 1,
                "split": 2,
                "min_blocks": 1,
            },
        ),
        # Rows whose keys are hidden in one part or in both, and biases that are not aligned.
        (
            "cuda_mma",
            "batch=2,heads=2,seq_q=24,head_dim=16,dtype=f16,seq_k=141,bias=bqk",
            {
                "bm": 16,
                "bn": 32,
                "row_warps": 1,
                "key_warps": 2,
                "stages": 2,
                "hold_q": 0,
                "pack_heads": 0,
                "split": 2,
                "min_blocks": 1,
            },
        ),
        (
            "cuda_simt",
            "batch=2,heads=2,seq_q=24,head_dim=16,dtype=f32,seq_k=141,bias=bqk,causal=true,window=30",
            {"bm": 8, "bn": 16, "tm": 2, "lanes": 8, "pack_heads": 0, "split": 3},
        ),
    ],
)
def test_pipelines_synchronise_under_race_detection(name: str, text: str, choices: dict[str, int]) -> None:
    workload, config = attention(text), Config(choices)
    assert variant(name).configs(workload, H100).row(config) is not None
    inputs = workload.draw(np.random.default_rng(0))
    seen = watch(variant(name), workload, config, inputs, order="reverse")
    assert_right(workload, inputs, seen.outputs)


def test_causal_blocks_count_only_visible_tiles() -> None:
    # 4 tiles of 64 rows against tiles of 64 keys, 2 of which precede the first row's own: 3 + 4 + 5 + 6.
    workload = attention("batch=2,heads=3,seq_q=256,head_dim=64,dtype=f16,seq_k=384,causal=true")
    mma = variant("cuda_mma")
    table = mma.configs(workload, H100)
    chosen = (table["bm"] == 64) & (table["bn"] == 64) & (table["split"] == 1) & (table["key_warps"] == 1)
    costs = mma.costs(workload, table.take(chosen), H100)
    assert set(costs.blocks * costs.mma_flop) == {4.0 * 6 * (3 + 4 + 5 + 6) * 64 * 64 * 64}
    assert set(costs.full_blocks) == {6}


@pytest.mark.parametrize(("mask", "tiles"), [("window=65", (2, 2, 2, 2)), ("align=first", (1, 2, 3, 4))])
def test_blocks_count_only_tiles_that_the_mask_shows(mask: str, tiles: tuple[int, ...]) -> None:
    workload = attention(f"batch=2,heads=3,seq_q=256,head_dim=64,dtype=f16,seq_k=384,causal=true,{mask}")
    mma = variant("cuda_mma")
    table = mma.configs(workload, H100)
    chosen = (table["bm"] == 64) & (table["bn"] == 64) & (table["split"] == 1) & (table["key_warps"] == 1)
    costs = mma.costs(workload, table.take(chosen), H100)
    assert set(costs.blocks * costs.mma_flop) == {4.0 * 6 * sum(tiles) * 64 * 64 * 64}
    assert set(costs.mma_flop) == {4.0 * max(tiles) * 64 * 64 * 64}


@needs_compiler
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_lowest_finite_biases_share_attention_and_pass_no_gradient(direction: str) -> None:
    """A row whose biases are all the most negative number, as models mask padding, is a mean, as in torch."""
    workload = attention(
        f"batch=1,heads=1,seq_q=2,head_dim=8,dtype=f32,seq_k=4,bias=qk,direction={direction}"
    )
    inputs = workload.draw(np.random.default_rng(0))
    inputs["bias"][...] = [[[[0, 0, 0, -np.inf], [np.finfo(np.float32).min] * 4]]]
    name = "cuda_simt" if direction == "forward" else "cuda_simt_backward"
    outputs = assert_emulates_right(
        variant(name), workload, variant(name).default(workload, H100), inputs, order="forward"
    )
    if direction == "forward":
        np.testing.assert_allclose(outputs["o"][0, 0, 1], inputs["v"][0, 0].mean(axis=0), rtol=1e-5)
    else:
        assert not outputs["dq"][0, 0, 1].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cuda_mma", "cuda_wgmma", "cuda_simt"])
def test_defaults_are_valid_for_prompts_and_single_tokens(name: str) -> None:
    for text in (
        "batch=4,heads=32,seq_q=4096,head_dim=128,dtype=f16,causal=true",
        "batch=64,heads=32,seq_q=1,head_dim=128,dtype=f16,seq_k=8192,heads_k=8",
        "batch=1,heads=1,seq_q=1,head_dim=8,dtype=f16",
        "batch=1,heads=8,seq_q=65536,head_dim=256,dtype=f16,heads_k=1",
    ):
        workload = attention(text)
        default = variant(name).default(workload, H100)
        assert variant(name).configs(workload, H100).row(default) is not None


def test_few_queries_share_keys_among_blocks_and_heads_among_rows() -> None:
    workload = attention("batch=4,heads=32,seq_q=1,head_dim=128,dtype=f16,seq_k=8192,heads_k=8")
    default = variant("cuda_mma").default(workload, H100)
    assert default["pack_heads"] == 1
    assert default["split"] > 1
    (first, second) = variant("cuda_mma").launches(workload, default)
    assert first.grid[0] >= H100.sm_count
    assert second.entry.startswith("attention_combine")


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_exponentials_overlap_with_products(head_dim: int) -> None:
    """Read the machine code, since no result would show it (docs/decisions/0023)."""
    from tunebench.compile.nvrtc import compile_cuda

    workload = attention(f"batch=4,heads=32,seq_q=4096,head_dim={head_dim},dtype=f16")
    wgmma = variant("cuda_wgmma")
    config = wgmma.default(workload, H100)
    code = sass(compile_cuda(wgmma, workload, config, H100).payload)
    # A wait for all products but the latest group, then the exponentials of a tile, then a wait for that
    # group.
    _, _, after = code.partition("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    between, _, _ = after.partition("WARPGROUP.DEPBAR.LE gsb0, 0x0")
    assert between.count("MUFU.EX2") >= 64 * config["bn"] // 128
    assert "HGMMA" not in between
