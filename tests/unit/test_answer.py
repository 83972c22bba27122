"""Lookup: what is served and what is not, how it is known, and what a serving process pays for it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tunebench.answer import Answer, lookup, lookup_workload
from tunebench.db import RunStart, Store, TrialKey, index, locate, open_store
from tunebench.device import Device, described, local_cpu
from tunebench.errors import DatabaseError, InputError, LookupMiss, SchemaError, UnknownName
from tunebench.kernels import variant
from tunebench.outcome import Crashed, Measured, Outcome, Predicted, Result, Verification, WrongResult
from tunebench.space import Config
from tunebench.workloads import parse

SXM, PCIE, A100 = (described()[name] for name in ("h100-sxm", "h100-pcie", "a100-80-sxm"))
DIMENSIONS: dict[str, Any] = {"rows": 64, "cols": 128, "dtype": "f32"}
WORKLOAD = "softmax:rows=64,cols=128,dtype=f32"
RIGHT = Verification(how="reference", detail="all elements", worst=0.25)
UNPROVED = Verification(how="not verified", detail="g++ is not installed")

Remember = Callable[..., None]


def measured(median_us: float, *, cache: Any = "cold", verification: Verification = RIGHT) -> Measured:
    return Measured(
        median_us=median_us,
        ci_us=(median_us - 0.5, median_us + 0.5),
        samples_us=(median_us,),
        cache=cache,
        verification=verification,
    )


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "answers.db")


@pytest.fixture
def remember(db: str) -> Remember:
    """Record one outcome of a configuration, named by a number."""

    def record(
        device: Device, number: int, outcome: Outcome, *, revision: str = "r1", bound_us: float = 1.0
    ) -> None:
        with open_store(db) as store:
            _record(store, device, number, outcome, revision, bound_us)

    return record


def _record(
    store: Store, device: Device, number: int, outcome: Outcome, revision: str = "r1", bound_us: float = 1.0
) -> None:
    store.begin_run(RunStart(device=device, workload=WORKLOAD, sampler="bound", seed=0))
    key = TrialKey(
        device=device.key,
        workload=WORKLOAD,
        variant="softmax/example",
        revision=revision,
        config=Config({"tile": number, "order": "nk"}),
    )
    store.record(key, Result(outcome=outcome), bound_us=bound_us)


def ask(db: str, device: Device | str | None = SXM) -> tuple[int, str]:
    answer = lookup("softmax", **DIMENSIONS, device=device, db=db)
    return answer.config["tile"], answer.how


# -- what is served --------------------------------------------------------------------------------


def test_an_answer_tells_everything(db: str, remember: Remember) -> None:
    remember(SXM, 7, measured(12.5), bound_us=10.0)
    answer = lookup("softmax", **DIMENSIONS, device="h100-sxm", db=db)
    assert answer == Answer(
        workload=WORKLOAD,
        device=SXM.key,
        how="measured here",
        variant="softmax/example",
        config=Config({"tile": 7, "order": "nk"}),
        expected_us=12.5,
        ci_us=(12.0, 13.0),
        bound_us=10.0,
        cache="cold",
        verification="reference",
        revision="r1",
        stale=False,
        recorded_at=answer.recorded_at,
        database=db,
    )
    assert list(answer.config) == ["tile", "order"]
    plain = json.loads(json.dumps(answer.to_json()))
    assert (plain["config"], plain["how"], plain["ci_us"]) == (
        {"tile": 7, "order": "nk"},
        "measured here",
        [12.0, 13.0],
    )


def test_every_way_to_ask_gives_the_same_answer(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 7, measured(12.5))
    answer = lookup("softmax", **DIMENSIONS, device=SXM, db=db)
    assert lookup("softmax", cols="128", rows="64", dtype="f32", device=SXM.key, db=Path(db)) == answer
    assert lookup_workload(WORKLOAD, device="h100-sxm", db=f"sqlite:///{db}") == answer
    assert lookup_workload(parse("softmax:cols=128,dtype=f32,rows=64"), device="sm_90", db=db) == answer
    monkeypatch.setenv("TUNEBENCH_DB", db)
    assert lookup_workload(WORKLOAD, device=SXM) == answer


def test_the_fastest_right_one_is_served(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(3.0))
    remember(SXM, 2, measured(2.0))
    remember(SXM, 3, measured(1.0, verification=UNPROVED))
    remember(SXM, 4, Crashed(reason="signal 11"))
    remember(SXM, 5, measured(0.5))
    remember(SXM, 5, WrongResult(reason="y[0] is nan"))
    assert ask(db) == (2, "measured here")


def test_only_failures_are_a_miss(db: str, remember: Remember) -> None:
    remember(SXM, 1, WrongResult(reason="y[0] is nan"))
    remember(SXM, 2, measured(1.0, verification=UNPROVED))
    with pytest.raises(LookupMiss):
        ask(db)


def test_cold_times_come_before_warm_ones_and_do_not_compare(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(2.0, cache="warm"))
    assert ask(db) == (1, "measured here")
    remember(SXM, 2, measured(9.0, cache="cold"))
    assert ask(db) == (2, "measured here")


def test_the_order_of_knowledge(db: str, remember: Remember) -> None:
    remember(A100, 1, measured(0.1))
    with pytest.raises(LookupMiss):
        ask(db)
    remember(PCIE, 2, Predicted(predicted_us=0.2, verification=RIGHT))
    assert ask(db) == (2, "predicted")
    remember(SXM, 3, Predicted(predicted_us=0.9, verification=UNPROVED))
    assert ask(db) == (3, "predicted")
    remember(PCIE, 4, measured(5.0))
    assert ask(db) == (4, "same architecture")
    remember(SXM, 5, measured(8.0))
    assert ask(db) == (5, "measured here")
    assert ask(db, PCIE) == (4, "measured here")
    with open_store(db) as store:
        store.recheck(SXM.key, WORKLOAD, "softmax/example", lambda config: "r2")
    assert ask(db) == (4, "same architecture")
    with open_store(db) as store:
        store.recheck(PCIE.key, WORKLOAD, "softmax/example", lambda config: "r2")
    assert ask(db) == (5, "measured here")
    assert lookup("softmax", **DIMENSIONS, device=SXM, db=db).stale


def test_a_prediction_has_the_interval_it_was_recorded_with(db: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.9, verification=RIGHT, low_us=0.5, high_us=1.7))
    answer = lookup("softmax", **DIMENSIONS, device=SXM, db=db)
    assert (answer.expected_us, answer.interval_us, answer.ci_us) == (0.9, (0.5, 1.7), None)
    remember(SXM, 2, measured(8.0))  # and a measured time has none of a belief
    answer = lookup("softmax", **DIMENSIONS, device=SXM, db=db)
    assert (answer.expected_us, answer.interval_us) == (8.0, None)


def test_a_prediction_of_an_older_record_has_no_interval(db: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.9, verification=UNPROVED))
    answer = lookup("softmax", **DIMENSIONS, device=SXM, db=db)
    assert answer.interval_us is None
    assert (answer.expected_us, answer.ci_us, answer.cache, answer.verification) == (
        0.9,
        None,
        None,
        "not verified",
    )


def test_of_other_devices_the_nearest_answers(db: str, remember: Remember) -> None:
    limited = f"{SXM.architecture}:{SXM.name},sm={SXM.sm_count},power=350"
    remember(described()["h200-sxm"], 1, measured(1.0))
    remember(PCIE, 2, measured(0.5))
    assert ask(db, limited) == (1, "same architecture")  # 132 SMs, as asked for, before 114
    remember(SXM, 3, measured(2.0))
    assert ask(db, limited) == (3, "same architecture")  # the same product, with another power limit


def test_no_device_named_means_this_machines(db: str, remember: Remember) -> None:
    from tunebench import device

    remember(device.find(None), 1, measured(1.0))
    assert ask(db, None) == (1, "measured here")


# -- misses and mistakes ---------------------------------------------------------------------------


def test_a_miss_names_the_command_that_would_tune_it(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(A100, 1, measured(1.0))
    with pytest.raises(LookupMiss) as caught:
        ask(db)
    assert SXM.key in str(caught.value)
    assert f"tunebench tune --workload {WORKLOAD} --device offline --arch sm_90 --db {db}" in str(
        caught.value
    )
    monkeypatch.setenv("TUNEBENCH_DB", db)
    with pytest.raises(LookupMiss) as caught:
        lookup_workload(WORKLOAD, device="cpu")
    assert str(caught.value).endswith(f"tunebench tune --workload {WORKLOAD} --device cpu")
    assert "\n" not in str(caught.value)


def test_no_database_is_a_miss_and_makes_none(db: str) -> None:
    with pytest.raises(LookupMiss, match="does not exist yet"):
        ask(db)
    assert not Path(db).exists()
    Path(db).touch()
    with pytest.raises(LookupMiss):
        ask(db)


@pytest.mark.parametrize(
    ("operator", "dimensions", "named"),
    [
        ("softmaxx", DIMENSIONS, "softmax"),
        ("softmax", {"rows": 64, "cols": 128}, "missing dtype"),
        ("softmax", {**DIMENSIONS, "rows": 0}, "rows=0"),
        ("softmax", {**DIMENSIONS, "rows": [64]}, "rows="),
        ("softmax", {**DIMENSIONS, "rows": 64.0}, "rows=64.0"),
        ("softmax", {**DIMENSIONS, "rows": True}, "rows=True"),
        ("softmax", {**DIMENSIONS, "row": 1}, "rows"),
        ("softmax", {**DIMENSIONS, "dtype": "f64"}, "f32"),
        ("softmax:rows=1", DIMENSIONS, "unknown operator"),
    ],
)
def test_malformed_dimensions_are_named(
    db: str, operator: str, dimensions: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        lookup(operator, **dimensions, device=SXM, db=db)


@pytest.mark.parametrize("name", ["h101", "sm_90:h100-sxm,sm=many", ":,sm=1", ""])
def test_an_unknown_device_is_named(db: str, name: str) -> None:
    with pytest.raises(UnknownName, match="device"):
        ask(db, name)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database")
    with pytest.raises(DatabaseError, match=r"notes\.txt is not an SQLite database"):
        ask(str(path))
    with pytest.raises(DatabaseError, match="is a folder"):
        ask(str(tmp_path))


def test_a_database_of_another_program_is_named(db: str) -> None:
    connection = sqlite3.connect(db)
    connection.execute("CREATE TABLE moz_places (id INTEGER)")
    connection.close()
    with pytest.raises(SchemaError, match="answer_v1"):
        ask(db)


# -- what a process keeps --------------------------------------------------------------------------


def test_new_records_are_served_without_a_restart(db: str, remember: Remember) -> None:
    with open_store(db) as store:
        for number, median_us in enumerate((9.0, 8.0, 7.0)):
            _record(store, SXM, number, measured(median_us))
            assert ask(db) == (number, "measured here")
            assert ask(db) == (number, "measured here")
    remember(SXM, 5, measured(6.0))
    assert ask(db) == (5, "measured here")


def test_a_miss_ends_when_something_is_recorded(db: str, remember: Remember) -> None:
    for _ in range(2):
        with pytest.raises(LookupMiss):
            ask(db)
    remember(SXM, 1, measured(1.0))
    assert ask(db) == (1, "measured here")


def test_another_file_in_its_place_is_noticed(db: str, remember: Remember, tmp_path: Path) -> None:
    remember(SXM, 1, measured(1.0))
    assert ask(db) == (1, "measured here")
    other = tmp_path / "other.db"
    with open_store(other) as store:
        _record(store, SXM, 2, measured(2.0))
    other.replace(db)
    assert ask(db) == (2, "measured here")
    Path(db).unlink()
    with pytest.raises(LookupMiss):
        ask(db)


def test_threads_do_not_share_a_connection(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0))
    found: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: found.extend(ask(db) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(1, "measured here")] * 200


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_looks_up_too(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0))
    assert ask(db) == (1, "measured here")
    child = os.fork()
    if child == 0:
        try:
            remember(SXM, 2, measured(0.5))
            os._exit(0 if ask(db) == (2, "measured here") else 2)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(db) == (2, "measured here")


def test_a_folder_one_may_not_write_serves_and_sees_changes(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(1.0))
    probed = index._probed

    def refuse(uri: str, factory: type[sqlite3.Connection]) -> sqlite3.Connection:
        """Refuse as SQLite does where it cannot make the shared memory of a file in WAL mode."""
        if "immutable" not in uri:
            raise sqlite3.OperationalError("unable to open database file")
        return probed(uri, factory)

    monkeypatch.setattr(index, "_probed", refuse)
    assert ask(db) == (1, "measured here")
    remember(SXM, 2, measured(0.5))
    assert ask(db) == (2, "measured here")
    with open_store(db) as store:
        _record(store, SXM, 3, measured(0.1))  # and is still at it: its log holds what the file does not
        with pytest.raises(DatabaseError, match="cannot be opened"):
            ask(db)


# -- an answer may be outdated ---------------------------------------------------------------------


def test_an_answer_knows_whether_its_source_has_changed(db: str) -> None:
    cpu, softmax, problem = local_cpu(), variant("softmax/numba_cpu"), parse(WORKLOAD)
    config = softmax.default(problem, cpu)
    with open_store(db) as store:
        store.begin_run(RunStart(device=cpu, workload=WORKLOAD, sampler="bound", seed=0))
        for revision in (softmax.revision(problem, config), "another"):
            key = TrialKey(
                device=cpu.key, workload=WORKLOAD, variant=softmax.key, revision=revision, config=config
            )
            store.record(key, Result(outcome=measured(1.0)))
            outdated = lookup_workload(WORKLOAD, device="cpu", db=db).outdated()
            assert (outdated is None) == (revision != "another")
        assert outdated == "the source of softmax/numba_cpu has changed since it was timed"


def test_a_variant_or_a_value_that_is_gone_outdates_an_answer(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0))
    answer = lookup_workload(WORKLOAD, device=SXM, db=db)
    assert "unknown variant 'softmax/example'" in str(answer.outdated())


# -- an index of a server --------------------------------------------------------------------------


@pytest.fixture
def far_away(db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A URL whose server is this test's SQLite file."""
    import tunebench.db.store

    url = "postgresql://me:s3cret@far.away/tunes"

    def reach(location: Any, *, read_only: bool = False) -> Store:
        if not Path(db).exists():
            raise DatabaseError("the server is down")
        return Store(locate(db), read_only=read_only)

    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tunebench.db.store, "open_store", reach)
    monkeypatch.setattr(index, "_asked", {})
    return url


def test_a_server_is_read_through_an_index(
    db: str, far_away: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(3.0))
    remember(PCIE, 2, Predicted(predicted_us=0.2, verification=RIGHT))
    here = lookup_workload(WORKLOAD, device=SXM, db=db)
    there = lookup_workload(WORKLOAD, device=SXM, db=far_away)
    assert there.database == "postgresql://me:***@far.away/tunes"
    assert there.to_json() | {"database": db} == here.to_json()
    assert ask(far_away, PCIE) == ask(db, PCIE)

    remember(SXM, 3, measured(1.0))
    assert ask(far_away) == (1, "measured here")  # it asks the server once a minute
    monkeypatch.setattr(index, "REFRESH_S", 0.0)
    assert ask(far_away) == (3, "measured here")
    before = index.index_path(locate(far_away)).stat().st_ino
    assert ask(far_away) == (3, "measured here")
    assert index.index_path(locate(far_away)).stat().st_ino == before


def test_an_index_has_the_intervals_of_predictions(db: str, far_away: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.2, verification=RIGHT, low_us=0.1, high_us=0.4))
    assert lookup_workload(WORKLOAD, device=SXM, db=far_away).interval_us == (0.1, 0.4)


def test_an_index_outlives_its_server_and_says_so(
    db: str, far_away: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatabaseError, match="the server is down"):
        ask(far_away)
    remember(SXM, 1, measured(3.0))
    assert ask(far_away) == (1, "measured here")
    Path(db).unlink()
    monkeypatch.setattr(index, "REFRESH_S", 0.0)
    with pytest.warns(RuntimeWarning, match=r"answers are as of .*the server is down"):
        assert ask(far_away) == (1, "measured here")


def test_an_index_is_replaced_whole(db: str, remember: Remember, tmp_path: Path) -> None:
    remember(SXM, 1, measured(3.0))
    path = tmp_path / "index.db"
    with open_store(db) as store:
        index.export(store, path)

        def torn() -> Any:
            yield from store.answers()
            raise DatabaseError("the server is gone")

        broken = Store(locate(db))
        broken.answers = torn  # type: ignore[method-assign]
        broken.fingerprint = lambda: "new"  # type: ignore[method-assign]
        with pytest.raises(DatabaseError, match="gone"):
            index.export(broken, path)
        broken.close()
    assert ask(str(path)) == (1, "measured here")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.db", "index.db"]


def test_the_view_has_the_columns_that_are_exported() -> None:
    from tunebench.db import schema

    assert tuple(column.name for column in schema.answer_v1.columns) == index.COLUMNS


# -- what a serving process pays -------------------------------------------------------------------


def test_a_lookup_imports_nothing_heavy(db: str) -> None:
    cpu = local_cpu()
    with open_store(db) as store:
        _record(store, cpu, 1, measured(1.0))
    script = (
        "import json, sys\n"
        "from tunebench.answer import lookup\n"
        "from tunebench.errors import LookupMiss\n"
        f"answer = lookup('softmax', **{DIMENSIONS!r}, device='cpu', db=sys.argv[1])\n"
        "assert dict(answer.config) == {'tile': 1, 'order': 'nk'}\n"
        "try: lookup('softmax', rows=1, cols=1, dtype='f32', device='cpu', db=sys.argv[1])\n"
        "except LookupMiss: pass\n"
        "else: raise SystemExit('a miss was expected')\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))\n"
    )
    run = subprocess.run([sys.executable, "-c", script, db], check=True, capture_output=True, text=True)
    imported = set(json.loads(run.stdout))
    heavy = {
        "numpy",
        "sqlalchemy",
        "alembic",
        "optuna",
        "numba",
        "cuda",
        "torch",
        "typer",
        "rich",
        "ml_dtypes",
    }
    assert imported.isdisjoint(heavy)
    assert "sqlite3" in imported
