"""Loop counts of the attention gradients, compared with a count of tile pairs."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from tunebench.kernels.attention import _attention_backward as backward
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention


def _sees(workload: Attention, query: int, key: int) -> bool:
    last = query + (0 if workload.align == "first" else workload.seq_k - workload.seq_q)
    first = last - workload.window if workload.window else -1
    return not workload.causal or first < key <= last


def _met(workload: Attention, side: Literal["keys", "queries"], tile: int, step: int) -> list[list[int]]:
    """Return, for each tile of a side, the tiles of the other side with a pair of rows that is not masked."""
    rows, others = workload.seq_k, workload.seq_q
    if side == "queries":
        rows, others = others, rows
    met = []
    for first in range(0, rows, tile):
        mine = range(first, min(rows, first + tile))
        met.append(
            [
                at
                for at in range(0, others, step)
                if any(
                    _sees(workload, *((other, row) if side == "keys" else (row, other)))
                    for other in range(at, min(others, at + step))
                    for row in mine
                )
            ]
        )
    return met


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
    found = backward.loop_counts(workload, side, tiles, steps)
    heads, times = (6, 2) if side == "keys" else (12, 1)
    others = 37 if side == "keys" else 54
    for row, (tile, step) in enumerate(zip(tiles, steps, strict=True)):
        met = _met(workload, side, int(tile), int(step))
        lengths = [len(each) for each in met]
        lines = [times * sum(min(step, others - at) for at in each) for each in met]
        assert found.blocks[row] == heads * len(met)
        assert found.most[row] == times * max(lengths)
        assert found.full[row] == heads * lengths.count(max(lengths))
        assert found.steps[row] == heads * times * sum(lengths)
        busiest = [line for line, length in zip(lines, lengths, strict=True) if length == max(lengths)]
        assert found.lines[row] <= min(busiest)
        assert found.all_lines[row] <= heads * sum(lines)
        if side == "keys" and workload.has_simple_mask:  # keys always include the last tile of queries
            assert found.lines[row] == min(busiest)
            assert found.all_lines[row] == heads * sum(lines)
