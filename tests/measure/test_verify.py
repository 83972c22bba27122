"""Verification of results: one wrong, stale or unwritten element fails."""

from __future__ import annotations

import numpy as np
import pytest

from tunebench.measure.verify import describe_worst, draw, poisoned, worst_error
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=37,cols=101,dtype=f32")


def right() -> tuple[dict[str, np.ndarray], dict]:
    inputs = draw(WORKLOAD, 3)
    x = inputs.inputs["x"]
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return {"y": e / e.sum(axis=1, keepdims=True)}, dict(inputs.references)


def test_correct_result_passes() -> None:
    outputs, references = right()
    assert worst_error(WORKLOAD, outputs, references) <= 1


@pytest.mark.parametrize("at", [(0, 0), (36, 100), (18, 50)])
@pytest.mark.parametrize("change", [1.001, np.nan, np.inf, 0.0])
def test_wrong_element_fails_and_message_names_it(at: tuple[int, int], change: float) -> None:
    outputs, references = right()
    outputs["y"][at] *= change
    worst = worst_error(WORKLOAD, outputs, references)
    assert worst > 1
    assert f"y[{at[0]},{at[1]}]" in describe_worst(outputs, references, worst)


def test_unwritten_element_fails() -> None:
    outputs, references = right()
    untouched = poisoned(WORKLOAD)
    assert np.isnan(untouched["y"]).all()
    untouched["y"][:, :-1] = outputs["y"][:, :-1]
    assert worst_error(WORKLOAD, untouched, references) == np.inf


def test_inputs_are_reproducible_by_seed() -> None:
    first, repeated, different = (draw(WORKLOAD, seed).inputs["x"] for seed in (1, 1, 2))
    assert (first == repeated).all()
    assert (first != different).any()
