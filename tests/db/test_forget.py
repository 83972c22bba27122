"""Forgetting recorded outcomes: what is selected, what is kept, and that all or nothing is deleted."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.db.support import DEVICE, TWIN, VARIANT, WORKLOAD, begin, key, measured, result
from tests.support import needs_fork
from tunebench.answer import lookup_workload
from tunebench.db import Demand, RunStart, TrialKey, forget, lookup_index, open_store, schema
from tunebench.db.forget import ForgetSelection
from tunebench.db.integrity import examine
from tunebench.db.merge import merge
from tunebench.db.store import Store
from tunebench.errors import InputError, LookupMiss, UnknownName
from tunebench.kernels import variant
from tunebench.outcome import Crashed, Result
from tunebench.workloads import parse

OTHER = "softmax/other"


@pytest.fixture
def filled(store: Store) -> Store:
    """Five trials of the workload: three of one variant, one of another, and one on another device."""
    run_id = begin(store)
    for number in range(3):
        store.record(key(number), result(1.0 + number), run_id=run_id)
    store.record(key(0), result(0.9), run_id=run_id, purpose="finalist")
    store.record(key(7, variant=OTHER), Result(outcome=Crashed(reason="signal 11")), run_id=run_id)
    begin(store, TWIN)
    store.record(key(0, device=TWIN), result(2.0))
    return store


BOTH = {"variants": [VARIANT], "device": DEVICE.key, "configs": [{"tile": "0"}, {"tile": "2", "order": "nk"}]}
OF_VARIANT, OF_OTHER, OF_TWIN = (DEVICE.key, VARIANT), (DEVICE.key, OTHER), (TWIN.key, VARIANT)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (
            {},
            {
                OF_VARIANT: (3, {"measured": 4}),
                OF_OTHER: (1, {"crashed": 1}),
                OF_TWIN: (1, {"measured": 1}),
            },
        ),
        ({"device": "h100-pcie"}, {OF_TWIN: (1, {"measured": 1})}),
        ({"variants": ["other"]}, {OF_OTHER: (1, {"crashed": 1})}),
        (BOTH, {OF_VARIANT: (2, {"measured": 3})}),
    ],
    ids=["all", "device", "variant", "configurations"],
)
def test_selected_outcomes_are_forgotten_and_all_others_kept(
    filters: dict[str, object], expected: dict[tuple[str, str], tuple[int, dict[str, int]]], filled: Store
) -> None:
    assert filled.claim(key(9), "a running tuner")
    filled.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=3, time_us=9.0)])
    before = filled.stats()
    selection = ForgetSelection(workload=WORKLOAD, **filters)  # type: ignore[arg-type]
    listed = forget.find(filled, selection)
    assert filled.stats() == before
    assert {(f.space.device, f.space.variant): (f.trials, f.outcomes) for f in listed} == expected
    assert forget.forget(filled, selection) == listed
    after = filled.stats()
    assert after.trials == before.trials - sum(trials for trials, _ in expected.values())
    assert sum(after.outcomes.values()) == 6 - sum(
        n for _, kinds in expected.values() for n in kinds.values()
    )
    assert (after.runs, after.claimed, after.devices) == (before.runs, 1, before.devices)
    assert filled.demand(DEVICE.key)[0].calls == 3
    assert examine(filled).clean
    assert filled.claim(key(0, variant=OTHER), "me")  # can be tried


def test_nothing_else_than_the_workload_is_selected(filled: Store) -> None:
    other_key = dataclasses.replace(key(), workload="softmax:rows=64,cols=640,dtype=f32")
    filled.record(other_key, result(1.0))
    forget.forget(filled, ForgetSelection(workload="softmax:cols=64,rows=64,dtype=f32"))
    assert [space.workload for space in filled.spaces()] == [other_key.workload]
    with pytest.raises(InputError, match="there is nothing to forget"):
        forget.forget(filled, ForgetSelection(workload=WORKLOAD))


@pytest.mark.parametrize(
    ("filters", "error", "message"),
    [
        ({"variants": ["none"]}, UnknownName, "unknown variant with records 'none'"),
        ({"device": "none"}, UnknownName, "unknown device 'none'"),
        ({"configs": [{"tile": "99"}]}, InputError, "no recorded configuration"),
    ],
)
def test_filter_that_selects_nothing_is_an_error(
    filters: dict[str, object], error: type[Exception], message: str, filled: Store
) -> None:
    before = filled.stats()
    with pytest.raises(error, match=message):
        forget.forget(filled, ForgetSelection(workload=WORKLOAD, **filters))  # type: ignore[arg-type]
    assert filled.stats() == before


def test_forgotten_record_is_not_looked_up_and_a_merge_brings_it_back(db: str, tmp_path: Path) -> None:
    softmax, workload = variant("softmax/cuda_block"), parse(WORKLOAD)
    config = softmax.default(workload, DEVICE)
    trial = TrialKey(
        device=DEVICE.key,
        workload=WORKLOAD,
        variant=softmax.key,
        revision=softmax.revision(workload, config),
        config=config,
    )
    with open_store(db) as store:
        store.begin_run(RunStart(device=DEVICE, workload=WORKLOAD, sampler="bound", seed=0))
        store.record(trial, Result(outcome=measured(12.0)), bound_us=0.01)
    merge([db], into=tmp_path / "copy.db")

    def looked_up() -> float:
        return lookup_workload(WORKLOAD, device=DEVICE, db=db, strict=True).expected_us

    assert looked_up() == 12.0
    with open_store(db) as store:
        forget.forget(store, ForgetSelection(workload=WORKLOAD))
        with pytest.raises(LookupMiss):  # although the index of a server is younger than a minute
            looked_up()
    merge([tmp_path / "copy.db"], into=db)
    if "://" in db:
        with open_store(db, read_only=True) as store:
            lookup_index.export_index(store, lookup_index.index_path(store.location))
    assert looked_up() == 12.0


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_before_its_commit_it_forgets_nothing(filled: Store, db: str) -> None:
    before = filled.stats()
    filled.close()
    child = os.fork()
    if child == 0:
        deleted = 0

        def die(conn: object, cursor: object, text: str, *rest: object) -> None:
            nonlocal deleted
            deleted += text.startswith("DELETE")
            if deleted == 2:  # of the measurements, and of their trials
                os.kill(os.getpid(), signal.SIGKILL)

        sa.event.listen(sa.Engine, "after_cursor_execute", die)
        with contextlib.suppress(BaseException), open_store(db) as store:
            forget.forget(store, ForgetSelection(workload=WORKLOAD))
        os._exit(0)  # the process was not killed
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with open_store(db) as store:
        assert store.stats() == before
        assert examine(store).clean
        deleted = forget.forget(store, ForgetSelection(workload=WORKLOAD))
        assert sum(space.trials for space in deleted) == 5
        with store.reading() as connection:
            assert connection.execute(sa.select(schema.measurement_table)).first() is None
