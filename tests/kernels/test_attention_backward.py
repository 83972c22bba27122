"""Loop counts of the attention gradients against a count of tile pairs, and the pipeline of products."""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
import pytest

from tests.emulate.kernel_text import Faulty
from tests.kernels.kernel_checks import H100, assert_right, assert_right_in_every_order
from tests.support import needs_compiler, needs_disassembler, needs_nvrtc
from tunebench import kernels
from tunebench.binary.disassembly import sass
from tunebench.emulate.emulator import EmulationFailed, watch
from tunebench.kernels.attention import _attention_backward as backward
from tunebench.space import Config
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention


def _sees(workload: Attention, query: int, key: int) -> bool:
    last = query + (0 if workload.align == "first" else workload.seq_k - workload.seq_q)
    first = last - workload.window if workload.window else -1
    return not workload.causal or first < key <= last


def _met(workload: Attention, side: Literal["keys", "queries"], tile: int, step: int) -> list[list[int]]:
    """Return, for each tile of a side, the tiles of the other side with a pair of rows that is not masked."""
    rows, other_rows = workload.seq_k, workload.seq_q
    if side == "queries":
        rows, other_rows = other_rows, rows
    visible = []
    for first in range(0, rows, tile):
        mine = range(first, min(rows, first + tile))
        visible.append(
            [
                at
                for at in range(0, other_rows, step)
                if any(
                    _sees(workload, *((other_row, row) if side == "keys" else (row, other_row)))
                    for other_row in range(at, min(other_rows, at + step))
                    for row in mine
                )
            ]
        )
    return visible


@pytest.mark.parametrize(
    "mask",
    [
        "",
        ",causal=true",
        ",causal=true,align=first",
        ",causal=true,window=9",
        ",causal=true,align=first,window=30",
    ],
)
@pytest.mark.parametrize("side", ["keys", "queries"])
def test_loop_counts_match_visible_tile_pairs(mask: str, side: Any) -> None:
    workload = parse(
        f"attention:batch=2,heads=6,seq_q=37,head_dim=8,dtype=f16,seq_k=54,heads_k=3{mask},direction=backward"
    )
    assert isinstance(workload, Attention)
    tiles, steps = np.array([16, 16, 32, 64]), np.array([16, 32, 16, 64])
    loops = backward.loop_counts(workload, side, tiles, steps)
    heads, times = (6, 2) if side == "keys" else (12, 1)
    other_rows = 37 if side == "keys" else 54
    for row, (tile, step) in enumerate(zip(tiles, steps, strict=True)):
        visible = _met(workload, side, int(tile), int(step))
        lengths = [len(tiles_seen) for tiles_seen in visible]
        lines = [times * sum(min(step, other_rows - at) for at in tiles_seen) for tiles_seen in visible]
        assert loops.blocks[row] == heads * len(visible)
        assert loops.most[row] == times * max(lengths)
        assert loops.full[row] == heads * lengths.count(max(lengths))
        assert loops.steps[row] == heads * times * sum(lengths)
        busiest = [line for line, length in zip(lines, lengths, strict=True) if length == max(lengths)]
        assert loops.lines[row] <= min(busiest)
        assert loops.all_lines[row] <= heads * sum(lines)
        if side == "keys" and workload.has_simple_mask:  # keys always include the last tile of queries
            assert loops.lines[row] == min(busiest)
            assert loops.all_lines[row] == heads * sum(lines)


# -- products by wgmma ---------------------------------------------------------------------------------------

WGMMA: Any = kernels.variant("attention/cuda_wgmma_backward")
TWO_STEPS_OF_TWO_HEADS = parse(
    "attention:batch=1,heads=2,seq_q=100,head_dim=72,dtype=bf16,seq_k=140,heads_k=1,causal=true,direction=backward"
)
PIPELINED = [{"ds": "shared", "early": 1, "heads": "one"}, {"ds": "registers", "early": 0, "heads": "all"}]


def _pipelined(**values: Any) -> Config:
    config = {"bn": 64, "consumers": 2, "stages": 2, "dq": "atomic", "ahead": 1, "together": "head", **values}
    return Config({name: config[name] for name in WGMMA.space.names})


@needs_compiler
@pytest.mark.parametrize("values", PIPELINED)
def test_pipelined_gradients_are_right_in_every_order(values: dict[str, Any]) -> None:
    assert_right_in_every_order(WGMMA, TWO_STEPS_OF_TWO_HEADS, _pipelined(**values))


@needs_compiler
def test_pipelined_gradients_do_not_race() -> None:
    inputs = TWO_STEPS_OF_TWO_HEADS.draw(np.random.default_rng(0))
    seen = watch(WGMMA, TWO_STEPS_OF_TWO_HEADS, _pipelined(**PIPELINED[0]), inputs)
    assert_right(TWO_STEPS_OF_TWO_HEADS, inputs, seen.outputs)


SYNCHRONISATION = {
    "dS of other warpgroups": ("mbarrier_wait(at.ds_full, odd);", "", "race"),
    "second tile of dS": ("odd ^= 1;", "", "race|deadlock"),
    "proxy fence": ("fence_proxy_async();  // products read dS", "// ", "no fence.proxy.async"),
    "release after the product": ("wgmma_wait<1>();  // the dS before has been multiplied", "", "race"),
}


@needs_compiler
@pytest.mark.parametrize("missing", SYNCHRONISATION)
def test_missing_synchronisation_of_pipelined_gradients_is_found(missing: str) -> None:
    right, wrong, reason = SYNCHRONISATION[missing]
    faulty: Any = Faulty(WGMMA, right, wrong)
    inputs = TWO_STEPS_OF_TWO_HEADS.draw(np.random.default_rng(0))
    with pytest.raises(EmulationFailed, match=reason):
        watch(faulty, TWO_STEPS_OF_TWO_HEADS, _pipelined(ds="shared", early=1, heads="all"), inputs)


def _work_during_products(code: str) -> list[tuple[str, int]]:
    """Return each exponential, store of dS and addition to dq, with the groups of products in flight."""
    groups, is_open, work_items = 0, 0, []
    for line in code.splitlines():
        if "HGMMA" in line:
            groups, is_open = (groups + 1, 0) if "gsb0" in line else (groups, 1)
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line):
            groups = min(groups, int(wait[1]))
        elif work := re.search(r"MUFU\.EX2|STS |REDG\.E\.ADD\.F32x4", line):
            work_items.append((work[0], groups + is_open))
    return work_items


def test_causal_groups_of_query_heads_are_divided_among_blocks() -> None:
    """A block of keys with all heads of its group would take half of the time of a balanced GPU."""
    text = "attention:batch=1,heads=32,seq_q=2048,head_dim=128,dtype=bf16,heads_k=8,direction=backward"
    full, causal = (parse(text), parse(f"{text},causal=true"))
    assert WGMMA.default(full, H100)["heads"] == "all"
    default = WGMMA.default(causal, H100)
    assert default["heads"] == "one"
    launches = WGMMA.launches(causal, default)
    assert launches[1].grid[0] == 32 * 2048 // 128
    assert [launch.entry.partition("<")[0] for launch in launches[2:]] == ["attention_round_sums"] * 3
    table = WGMMA.configs(causal, H100)
    row, together = (table.row(Config({**default, "heads": heads})) for heads in ("one", "all"))
    costs = WGMMA.costs(causal, table, H100)
    assert costs.mma_flop[row] == costs.mma_flop[together] / 4
    assert costs.blocks[row] == 4 * costs.blocks[together]


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize(("head_dim", "causal"), [(64, "true"), (128, "false")])
def test_products_are_in_flight_while_gradients_of_scores_are_computed(head_dim: int, causal: str) -> None:
    """Read the machine code, since no result would show it (docs/decisions/0023)."""
    from tunebench.compile.nvrtc import compile_cuda

    workload = parse(
        f"attention:batch=2,heads=16,seq_q=8192,head_dim={head_dim},dtype=f16,causal={causal},direction=backward"
    )
    config = WGMMA.default(workload, H100)
    assert [config[name] for name in ("dq", "early", "ahead")] == ["atomic", 1, 1]
    code = sass(compile_cuda(WGMMA, workload, config, H100).payload)
    gradients = code.partition(".text._Z19attention_gradients")[2].partition(".text._Z20attention_round")[0]
    work = _work_during_products(gradients)
    assert all(in_flight >= 1 for _, in_flight in work), work
    # Twice: the loop, and the last iteration.
    scores, of_dq = 64 * config["bn"] // 128, config["bn"] * head_dim // 128 // config["consumers"]
    counts = [sum(name.startswith(kind) for name, _ in work) for kind in ("MUFU", "STS", "REDG")]
    assert counts == [2 * scores, scores, of_dq // 2]
    # Each group is waited for by count, but for the last of a block: ptxas has not serialised the products.
    assert gradients.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 2
