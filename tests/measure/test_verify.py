"""Verification of results: one wrong, stale or unwritten element fails."""

from __future__ import annotations

import numpy as np
import pytest

from tunebench.measure.verify import (
    Errors,
    EveryElement,
    describe_worst,
    draw,
    magnitude_of,
    poisoned,
    worst_error,
)
from tunebench.workload import Reference
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


def test_errors_are_those_of_the_most_wrong_element() -> None:
    inputs = draw(WORKLOAD, 0)
    reference = inputs.references["y"].value
    output = reference.astype(np.float32)
    output[1, 2] += np.float32(0.25)
    errors = EveryElement(inputs).errors({"y": output})
    assert errors.absolute == pytest.approx(0.25, rel=1e-4)
    assert errors.relative == pytest.approx(0.25 / np.abs(reference).max(), rel=1e-4)
    assert errors.share > 1
    small = Errors(share=0.5, absolute=1e-3)
    assert errors.joined(small) == errors
    assert small.joined(Errors(share=0.25, relative=0.1)).fields() == {
        "worst": 0.5,
        "absolute": 1e-3,
        "relative": 0.1,
    }


def test_magnitude_leaves_out_what_is_not_finite() -> None:
    value = np.array([1.0, -3.0, np.inf, np.nan])
    assert magnitude_of(Reference(value=value, scale=np.ones(4))) == 3.0
