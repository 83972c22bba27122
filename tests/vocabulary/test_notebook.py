"""Tables for notebooks."""

from __future__ import annotations

import pytest

import tunebench
from tunebench import device, kernels
from tunebench._notebook import html_table
from tunebench.answer import Unmeasured
from tunebench.workloads import parse


def test_cells_are_escaped_and_missing_values_left_out() -> None:
    text = html_table("<b>", [("a", "<script>"), ("b", None), ("c", 3)])
    assert "<script>" not in text
    assert text.count("<tr>") == 2
    assert "<caption>&lt;b&gt;</caption>" in text


def test_space_answer_and_prediction_have_tables() -> None:
    space = kernels.variant("softmax/numba_cpu").space
    assert all(f">{name}</th>" in space._repr_html_() for name in space.names)
    workload = parse("softmax:rows=16,cols=16,dtype=f32")
    prediction = tunebench.predict(workload, device.described()["a100-80-sxm"])
    assert "90 % prediction interval" in prediction._repr_html_()
    with pytest.warns(Unmeasured):
        answer = tunebench.lookup("softmax", rows=16, cols=16, dtype="f32", device="a100-80-sxm")
    assert answer.variant in answer._repr_html_()
