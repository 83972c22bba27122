"""Figures of a best record: stored and read back, tolerant of other data, and in one order everywhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support import VERIFIED, measured
from tunebench.answer._reader import AnswerReader
from tunebench.answer._target import lookup_target
from tunebench.db import RunStart, TrialKey, Verdict, open_store
from tunebench.db.browse import open_browser
from tunebench.db.figures import BaselineComparison, Figures, TiedConfig, answer_order
from tunebench.db.location import locate
from tunebench.db.record import default_record, figures_of
from tunebench.device import described
from tunebench.outcome import Crashed, Outcome, Predicted, Result, Verification, WrongResult
from tunebench.space import Config

GPU = described()["h100-sxm"]
WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
UNPROVED = Verification(how="not verified", detail="no compiler")
TORCH = BaselineComparison(ratio=1.5, low=1.2, high=1.9, time_us=15.5, ci_us=(15.0, 16.0), probability=0.99)
NUMPY = BaselineComparison(ratio=1.25, low=0.0, high=None, time_us=12.0)


def test_figures_are_read_as_they_were_stored() -> None:
    figures = Figures(
        default=TORCH,
        runner_up=NUMPY,
        baselines={"numpy": NUMPY, "torch": TORCH},
        tie_count=3,
        ties=(TiedConfig(variant="softmax/a", config={"block": 2, "exp": "poly"}, time_us=10.0),),
        bound_us=4.0,
        searched=("softmax/a", "softmax/b"),
    )
    assert Figures.of(json.loads(json.dumps(figures.stored())), 10.0) == figures
    assert Figures.of({}, 10.0) == Figures() == Figures.of({}, None)
    assert figures.fastest_baseline == ("numpy", NUMPY)
    assert list(Figures.of({"libraries": {"slow": {"ratio": 2}, "fast": {"ratio": 1}}}, 5.0).baselines) == [
        "fast",
        "slow",
    ]
    assert (TORCH.faster, TORCH.tied, TORCH.is_known) == (True, False, True)
    assert (NUMPY.faster, NUMPY.tied, NUMPY.is_known) == (False, True, False)
    assert [figures.speedup_over_default(is_default=is_default) for is_default in (True, False)] == [1.0, 1.5]
    assert Figures().speedup_over_default(is_default=False) is None


def test_time_that_an_earlier_version_did_not_store_follows_from_the_ratio() -> None:
    comparison = BaselineComparison.from_json({"ratio": 1.5, "low": 1.2, "high": None}, 10.0)
    assert comparison == BaselineComparison(ratio=1.5, low=1.2, high=None, time_us=15.0)
    assert BaselineComparison.from_json({"ratio": 1.5}, None) == BaselineComparison(
        ratio=1.5, low=0.0, high=None
    )


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [1],
        "text",
        {"default": 3, "libraries": [3], "ties": 4, "bound_us": "x", "searched": "y"},
        {"default": {"ratio": True}, "libraries": {"numpy": {"ratio": float("nan")}, "torch": {"ratio": 0}}},
        {"ties": {"count": "many", "first": [{"variant": 1}, 5, {"variant": "a", "config": 2}]}},
    ],
)
def test_comparison_of_another_form_is_left_out(stored: Any) -> None:
    assert Figures.of(stored, 10.0) == Figures()


# -- records -------------------------------------------------------------------------------------------


def fill(path: Path, outcomes: list[tuple[int, Outcome, str | None]], variant: str = "softmax/a") -> None:
    """Record outcomes of configurations, each with its comparison with the default."""
    with open_store(path) as store:
        store.begin_run(RunStart(device=GPU, workload=WORKLOAD, sampler="random", seed=0))
        for block, outcome, versus in outcomes:
            key = TrialKey(
                device=GPU.key,
                workload=WORKLOAD,
                variant=variant,
                revision="r",
                config=Config({"block": block}),
            )
            verdict = Verdict(versus_default=versus)  # type: ignore[arg-type]
            store.record(key, Result(outcome=outcome), bound_us=0.5, verdict=verdict)


@pytest.mark.parametrize(
    ("later", "default_us"),
    [
        ([], 8.0),
        ([(1, measured(9.0), "itself")], 9.0),
        ([(1, measured(7.0, cache="warm"), "itself")], 8.0),
        ([(1, Crashed(reason="SIGSEGV"), "itself")], None),
        ([(1, Crashed(reason="SIGSEGV"), "itself"), (1, measured(6.0), "itself")], 6.0),
        ([(1, WrongResult(reason="y[0]"), "itself"), (1, measured(6.0), "itself")], None),
    ],
)
def test_default_that_was_not_timed_with_the_best_is_its_newest_valid_record(
    tmp_path: Path, later: list[tuple[int, Outcome, str | None]], default_us: float | None
) -> None:
    fill(tmp_path / "a.db", [(1, measured(8.0), "itself"), (2, measured(2.0), None), *later])
    with open_store(tmp_path / "a.db", read_only=True) as store:
        records = store.history(WORKLOAD)
    best = next(record for record in records if record.key.config["block"] == 2)
    default = figures_of(best, records).default
    assert (None if default is None else default.time_us) == default_us
    if default is not None:
        assert default.ratio == pytest.approx((default_us or 0.0) / 2.0)
        assert default_record(records[0], records) is records[0]


def test_all_readers_order_answers_alike(tmp_path: Path) -> None:
    """`Reader.best`, the lookup, the dashboard and the comparison of databases agree on the first answer."""
    path, chosen = tmp_path / "a.db", random.Random(7)
    for number in range(12):
        outcomes: list[tuple[int, Outcome, str | None]] = []
        for block in range(chosen.randint(1, 4)):
            us = float(chosen.randint(1, 3))  # ties are frequent
            proof = chosen.choice([VERIFIED, UNPROVED])
            outcome: Outcome = Predicted(predicted_us=us, verification=proof)
            if chosen.random() < 0.6:
                outcome = measured(us, us, us, cache=chosen.choice(["cold", "warm"]), verification=proof)
            outcomes.append((block, outcome, chosen.choice(["itself", None])))
        fill(path, outcomes, variant=f"softmax/v{number}")
    with open_store(path, read_only=True) as store:
        best = [record.id for record in store.best(WORKLOAD, GPU.key, limit=1000)]
        rows = sorted(store.answers(), key=answer_order)
    assert len(best) > 12
    assert [row["measurement_id"] for row in rows] == best
    with AnswerReader(path, locate(str(path))) as reader:
        answers = reader.rows(WORKLOAD, lookup_target(GPU), None)
    assert [answer.measurement_id for answer in answers] == best
    with open_browser(str(path)) as browser:
        (entry,) = browser.entries(WORKLOAD)
    assert [(answer.variant, answer.config, answer.cache, answer.time_us) for answer in entry.answers] == [
        (row["variant"], row["config"], row["cache"], row["time_us"]) for row in rows
    ]
