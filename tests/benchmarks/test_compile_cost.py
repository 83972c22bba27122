"""Figures of the page of `benchmarks.compile_cost`: ratios to torch.compile, and their targets."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")

from benchmarks.compile_cost import MODELS, STEPS, Row, page, step_of


def row(model: str, state: str, tuned_s: float) -> Row:
    figures = {"processor time": 2.0, "wall time": 4.0, "memory": 300.0}
    costs = {"torch.compile": figures, "empty": figures, "tuned": {**figures, "processor time": tuned_s}}
    return Row(model=model, step="training", state=state, costs=costs, kernels=3, import_s=0.2)  # type: ignore[arg-type]


def test_page_states_ratios_and_how_many_are_within_their_target() -> None:
    rows = [row("A", "warm", 2.0), row("B", "warm", 8.0), row("A", "cold", 2.4), row("B", "cold", 2.6)]
    lines = page(rows, "command", 0.5).splitlines()
    assert (
        "| B | training | warm | 2.0 s | 4.0 s | 300 MB | 1.00 | 1.00 | 1.00 | 4.00 | 1.00 | 1.00 | 3 |"
        in lines
    )
    assert "| tuned | warm | processor time | 2.00 | 4.00 | B training | 1.1 | 1 of 2 |" in lines
    assert "| tuned | cold | processor time | 1.25 | 1.30 | B training | 1.3 | 2 of 2 |" in lines
    assert "| empty | warm | memory | 1.00 | 1.00 | A training | 1.1 | 2 of 2 |" in lines


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_models_run(model: str, step: str) -> None:
    module, run = step_of(model, step)
    run(module)
    assert any(p.grad is not None for p in module.parameters()) == (step == "training")
