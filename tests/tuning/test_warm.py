"""Warm start from database records of other devices and of related workloads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support import VERIFIED, measured
from tunebench import device as devices
from tunebench import tune
from tunebench.db.record import RunStart, TrialKey
from tunebench.db.store import Store, open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels import load_file, variant
from tunebench.measure.timing import Protocol
from tunebench.outcome import Aborted, CompileFailed, Outcome, Predicted, Result
from tunebench.space import Config
from tunebench.tuning import Plan, Progress, warm
from tunebench.tuning.run import prepare
from tunebench.tuning.run_context import RunContext, TuningSetup
from tunebench.tuning.run_report import finish
from tunebench.tuning.tunable import tuning_target
from tunebench.tuning.warm import FIRST, LEAST_TIMED, WarmStart, distance, warm_starts
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.workloads import parse

FORTY = str(Path(__file__).parents[1] / "data" / "forty_variant.py")
KEY = "softmax/forty"
WORKLOAD = "softmax:rows=16,cols=32,dtype=f32"
HERE = devices.local_cpu()
THERE = dataclasses.replace(HERE, name="another-cpu")


def fill(
    store: Store,
    outcomes: Mapping[int, Outcome],
    *,
    device: Device = THERE,
    workload: str = WORKLOAD,
    revision: str = "another",
) -> None:
    store.begin_run(RunStart(device=device, workload=workload, sampler="random", seed=0))
    for copy, outcome in outcomes.items():
        key = TrialKey(
            device=device.key,
            workload=workload,
            variant=KEY,
            revision=revision,
            config=Config({"copy": copy}),
        )
        store.record(key, Result(outcome=outcome))


def start(store: Store, *, workload: str = WORKLOAD, learns: bool = True) -> WarmStart:
    problem = parse(workload)
    tables = {KEY: variant(KEY).configs(problem, HERE)}
    return warm_starts(store, problem, HERE, tables, cache="cold", learns=learns)[KEY]


@pytest.fixture(scope="module", autouse=True)
def _forty_configurations() -> None:
    load_file(FORTY)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    with open_store(tmp_path / "a.db") as opened:
        yield opened  # type: ignore[misc]


# -- records that a warm start finds -----------------------------------------------------------------


def test_empty_database_gives_no_warm_start(store: Store) -> None:
    assert start(store) == WarmStart()


def test_times_of_another_device_go_to_their_rows(store: Store) -> None:
    fill(store, {copy: measured(100.0 + copy) for copy in range(20)})
    fill(store, {20: CompileFailed(reason="no"), 21: Aborted(samples_us=(9.0, 8.0), above_us=5.0)})
    fill(store, {22: Predicted(predicted_us=1.0, verification=VERIFIED), 23: measured(1.0, cache="warm")})
    warm_start = start(store)
    [column] = warm_start.elsewhere_us
    np.testing.assert_array_equal(column[:22], [*range(100, 120), math.inf, 8.0])
    assert np.isnan(column[22:]).all()
    [source] = warm_start.sources
    assert (source.device, source.workload) == (THERE.key, WORKLOAD)
    assert (source.records, source.use) == (22, "expected")
    assert warm_start.first == ()


def test_few_records_only_say_what_to_try_first(store: Store) -> None:
    fill(store, {copy: measured(100.0 - copy) for copy in range(LEAST_TIMED - 1)})
    fill(store, {30: CompileFailed(reason="no")})
    warm_start = start(store)
    assert warm_start.elsewhere_us == ()
    assert [config["copy"] for config in warm_start.first] == [18, 17, 16, 15, 14][:FIRST]
    assert [(source.records, source.use) for source in warm_start.sources] == [(LEAST_TIMED, "tried first")]


def test_a_column_with_gaps_only_says_what_to_try_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, {copy: measured(100.0 - copy) for copy in range(25)})
    assert start(store).sources[0].use == "expected"
    monkeypatch.setattr(warm, "LEAST_KNOWN", 26 / 40)
    warm_start = start(store)
    assert warm_start.elsewhere_us == ()
    assert warm_start.first[0] == Config({"copy": 24})
    assert warm_start.sources[0].use == "tried first"


def test_a_search_that_does_not_learn_tries_the_best(store: Store) -> None:
    fill(store, {copy: measured(100.0 - copy) for copy in range(30)})
    warm_start = start(store, learns=False)
    assert warm_start.elsewhere_us == ()
    assert warm_start.first[0] == Config({"copy": 29})
    assert [source.use for source in warm_start.sources] == ["tried first"]


def test_the_newest_time_of_the_newest_source_counts(store: Store) -> None:
    fill(store, {0: measured(5.0)}, revision="first")
    fill(store, {copy: measured(7.0) for copy in range(25)}, revision="second")
    fill(store, {0: measured(6.0)}, revision="second")
    assert start(store).elsewhere_us[0][0] == 6.0


def test_only_what_an_earlier_source_did_counts_here(store: Store) -> None:
    fill(store, {copy: measured(7.0) for copy in range(30)}, device=HERE, revision="today")
    assert start(store) == WarmStart()
    store.recheck(HERE.key, WORKLOAD, KEY, lambda config: "tomorrow")
    assert start(store).sources[0].records == 30


def test_configuration_no_longer_in_the_space_is_ignored(store: Store) -> None:
    fill(store, {copy: measured(7.0) for copy in (*range(30), 99)})
    assert start(store).sources[0].records == 30


def test_another_kind_of_device_is_ignored(store: Store) -> None:
    fill(store, {copy: measured(7.0) for copy in range(30)}, device=devices.described()["h100-sxm"])
    assert start(store) == WarmStart()


@pytest.mark.parametrize("text", ["softmax:rows=16,columns=32", "recorded:kernel=Xgemm"])
def test_records_of_texts_that_are_no_workload_are_ignored(store: Store, text: str) -> None:
    fill(store, {copy: measured(7.0) for copy in range(30)}, workload=text)
    assert start(store) == WarmStart()


def test_related_workloads_are_used_when_this_one_was_never_tuned(store: Store) -> None:
    times = {copy: measured(7.0) for copy in range(30)}
    near, far, unrelated = (
        WORKLOAD.replace("cols=32", "cols=64"),
        WORKLOAD.replace("rows=16", "rows=1024"),
        WORKLOAD.replace("f32", "f16"),
    )
    for workload in (far, unrelated):
        fill(store, times, workload=workload)
    assert start(store) == WarmStart()
    fill(store, times, workload=near)
    fill(store, times, workload=near, device=HERE)
    warm_start = start(store)
    assert [(source.workload, source.device) for source in warm_start.sources] == [
        (near, HERE.key),
        (near, THERE.key),
    ]
    fill(store, times)
    assert [source.workload for source in start(store).sources] == [WORKLOAD]


@pytest.mark.parametrize(
    ("other", "doublings"),
    [
        ("softmax:rows=16,cols=32,dtype=f32", 0.0),
        ("softmax:rows=8,cols=32,dtype=f32", 1.0),
        ("softmax:rows=128,cols=512,dtype=f32", 5.0),
        ("softmax:rows=16,cols=32,dtype=f16", math.inf),
        ("layernorm:rows=16,cols=32,dtype=f32", math.inf),
    ],
)
def test_distance_is_in_doublings(other: str, doublings: float) -> None:
    assert distance(parse(WORKLOAD), parse(other)) == doublings


def test_another_eps_is_no_farther_and_a_fused_operation_as_far_as_a_doubling() -> None:
    rows, product = "layernorm:rows=64,cols=512,dtype=f16", "gemm:m=8,n=8,k=16,dtype=f32"
    assert distance(parse(rows), parse(f"{rows},eps=1e-12")) == 0
    assert distance(parse(rows), parse("layernorm:rows=128,cols=512,dtype=f16,eps=0.001")) == 1
    assert distance(parse(product), parse(f"{product},epilogue=bias")) == 1


# -- use of a warm start by tune ---------------------------------------------------------------------


def begun(store: Store, asks: int = 0, **changes: object) -> tuple[RunContext, list[int]]:
    """Return a run that has not measured yet, and the configurations that it would try first."""
    problem, plan = parse(WORKLOAD), Plan(**changes)  # type: ignore[arg-type]
    setup = TuningSetup(target=tuning_target(HERE), plan=plan, store=store)
    weighted = WeightedWorkload(workload=problem)
    weighted.find_variants(setup.target, plan, (KEY,))
    context = prepare(setup, weighted, lambda progress: None)
    [search] = context.searches
    proposals = [search.ask(search.best_us) for _ in range(asks)]
    return context, [proposal.config["copy"] for proposal in proposals if proposal is not None]


def test_tune_begins_with_what_was_fastest_elsewhere(tmp_path: Path) -> None:
    database = tmp_path / "a.db"
    with open_store(database) as store:
        fill(store, {copy: measured(100.0 + abs(copy - 27)) for copy in range(40)})
    protocol = Protocol(min_samples=3, max_samples=5, max_s=0.05)
    plan = Plan(trials=2, protocol=protocol, baselines=False, finalists=1, workers=1, variant_files=(FORTY,))
    seen: list[Progress] = []
    report = tune(WORKLOAD, device="cpu", db=database, plan=plan, watcher=seen.append)
    with open_store(database) as store:
        history = store.history(WORKLOAD, HERE.key)
    tried = [entry.key.config["copy"] for entry in history if entry.purpose == "search"]
    assert tried == [0, 27]  # after the default
    [source] = report.to_json()["warm"]
    assert (source["device"], source["records"], source["use"]) == (THERE.key, 40, "expected")
    assert seen[0].elsewhere == 40


def test_cold_start_ignores_the_database(store: Store) -> None:
    fill(store, {copy: measured(100.0 + abs(copy - 27)) for copy in range(40)})
    assert begun(store)[0].warm[KEY].sources
    assert begun(store, warm=False)[0].warm == {}


def test_few_records_are_tried_first_and_a_random_sample_stays_one(store: Store) -> None:
    fill(store, {5: measured(3.0), 9: measured(2.0)})
    assert begun(store, 3)[1] == [0, 9, 5]
    for sampler in ("bound", "tpe"):
        assert begun(store, 3, sampler=sampler)[1] == [0, 9, 5]
    cold = begun(store, 5, sampler="random", warm=False)[1]
    assert begun(store, 5, sampler="random")[1] == cold
    assert begun(store, 5, sampler="random", learned_pruner=True)[1] == cold


def test_tune_skips_unlikely_configurations(store: Store) -> None:
    times = {copy: math.exp(0.2 * copy) for copy in range(40)}
    fill(store, {copy: measured(us) for copy, us in times.items()})
    for copy in range(2, 27):
        today = variant(KEY).revision(parse(WORKLOAD), Config({"copy": copy}))
        fill(store, {copy: measured(2.0 * times[copy])}, device=HERE, revision=today)
    context, tried = begun(store, 3, learned_pruner=True, sampler="random")
    assert context.state.cached == 25
    assert tried[0] == 0
    assert set(tried[1:]) <= {1, *range(27, 32)}
    counts = finish(context).to_json()
    assert 5 < counts["unlikely"] < 13
    assert 0 < counts["unlikely_winners"] < 0.1
    assert finish(begun(store)[0]).unlikely == 0


def test_there_is_nothing_to_learn_from_where_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs measurements"):
        tune(WORKLOAD, device="h100-sxm", db=tmp_path / "a.db", plan=Plan(learned_pruner=True))
