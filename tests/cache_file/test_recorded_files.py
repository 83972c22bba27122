"""Recorded tuning spaces in the database: round trips, separation from our own records, and rejected rows."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fuzz.corrupt_files import corrupt
from tests.public_data import IS_WHOLE, found
from tests.support import measured
from tunebench import lookup
from tunebench.answer import lookup_workload
from tunebench.cache_file import FORMATS, RecordedSpace, metrics_of, read, scan, write
from tunebench.db import RunStart, SpaceKey, Store, TrialKey, Verdict, open_store
from tunebench.db.exchange import Selection, export_to, import_file
from tunebench.db.recorded_space import ImportOverrides, names_of, recorded_space_log, workload_of
from tunebench.device import described
from tunebench.errors import InputError, LookupMiss, UnknownName
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    LaunchFailed,
    Outcome,
    Predicted,
    Result,
    Verification,
    WrongResult,
)
from tunebench.space import Config

SPACE = SpaceKey(
    device=described()["a100-40-pcie"].key,
    workload="recorded:kernel=Xgemm,problem=64x32",
    variant="recorded/Xgemm",
)


def entry(b: int, m: str, time: Any, **fields: Any) -> dict[str, Any]:
    return {
        "b": b,
        "m": m,
        "time": time,
        **({"times": [time, 2 * time]} if isinstance(time, float) else {}),
        **fields,
    }


def cache(*entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    chosen = entries or (
        entry(8, "x", 4.0, compile_time=500.0, timestamp="2023-12-22"),
        entry(8, "y", "CompilationFailedConfig"),
        entry(64, "x", 2.0),
        entry(64, "y", "RuntimeFailedConfig"),
    )
    return {
        "kernel_name": "Xgemm",
        "device_name": "NVIDIA A100-PCIE-40GB",
        "problem_size": [64, 32],
        "tune_params_keys": ["b", "m"],
        "tune_params": {"b": [64, 8], "m": ["y", "x"]},
        "cache": {f"{e['b']},{e['m']}": e for e in chosen},
    } | changes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(data: Any, name: str = "in.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(data))
        return path

    return write


def equal(space: RecordedSpace, expected: RecordedSpace) -> bool:
    return (
        (space.kernel, space.device, space.problem) == (expected.kernel, expected.device, expected.problem)
        and space.table.space == expected.table.space
        and np.array_equal(space.table.ordinals, expected.table.ordinals)
        and np.array_equal(space.times_us, expected.times_us, equal_nan=True)
        and np.array_equal(space.fastest_us, expected.fastest_us, equal_nan=True)
        and space.failures == expected.failures
    )


def with_energy(energies: bool = True) -> dict[str, Any]:
    """Return a cache file with the columns that observers of Kernel Tuner add."""
    data = cache()
    for entry in data["cache"].values():
        is_timed = isinstance(entry["time"], float)
        observed = {"nvml_energy": 0.25 * entry["b"], "GFLOP/s": 12.5} if is_timed else {"GFLOP/s": "failed"}
        if energies:
            entry |= observed | {"core_freq_readings": [1410, 1395], "comment": "text"}
    return data


def test_metrics_of_a_cache_file_are_kept(store: Store, file: Any, tmp_path: Path) -> None:
    path = file(with_energy())
    import_file(store, path)
    log = recorded_space_log(store, SPACE)
    metrics = {row.config: metrics_of(row.result.outcome) for row in log.rows}
    assert metrics[Config({"b": 8, "m": "x"})] == {"nvml_energy": 2.0, "GFLOP/s": 12.5}
    assert metrics[Config({"b": 8, "m": "y"})] == {}
    space = log.recorded_space()
    assert list(space.metrics) == ["nvml_energy", "GFLOP/s"]
    timed = ~np.isnan(space.times_us)
    assert sorted(space.metrics["nvml_energy"][timed]) == [2.0, 16.0]
    assert np.isnan(space.metrics["nvml_energy"][~timed]).all()
    for form in FORMATS:
        export_to(store, tmp_path / form, form, Selection())
        written, faults = scan(tmp_path / form)
        assert not faults
        assert {row.config: metrics_of(row.result.outcome) for row in written.rows} == metrics


def test_units_of_metrics_survive_an_export(store: Store, file: Any, tmp_path: Path) -> None:
    log, _ = scan(file(with_energy()))
    units = {"nvml_energy": "J"}
    write(dataclasses.replace(log, units=units), tmp_path / "in_t4.json", "t4")
    import_file(store, tmp_path / "in_t4.json")
    export_to(store, tmp_path / "out.json", "t4", Selection())
    assert scan(tmp_path / "out.json")[0].units == units


def test_importing_again_adds_metrics_that_were_dropped(store: Store, file: Any) -> None:
    import_file(store, file(with_energy(energies=False)))
    assert import_file(store, file(with_energy())).added == 2
    assert import_file(store, file(with_energy())).added == 0
    assert import_file(store, file(with_energy(energies=False))).added == 0
    assert any(metrics_of(row.result.outcome) for row in recorded_space_log(store, SPACE).rows)


def test_imported_space_is_exported_unchanged(store: Store, file: Any) -> None:
    path = file(cache())
    done = import_file(store, path)
    assert (done.spaces, done.added, done.known, done.faults) == ((SPACE,), 4, 0, ())
    log = recorded_space_log(store, SPACE)
    assert equal(log.recorded_space(), read(path))
    assert log.recorded_space().table.space.parameters[1].values == ("y", "x")
    first = next(row for row in log.rows if row.config == Config({"b": 8, "m": "x"}))
    assert first.result.effort.compile_s == 0.5
    assert first.result.conditions["timestamp"] == "2023-12-22"


def test_importing_a_file_again_adds_nothing(store: Store, file: Any) -> None:
    import_file(store, file(cache()))
    before = store.stats()
    done = import_file(store, file(cache()))
    assert (done.added, done.known) == (0, 4)
    assert store.stats() == before
    assert (before.trials, before.recorded, before.runs) == (4, 4, 1)


def test_grown_file_adds_new_rows_and_the_newest_counts(store: Store, file: Any) -> None:
    import_file(store, file(cache(entry(8, "x", 4.0))))
    done = import_file(store, file(cache(entry(8, "x", 4.0), entry(64, "x", 2.0))))
    assert (done.added, done.known) == (1, 1)
    done = import_file(store, file(cache(entry(8, "x", 3.0))))
    assert (done.added, done.known) == (1, 0)
    recording = recorded_space_log(store, SPACE).recorded_space()
    assert dict(zip(recording.table["b"].tolist(), recording.times_us.tolist(), strict=True)) == {
        8: 3000.0,
        64: 2000.0,
    }
    assert (store.stats().trials, sum(store.stats().outcomes.values())) == (2, 3)


def test_parameters_in_another_order_are_the_same_configurations(store: Store, file: Any) -> None:
    import_file(store, file(cache()))
    assert import_file(store, file(cache(tune_params_keys=["m", "b"]))).added == 0


def test_another_space_under_the_same_name_is_refused(store: Store, file: Any) -> None:
    import_file(store, file(cache()))
    renamed = cache({"b": 8, "m": "x", "n": 1, "time": 1.0}, tune_params_keys=["b", "m", "n"])
    with pytest.raises(InputError, match=r"in\.json: .* other parameters \(b, m\).*--kernel"):
        import_file(store, file(renamed))
    assert import_file(store, file(renamed), ImportOverrides(kernel="Xgemm_2")).added == 1


def test_recorded_space_is_never_returned_by_lookup(store: Store, file: Any, tmp_path: Path) -> None:
    import_file(store, file(cache(kernel_name="softmax")))
    database = tmp_path / "store.db"
    assert store.answers() == []
    for text in ("softmax:rows=64,cols=32,dtype=f32", "gemm:m=64,n=32,k=1,dtype=f32"):
        with pytest.raises(LookupMiss):
            lookup_workload(text, device="a100-40-pcie", db=database, strict=True)
    with pytest.raises(UnknownName, match="unknown operator 'recorded'"):
        lookup_workload("recorded:kernel=softmax,problem=64x32", device="a100-40-pcie", db=database)
    with pytest.raises(UnknownName):
        lookup("recorded", kernel="softmax", problem="64x32", device="a100-40-pcie", db=database)


def test_rejected_rows_are_reported_and_the_others_imported(store: Store, file: Any) -> None:
    done = import_file(store, file(cache(entry(8, "x", 4.0), entry(8, "y", -1.0), entry(64, "x", 2.0))))
    assert (done.added, [fault.place for fault in done.faults]) == (2, ["cache entry 2 ('8,y')"])
    assert len(recorded_space_log(store, SPACE).rows) == 2


def test_interrupted_import_stores_nothing(store: Store, file: Any) -> None:
    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_file(store, file(cache()), watcher=interrupt)
    assert (store.stats().trials, store.stats().runs, store.stats().devices) == (0, 0, ())
    assert import_file(store, file(cache())).added == 4


def test_missing_kernel_and_device_must_be_given(store: Store, file: Any) -> None:
    t4 = {"results": [{"configuration": {"b": 1}, "invalidity": "compile"}]}
    with pytest.raises(InputError, match=r"in\.json: it does not name its kernel; give --kernel"):
        import_file(store, file(t4))
    with pytest.raises(InputError, match=r"in\.json: it does not name its device; give --device"):
        import_file(store, file(t4), ImportOverrides(kernel="k"))
    with pytest.raises(InputError, match=r"unknown device 'FPGA 3'.*Known: .*a100-40-pcie.*give --device"):
        import_file(store, file(cache(device_name="FPGA 3")))
    with pytest.raises(UnknownName, match="unknown device 'a101'"):
        import_file(store, file(t4), ImportOverrides(kernel="k", device="a101"))
    for name in ("a,problem=1", "a b", "", "k" * 300, "k\n", "é"):
        with pytest.raises(InputError, match="kernel"):
            import_file(store, file(cache(kernel_name=name)))
    assert store.stats().devices == ()
    done = import_file(store, file(t4), ImportOverrides(kernel="k", device="rtx-3090", problem=(7,)))
    assert done.spaces[0].workload == "recorded:kernel=k,problem=7"
    assert done.spaces[0].device == described()["rtx-3090"].key


@pytest.mark.parametrize("problem", [(), (4096,), (25000, 2048, 1)])
def test_names_are_read_back_from_their_text(problem: tuple[int, ...]) -> None:
    assert names_of(workload_of("ns/k.1+2-3", problem)) == ("ns/k.1+2-3", problem)


# -- export ----------------------------------------------------------------------------------------

OWN = SpaceKey(
    device=described()["h100-sxm"].key,
    workload="softmax:rows=4,cols=4,dtype=f32",
    variant="softmax/cuda_block",
)


def record(
    store: Store,
    tile: int,
    outcome: Outcome,
    revision: str = "r",
    purpose: Any = "search",
    verdict: Verdict | None = None,
) -> None:
    key = TrialKey(
        device=OWN.device,
        workload=OWN.workload,
        variant=OWN.variant,
        revision=revision,
        config=Config({"tile": tile}),
    )
    store.record(key, Result(outcome=outcome), purpose=purpose, verdict=verdict)


@pytest.fixture
def own(store: Store) -> Store:
    store.begin_run(RunStart(device=described()["h100-sxm"], workload=OWN.workload, sampler="random", seed=0))
    return store


def test_export_has_the_newest_measurement_unless_a_result_was_wrong(
    own: Store,
) -> None:
    record(own, 1, measured(5.0))
    verdict = Verdict(versus_default="faster", comparison={"default": {"ratio": 1.1, "high": None}})
    record(own, 1, measured(6.0), purpose="finalist", verdict=verdict)
    record(own, 2, WrongResult(reason="nan"))
    record(own, 2, measured(1.0))
    record(own, 3, measured(2.0), revision="old")
    record(own, 3, measured(3.0), revision="new")
    record(own, 4, Predicted(predicted_us=1.0, verification=Verification(how="not verified", detail="")))
    record(own, 5, Aborted(samples_us=(9.0,), above_us=2.0))
    assert [(row.config["tile"], row.result.outcome) for row in recorded_space_log(own, OWN).rows] == [
        (1, measured(6.0)),
        (2, WrongResult(reason="nan")),
        (3, measured(3.0)),
        (5, Aborted(samples_us=(9.0,), above_us=2.0)),
    ]


def test_times_of_cold_and_warm_caches_are_never_mixed(own: Store) -> None:
    record(own, 1, measured(5.0))
    record(own, 2, measured(4.0, cache="warm"))
    record(own, 3, CompileFailed(reason="no"))
    with pytest.raises(InputError, match="--cache"):
        recorded_space_log(own, OWN)
    assert [row.config["tile"] for row in recorded_space_log(own, OWN, cache="cold").rows] == [1, 3]
    assert [row.config["tile"] for row in recorded_space_log(own, OWN, cache="warm").rows] == [2, 3]


def test_export_needs_one_existing_space(own: Store, file: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with pytest.raises(InputError, match="no trials to export"):
        export_to(own, out, "t4", Selection())
    record(own, 1, measured(5.0))
    import_file(own, file(cache()))
    with pytest.raises(InputError, match=r"select it by --workload.*recorded/Xgemm.*softmax/cuda_block"):
        export_to(own, out, "t4", Selection())
    for wrong in (
        Selection(workload="softmax:rows=5,cols=4,dtype=f32"),
        Selection(workload="recorded:kernel=other"),
        Selection(variant="softmax/other"),
        Selection(device="rtx-3090"),
    ):
        with pytest.raises(UnknownName):
            export_to(own, out, "t4", wrong)
    with pytest.raises(UnknownName, match="format"):
        export_to(own, out, "csv", Selection())
    assert not out.exists()
    for right in (
        Selection(workload="softmax:cols=4,dtype=f32,rows=4"),
        Selection(variant=OWN.variant),
        Selection(device="h100-sxm"),
        Selection(device="sm_90"),
        Selection(device=OWN.device),
    ):
        assert export_to(own, out, "t4", right) == 1
        assert read(out).times_us.tolist() == [5.0]


def test_t4_of_our_own_variant_is_refused_unless_a_kernel_name_is_given(own: Store, tmp_path: Path) -> None:
    record(own, 1, measured(5.0))
    export_to(own, tmp_path / "t4.json", "t4", Selection())
    with pytest.raises(InputError, match=r"tunebench's own softmax/cuda_block .*--kernel"):
        import_file(own, tmp_path / "t4.json")
    assert import_file(own, tmp_path / "t4.json", ImportOverrides(kernel="my")).added == 1


# -- JSON Lines ------------------------------------------------------------------------------------


def everything(own: Store, file: Any) -> None:
    record(own, 1, measured(5.0))
    record(own, 1, measured(6.0), purpose="finalist")
    record(own, 2, WrongResult(reason="y[0] is 'nan'\nnot 1"))
    record(own, 3, Aborted(samples_us=(9.0, 8.0), above_us=2.0))
    record(
        own, 4, Predicted(predicted_us=1.0, verification=Verification(how="emulated", detail="", worst=0.5))
    )
    import_file(own, file(cache()))


def test_jsonl_export_and_import_copy_a_database(own: Store, file: Any, tmp_path: Path) -> None:
    everything(own, file)
    out = tmp_path / "all.jsonl.gz"
    assert export_to(own, out, "jsonl", Selection()) == 9
    with open_store(tmp_path / "other.db") as copy:
        done = import_file(copy, out)
        assert (done.added, done.known, done.faults) == (9, 0, ())
        assert import_file(copy, out).added == 0
        assert export_to(copy, tmp_path / "again.jsonl.gz", "jsonl", Selection()) == 9
        assert gzip.decompress((tmp_path / "again.jsonl.gz").read_bytes()) == gzip.decompress(
            out.read_bytes()
        )
        expected, got = own.history(OWN.workload), copy.history(OWN.workload)
        plain = {"id": 0, "run_id": None, "stale": False}
        assert [dataclasses.replace(e, **plain) for e in got] == [
            dataclasses.replace(e, **plain) for e in expected
        ]
        assert copy.descriptors() == own.descriptors()
        assert all(entry.stale for entry in copy.best(OWN.workload))  # "r" is not the current revision
    with pytest.raises(LookupMiss):
        lookup_workload(OWN.workload, device="h100-sxm", db=tmp_path / "other.db", strict=True)


def test_import_skips_measurements_older_than_local_ones(own: Store, file: Any, tmp_path: Path) -> None:
    everything(own, file)
    export_to(own, tmp_path / "all.jsonl", "jsonl", Selection(workload=OWN.workload))
    text = (tmp_path / "all.jsonl").read_text()
    (tmp_path / "all.jsonl").write_text(text.replace("6.0", "4.0"))
    record(own, 1, measured(7.0))
    assert import_file(own, tmp_path / "all.jsonl").added == 0
    assert recorded_space_log(own, OWN).rows[0].result.outcome == measured(7.0)


LINE: dict[str, Any] = {
    "what": "measurement",
    "device": OWN.device,
    "workload": OWN.workload,
    "variant": OWN.variant,
    "revision": "r",
    "config": {"tile": 1},
    "purpose": "search",
    "outcome": {"kind": "compile_failed", "reason": "no"},
    "resources": {},
    "effort": {},
    "conditions": {},
    "recorded_at": "2026-01-31T12:00:00+00:00",
}
TIMED = {
    "kind": "measured",
    "median_us": 1.0,
    "ci_us": [1.0, 1.0],
    "samples_us": [1.0],
    "cache": "cold",
    "verification": {"how": "reference", "detail": ""},
}
BAD_LINES: dict[str, tuple[Any, str]] = {
    "no json": ("{", "JSON"),
    "no number": ('{"what": NaN}', "JSON"),
    "no object": ([1], "must be an object"),
    "something else": ({"what": "kernel"}, "device or measurement"),
    "an undescribed device": ({"device": "sm_99:x,sm=1"}, "describes the device"),
    "no workload": ({"workload": ""}, "workload must be"),
    "no text": ({"variant": 3}, "variant must be"),
    "a line break": ({"revision": "a\nb"}, "revision must be"),
    "no configuration": ({"config": {}}, "config must"),
    "a list as a value": ({"config": {"tile": [1]}}, "numbers or text"),
    "a purpose": ({"purpose": "fun"}, "purpose must be"),
    "a kind": ({"outcome": {"kind": "lucky"}}, "kind of an outcome must be known"),
    "a field too many": ({"outcome": {"kind": "crashed", "reason": "x", "why": 1}}, "outcome"),
    "a field too few": ({"outcome": {"kind": "measured"}}, "outcome"),
    "a time in words": ({"outcome": TIMED | {"median_us": "1"}}, "median_us must be"),
    "a negative time": ({"outcome": TIMED | {"samples_us": [-1.0]}}, "samples_us must be"),
    "true for a time": ({"outcome": TIMED | {"median_us": True}}, "median_us must be"),
    "no interval": ({"outcome": TIMED | {"ci_us": [1.0]}}, "two times"),
    "no cache": ({"outcome": TIMED | {"cache": "hot"}}, "cache must be"),
    "no proof": (
        {"outcome": TIMED | {"verification": {"how": "trust me", "detail": ""}}},
        "verification method must be",
    ),
    "a median of no clock": ({"outcome": TIMED | {"median_us": 5e-324}}, "below the shortest possible time"),
    "times of no clock": (
        {"outcome": TIMED | {"median_us": 5e-324, "samples_us": [5e-324], "ci_us": [5e-324, 5e-324]}},
        "below the shortest possible time",
    ),
    "a median below its bound": ({"outcome": TIMED, "bound_us": 1.5}, "below its lower bound of 1.5 us"),
    "a median outside of its samples": (
        {"outcome": TIMED | {"samples_us": [2.0, 3.0]}},
        "outside of its samples",
    ),
    "a median outside of its interval": (
        {"outcome": TIMED | {"ci_us": [1.5, 2.0]}},
        "outside of its interval",
    ),
    "a wrong result with a time": (
        {"outcome": TIMED | {"verification": {"how": "reference", "detail": "", "worst": 7.0}}},
        "with an error of 7 times the tolerance",
    ),
    "a prediction outside of its interval": (
        {
            "outcome": {
                "kind": "predicted",
                "predicted_us": 9.0,
                "low_us": 1.0,
                "high_us": 2.0,
                "verification": {"how": "emulated", "detail": ""},
            }
        },
        "outside of its interval",
    ),
    "no reason": ({"outcome": {"kind": "crashed", "reason": 1}}, "reason must be"),
    "resources": ({"resources": {"registers": "many"}}, "resources must be"),
    "effort": ({"effort": {"compile_s": -1}}, "compile_s must be"),
    "conditions": ({"conditions": []}, "conditions must be"),
    "a seed": ({"seed": 0.5}, "seed must be"),
    "a verdict": ({"versus_default": "better"}, "versus_default must be"),
    "a comparison": ({"comparison": [1]}, "comparison must be"),
    "an invalid refused flag": (
        {"outcome": {"kind": "compile_failed", "reason": "no", "refused": "yes"}},
        "refused must be",
    ),
    "no time zone": ({"recorded_at": "2026-01-31T12:00:00"}, "recorded_at must be"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_rejected_line_is_located_and_the_others_imported(bad: str, own: Store, tmp_path: Path) -> None:
    record(own, 0, measured(5.0))
    path = tmp_path / "in.jsonl"
    export_to(own, path, "jsonl", Selection())
    change, reason = BAD_LINES[bad]
    line = (
        change
        if isinstance(change, str)
        else json.dumps(LINE | change if isinstance(change, dict) else change)
    )
    timed = json.dumps(LINE | {"outcome": TIMED, "config": {"tile": 2}})
    path.write_text(f"{path.read_text()}{line}\n\n{timed}\n")
    with open_store(tmp_path / "other.db") as target:
        done = import_file(target, path)
        assert [fault.place for fault in done.faults] == ["line 3"]
        assert reason in done.faults[0].reason
        assert done.added == 2
        assert [e.key.config["tile"] for e in target.history(OWN.workload)] == [0, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sm_count": "many"}, "must be numbers"),
        ({"sm_count": 131}, "its key must be"),
        ({"wheels": 4}, "not those of a device"),
        ({"dram_gb_s": 0}, "must be positive"),
        ({"name": "a\nb"}, "name must be"),
        ({"mma_flop_per_clock": {"f16": "fast"}}, "must be numbers"),
    ],
)
def test_invalid_device_and_its_measurements_are_rejected(
    change: dict[str, Any], said: str, own: Store, tmp_path: Path
) -> None:
    record(own, 0, measured(5.0))
    path = tmp_path / "in.jsonl"
    export_to(own, path, "jsonl", Selection())
    device, measurement = path.read_text().splitlines()
    path.write_text(f"{json.dumps(json.loads(device) | change)}\n{measurement}\n")
    with open_store(tmp_path / "other.db") as target:
        done = import_file(target, path)
        assert [fault.place for fault in done.faults] == ["line 1", "line 2"]
        assert said in done.faults[0].reason
        assert target.stats().devices == ()


def test_truncated_or_oversized_jsonl_stores_nothing(
    own: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(own, 0, measured(5.0))
    path = tmp_path / "in.jsonl.gz"
    export_to(own, path, "jsonl", Selection())
    whole = path.read_bytes()
    with open_store(tmp_path / "other.db") as target:
        path.write_bytes(gzip.compress(gzip.decompress(whole) * 1000, mtime=0)[:-200])
        with pytest.raises(InputError, match=r"in\.jsonl\.gz cannot be read"):
            import_file(target, path)
        path.write_bytes(whole)
        monkeypatch.setattr("tunebench.db.jsonl_file.MAX_FILE_BYTES", 1000)
        with pytest.raises(InputError, match="contains more than"):
            import_file(target, path)
        assert target.stats().devices == ()


# -- arbitrary files -------------------------------------------------------------------------------


def test_any_file_is_imported_or_refused(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    became: Counter[str] = Counter()
    for seed in range(300):
        path.write_bytes(corrupt(random.Random(seed)))
        try:
            became["with faults" if import_file(store, path).faults else "whole"] += 1
        except InputError:
            became["refused"] += 1
    assert min(became.values()) > 20
    assert set(became) == {"whole", "with faults", "refused"}
    assert export_to(store, tmp_path / "all.jsonl", "jsonl", Selection()) == sum(
        store.stats().outcomes.values()
    )


# -- public recordings -----------------------------------------------------------------------------


def test_exported_t4_matches_published_t4(store: Store, tmp_path: Path) -> None:
    theirs = read(found("recorded/convolution_milo/A100_T4.json.gz"))
    path = found("recorded/convolution_milo/A100.json.gz")
    count = len(json.loads(gzip.decompress(path.read_bytes()))["cache"])
    assert count == 4362 if IS_WHOLE else count > 150
    assert import_file(store, path).added == count
    assert export_to(store, tmp_path / "t4.json.gz", "t4", Selection()) == count
    ours = read(tmp_path / "t4.json.gz")
    fields = {"kernel": ours.kernel, "device": ours.device, "problem": ours.problem}
    assert equal(ours, dataclasses.replace(theirs, **fields))
    assert {type(f) for f in ours.failures.values()} == {CompileFailed, LaunchFailed}
    assert equal(ours, read(path))
    assert _told(tmp_path / "t4.json.gz") == _told(found("recorded/convolution_milo/A100_T4.json.gz"))
    # Published T4 files contain the same measurements: with kernel and device given, none is new.
    naming = ImportOverrides(kernel="convolution_kernel", device="a100-40-pcie", problem=(4096, 4096))
    assert import_file(store, found("recorded/convolution_milo/A100_T4.json.gz"), naming).added == 0


def _told(path: Path) -> list[tuple[Any, ...]]:
    """Return the values in which T4 files of the same measurements must agree, except times."""
    results = json.loads(gzip.decompress(path.read_bytes()))["results"]
    same = ("configuration", "invalidity", "correctness", "objectives", "timestamp")
    times = (m["value"] for r in results for m in r["measurements"] if m["name"] == "time")
    words = (value if isinstance(value, str) else "" for value in times)
    return [(*(r[name] for name in same), word) for r, word in zip(results, words, strict=True)]
