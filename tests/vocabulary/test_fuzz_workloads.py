"""Nearly valid workload texts: a few hundred here, and each defect that a fuzz run of 100,000 found."""

from __future__ import annotations

import functools

import pytest

from tests.fuzz import workload_texts
from tunebench import workloads
from tunebench.dimension import Kind
from tunebench.errors import InputError
from tunebench.workloads import parse


def test_nearly_valid_texts_are_refused_or_mean_what_they_say() -> None:
    outcomes = workload_texts.fuzz(0, range(500))
    assert outcomes["failed"] == 0
    assert min(outcomes["accepted"], outcomes["refused"]) > 50


def test_text_that_is_taken_as_something_else_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(operator: str, name: str, value: object, kind: Kind) -> object:
        return 64 if kind.base is int else value

    monkeypatch.setattr("tunebench.workload.value_of", wrong)
    # The wrong workloads must not stay in the cache of parsed texts, which later tests of the process read.
    fresh = functools.lru_cache(workloads._parsed.__wrapped__)
    monkeypatch.setattr(workloads, "_parsed", fresh)
    assert workload_texts.fuzz(5, range(60))["failed"] > 0
    assert "is taken as 64" in capsys.readouterr().out


def test_long_value_is_shortened_in_the_message() -> None:
    for text in (
        "softmax:rows=8,cols=8,dtype=" + "f" * 10_000,
        "softmax:rows=" + "8" * 10_000 + ",cols=8,dtype=f32",
        "elementwise:rows=8,cols=8,dtype=f32,expression=" + "(" * 10_000 + "x",
        "x" * 10_000,
    ):
        with pytest.raises(InputError) as caught:
            parse(text)
        assert len(str(caught.value)) < 1000
