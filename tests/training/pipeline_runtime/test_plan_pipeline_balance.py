"""The table of balanced memory: what fits, and gains within rounds."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from benchmarks.plan_pipeline_balance import CASES, HEADS, LENGTH, WIDTH, Block, table  # noqa: E402

PLANNED = {"small": 18, "large": 34, "large, balanced": 27}
STEP_S = {"small": 6.0, "large": 3.0, "large, balanced": 4.0}
EVICTIONS = {"small": 0, "large": 0, "large, balanced": 4}


def rank_rows(rank: int) -> dict[str, Any]:
    """Return the rows of one of two ranks: rounds take 1, 2 and 4 times as long, as on a busy machine."""
    load = (1.0, 2.0, 4.0)
    return {
        name: {
            "planned": [PLANNED[name] * 10**5, 10**5],
            "measured": PLANNED[name] * 10**5 - rank,
            "evictions": EVICTIONS[name] * (1 - rank),
            "processor_s": [STEP_S[name] * factor / 2 for factor in load],
            # Rank 1 starts later and ends later.
            "spans": [(rank, 100.0 + rank + STEP_S[name] * factor) for factor in load],
        }
        for name in CASES
    }


def test_table_states_peaks_and_gains_within_rounds() -> None:
    lines = table([rank_rows(0), rank_rows(1)])
    assert lines[2:5] == [
        "| 1 | 1f1b | 0 | 1.80 | 1.80 | yes | 12000 | 113000 |",
        "| 2 | 1f1b | 0 | 3.40 | 3.40 | no | 6000 | 107000 |",
        "| 2 | 1f1b balanced | 4 | 2.70 | 2.70 | yes | 8000 | 109000 |",
    ]
    assert lines[6] == "Limit of each rank: 2.70 MB."
    assert lines[7] == "processor time, small over large balanced: 1.50 (quartiles 1.50 to 1.50)"
    assert lines[8] == "processor time, large over large balanced: 0.75 (quartiles 0.75 to 0.75)"


def test_block_computes_attention_and_keeps_its_scores() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, LENGTH, WIDTH)
    saved: list[Any] = []

    def noted(value: Any) -> Any:
        saved.append(value.shape)
        return value

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda value: value):
        result = block(x)
    heads = block.inputs(block.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
    mixed = x + block.outputs(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
    torch.testing.assert_close(result, mixed + block.forth(block.feed(mixed)))
    assert any(shape[-2:] == (LENGTH, LENGTH) for shape in saved)
