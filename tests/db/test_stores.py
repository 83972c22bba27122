"""Contract tests of the store, on SQLite and on a PostgreSQL server that the tests start."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.db.support import (
    DEVICE,
    EVERY_OUTCOME,
    TWIN,
    UNPROVED,
    VARIANT,
    WITH_METRICS,
    WORKLOAD,
    Clock,
    added,
    batch,
    begin,
    dead_owner,
    in_threads,
    key,
    measured,
    served,
)
from tests.support import VERIFIED, needs_fork
from tunebench.db import (
    Demand,
    MeasuredSpace,
    RunStart,
    RunSummary,
    Verdict,
    bulk,
    locate,
    migrate,
    new_owner,
    open_store,
    schema,
    upgrade,
)
from tunebench.db.engine import create_engine, write
from tunebench.db.owner import end_owner
from tunebench.db.store import Store
from tunebench.device import Device, described
from tunebench.errors import DatabaseError, InputError, SchemaError
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    Crashed,
    Effort,
    Outcome,
    Predicted,
    Resources,
    Result,
    TimedOut,
    WrongResult,
)
from tunebench.space import Config

# -- recording and reading -------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [*EVERY_OUTCOME, *WITH_METRICS], ids=lambda outcome: outcome.kind)
def test_every_outcome_comes_back_as_it_was_recorded(store: Store, outcome: Outcome) -> None:
    result = Result(
        outcome=outcome,
        resources=Resources(registers=168, spill_bytes=0),
        effort=Effort(compile_s=0.25, verify_s=0.5, measure_s=0.125),
        conditions={"driver": "580.1", "host": "node7"},
    )
    run_id = begin(store)
    store.record(key(), result, purpose="audit", bound_us=2.5, run_id=run_id, seed=2**40)
    [entry] = store.history(WORKLOAD)
    assert entry.result == result
    assert (entry.key, entry.purpose, entry.bound_us) == (key(), "audit", 2.5)
    assert (entry.run_id, entry.seed, entry.stale) == (run_id, 2**40, False)
    assert list(entry.key.config.items()) == list(key().config.items())
    assert abs(datetime.now(UTC) - entry.recorded_at) < timedelta(minutes=1)
    [trial] = store.trial_outcomes(DEVICE.key, WORKLOAD, VARIANT)
    assert (trial.config, trial.revision, trial.outcome) == (key().config, "r1", outcome)
    assert (trial.bound_us, trial.purpose) == (2.5, "audit")


def test_numpy_scalars_are_stored_as_numbers(store: Store) -> None:
    np = pytest.importorskip("numpy")
    begin(store)
    store.record(
        key(), Result(outcome=measured(1.0), conditions={"clock_mhz": np.float32(1980), "n": np.int64(3)})
    )
    assert store.history(WORKLOAD)[0].result.conditions == {"clock_mhz": 1980.0, "n": 3}


@pytest.mark.parametrize("bad", [float("nan"), object()], ids=["nan", "object"])
def test_what_cannot_be_stored_is_refused_whole(store: Store, bad: object) -> None:
    begin(store)
    with pytest.raises(DatabaseError, match="JSON data with finite numbers"):
        store.record(key(), Result(outcome=measured(1.0), conditions={"clock_mhz": bad}))
    assert store.history(WORKLOAD) == []
    assert store.stats().trials == 0


def test_a_success_without_a_time_is_refused_by_the_database(store: Store) -> None:
    begin(store)
    trial = store.record(key(), Result(outcome=TimedOut(reason="slow")))
    for change in ("kind = 'measured'", "median_us = 1.0", "reason = NULL", "purpose = 'fun'"):
        with pytest.raises(DatabaseError), store.writing() as connection:
            connection.exec_driver_sql(f"UPDATE measurement SET {change} WHERE id = {trial}")


def test_measured_spaces_exclude_current_trials_of_one_device(store: Store) -> None:
    excluded, other_device = (DEVICE.key, WORKLOAD), described()["a100-80-sxm"]
    begin(store)
    begin(store, other_device)
    for number, outcome in enumerate(EVERY_OUTCOME):
        store.record(key(number, device=other_device), Result(outcome=outcome))
        store.record(key(number), Result(outcome=outcome))
    store.record(key(0, device=other_device), Result(outcome=measured(99.0, cache="warm")))

    def places(operator: str, kind: str) -> list[MeasuredSpace]:
        return store.measured_spaces(operator, (VARIANT,), kind=kind, exclude=excluded)

    [space] = places("softmax", "gpu")
    assert (space.device, space.architecture, space.workload) == (other_device.key, "sm_80", WORKLOAD)
    assert space.count == len(EVERY_OUTCOME) - 2  # predicted and pruned configurations were not run
    assert places("soft", "gpu") == places("softmax", "cpu") == []
    times = {config["tile"]: us for config, us in store.config_times(space, cache="cold", exclude=excluded)}
    assert times == {0: 12.5, 2: 98.5} | dict.fromkeys(range(4, len(EVERY_OUTCOME)), math.inf)
    store.recheck(*excluded, VARIANT, lambda config: "r2")
    assert {space.device for space in places("softmax", "gpu")} == {DEVICE.key, other_device.key}


def test_trial_outcomes_are_one_per_trial_as_the_search_saw_it(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(10.0)))
    store.record(key(2), Result(outcome=measured(20.0)))
    store.record(key(1), Result(outcome=measured(11.0, cache="warm")), purpose="finalist")
    store.record(key(3), Result(outcome=measured(30.0)), purpose="audit")
    store.record(key(3), Result(outcome=measured(31.0)), purpose="audit")
    store.record(key(1, variant="softmax/other"), Result(outcome=measured(1.0)))
    trials = store.trial_outcomes(DEVICE.key, WORKLOAD, VARIANT)
    assert [(k.config["tile"], k.outcome.median_us) for k in trials] == [(1, 10.0), (2, 20.0), (3, 31.0)]
    assert len(store.history(WORKLOAD)) == 6
    assert store.trial_outcomes(TWIN.key, WORKLOAD, VARIANT) == []


def test_trial_outcomes_prefer_the_requested_cache_state(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(10.0)))
    store.record(key(1), Result(outcome=measured(5.0, cache="warm")))
    store.record(key(2), Result(outcome=measured(6.0, cache="warm")))
    store.record(key(3), Result(outcome=Crashed(reason="signal 11")))

    def times(cache: Any) -> list[Any]:
        trials = store.trial_outcomes(DEVICE.key, WORKLOAD, VARIANT, cache=cache)
        median_of = {k.config["tile"]: getattr(k.outcome, "median_us", None) for k in trials}
        return [median_of[number] for number in (1, 2, 3)]

    assert times("cold") == [10.0, 6.0, None]
    assert times("warm") == times(None) == [5.0, 6.0, None]


def test_trials_of_interrupted_runs_are_counted(store: Store) -> None:
    def run(host: str, first: int, *, seed: int = 7, cache: str | None = "cold") -> str:
        start = RunStart(
            device=DEVICE,
            workload=WORKLOAD,
            sampler="bound",
            seed=seed,
            host=host,
            options=None if cache is None else {"cache": cache},
        )
        run_id = store.begin_run(start)
        store.record(key(first), Result(outcome=measured(1.0)), run_id=run_id)
        store.record(key(first + 1), Result(outcome=Crashed(reason="x")), run_id=run_id)
        store.record(key(first), Result(outcome=measured(1.0)), run_id=run_id, purpose="finalist")
        return run_id

    def cut_off() -> list[tuple[int, str | None, int]]:
        runs = store.interrupted_runs(DEVICE.key, WORKLOAD, lambda stored, current: stored == current)
        return [(run.seed, run.options and run.options["cache"], run.trials) for run in runs]

    assert cut_off() == []
    run(dead_owner(), 10, cache=None)  # of an earlier version
    run(dead_owner(), 20)
    run(new_owner(), 30)  # still running
    run(dead_owner(), 40, seed=8)
    run(dead_owner(), 50, cache="warm")
    before = [(7, None, 2), (7, "cold", 2), (8, "cold", 2), (7, "warm", 2)]
    assert cut_off() == before
    with pytest.warns(FutureWarning, match="interrupted_runs"):
        assert store.interrupted_trials(DEVICE.key, WORKLOAD, sampler="bound", seed=7) == 6
    store.finish_run(run(new_owner(), 60, cache="hot"), RunSummary())
    assert cut_off() == before[1:]  # the options of the first run may have been these
    store.finish_run(run(new_owner(), 70), RunSummary())
    assert cut_off() == [(8, "cold", 2), (7, "warm", 2)]
    run(dead_owner(), 80)
    store.record(key(80, revision="r2"), Result(outcome=measured(1.0)))  # its source has changed
    assert cut_off()[-1] == (7, "cold", 1)
    ended = new_owner()
    run(ended, 90, seed=9)
    assert cut_off()[-1][0] == 7
    end_owner(ended)  # such as by Ctrl-C in a notebook
    assert cut_off()[-1] == (9, "cold", 2)


def test_run_is_found_by_the_start_of_its_id(store: Store) -> None:
    ids = [
        store.begin_run(
            RunStart(device=DEVICE, workload=WORKLOAD, sampler="bound", seed=7, options={"seed": number})
        )
        for number in range(17)  # two of them start with the same digit
    ]
    assert store.run_of(ids[3]) == store.run_of(ids[3][:16])
    assert store.run_of(ids[3]).options == {"seed": 3}
    twice = next(first for first in "0123456789abcdef" if sum(id_[0] == first for id_ in ids) > 1)
    for prefix, count in ((twice, "several runs"), ("none", "no run"), ("", "several runs")):
        with pytest.raises(InputError, match=f"{count} with an id that starts with '{prefix}'"):
            store.run_of(prefix)


def test_history_of_one_device_or_of_all(store: Store) -> None:
    begin(store)
    begin(store, TWIN)
    store.record(key(), Result(outcome=measured(10.0)))
    store.record(key(device=TWIN), Result(outcome=measured(12.0)))
    assert [entry.key.device for entry in store.history(WORKLOAD)] == [DEVICE.key, TWIN.key]
    assert [entry.key.device for entry in store.history(WORKLOAD, TWIN.key)] == [TWIN.key]
    assert store.history("softmax:rows=1,cols=1,dtype=f32") == []


def test_add_stores_measurements_once_and_in_order(store: Store) -> None:
    measurements = [added(number, outcome) for number, outcome in enumerate(EVERY_OUTCOME * 150)]
    shown: list[tuple[int, int]] = []
    assert store.add([batch(*measurements)], lambda done, total: shown.append((done, total))) == len(
        measurements
    )
    assert shown[0] == (0, len(measurements))
    assert shown[-1] == (len(measurements), len(measurements))
    assert len(shown) > 2
    entries = store.history(WORKLOAD)
    assert [(e.key, e.result.outcome) for e in entries] == [(a.key, a.result.outcome) for a in measurements]
    before = store.stats()
    assert (before.trials, before.claimed, before.runs) == (len(measurements), 0, 1)
    repeated = added(0, measured(1.0), purpose="finalist", bound_us=0.5, seed=9)
    assert store.add([batch(*measurements, repeated, repeated)]) == 1
    assert store.add([batch(*measurements)]) == 0
    assert store.stats().runs == 2
    last = store.history(WORKLOAD)[-1]
    assert (last.purpose, last.bound_us, last.seed, last.result.outcome) == (
        "finalist",
        0.5,
        9,
        measured(1.0),
    )


def test_add_commits_all_batches_or_none(store: Store) -> None:
    begin(store)
    store.record(key(0), Result(outcome=measured(5.0)))
    before = store.stats()

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    first = batch(*(added(number, measured(1.0)) for number in range(3)))
    with pytest.raises(KeyboardInterrupt):
        store.add([first, batch(added(7, measured(1.0)))], interrupt)
    assert store.stats() == before
    with pytest.raises(DatabaseError):
        store.add([first, batch(added(7, CompileFailed(reason=object())))])  # type: ignore[arg-type]
    assert store.stats() == before
    assert store.add([first]) == 3


def test_clock_set_back_within_a_batch_skips_no_measurement(store: Store) -> None:
    late, early = datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
    measurements = [added(number, measured(1.0), recorded_at=late) for number in range(bulk.CHUNK + 1)]
    measurements.append(added(0, measured(2.0), recorded_at=early))
    assert store.add([batch(*measurements)]) == len(measurements)


def test_add_ends_claims_and_skips_older_measurements(store: Store) -> None:
    begin(store)
    assert store.claim(key(1), "me")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    store.record(key(0), Result(outcome=measured(5.0)))
    old = [added(number, measured(1.0), recorded_at=long_ago) for number in (0, 1)]
    assert store.add([batch(*old)]) == 1
    assert (store.stats().claimed, store.stats().trials) == (0, 2)
    assert [(e.key, e.recorded_at) for e in store.history(WORKLOAD)][1:] == [(key(1), long_ago)]
    assert store.add([batch(added(0, measured(1.0)))]) == 1


def test_spaces_and_parameters(store: Store) -> None:
    begin(store)
    begin(store, TWIN)
    store.record(key(0), Result(outcome=measured(5.0)))
    store.record(key(1), Result(outcome=measured(5.0)))
    store.record(key(1, device=TWIN), Result(outcome=measured(5.0)))
    store.claim(key(2, variant="softmax/claimed"), "me")
    assert store.spaces() == {key().space: 2, key(device=TWIN).space: 1}
    assert store.parameters(key().space) == ("tile", "ratio", "order")
    assert store.parameters(key(variant="softmax/none").space) is None
    assert [e.key.device for e in store.history(WORKLOAD, variant=VARIANT)] == [DEVICE.key] * 2 + [TWIN.key]
    assert store.history(WORKLOAD, variant="softmax/none") == []
    assert Device(**store.descriptors()[TWIN.key]) == TWIN


def test_an_unknown_device_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match="call begin_run"):
        store.record(key(), Result(outcome=measured(10.0)))


def test_runs_devices_and_effort_are_counted(store: Store) -> None:
    run_id = begin(store)
    begin(store)
    begin(store, TWIN)
    store.record(key(1), Result(outcome=measured(10.0), effort=Effort(compile_s=2.0)), run_id=run_id)
    store.record(
        key(2), Result(outcome=Crashed(reason="signal 11"), effort=Effort(measure_s=1.0)), run_id=run_id
    )
    store.claim(key(3), new_owner())
    store.finish_run(
        run_id, RunSummary(masked=900, cached=4, wall_s=5.0, effort=Effort(compile_s=2.0), overhead_s=0.1)
    )
    stats = store.stats()
    assert stats.devices == tuple(sorted((DEVICE.key, TWIN.key)))
    assert (stats.runs, stats.workloads, stats.trials, stats.claimed, stats.stale) == (3, 1, 2, 1, 0)
    assert stats.outcomes == {"measured": 1, "crashed": 1}
    assert stats.effort == Effort(compile_s=2.0, measure_s=1.0)
    with store.reading() as connection:
        run = (
            connection.execute(sa.select(schema.run_table).where(schema.run_table.c.id == run_id))
            .mappings()
            .one()
        )
    assert (run["masked"], run["cached"], run["wall_s"], run["compile_s"]) == (900, 4, 5.0, 2.0)
    assert run["started_at"] <= run["finished_at"]


# -- what may be served ----------------------------------------------------------------------------


def test_best_is_the_fastest_success_of_each_variant(store: Store) -> None:
    begin(store)
    for number, outcome in enumerate((measured(10.0), measured(9.0), Crashed(reason="x"), measured(9.5))):
        store.record(key(number), Result(outcome=outcome))
    store.record(key(8, variant="softmax/other"), Result(outcome=measured(9.2)))
    assert served(store) == [(1, 9.0, False), (8, 9.2, False)]
    assert len(store.best(WORKLOAD, limit=1)) == 1
    assert store.best(WORKLOAD, TWIN.key) == []


def test_finalist_measurements_replace_those_of_the_search(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(9.0)))
    store.record(key(2), Result(outcome=measured(9.5)))
    store.record(key(3, variant="softmax/other"), Result(outcome=measured(9.4)))
    store.record(key(1), Result(outcome=measured(9.9)), purpose="finalist")
    assert served(store) == [(1, 9.9, False)]
    store.record(key(4), Result(outcome=measured(9.8)))  # found later, not measured as a finalist yet
    assert served(store) == [(4, 9.8, False)]
    store.record(key(4), Result(outcome=measured(10.0)), purpose="finalist")
    assert served(store) == [(1, 9.9, False)]


def test_finalists_of_another_cache_state_or_stale_source_supersede_nothing(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(9.0)))
    store.record(key(2), Result(outcome=measured(7.0, cache="warm")), purpose="finalist")
    assert [tile for tile, _, _ in served(store)] == [1, 2]
    store.record(key(3), Result(outcome=measured(8.0)), purpose="finalist")
    store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda config: "r2" if config["tile"] == 3 else "r1")
    assert (1, 9.0, False) in served(store)


DEFAULT, FASTER, NOT_FASTER = (
    Verdict(versus_default=how)
    for how in ("itself", "faster", "not faster")  # type: ignore[arg-type]
)


def test_finalist_that_does_not_beat_the_default_is_not_returned(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(10.0)), purpose="finalist", verdict=DEFAULT)
    store.record(key(2), Result(outcome=measured(9.0)), purpose="finalist", verdict=NOT_FASTER)
    assert served(store) == [(1, 10.0, False)]
    store.record(key(3), Result(outcome=measured(9.5)), purpose="finalist", verdict=FASTER)
    assert served(store) == [(3, 9.5, False)]
    store.record(key(1), Result(outcome=Crashed(reason="x")))  # no default to compare with
    assert served(store) == [(2, 9.0, False)]


def test_verdict_applies_to_one_variant_device_and_cache_state(store: Store) -> None:
    begin(store)
    begin(store, TWIN)
    store.record(key(1), Result(outcome=measured(10.0)), purpose="finalist", verdict=DEFAULT)
    elsewhere = key(2, variant="softmax/other")
    store.record(elsewhere, Result(outcome=measured(9.0)), purpose="finalist", verdict=NOT_FASTER)
    warm = Result(outcome=measured(8.0, cache="warm"))
    store.record(key(3), warm, purpose="finalist", verdict=NOT_FASTER)
    twin = dataclasses.replace(key(4), device=TWIN.key)
    store.record(twin, Result(outcome=measured(7.0)), purpose="finalist", verdict=NOT_FASTER)
    assert {tile for tile, _, _ in served(store)} == {1, 2, 3, 4}


def test_confidence_intervals_decide_before_finalists_are_measured(store: Store) -> None:
    begin(store)

    def found(number: int, us: float, low: float, high: float, verdict: Verdict | None = None) -> None:
        outcome = dataclasses.replace(measured(us), ci_us=(low, high))
        store.record(key(number), Result(outcome=outcome), verdict=verdict)

    found(2, 9.0, 8.0, 9.6)
    assert served(store) == [(2, 9.0, False)]  # without any comparison
    found(1, 10.0, 9.5, 10.5, DEFAULT)
    assert served(store) == [(1, 10.0, False)]
    found(3, 9.2, 9.1, 9.4)
    assert served(store) == [(3, 9.2, False)]
    store.record(
        key(1),
        Result(outcome=dataclasses.replace(measured(9.9), ci_us=(9.3, 10.0))),
        purpose="finalist",
        verdict=DEFAULT,
    )
    assert served(store) == [(1, 9.9, False)]


def test_predictions_are_compared_without_intervals(store: Store) -> None:
    begin(store)
    for number, us, verdict in ((1, 2.0, DEFAULT), (2, 1.9, None)):
        outcome = Predicted(predicted_us=us, verification=VERIFIED)
        store.record(key(number), Result(outcome=outcome), verdict=verdict)
    assert [entry.key.config["tile"] for entry in store.best(WORKLOAD)] == [2]


def test_verdict_is_stored(store: Store) -> None:
    begin(store)
    verdict = Verdict(versus_default="faster", comparison={"default": {"ratio": 1.25, "probability": 0.99}})
    store.record(key(1), Result(outcome=measured(1.0)), verdict=verdict)
    store.record(key(2), Result(outcome=measured(1.0)))
    assert [entry.verdict for entry in store.history(WORKLOAD)] == [verdict, Verdict()]


def test_fastest_samples_are_returned_and_violations_counted(store: Store) -> None:
    begin(store)
    outcome = dataclasses.replace(measured(9.0), samples_us=(9.0, 4.0, 12.0))
    store.record(key(1), Result(outcome=outcome, resources=Resources(registers=40)), bound_us=5.0)
    store.record(key(2), Result(outcome=Aborted(samples_us=(30.0, 31.0), above_us=9.0)), bound_us=29.0)
    store.record(key(3), Result(outcome=Crashed(reason="x")), bound_us=29.0)
    samples = store.fastest_samples(DEVICE.key, WORKLOAD, VARIANT)
    assert [
        (sample.config["tile"], sample.fastest_us, sample.bound_us, sample.cache) for sample in samples
    ] == [
        (1, 4.0, 5.0, "cold"),
        (2, 30.0, 29.0, None),
    ]
    assert samples[0].resources == Resources(registers=40)
    assert store.fastest_samples(DEVICE.key, WORKLOAD, "softmax/none") == []
    assert store.stats().violations == 1
    assert [entry.violates_bound for entry in store.history(WORKLOAD)] == [True, False, False]


@pytest.mark.parametrize(
    "failure", [WrongResult(reason="x"), Crashed(reason="x"), TimedOut(reason="x")], ids=lambda f: f.kind
)
def test_trial_that_failed_later_is_not_returned(store: Store, failure: Outcome) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(9.0)))
    store.record(key(2), Result(outcome=measured(9.5)))
    store.record(key(1), Result(outcome=failure), purpose="finalist")
    assert served(store) == [(2, 9.5, False)]
    store.record(key(1), Result(outcome=measured(9.1)), purpose="finalist")
    forgiven = not isinstance(failure, WrongResult)  # a wrong result excludes the trial even after a success
    assert served(store) == ([(1, 9.1, False)] if forgiven else [(2, 9.5, False)])


def test_unverified_result_does_not_count_as_measured(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(9.0, verification=UNPROVED)))
    assert store.best(WORKLOAD) == []


def test_cold_and_warm_are_separate_and_predictions_come_last(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=Predicted(predicted_us=1.0, verification=VERIFIED)))
    store.record(key(2), Result(outcome=measured(5.0, cache="warm")))
    store.record(key(3), Result(outcome=measured(9.0)))
    assert [entry.key.config["tile"] for entry in store.best(WORKLOAD)] == [3, 2, 1]


def test_a_prediction_for_a_verified_kernel_comes_first(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=Predicted(predicted_us=1.0, verification=UNPROVED)))
    store.record(
        key(2, variant="softmax/other"), Result(outcome=Predicted(predicted_us=1.5, verification=UNPROVED))
    )
    assert [entry.key.config["tile"] for entry in store.best(WORKLOAD)] == [1, 2]
    store.record(key(3), Result(outcome=Predicted(predicted_us=4.0, verification=VERIFIED)))
    assert [entry.key.config["tile"] for entry in store.best(WORKLOAD)] == [3, 2]


def test_new_revision_makes_the_earlier_one_stale(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(9.0)))
    store.record(key(1, revision="r2"), Result(outcome=measured(10.0)))
    assert served(store) == [(1, 10.0, False), (1, 9.0, True)]
    store.record(key(1), Result(outcome=measured(9.3)))  # the source was reverted and measured again
    assert served(store) == [(1, 9.3, False), (1, 10.0, True)]


def test_recheck_marks_trials_stale_and_current_again(store: Store) -> None:
    begin(store)
    for number in range(4):
        store.record(key(number), Result(outcome=measured(9.0 + number)))
    changed = store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda c: "r2" if c["tile"] < 2 else "r1")
    assert changed == 2
    assert served(store) == [(2, 11.0, False), (0, 9.0, True)]
    assert store.stats().stale == 2

    def gone(config: Config) -> str:
        from tunebench.errors import ConfigError

        raise ConfigError("no such value any more")

    assert store.recheck(DEVICE.key, WORKLOAD, VARIANT, gone) == 4
    assert store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda config: "r1") == 0
    assert served(store) == [(0, 9.0, False)]


def test_fingerprint_changes_with_every_answer(store: Store) -> None:
    begin(store)
    seen = [store.fingerprint()]
    store.record(key(), Result(outcome=measured(9.0)))
    seen.append(store.fingerprint())
    store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda config: "r2")
    seen.append(store.fingerprint())
    assert len(set(seen)) == 3
    assert store.fingerprint() == seen[-1]


# -- claims ----------------------------------------------------------------------------------------


def test_a_claim_is_exclusive_and_is_renewed_released_and_ended(store: Store) -> None:
    begin(store)
    assert store.claim(key(), "a")
    assert not store.claim(key(), "b")
    assert store.claim(key(), "a")
    store.release(key(), "b")
    assert not store.claim(key(), "b")
    store.release(key(), "a")
    assert store.claim(key(), "b")
    store.record(key(), Result(outcome=measured(1.0)))
    assert not store.claim(key(), "a")
    assert not store.claim(key(), "b")
    store.release(key(), "b")
    assert len(store.history(WORKLOAD)) == 1
    assert store.claim(key(revision="r2"), "a")


def test_an_expired_claim_is_taken_over(db: str) -> None:
    clock = Clock()
    with closing(Store(locate(db), clock=clock)) as store:
        begin(store)
        assert store.claim(key(), "elsewhere:1", ttl_s=60)
        clock.now += timedelta(seconds=59)
        assert not store.claim(key(), "b", ttl_s=60)
        clock.now += timedelta(seconds=2)
        assert store.claim(key(), "b", ttl_s=60)
        assert not store.claim(key(), "elsewhere:1", ttl_s=60)


def test_clock_set_back_only_delays_expiry(db: str) -> None:
    clock = Clock()
    with closing(Store(locate(db), clock=clock)) as store:
        begin(store)
        assert store.claim(key(1), "a", ttl_s=60)
        clock.now -= timedelta(hours=1)
        assert not store.claim(key(1), "b", ttl_s=60)
        assert store.claim(key(2), "b", ttl_s=60)
        store.record(key(1), Result(outcome=measured(1.0)))
        assert len(store.history(WORKLOAD)) == 1
        assert store.claim(key(3), "a", ttl_s=60)
        clock.now += timedelta(hours=1, seconds=61)
        assert store.claim(key(3), "b", ttl_s=60)


def test_claims_of_dead_processes_of_this_host_are_released(store: Store) -> None:
    begin(store)
    alive = new_owner()
    assert alive.split(":")[2] == str(os.getpid())
    dead = dead_owner()
    elsewhere = f"otherhost:1:{dead.split(':', 2)[2]}"
    for number, owner in enumerate((alive, dead, elsewhere)):
        assert store.claim(key(number), owner)
    begin(store)
    assert [store.claim(key(number), "new") for number in range(3)] == [False, True, False]


def test_threads_share_a_store(store: Store) -> None:
    begin(store)
    won: list[int] = []

    def work() -> None:
        owner = new_owner()
        for number in range(30):
            if store.claim(key(number), owner):
                store.record(key(number), Result(outcome=measured(1.0 + number)))
                won.append(number)

    in_threads([work] * 4)
    assert sorted(won) == list(range(30))
    assert len(store.history(WORKLOAD)) == 30


def _in_processes(work: Callable[..., None], arguments: list[tuple[Any, ...]]) -> None:
    """Run a function in a new process for each tuple of arguments, all at the same time."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=process_arguments) for process_arguments in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def _tune(db: str, offset: int, trials: int) -> None:
    """Run all trials; each process starts at another one, like several tuners of one workload."""
    with open_store(db) as store:
        begin(store)
        owner = new_owner()
        for number in range(trials):
            mine = key((number + offset) % trials)
            if store.claim(mine, owner):
                store.record(mine, Result(outcome=measured(1.0 + offset)))


def test_four_processes_claim_200_trials_once_each(db: str) -> None:
    _in_processes(_tune, [(db, offset, 200) for offset in (0, 50, 100, 150)])
    with open_store(db) as store:
        entries = store.history(WORKLOAD)
        assert sorted(entry.key.config["tile"] for entry in entries) == list(range(200))
        assert store.stats().claimed == 0


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_store_works_on_after_a_fork(store: Store) -> None:
    begin(store)
    store.record(key(1), Result(outcome=measured(1.0)))
    child = os.fork()
    if child == 0:
        try:
            store.record(key(2), Result(outcome=measured(2.0)))
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.record(key(3), Result(outcome=measured(3.0)))
    assert len(store.history(WORKLOAD)) == 3


# -- what programs run -----------------------------------------------------------------------------

OTHER = "gemm:m=64,n=64,k=64,dtype=f32"


def spent(store: Store, device: Device = DEVICE) -> list[tuple[str, int, float]]:
    return [(demand.workload, demand.calls, demand.time_us) for demand in store.demand(device.key)]


def test_demand_accumulates_and_the_most_time_comes_first(db: str) -> None:
    moments = [datetime(2026, 11, 20, 12, minute, tzinfo=UTC) for minute in (0, 5, 3)]
    for moment in moments:  # the last with a clock that was set back
        with closing(Store(locate(db), clock=lambda moment=moment: moment)) as store:
            store._clock_is_behind = timedelta()
            store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=2, time_us=1.5)])
    with open_store(db) as store:
        [once] = store.demand(DEVICE.key)
        assert (once.first_noted_at, once.last_noted_at) == (moments[0], moments[1])
        store.add_demand(DEVICE, [Demand(workload=OTHER, calls=1, time_us=100.0)])
        store.add_demand(TWIN, [Demand(workload=OTHER, calls=2**40, time_us=0.0)])
        assert spent(store) == [(OTHER, 1, 100.0), (WORKLOAD, 6, 4.5)]
        assert spent(store, TWIN) == [(OTHER, 2**40, 0.0)]
        store.add_demand(DEVICE, [])
        many = [Demand(workload=f"{OTHER},n={n}", calls=1, time_us=1.0) for n in range(2500)]
        store.add_demand(DEVICE, many)
        assert len(store.demand(DEVICE.key)) == 2502


@pytest.mark.parametrize(("calls", "time_us"), [(0, 1.0), (1, -1.0), (1, math.nan), (1, math.inf)])
def test_demand_is_of_calls_and_of_a_finite_time(store: Store, calls: int, time_us: float) -> None:
    with pytest.raises(InputError, match=WORKLOAD):
        Demand(workload=WORKLOAD, calls=calls, time_us=time_us)
    store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=1, time_us=1.0)])
    for change in ("calls = 0", "time_us = -1.0"):
        with pytest.raises(DatabaseError), store.writing() as connection:
            connection.exec_driver_sql(f"UPDATE demand SET {change}")


def test_demand_of_other_origins_is_added(store: Store) -> None:
    store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=2, time_us=3.0)])
    with store.writing() as connection:
        connection.exec_driver_sql(
            "INSERT INTO demand (device_id, workload, origin, calls, time_us, first_noted_at, last_noted_at)"
            " SELECT device_id, workload, 'another', 40, 50.0, first_noted_at, last_noted_at FROM demand"
        )
    store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=1, time_us=1.0)])
    assert spent(store) == [(WORKLOAD, 43, 54.0)]


def _add_demand(db: str, writer: int) -> None:
    texts = [WORKLOAD, OTHER] if writer % 2 else [OTHER, WORKLOAD]
    with open_store(db) as store:
        for _ in range(20):
            store.add_demand(DEVICE, [Demand(workload=text, calls=1, time_us=0.5) for text in texts])


def test_concurrent_demand_writers_are_summed(db: str) -> None:
    open_store(db).close()
    _in_processes(_add_demand, [(db, writer) for writer in range(3)])
    with open_store(db) as store:
        assert spent(store) == [(OTHER, 60, 30.0), (WORKLOAD, 60, 30.0)]


def test_databases_have_distinct_origins(db: str, tmp_path: Path) -> None:
    def name(db: str) -> str:
        with open_store(db) as store, store.reading() as connection:
            return str(connection.execute(sa.select(schema.origin_table.c.id)).scalar_one())

    assert name(db) == name(db) != name(str(tmp_path / "other.db"))


# -- schema ----------------------------------------------------------------------------------------


def _described(db: str) -> Any:
    """Return a description of a schema, for comparison."""
    engine = create_engine(locate(db))
    with engine.connect() as connection:
        inspector = sa.inspect(connection)
        tables = {
            table: (
                sorted((c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)),
                inspector.get_pk_constraint(table),
                sorted(map(str, inspector.get_unique_constraints(table))),
                sorted(map(str, inspector.get_check_constraints(table))),
                sorted(map(str, inspector.get_foreign_keys(table))),
                sorted(map(_index, inspector.get_indexes(table))),
            )
            for table in inspector.get_table_names()
        }
        view = inspector.get_view_definition("answer_v1").split()
    engine.dispose()
    return tables, view


def _index(index: Any) -> str:
    """Return a description of an index, whose conditions are objects that only compare as text."""
    conditions = {name: str(value) for name, value in index.get("dialect_options", {}).items()}
    return str({**index, "dialect_options": conditions})


def test_migrations_produce_the_declared_schema(
    request: pytest.FixtureRequest, db: str, tmp_path: Path
) -> None:
    made_at_once = db
    is_sqlite = locate(db).path is not None
    migrated = (
        str(tmp_path / "migrated.db") if is_sqlite else request.getfixturevalue("server").new_database()
    )
    open_store(made_at_once).close()
    assert upgrade(migrated) == (None, schema.HEAD)
    assert _described(migrated) == _described(made_at_once)
    assert upgrade(migrated) == (schema.HEAD, schema.HEAD)
    with open_store(migrated) as store:
        begin(store)
        store.record(key(), Result(outcome=measured(1.0)))
        assert served(store) == [(0, 1.0, False)]


def test_migrations_go_both_ways(db: str) -> None:
    open_store(db).close()
    engine = create_engine(locate(db), foreign_keys=False)
    with write(engine) as connection:
        migrate.run_alembic(connection, "downgrade", "base")
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["alembic_version"]
    engine.dispose()


def test_samples_survive_a_downgrade_and_upgrade(db: str) -> None:
    outcomes = (measured(7.0), Aborted(samples_us=(30.0, 29.0), above_us=9.0), Crashed(reason="x"))
    with open_store(db) as store:
        begin(store)
        for number, outcome in enumerate(outcomes):
            store.record(key(number), Result(outcome=outcome), verdict=DEFAULT)
    engine = create_engine(locate(db), foreign_keys=False)
    with write(engine) as connection:
        migrate.run_alembic(connection, "downgrade", "0002")
    engine.dispose()
    assert upgrade(db) == ("0002", schema.HEAD)
    with open_store(db) as store:
        assert [entry.result.outcome for entry in store.history(WORKLOAD)] == list(outcomes)
        samples = store.fastest_samples(DEVICE.key, WORKLOAD, VARIANT)
    assert [sample.fastest_us for sample in samples] == [0.99 * 7.0, 29.0]


NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "{next}"
down_revision = "{head}"

def upgrade():
    op.execute("DROP VIEW answer_v1")
    rebuild = "always" if op.get_bind().dialect.name == "sqlite" else "auto"
    with op.batch_alter_table("trial", recreate=rebuild) as t:
        t.add_column(sa.Column("note", sa.Text))
        t.drop_constraint(op.f("ck_trial_state"), type_="check")
    {failure}
"""


HEAD, NEXT_REVISION = schema.HEAD, f"{int(schema.HEAD) + 1:04}"


def _next(failure: str = "") -> str:
    return NEXT.format(head=HEAD, next=NEXT_REVISION, failure=failure)


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A migration that rebuilds a referenced table, the hardest case for SQLite."""
    monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, NEXT_REVISION))
    monkeypatch.setattr(schema, "HEAD", NEXT_REVISION)
    folder = tmp_path / "migrations"
    shutil.copytree(migrate.MIGRATIONS, folder)
    monkeypatch.setattr(migrate, "MIGRATIONS", folder)
    step = folder / "versions" / f"{NEXT_REVISION}_note.py"
    step.write_text(_next())
    return step


def _fill(db: str) -> None:
    with open_store(db) as store:
        begin(store)
        for number in range(5):
            store.record(key(number), Result(outcome=measured(1.0 + number)))


def test_an_older_schema_is_named_and_upgraded_without_loss(db: str, request: pytest.FixtureRequest) -> None:
    _fill(db)
    request.getfixturevalue("next_revision")
    with pytest.raises(SchemaError, match="tunebench db upgrade"):
        open_store(db)
    assert upgrade(db) == (HEAD, NEXT_REVISION)
    with closing(Store(locate(db))) as store:
        assert [entry.key.config["tile"] for entry in store.history(WORKLOAD)] == list(range(5))
    assert upgrade(db) == (NEXT_REVISION, NEXT_REVISION)


def test_an_upgrade_that_fails_changes_nothing(db: str, request: pytest.FixtureRequest) -> None:
    _fill(db)
    before = _described(db)
    step: Path = request.getfixturevalue("next_revision")
    step.write_text(_next("op.execute('DELETE FROM nowhere')"))
    with pytest.raises(DatabaseError, match="nowhere"):
        upgrade(db)
    assert _described(db) == before


def test_a_newer_schema_is_refused(db: str) -> None:
    open_store(db).close()
    engine = create_engine(locate(db))
    with write(engine) as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    engine.dispose()
    for attempt in (open_store, upgrade):
        with pytest.raises(SchemaError, match=r"9999.*newer.*upgrade tunebench"):
            attempt(db)


def test_tables_of_another_program_are_left_unchanged(db: str) -> None:
    engine = create_engine(locate(db))
    with write(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE moz_places (id INTEGER)")
    for attempt in (open_store, upgrade):
        with pytest.raises(SchemaError, match="another program"):
            attempt(db)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == ["moz_places"]
    engine.dispose()


# -- a server that dies ----------------------------------------------------------------------------


def test_nothing_committed_is_lost_when_the_server_is_killed(server: Any) -> None:
    with open_store(server.new_database()) as store:
        begin(store)
        for number in range(20):
            store.record(key(number), Result(outcome=measured(1.0 + number)))
        server.stop("immediate")
        with pytest.raises(DatabaseError, match="kept"):
            store.record(key(20), Result(outcome=measured(9.0)))
        server.start()
        store.record(key(20), Result(outcome=measured(9.0)))
        assert len(store.history(WORKLOAD)) == 21
