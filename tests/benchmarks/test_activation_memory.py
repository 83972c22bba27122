"""Formulas of activation memory against what torch keeps."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.activation_memory import formula_bytes, layer_bytes  # noqa: E402 - needs torch


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("recompute", [False, True])
def test_layer_keeps_what_the_formulas_say(family: str, recompute: bool) -> None:
    settings = {"dropout": 0.0, "flash": False, "recompute": recompute}
    measured = layer_bytes(family, torch.bfloat16, **settings)
    assert formula_bytes(family, "bf16", **settings) == pytest.approx(measured, rel=0.003)
