"""Lookup: which configuration is returned, from which source, and what a lookup imports."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.support import VERIFIED, needs_fork
from tunebench.answer import (
    Answer,
    BaselineComparison,
    Unmeasured,
    _cache,
    _reader,
    generation,
    lookup,
    lookup_workload,
    records_state,
    tried_operators,
)
from tunebench.answer._estimate import LAYOUT_DISTANCE, workload_distance
from tunebench.db import (
    RunStart,
    Store,
    TrialKey,
    Verdict,
    bundled,
    locate,
    lookup_index,
    open_store,
    sqlite_file,
    write_count,
)
from tunebench.db.exchange import Selection, export_to, import_file
from tunebench.device import Device, described, local_cpu
from tunebench.errors import DatabaseError, InputError, LookupMiss, SchemaError, UnknownName
from tunebench.kernels import variant
from tunebench.outcome import Crashed, Measured, Outcome, Predicted, Result, Verification, WrongResult
from tunebench.space import Config
from tunebench.workloads import parse

SXM, PCIE, A100 = (described()[name] for name in ("h100-sxm", "h100-pcie", "a100-80-sxm"))
DIMENSIONS: dict[str, Any] = {"rows": 64, "cols": 128, "dtype": "f32"}
WORKLOAD = "softmax:rows=64,cols=128,dtype=f32"
PROBLEM = parse(WORKLOAD)
GPU, CPU = variant("softmax/cuda_block"), variant("softmax/numba_cpu")
UNPROVED = Verification(how="not verified", detail="g++ is not installed")

Remember = Callable[..., None]


def measured(median_us: float, **changes: Any) -> Measured:
    return support.measured(median_us, ci_us=(median_us - 0.5, median_us + 0.5), **changes)


def later() -> None:
    """Let the next lookup check the files, after pending refreshes of servers."""
    _cache.lookup_cache.look()
    lookup_index.join_refreshes()
    _cache.lookup_cache.due = 0.0


@pytest.fixture
def db(tmp_path: Path) -> str:
    return str(tmp_path / "answers.db")


def numbered(number: int, device: Device = SXM, workload: str = WORKLOAD) -> Config:
    """Return a valid configuration for a workload on a device, by number."""
    return _variant(device).configs(parse(workload), device).config(number)


def _variant(device: Device) -> Any:
    return GPU if device.kind == "gpu" else CPU


@pytest.fixture
def remember(db: str) -> Remember:
    """Record an outcome of a configuration, given by number."""

    def record(device: Device, number: int, outcome: Outcome, **said: Any) -> None:
        with open_store(db) as store:
            _record(store, device, number, outcome, **said)

    return record


def _record(
    store: Store,
    device: Device,
    number: int,
    outcome: Outcome,
    *,
    workload: str = WORKLOAD,
    revision: str | None = None,
    variant: str | None = None,
    bound_us: float = 0.01,
    **said: Any,
) -> None:
    store.begin_run(RunStart(device=device, workload=workload, sampler="bound", seed=0))
    config = numbered(number, device, workload)
    key = TrialKey(
        device=device.key,
        workload=workload,
        variant=variant or _variant(device).key,
        revision=revision or _variant(device).revision(parse(workload), config),
        config=config,
    )
    store.record(key, Result(outcome=outcome), bound_us=bound_us, **said)


def ask(db: str, device: Device | str | None = SXM, *, strict: bool = True) -> tuple[int, str]:
    """Return the number of the configuration that is returned, and the source of the answer."""
    answer = lookup("softmax", **DIMENSIONS, device=device, db=db, strict=strict)
    on = device if isinstance(device, Device) else SXM
    if answer.variant == CPU.key:
        on = local_cpu()
    row = _variant(on).configs(PROBLEM, on).row(answer.config)
    return row, answer.how


@pytest.mark.parametrize(("device", "variant"), [(SXM, "cuda_wgmma_backward"), (A100, "cuda_mma_backward")])
def test_reproducible_answer_has_no_atomic_sums(device: Device, variant: str, db: str) -> None:
    text = "attention:batch=2,heads=8,seq_q=1024,head_dim=64,dtype=f16,direction=backward"
    for reproducible, dq in ((False, "atomic"), (True, "second_pass")):
        answer = lookup_workload(text, device=device, db=db, quiet=True, reproducible=reproducible)
        assert (answer.variant, answer.config["dq"]) == (f"attention/{variant}", dq)
    scatter = "scatter_add:rows=9,cols=6,bins=5,dtype=f32"
    with pytest.raises(LookupMiss, match=r"cuda_atomic with .* depend on the order of atomic additions"):
        lookup_workload(scatter, device=device, db=db, reproducible=True)


def test_reproducible_answer_by_an_objective_has_no_atomic_sums(db: str) -> None:
    text = "attention:batch=2,heads=8,seq_q=1024,head_dim=64,dtype=f16,direction=backward"
    key = "attention/cuda_mma_backward"
    ask_goal = functools.partial(lookup_workload, text, device=A100, db=db, objective="time_us")
    default = variant(key).default(parse(text), A100)
    support.record_outcome(db, text, A100, key, Config({**default, "dq": "atomic"}), support.measured(1.0))
    with pytest.raises(LookupMiss, match="time_us and reproducible results"):
        ask_goal(reproducible=True)
    support.record_outcome(
        db, text, A100, key, Config({**default, "dq": "second_pass"}), support.measured(2.0)
    )
    answers = [ask_goal(reproducible=reproducible) for reproducible in (False, True)]
    assert [answer.config["dq"] for answer in answers] == ["atomic", "second_pass"]


def ask_quietly(db: str) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unmeasured)
        return lookup("softmax", **DIMENSIONS, device=SXM, db=db)


# -- answers from records --------------------------------------------------------------------------


def test_answer_has_every_field(db: str, remember: Remember) -> None:
    versus = {"ratio": 1.5, "low": 1.2, "high": None, "probability": 0.99}
    verdict = Verdict(versus_default="faster", comparison={"libraries": {"torch": versus}})
    remember(SXM, 7, measured(12.5), bound_us=10.0, verdict=verdict)
    answer = lookup("softmax", **DIMENSIONS, device="h100-sxm", db=db)
    assert answer == Answer(
        workload=WORKLOAD,
        device=SXM.key,
        how="measured here",
        because=f"measured for {SXM.key} on {answer.recorded_at:%Y-%m-%d}",
        variant="softmax/cuda_block",
        config=numbered(7),
        expected_us=12.5,
        ci_us=(12.0, 13.0),
        bound_us=10.0,
        cache="cold",
        verification="reference",
        revision=GPU.revision(PROBLEM, numbered(7)),
        recorded_at=answer.recorded_at,
        database=db,
        baselines={
            "torch": BaselineComparison(ratio=1.5, low=1.2, high=None, time_us=18.75, probability=0.99)
        },
    )
    assert answer.exact
    assert answer.baselines["torch"].faster
    assert list(answer.config) == list(GPU.space.names)
    plain = json.loads(json.dumps(answer.to_json()))
    assert (plain["config"], plain["how"], plain["ci_us"], plain["libraries"]) == (
        dict(numbered(7)),
        "measured here",
        [12.0, 13.0],
        {"torch": {"ratio": 1.5, "low": 1.2, "high": None, "time_us": 18.75, "probability": 0.99}},
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


def test_text_of_a_workload_is_looked_up_with_changes(db: str, remember: Remember) -> None:
    remember(SXM, 0, measured(10.0))
    answer = lookup(WORKLOAD, device="h100-sxm", db=db)
    assert answer == lookup("softmax", **DIMENSIONS, device="h100-sxm", db=db)
    assert lookup("softmax:rows=8,cols=128,dtype=f32", rows=64, device="h100-sxm", db=db) == answer
    with pytest.raises(InputError, match="expected dimension=value"):
        lookup("softmax:rows", device="h100-sxm", db=db)
    with pytest.raises(InputError, match="depth"):
        lookup(WORKLOAD, depth=1, device="h100-sxm", db=db)


def test_lookup_returns_the_fastest_correct_configuration(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(3.0))
    remember(SXM, 2, measured(2.0))
    remember(SXM, 3, measured(1.0, verification=UNPROVED))
    remember(SXM, 4, Crashed(reason="signal 11"))
    remember(SXM, 5, measured(0.5))
    remember(SXM, 5, WrongResult(reason="y[0] is nan"))
    assert ask(db) == (2, "measured here")


def test_lookup_with_only_failures_is_a_miss(db: str, remember: Remember) -> None:
    remember(SXM, 1, WrongResult(reason="y[0] is nan"))
    remember(SXM, 2, measured(1.0, verification=UNPROVED))
    with pytest.raises(LookupMiss):
        ask(db)


def test_cold_times_come_before_warm_ones_and_do_not_compare(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(2.0, cache="warm"))
    assert ask(db) == (1, "measured here")
    remember(SXM, 2, measured(9.0, cache="cold"))
    assert ask(db) == (2, "measured here")


def test_configuration_with_a_wrong_result_here_is_not_inferred(db: str, remember: Remember) -> None:
    asked = functools.partial(ask, db, strict=False)
    remember(A100, 1, measured(0.1))
    remember(SXM, 6, measured(90.0), workload="softmax:rows=64,cols=256,dtype=f32")
    with pytest.warns(Unmeasured):
        assert asked() == (6, "neighbour")
    remember(SXM, 6, WrongResult(reason="y[0] is nan"))
    assert asked() == (1, "other architecture")
    remember(SXM, 1, WrongResult(reason="y[0] is nan"))
    default = GPU.configs(PROBLEM, SXM).row(GPU.default(PROBLEM, SXM))
    assert asked() == (default, "predicted")
    remember(SXM, default, WrongResult(reason="y[0] is nan"))
    assert ask_quietly(db).variant != GPU.key
    with pytest.raises(LookupMiss, match="had a wrong result"):
        lookup_workload(PROBLEM, device=SXM, db=db, variant=GPU.key)


def test_order_of_answer_sources(db: str, remember: Remember) -> None:
    twice = "softmax:rows=64,cols=256,dtype=f32"
    far = "softmax:rows=4096,cols=128,dtype=f32"
    asked = functools.partial(ask, db, strict=False)
    with pytest.warns(Unmeasured, match="nothing comparable was measured"):
        assert asked() == (GPU.configs(PROBLEM, SXM).row(GPU.default(PROBLEM, SXM)), "predicted")
    remember(PCIE, 2, Predicted(predicted_us=0.2, verification=VERIFIED))
    assert asked() == (2, "predicted")
    remember(A100, 1, measured(0.1))
    assert asked() == (1, "other architecture")
    remember(SXM, 6, measured(90.0), workload=far)
    assert asked() == (6, "neighbour")
    remember(SXM, 7, measured(9.0), workload=twice)
    assert asked() == (7, "neighbour")
    remember(SXM, 3, Predicted(predicted_us=0.9, verification=UNPROVED))
    assert asked() == (3, "predicted")  # tuned for this device
    with pytest.raises(LookupMiss, match="nothing was measured"):
        ask(db)
    remember(PCIE, 4, measured(5.0))
    assert ask(db) == (4, "same architecture")
    remember(SXM, 5, measured(8.0))
    assert ask(db) == (5, "measured here")
    assert ask(db, PCIE) == (4, "measured here")
    with open_store(db) as store:
        store.recheck(SXM.key, WORKLOAD, GPU.key, lambda config: "another")
    assert ask(db) == (4, "same architecture")
    with open_store(db) as store:
        store.recheck(PCIE.key, WORKLOAD, GPU.key, lambda config: "another")
    assert asked() == (7, "neighbour")  # stale records are not returned
    with open_store(db) as store:
        store.recheck(SXM.key, WORKLOAD, GPU.key, lambda config: GPU.revision(PROBLEM, config))
    assert ask(db) == (5, "measured here")


# -- configurations that cannot run ----------------------------------------------------------------


def test_stale_record_is_not_returned(db: str, remember: Remember) -> None:
    """The record is not marked as stale yet: checking the variant finds it."""
    remember(SXM, 1, measured(1.0), revision="of long ago")
    with pytest.raises(LookupMiss, match="softmax/cuda_block has changed since it was measured"):
        ask(db)
    remember(SXM, 2, measured(2.0))
    with open_store(db) as store:  # as tune does before it starts
        store.recheck(SXM.key, WORKLOAD, GPU.key, lambda config: GPU.revision(PROBLEM, config))
    assert ask(db) == (2, "measured here")


def test_record_of_an_unknown_variant_is_not_returned(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0), variant="softmax/of_a_plugin")
    with pytest.raises(LookupMiss, match="unknown variant 'softmax/of_a_plugin'"):
        ask(db)


def test_configuration_that_the_device_cannot_run_is_not_returned(db: str) -> None:
    """A device of the same architecture with less shared memory: the best configuration does not fit."""
    product, text = variant("gemm/cuda_mma"), "gemm:m=512,n=512,k=512,dtype=f16"
    problem = parse(text)
    small = dataclasses.replace(SXM, name="h100-small", smem_per_block_bytes=48 << 10)
    wide, narrow = product.configs(problem, SXM), product.configs(problem, small)
    config = next(wide.config(i) for i in range(len(wide)) if narrow.row(wide.config(i)) is None)
    with open_store(db) as store:
        store.begin_run(RunStart(device=SXM, workload=text, sampler="bound", seed=0))
        revision = product.revision(problem, config)
        key = TrialKey(device=SXM.key, workload=text, variant=product.key, revision=revision, config=config)
        store.record(key, Result(outcome=measured(1.0)))
    assert lookup_workload(text, device=SXM, db=db).config == config
    with pytest.raises(LookupMiss, match="violates"):
        lookup_workload(text, device=small, db=db, strict=True)
    with pytest.warns(Unmeasured):
        answer = lookup_workload(text, device=small, db=db)
    assert narrow.row(answer.config) is not None or answer.variant != product.key


def test_valid_record_is_not_checked_again_until_a_file_changes(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.answer import _validity

    asked: list[str] = []
    real = _validity.check_variant

    def ask_variant(row: Any, device: Any) -> str | None:
        asked.append(row.variant)
        return real(row, device)

    monkeypatch.setattr(_validity, "check_variant", ask_variant)
    for files in ("some files", "other files"):
        monkeypatch.setattr(_validity, "signature", lambda files=files: files)
        for _ in range(2):
            remember(SXM, 1, measured(1.0))
            assert ask(db) == (1, "measured here")
    assert asked == [GPU.key, GPU.key]


# -- neighbours ------------------------------------------------------------------------------------


def test_neighbour_with_the_shortest_expected_time_is_returned(db: str, remember: Remember) -> None:
    """Equal rows, twice and half as many: the slower one is not chosen."""
    remember(SXM, 1, measured(40.0), workload="softmax:rows=128,cols=128,dtype=f32")
    remember(SXM, 2, measured(4.0), workload="softmax:rows=32,cols=128,dtype=f32")
    with pytest.warns(Unmeasured, match="softmax:rows=32,cols=128,dtype=f32 took 4.00 us"):
        answer = lookup("softmax", **DIMENSIONS, device=SXM, db=db)
    assert (answer.how, answer.config) == ("neighbour", numbered(2))
    assert answer.expected_us >= 4.0 * 0.9
    assert answer.expected_us >= (answer.bound_us or 0.0)
    assert answer.ci_us is None


def test_other_dtypes_and_operations_are_not_neighbours(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(4.0), workload="softmax:rows=64,cols=128,dtype=f16")
    remember(SXM, 2, measured(4.0), workload="softmax:rows=64,cols=128,dtype=f32,log=true")
    with pytest.warns(Unmeasured):
        assert ask(db, strict=False)[1] == "predicted"
    remember(SXM, 3, measured(4.0), workload="softmax:rows=64,cols=128,dtype=f32,prologue=scale")
    assert ask(db, strict=False) == (3, "neighbour")  # a fused operation counts


def test_neighbour_has_a_wider_baseline_interval(db: str, remember: Remember) -> None:
    versus = {"ratio": 1.5, "low": 1.08, "high": 2.0, "probability": 0.99}
    verdict = Verdict(versus_default="faster", comparison={"libraries": {"torch": versus}})
    remember(SXM, 1, measured(4.0), workload="softmax:rows=64,cols=256,dtype=f32", verdict=verdict)
    with pytest.warns(Unmeasured):
        baseline = lookup("softmax", **DIMENSIONS, device=SXM, db=db).baselines["torch"]
    assert baseline.ratio == 1.5
    assert 0.9 < baseline.low < 1 < 2.0 < (baseline.high or 0.0)
    assert not baseline.faster


def test_lookup_of_one_variant(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(4.0))
    with pytest.warns(Unmeasured):
        answer = lookup_workload(WORKLOAD, device=SXM, db=db, variant="softmax/numba_cuda")
    assert (answer.variant, answer.how) == ("softmax/numba_cuda", "predicted")


def test_unsupported_workload_has_no_inferred_answer(db: str) -> None:
    product = "gemm:m=64,n=64,k=64,dtype=e4m3"
    with pytest.raises(LookupMiss, match="no variant supports"):
        lookup_workload(product, device="cpu", db=db)


def test_device_known_only_by_key_uses_its_architecture(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0))
    assert ask(db, "sm_90:no-such-card,sm=100") == (1, "same architecture")
    with pytest.raises(UnknownName, match="sm_91"):
        ask(db, "sm_91:no-such-card,sm=100", strict=False)


def test_unmeasured_answer_warns_once(db: str, remember: Remember) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ask(db, strict=False)
            write_count.count_write()
    assert [warning.category for warning in caught] == [Unmeasured]
    assert caught[0].filename == __file__


def test_prediction_has_its_recorded_interval(db: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.9, verification=VERIFIED, low_us=0.5, high_us=1.7))
    answer = ask_quietly(db)
    assert (answer.expected_us, answer.interval_us, answer.ci_us) == (0.9, (0.5, 1.7), None)
    remember(SXM, 2, measured(8.0))  # and a measured time has no prediction interval
    answer = ask_quietly(db)
    assert (answer.expected_us, answer.interval_us) == (8.0, None)


def test_a_prediction_of_an_older_record_has_no_interval(db: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.9, verification=UNPROVED))
    answer = ask_quietly(db)
    assert answer.interval_us is None
    assert (answer.expected_us, answer.ci_us, answer.cache, answer.verification) == (
        0.9,
        None,
        None,
        "not verified",
    )


def test_nearest_other_device_is_preferred(db: str, remember: Remember) -> None:
    limited = f"{SXM.architecture}:{SXM.name},sm={SXM.sm_count},power=350"
    remember(described()["h200-sxm"], 1, measured(1.0))
    remember(PCIE, 2, measured(0.5))
    assert ask(db, limited) == (1, "same architecture")  # 132 SMs, like the target, before 114
    remember(SXM, 3, measured(2.0))
    assert ask(db, limited) == (3, "same architecture")  # the same product with another power limit


def test_default_device_is_this_machine(db: str, remember: Remember) -> None:
    from tunebench import device

    remember(device.find(None), 1, measured(1.0))
    assert ask(db, None) == (1, "measured here")


# -- misses and mistakes ---------------------------------------------------------------------------


def test_miss_names_the_tune_command(db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(A100, 1, measured(1.0))
    with pytest.raises(LookupMiss) as caught:
        ask(db)
    assert SXM.key in str(caught.value)
    assert f"tunebench tune --workload {WORKLOAD} --device h100-sxm --db {db}" in str(caught.value)
    monkeypatch.setenv("TUNEBENCH_DB", db)
    with pytest.raises(LookupMiss) as caught:
        lookup_workload(WORKLOAD, device="cpu", strict=True)
    assert str(caught.value).endswith(f"tunebench tune --workload {WORKLOAD} --device cpu")
    assert "\n" not in str(caught.value)


def test_missing_database_is_a_miss_and_is_not_created(db: str) -> None:
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
        ("softmax:rows=1", DIMENSIONS, "missing"),
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


def test_lookup_names_a_file_that_is_not_a_database(tmp_path: Path) -> None:
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


def test_newer_schema_is_refused_by_lookup_also_while_it_is_open(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(3.0))
    assert ask(db) == (1, "measured here")
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    for _ in range(2):
        later()
        with pytest.raises(SchemaError, match=r"9999.*newer.*upgrade tunebench"):
            ask(db)


def test_view_that_never_ends_is_an_error(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(3.0))
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("DROP VIEW answer_v1")
        columns = {
            **dict.fromkeys(lookup_index.COLUMNS, f"'{WORKLOAD}'"),
            "architecture": "'sm_90'",
            "stale": "0",
        }
        connection.execute(
            f"""CREATE VIEW answer_v1 AS WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)
            SELECT {", ".join(f"{value} AS {name}" for name, value in columns.items())} FROM n"""
        )
    later()
    monkeypatch.setattr(_reader, "QUERY_S", 0.1)
    with pytest.raises(DatabaseError, match=r"did not answer a query within .* db verify"):
        ask(db)


@pytest.mark.parametrize("frozen", [False, True])
def test_views_and_triggers_of_a_file_call_no_functions_with_side_effects(
    db: str, remember: Remember, frozen: bool
) -> None:
    remember(SXM, 1, measured(3.0))
    with contextlib.closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("CREATE VIEW trap AS SELECT spring() AS x")
    open_it = sqlite_file._copy if frozen else sqlite_file.open_read_only
    if frozen:
        shutil.copyfile(db, f"{db}-wal")  # no valid log: it is ignored
    with contextlib.closing(open_it(Path(db))) as connection:
        connection.create_function("spring", 0, lambda: pytest.fail("the file called a function"))
        with pytest.raises(sqlite3.OperationalError, match="unsafe use of spring"):
            connection.execute("SELECT * FROM trap").fetchall()
        assert connection.execute("PRAGMA cell_size_check").fetchone() == (1,)


# -- bundled records -------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Bundle the records of a database."""
    folder = tmp_path / "bundled"
    monkeypatch.setattr(bundled, "FOLDER", folder)

    def export(db: str) -> None:
        with open_store(db) as store:
            bundled.export_bundled(store, folder)
        Path(db).unlink()
        later()

    return export


def test_bundled_records_rank_after_the_users_records(
    db: str, remember: Remember, bundle: Callable[[str], None]
) -> None:
    versus = {"ratio": 1.5, "low": 1.2, "high": None, "probability": 0.99}
    verdict = Verdict(comparison={"libraries": {"torch": versus}})
    remember(SXM, 1, measured(3.0), verdict=verdict)
    remember(A100, 2, measured(3.0))
    bundle(db)
    assert ask(db) == (1, "measured here")
    assert not Path(db).exists()
    assert lookup("softmax", **DIMENSIONS, device=SXM, db=db).baselines["torch"].faster
    assert ask(db, PCIE) == (1, "same architecture")
    with pytest.warns(Unmeasured):
        assert ask(db, "l4", strict=False)[1] == "other architecture"
    remember(SXM, 3, measured(9.0))
    assert ask(db) == (3, "measured here")  # the user's own record ranks first, although it is slower
    assert ask(db, PCIE) == (3, "same architecture")


# -- cached answers --------------------------------------------------------------------------------


def test_new_records_are_returned_without_a_restart(db: str, remember: Remember) -> None:
    with open_store(db) as store:
        for number, median_us in enumerate((9.0, 8.0, 7.0)):
            _record(store, SXM, number, measured(median_us))
            assert ask(db) == (number, "measured here")
            assert ask(db) == (number, "measured here")
    remember(SXM, 5, measured(6.0))
    assert ask(db) == (5, "measured here")


def test_cached_answer_is_not_returned_for_values_of_other_types_or_another_database(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remember(SXM, 7, measured(9.0))
    monkeypatch.setenv("TUNEBENCH_DB", db)
    rows = DIMENSIONS["rows"]
    assert isinstance(rows, int)
    for _ in range(2):
        assert lookup("softmax", **DIMENSIONS, device=SXM, strict=True).expected_us == 9.0
        with pytest.raises(InputError):
            lookup("softmax", **{**DIMENSIONS, "rows": float(rows)}, device=SXM)
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "other.db"))
    with pytest.raises(LookupMiss):
        lookup("softmax", **DIMENSIONS, device=SXM, strict=True)


@pytest.mark.slow
def test_records_of_other_processes_are_returned_soon(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_cache, "monotonic", lambda: now)
    monkeypatch.setattr(_cache.lookup_cache, "due", 0.0)
    remember(SXM, 1, measured(9.0))
    assert ask(db) == (1, "measured here")
    script = "import sys; sys.path.insert(0, sys.argv[2])\n"
    script += "import tests.answer.test_answer as t; from tunebench.db import *\n"
    script += "with open_store(sys.argv[1]) as s: t._record(s, t.SXM, 2, t.measured(1.0))"
    subprocess.run([sys.executable, "-c", script, db, str(Path(__file__).parents[2])], check=True)
    assert ask(db) == (1, "measured here")
    now += 1.001 * _cache.FRESH_S
    assert ask(db) == (2, "measured here")


def test_generation_changes_with_new_records(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", db)
    remember(SXM, 1, measured(9.0))
    ask(db)
    before = generation()
    assert generation() == before
    remember(SXM, 2, measured(9.0))
    assert generation() != before


def test_miss_ends_after_a_record(db: str, remember: Remember) -> None:
    for _ in range(2):
        with pytest.raises(LookupMiss):
            ask(db)
    remember(SXM, 1, measured(1.0))
    assert ask(db) == (1, "measured here")


def test_replaced_file_is_noticed(db: str, remember: Remember, tmp_path: Path) -> None:
    remember(SXM, 1, measured(1.0))
    assert ask(db) == (1, "measured here")
    replacement = tmp_path / "other.db"
    with open_store(replacement) as store:
        _record(store, SXM, 2, measured(2.0))
    replacement.replace(db)
    later()
    assert ask(db) == (2, "measured here")
    Path(db).unlink()
    later()
    with pytest.raises(LookupMiss):
        ask(db)


def test_threads_do_not_share_a_connection(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(1.0))
    answers: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: answers.extend(ask(db) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(1, "measured here")] * 200


@needs_fork
def test_signal_handler_looks_up_within_a_lookup(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(3.0))
    later()
    rows, answers = _reader.AnswerReader.rows, list[tuple[int, str]]()

    def rows_with_a_signal(*arguments: Any, **named: Any) -> Any:
        if not answers:
            answers.append((0, "interrupted"))
            signal.raise_signal(signal.SIGUSR1)
        return rows(*arguments, **named)

    monkeypatch.setattr(_reader.AnswerReader, "rows", rows_with_a_signal)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: answers.append(ask(db)))
    try:
        assert ask(db) == (1, "measured here")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert answers == [(0, "interrupted"), (1, "measured here")]
    assert not _cache.lookup_cache.is_reading


def test_cached_answers_and_open_files_are_bounded(
    db: str, remember: Remember, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(3.0))
    monkeypatch.setattr(_cache, "lookup_cache", _cache.LookupCache())  # without the files of other tests
    monkeypatch.setattr(_cache, "CACHED", 3)
    monkeypatch.setattr(_cache, "OPEN_FILES", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Unmeasured)
        for rows in range(1, 9):
            copy = shutil.copy(db, tmp_path / str(rows))
            lookup("softmax", **{**DIMENSIONS, "rows": rows}, device=SXM, db=copy)
    cache = _cache.lookup_cache
    assert max(map(len, (cache.asked, cache.answers, cache.warned))) <= 3
    assert len(cache.views) <= 4
    assert ask(db) == (1, "measured here")


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
    later()
    assert ask(db) == (2, "measured here")


def test_lookup_in_a_read_only_folder_sees_changes(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(1.0))
    probed = sqlite_file._probed

    def refuse(uri: str, factory: type[sqlite3.Connection], *wait: float) -> sqlite3.Connection:
        """Fail like SQLite if the shared memory of a file in WAL mode cannot be created."""
        if "immutable" not in uri:
            raise sqlite3.OperationalError("unable to open database file")
        return probed(uri, factory, *wait)

    monkeypatch.setattr(sqlite_file, "_probed", refuse)
    assert ask(db) == (1, "measured here")
    remember(SXM, 2, measured(0.5))
    assert ask(db) == (2, "measured here")
    with open_store(db) as store:
        _record(store, SXM, 3, measured(0.1))  # still open: its log has records that the file lacks
        assert ask(db) == (3, "measured here")


# -- an index of a server --------------------------------------------------------------------------


@pytest.fixture
def far_away(db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A URL whose server is this test's SQLite file."""
    import tunebench.db.store

    url = f"postgresql://me:s3cret@far.away/{tmp_path.name}"

    def reach(location: Any, *, read_only: bool = False, hasty: bool = False) -> Store:
        if not Path(db).exists():
            raise DatabaseError("the server is down")
        return Store(locate(db), read_only=read_only)

    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tunebench.db.store, "open_store", reach)
    lookup_index.forget_servers()
    yield url
    lookup_index.forget_servers()
    _cache.lookup_cache.views.clear()  # no other test uses this server


def test_a_server_is_read_through_an_index(
    db: str, far_away: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(SXM, 1, measured(3.0))
    remember(PCIE, 2, Predicted(predicted_us=0.2, verification=VERIFIED))
    local_answer = lookup_workload(WORKLOAD, device=SXM, db=db)
    server_answer = lookup_workload(WORKLOAD, device=SXM, db=far_away)
    assert server_answer.database == far_away.replace("s3cret", "***")
    assert server_answer.to_json() | {"database": db} == local_answer.to_json()
    monkeypatch.setenv("TUNEBENCH_DB", far_away)
    assert tried_operators(SXM) == {"softmax"}
    state = records_state(SXM)
    assert ask(far_away, PCIE) == ask(db, PCIE)

    remember(SXM, 3, measured(1.0))
    assert ask(far_away) == (1, "measured here")  # the server is contacted once a minute
    monkeypatch.setattr(lookup_index, "REFRESH_S", 0.0)
    later()
    assert ask(far_away) == (3, "measured here")
    assert state != records_state(SXM) == records_state(SXM)
    before = lookup_index.index_path(locate(far_away)).stat().st_ino
    assert ask(far_away) == (3, "measured here")
    assert lookup_index.index_path(locate(far_away)).stat().st_ino == before


def test_old_indexes_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    for age in range(3 * lookup_index.MAX_INDEXES):
        path = folder / f"{age}.db"
        lookup_index.replace_index(path, "one", [], {})
        os.utime(path, (time.time() - 100 * age,) * 2)
    unfinished = [folder / "left.new", folder / "current.new"]
    for path in unfinished:
        path.touch(mode=0o600)
    os.utime(unfinished[0], (0, 0))
    lookup_index.replace_index(folder / "new.db", "one", [], {})
    remaining = {path.name for path in folder.iterdir()}
    assert remaining == {
        "new.db",
        "current.new",
        *(f"{age}.db" for age in range(lookup_index.MAX_INDEXES - 1)),
    }


def test_an_index_has_the_intervals_of_predictions(db: str, far_away: str, remember: Remember) -> None:
    remember(SXM, 1, Predicted(predicted_us=0.2, verification=VERIFIED, low_us=0.1, high_us=0.4))
    with pytest.warns(Unmeasured):
        assert lookup_workload(WORKLOAD, device=SXM, db=far_away).interval_us == (0.1, 0.4)


def test_index_has_neighbours(db: str, far_away: str, remember: Remember) -> None:
    remember(PCIE, 7, measured(9.0), workload="softmax:rows=64,cols=256,dtype=f32")
    with pytest.warns(Unmeasured):
        server_answer = lookup_workload(WORKLOAD, device=SXM, db=far_away)
    with pytest.warns(Unmeasured):
        local_answer = lookup_workload(WORKLOAD, device=SXM, db=db)
    assert (server_answer.how, server_answer.config) == ("neighbour", numbered(7))
    assert dataclasses.replace(local_answer, database=server_answer.database) == server_answer


def test_index_is_used_with_a_warning_when_the_server_is_down(
    db: str, far_away: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatabaseError, match="the server is down"):
        ask(far_away)
    remember(SXM, 1, measured(3.0))
    assert ask(far_away) == (1, "measured here")
    Path(db).unlink()
    monkeypatch.setattr(lookup_index, "REFRESH_S", 0.0)
    with pytest.warns(RuntimeWarning, match=r"answers are \d+ s old: .*the server is down"):
        later()
    monkeypatch.setattr(lookup_index, "REFRESH_S", 60.0)
    assert ask(far_away) == (1, "measured here")


def test_imported_record_is_returned_as_imported_with_its_file(
    db: str, remember: Remember, tmp_path: Path
) -> None:
    remember(SXM, 1, measured(3.0))
    assert ask(db) == (1, "measured here")
    with open_store(db) as store:
        export_to(store, tmp_path / "of a friend.jsonl", "jsonl", Selection())
    with open_store(tmp_path / "other.db") as imported:
        assert import_file(imported, tmp_path / "of a friend.jsonl").added == 1
        lookup_index.export_index(imported, tmp_path / "index.db")
    for path in ("other.db", "index.db"):
        answer = lookup_workload(WORKLOAD, device=SXM, db=tmp_path / path, strict=True)
        assert (answer.how, answer.exact) == ("imported", True)
        assert answer.because.startswith("imported from of a friend.jsonl, measured for ")
    imported_answer = lookup_workload(WORKLOAD, device=PCIE, db=tmp_path / "other.db")
    assert imported_answer.how == "same architecture"
    assert imported_answer.because.startswith("imported from of a friend.jsonl, ")


def test_median_below_its_bound_is_not_returned(db: str, remember: Remember) -> None:
    remember(SXM, 1, measured(3.0), bound_us=1.0)
    remember(SXM, 2, measured(2.0), bound_us=2.5)
    assert ask(db) == (1, "measured here")


def test_index_is_replaced_atomically(db: str, remember: Remember, tmp_path: Path) -> None:
    remember(SXM, 1, measured(3.0))
    path = tmp_path / "index.db"
    with open_store(db) as store:
        lookup_index.export_index(store, path)

        def torn() -> Any:
            yield from store.answers()
            raise DatabaseError("the server is gone")

        broken = Store(locate(db))
        broken.answers = torn  # type: ignore[method-assign]
        broken.fingerprint = lambda: "new"  # type: ignore[method-assign]
        with pytest.raises(DatabaseError, match="gone"):
            lookup_index.export_index(broken, path)
        broken.close()
    assert ask(str(path)) == (1, "measured here")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.db", "index.db"]


def test_the_view_has_the_columns_that_are_exported() -> None:
    from tunebench.db import schema

    assert tuple(column.name for column in schema.answer_v1.columns) == lookup_index.COLUMNS


# -- imports of a lookup ---------------------------------------------------------------------------


def test_a_lookup_imports_nothing_heavy(db: str) -> None:
    """A valid record is remembered: a new process imports neither the variant nor its dependencies."""
    cpu = local_cpu()
    with open_store(db) as store:
        _record(store, cpu, 1, measured(1.0))
    assert ask(db, "cpu") == (1, "measured here")
    script = (
        "import json, sys\n"
        "from tunebench.answer import lookup\n"
        "from tunebench.errors import LookupMiss\n"
        f"answer = lookup('softmax', **{DIMENSIONS!r}, device='cpu', db=sys.argv[1])\n"
        f"assert dict(answer.config) == {dict(numbered(1, cpu))!r}\n"
        "try: lookup('softmax', rows=1, cols=1, dtype='f32', device='cpu', db=sys.argv[1], strict=True)\n"
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


@pytest.mark.parametrize(
    ("one", "other", "doublings"),
    [
        ("layernorm:rows=63,cols=511,dtype=f16,eps=1e-12", "layernorm:rows=63,cols=511,dtype=f16", 0.0),
        ("layernorm:rows=63,cols=511,dtype=f16", "layernorm:rows=127,cols=511,dtype=f16,eps=0.001", 1.0),
        ("gemm:m=9,n=9,k=9,dtype=f16,act=tanh(x)", "gemm:m=9,n=9,k=9,dtype=f16", LAYOUT_DISTANCE),
        ("gemm:m=9,n=9,k=9,dtype=f16,act=tanh(x)", "gemm:m=9,n=9,k=9,dtype=f32,act=tanh(x)", None),
    ],
)
def test_workloads_with_another_eps_or_activation_are_neighbours(
    one: str, other: str, doublings: float | None
) -> None:
    assert workload_distance(parse(one), parse(other)) == doublings


def test_operators_are_those_of_trials_on_the_architecture(
    db: str, remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", db)
    monkeypatch.setattr(bundled, "indexes", lambda architecture: [])
    assert tried_operators(SXM) == set()
    state = records_state(SXM)
    for rows in (8, 64, 512):
        remember(SXM, 0, measured(3.0), workload=f"softmax:rows={rows},cols=128,dtype=f32")
    key = variant("gemm/cuda_simt")
    gemm = parse("gemm:m=64,n=64,k=64,dtype=f32")
    with open_store(db) as store:
        store.begin_run(RunStart(device=PCIE, workload=str(gemm), sampler="bound", seed=0))
        config = key.default(gemm, PCIE)
        trial = TrialKey(device=PCIE.key, workload=str(gemm), variant=key.key, revision="r", config=config)
        store.record(trial, Result(outcome=Crashed(reason="it ended")), bound_us=0.01)
    remember(A100, 0, measured(3.0), workload="softmax:rows=8,cols=128,dtype=f16")
    later()
    assert state != records_state(SXM) == records_state(PCIE)
    assert tried_operators(SXM) == tried_operators(PCIE) == {"softmax", "gemm"}
    assert tried_operators(A100) == {"softmax"}
    assert tried_operators(local_cpu()) == set()
