"""The store on SQLite: bad, read-only, full and old files; killed processes; imports."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tunebench.db
from tests.db.support import DEVICE, GOLDEN, WORKLOAD, begin, filled, key, load_golden, result, unprivileged
from tests.support import VERIFIED
from tunebench.db import (
    Demand,
    Location,
    Verdict,
    locate,
    new_owner,
    open_store,
    schema,
    upgrade,
)
from tunebench.db.engine import create_engine
from tunebench.db.location import default_path
from tunebench.db.owner import is_dead
from tunebench.db.record import outcome_from_row, result_columns
from tunebench.errors import DatabaseError, InputError, SchemaError
from tunebench.outcome import FAILURES, Measured, Predicted, Result, Verification

# -- where -----------------------------------------------------------------------------------------


def test_location_is_the_argument_then_the_environment_then_the_user_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "env.db"))
    assert locate("given.db") == Location(path=Path("given.db"))
    assert locate() == Location(path=tmp_path / "env.db")
    monkeypatch.setenv("TUNEBENCH_DB", "")
    assert locate() == Location(path=default_path())
    assert default_path().name == "tunebench.db"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("x.db", "x.db"),
        ("sqlite:///x.db", "x.db"),
        ("sqlite:////a/b%20c.db", "/a/b c.db"),
        ("sqlite+pysqlite:////a/b.db", "/a/b.db"),
    ],
)
def test_paths_and_sqlite_urls_name_files(text: str, path: str) -> None:
    assert locate(text) == Location(path=Path(path))


@pytest.mark.parametrize("text", ["sqlite://", "sqlite:///:memory:", "sqlite:///x.db?mode=ro", ":memory:"])
def test_a_database_must_be_a_file(text: str) -> None:
    with pytest.raises(InputError, match="must name a file"):
        locate(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:s3cret@host/db", "postgresql://me:***@host/db"),
        ("postgres://me:s3cret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql+psycopg://me:s3%40cret@[::1]:5432/db", "postgresql+psycopg://me:***@[::1]:5432/db"),
        ("postgresql://:s3cret@host", "postgresql://:***@host"),
        ("postgresql://host/db?password=s3cret&user=me", "postgresql://host/db?password=***&user=me"),
        ("postgresql://host/db?%70assword=s3cret", "postgresql://host/db?%70assword=***"),
        ("postgresql://host/db?sslpassword=s3cret", "postgresql://host/db?sslpassword=***"),
        ("mysql://me:s3cret@host/db", "mysql://me:***@host/db"),
        ("postgresql://me@/db?host=/run/pg", "postgresql://me@/db?host=/run/pg"),
        ("postgresql://h/db?application_name=a@b", "postgresql://h/db?application_name=a@b"),
        ("host=h dbname=d user=me password=s3cret", "postgresql:///d?host=h&user=me&password=***"),
        ("password = 's3cret it\\'s' host=/run/a", "postgresql:///?password=***&host=/run/a"),
    ],
)
def test_a_password_is_never_shown(text: str, shown: str) -> None:
    location = locate(text)
    assert str(location) == shown
    assert repr(location) == f"Location({shown!r})"
    assert locate(location.url) == location
    assert ("s3" in text) == ("s3" in str(location.url))


@pytest.mark.parametrize(
    "text",
    [
        "postgresql://me:s3@cret@host/db",
        "postgresql://a/b:s3cret@host/db",
        "postgresql://me:s3/cret@host/db",
        "postgresql://me:s3?cret@host/db",
        "postgresql://me:s3#cret@host/db",
        "postgresql://me:s3:cret@host/db",
        "postgresql://me:s3cret",
        "postgresql://me:s3]cret",
        "postgresql://me:x@'s3cret",
        "postgresql://me:1?s3cret@host/db",
        "postgresql://host/db?password=a&s3cret",
        "postgresql://host/db?password=a&)=s3cret",
        "postgresql://me:x@?!s3cret@host:5432/db?sslmode=require",
        "password=s3'cret host=h",
        "user=me password='s3cret host=h",
        "sqlite://me:s3cret@host/:memory:",
    ],
)
def test_ambiguous_urls_are_refused_without_their_password(text: str) -> None:
    with pytest.raises(InputError, match="database") as refusal:
        open_store(text)
    assert "s3" not in str(refusal.value)
    assert "cret" not in str(refusal.value)


def test_values_of_libpq_reach_the_driver() -> None:
    engine = create_engine(locate("host=h port=99 dbname=d user=me password='s3 cret'"))
    _, arguments = engine.dialect.create_connect_args(engine.url)
    expected = {"host": "h", "port": "99", "dbname": "d", "user": "me", "password": "s3 cret"}
    assert {name: str(value) for name, value in arguments.items() if name in expected} == expected


@pytest.mark.parametrize(
    "url", ["mysql://host/db", "oracle://host/db", "nonsense://x", "postgresql://host:port/db"]
)
def test_unsupported_servers_are_named(url: str) -> None:
    with pytest.raises(InputError, match="database"):
        open_store(url)


def test_the_default_folder_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TUNEBENCH_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "not" / "yet"))
    if sys.platform != "linux":
        pytest.skip("only Linux has a variable for the folder")
    filled(default_path())
    assert len(open_store().history(WORKLOAD)) == 3
    assert default_path().is_relative_to(tmp_path)


# -- bad databases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"hello\n", b"# a readme\n" * 100, b"SQLite format 3\0" + b"x" * 5000])
def test_file_that_is_not_a_database_is_left_unchanged(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "README.md"
    path.write_bytes(text)
    for attempt in (open_store, upgrade, lambda p: open_store(p, read_only=True)):
        with pytest.raises(DatabaseError, match=r"README\.md"):
            attempt(path)
    assert path.read_bytes() == text


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    path.touch()
    assert len(open_store(filled(path)).history(WORKLOAD)) == 3


def test_messages_are_one_line_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="is a folder; name a file in it") as caught:
        open_store(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(DatabaseError, match="its folder must exist"):
        open_store(tmp_path / "no" / "such" / "folder.db")


def test_reading_needs_a_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        open_store(tmp_path / "none.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_writes_nothing(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db")
    before = path.read_bytes()
    with open_store(path, read_only=True) as store:
        assert len(store.history(WORKLOAD)) == 3
        with pytest.raises(DatabaseError, match="cannot be written"):
            store.record(key(9), result())
    assert path.read_bytes() == before


def test_database_in_a_read_only_folder_can_be_read(open_folder: Path) -> None:
    path = filled(open_folder / "x.db")
    path.chmod(0o444)
    open_folder.chmod(0o555)
    with unprivileged():
        with open_store(path, read_only=True) as store:
            assert len(store.history(WORKLOAD)) == 3
        with pytest.raises(DatabaseError, match="cannot be"):
            open_store(path)
        with pytest.raises(DatabaseError, match="cannot be opened"):
            open_store(open_folder / "new.db")


def test_a_full_disk_loses_nothing_and_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path / "x.db") as store:
        begin(store)
        with store.reading() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 4}")
        recorded = 0

        def record_until_full() -> None:
            nonlocal recorded
            while recorded < 1000:
                store.record(key(recorded), result())
                recorded += 1

        with pytest.raises(DatabaseError, match="disk is full") as caught:
            record_until_full()
        assert "\n" not in str(caught.value)
        assert recorded > 0
        assert len(store.history(WORKLOAD)) == recorded
        with store.reading() as connection:
            connection.exec_driver_sql("PRAGMA max_page_count = 100000")
        store.record(key(recorded), result())
        assert len(store.history(WORKLOAD)) == recorded + 1


def test_damaged_file_and_wrong_file_have_different_messages(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db", count=200)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(DatabaseError, match=r"is damaged.*recover"):
        open_store(path).history(WORKLOAD)


def test_missing_schema_revision_is_reported(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM alembic_version")
    with pytest.raises(SchemaError, match="restore a copy"):
        open_store(path)


# -- schema ----------------------------------------------------------------------------------------


def test_every_revision_has_its_step_and_its_golden_file() -> None:
    folder = Path(str(schema.__file__)).parent / "migrations" / "versions"
    steps = sorted(path.name[:4] for path in folder.glob("[0-9]*.py"))
    assert steps == list(schema.REVISIONS)
    assert sorted(path.stem for path in GOLDEN.glob("schema_*.sql")) == [
        f"schema_{r}" for r in schema.REVISIONS
    ]


@pytest.mark.parametrize("revision", schema.REVISIONS)
def test_golden_databases_are_upgraded_and_read(tmp_path: Path, revision: str) -> None:
    path = tmp_path / "golden.db"
    load_golden(revision, path)
    assert upgrade(path) == (revision, schema.HEAD)
    with open_store(path) as store:
        entries = store.history(WORKLOAD)
        kinds = [entry.result.outcome.kind for entry in entries]
        assert kinds == [
            "measured",
            "predicted",
            "aborted",
            "pruned",
            *(failure.kind for failure in FAILURES),
            *("measured",) * 3,
        ]
        assert entries[0].result.outcome == Measured(
            median_us=12.5,
            ci_us=(12.375, 12.625),
            samples_us=(12.5, 12.625, 12.375),
            cache="cold",
            verification=VERIFIED,
            conditions={"sm_clock_mhz": 1980},
            metrics={} if revision < "0008" else {"power_w": 287.5, "energy_j": 0.0021},
        )
        assert entries[0].recorded_at == datetime(2026, 11, 20, 12, 0, 3, tzinfo=UTC)
        assert entries[0].result.conditions == {"driver": "580.1", "host": "node7"}
        assert entries[9].purpose == "finalist"
        assert [entry.id for entry in store.best(WORKLOAD)] == [10, 12, 11, 2]
        stats = store.stats()
        assert (stats.trials, stats.claimed, stats.stale, stats.runs) == (11, 1, 1, 1)
        assert store.claim(key(30), new_owner())  # its claim has expired


def test_verdicts_of_a_golden_database_are_read(tmp_path: Path) -> None:
    path = tmp_path / "golden.db"
    load_golden("0003", path)
    upgrade(path)
    with open_store(path) as store:
        verdicts = {entry.id: entry.verdict for entry in store.history(WORKLOAD)}
    compared = {"default": {"ratio": 1.25, "low": 1.2, "high": 1.3, "probability": 1.0}}
    assert verdicts.pop(10) == Verdict(versus_default="faster", comparison=compared)
    assert set(map(str, verdicts.values())) == {str(Verdict())}


def test_recorded_problems_of_a_golden_database_are_read(tmp_path: Path) -> None:
    path = tmp_path / "golden.db"
    load_golden("0004", path)
    upgrade(path)
    with open_store(path) as store:
        first, last = datetime(2026, 11, 20, 12, 1, tzinfo=UTC), datetime(2026, 11, 20, 12, 3, tzinfo=UTC)
        gemm = Demand(
            workload="gemm:m=64,n=64,k=64,dtype=f32",
            calls=40,
            time_us=812.5,
            first_noted_at=first,
            last_noted_at=last,
        )
        assert store.demand(DEVICE.key)[0] == gemm  # rows of two origins
        assert [demand.workload for demand in store.demand(DEVICE.key)] == [gemm.workload, WORKLOAD]


def test_upgrade_computes_the_fastest_samples_of_old_records(tmp_path: Path) -> None:
    path = tmp_path / "golden.db"
    load_golden("0002", path)
    upgrade(path)
    with open_store(path) as store:
        samples = store.fastest_samples(DEVICE.key, WORKLOAD, "softmax/example")
    assert [sample.fastest_us for sample in samples] == [12.375, 98.5, 12.87, 10.89, 11.879999999999999]


# -- outcomes as columns ---------------------------------------------------------------------------

times = st.floats(min_value=1e-3, max_value=1e9)
verifications = st.builds(
    Verification,
    how=st.sampled_from(["reference", "emulated", "simulated", "not verified"]),
    detail=st.text(),
    worst=st.none() | st.floats(0, 1),
)


@pytest.mark.slow
@given(
    st.builds(
        Measured,
        median_us=times,
        ci_us=st.tuples(times, times),
        samples_us=st.lists(times).map(tuple),
        cache=st.sampled_from(["cold", "warm"]),
        verification=verifications,
        conditions=st.dictionaries(st.text(), st.integers() | st.text()),
    )
    | st.builds(
        Predicted,
        predicted_us=times,
        verification=verifications,
        low_us=st.none() | times,
        high_us=st.none() | times,
    )
    | st.builds(lambda cls, reason: cls(reason=reason), st.sampled_from(FAILURES), st.text())
)
def test_outcomes_survive_their_columns(outcome: Measured) -> None:
    assert outcome_from_row(result_columns(Result(outcome=outcome))) == outcome


# -- processes -------------------------------------------------------------------------------------


def test_an_owner_is_alive_until_its_process_ends() -> None:
    owner = new_owner()
    assert owner != new_owner()
    assert not is_dead(owner)
    ended = subprocess.Popen(
        [sys.executable, "-c", "import tunebench.db as d; print(d.new_owner())"], stdout=-1
    )
    text = ended.communicate()[0].decode().strip()
    assert is_dead(text)
    for foreign in ("", "me", "host:1:2:3", f"otherhost:{text.split(':', 1)[1]}"):
        assert not is_dead(foreign)


_TUNER = """
import sys
sys.path.insert(0, {folder!r})
from tests.db.support import begin, key, result
from tunebench.db import new_owner, open_store

with open_store({path!r}) as store:
    begin(store)
    owner = new_owner()
    for number in range(100000):
        if store.claim(key(number), owner):
            store.record(key(number), result())
            print(number, flush=True)
"""


@pytest.mark.slow
def test_process_killed_at_any_moment_loses_and_repeats_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    script = _TUNER.format(folder=str(Path(__file__).parents[2]), path=str(path))
    reported: list[int] = []
    for round_ in range(3):
        tuner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert tuner.stdout is not None
        reported.append(int(tuner.stdout.readline()))
        time.sleep(0.05 * round_)
        tuner.send_signal(signal.SIGKILL)
        reported += [int(line) for line in tuner.stdout.read().splitlines() if line]
        tuner.wait()
        tuner.stdout.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    with open_store(path) as store:
        recorded = [entry.key.config["tile"] for entry in store.history(WORKLOAD)]
        assert set(reported) <= set(recorded)
        assert len(recorded) == len(set(recorded))
        begin(store)
        assert store.stats().claimed == 0
        assert recorded == list(range(len(recorded)))


def test_a_writer_waits_for_another(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db")
    script = (
        "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "c.execute('BEGIN IMMEDIATE'); print('held', flush=True); time.sleep(0.3); c.execute('COMMIT')"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    with open_store(path) as store:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        store.record(key(9), result())
        assert len(store.history(WORKLOAD)) == 4
    assert holder.wait() == 0
    holder.stdout.close()


def test_commits_survive_a_power_cut(tmp_path: Path) -> None:
    with open_store(tmp_path / "x.db") as store, store.reading() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_claims_last_longer_than_any_trial_should() -> None:
    from tunebench.db.store import CLAIM_S

    assert timedelta(seconds=CLAIM_S) >= timedelta(minutes=5)


# -- imports ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_public_names_exist_and_importing_them_is_lazy() -> None:
    script = (
        "import sys, tunebench.db\n"
        "assert 'sqlalchemy' not in sys.modules\n"
        "for name in tunebench.db.__all__: getattr(tunebench.db, name)\n"
        "assert 'sqlalchemy' in sys.modules\n"
        "with tunebench.db.open_store(sys.argv[1]): pass\n"
        "with tunebench.db.open_store(sys.argv[1]): pass\n"
        "assert 'alembic' not in sys.modules\n"
    )
    path = os.environ["TUNEBENCH_DB"]
    subprocess.run([sys.executable, "-W", "error", "-c", script, path], check=True)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        tunebench.db.nothing_of_the_kind  # noqa: B018 (the access is the test)
