"""Commands that list and inspect, as text and as JSON."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.support import needs_nvrtc
from tunebench import cli, device, kernels, workloads
from tunebench.cli import doctor
from tunebench.errors import install_command
from tunebench.workloads.networks import networks


def test_devices(run_text: Run, run_json: Run) -> None:
    devices_by_name = {entry["name"]: entry for entry in run_json("devices")}
    cpu = device.local_cpu()
    assert devices_by_name[cpu.name]["known"] == "here"
    assert devices_by_name[cpu.name]["key"] == cpu.key
    assert {name for name, entry in devices_by_name.items() if entry["known"] == "described"} >= set(
        device.described()
    )
    # 132 SMs at 1980 MHz, 2 x 128 FLOP per clock. Source: NVIDIA H100 datasheet, 67 TFLOP/s.
    assert devices_by_name["h100-sxm"]["peak_gflop_s"]["f32"] == pytest.approx(66_908, abs=1)
    text = run_text("devices")
    assert all(name in text for name in devices_by_name)


def test_workloads_lists_operators_and_suites(run_text: Run, run_json: Run) -> None:
    listed = run_json("workloads")
    assert {entry["operator"] for entry in listed["operators"]} == set(workloads.all_operators())
    suites = {entry["suite"]: entry for entry in listed["suites"]}
    assert set(suites) == set(workloads.suites())
    assert listed["models"] == list(networks())
    assert suites["resnet50"]["layers"] == len(workloads.suite("resnet50"))
    # ResNet-50 v1.5 needs 4.1 G multiply-adds per image. Source: torchvision's table of models.
    assert suites["resnet50"]["gflop"] == pytest.approx(2 * 4.09, rel=0.01)
    text = run_text("workloads")
    assert all(cls.usage() in text for cls in workloads.all_operators().values())
    assert "gpt2-large" in text


def test_workloads_shows_one_operator(run_text: Run, run_json: Run) -> None:
    shown = run_json("workloads", "softmax")
    assert shown["dimensions"] == ["rows", "cols", "dtype", "prologue", "log", "direction"]
    assert shown["usage"] in run_text("workloads", "softmax")


def test_workloads_shows_one_suite_at_a_batch(run_text: Run, run_json: Run) -> None:
    single, eight = run_json("workloads", "gpt2"), run_json("workloads", "gpt2", "--batch", "8")
    assert [entry["layer"] for entry in single] == [f"gpt2/{layer.name}" for layer in workloads.suite("gpt2")]
    assert sum(e["gflop"] for e in eight) == pytest.approx(8 * sum(e["gflop"] for e in single))
    text = run_text("workloads", "gpt2")
    assert all(entry["workload"] in text for entry in single)


def test_workloads_shows_one_workload(run_text: Run, run_json: Run) -> None:
    shown = run_json("workloads", "gemm:k=4,n=3,m=2,dtype=f16")
    assert shown["workload"] == "gemm:m=2,n=3,k=4,dtype=f16"
    assert shown["gflop"] == 2 * 2 * 3 * 4 / 1e9
    assert (shown["read_bytes"], shown["write_bytes"]) == (2 * (8 + 12), 2 * 6)
    assert "writes c (1, 2, 3) f16" in run_text("workloads", "gemm:k=4,n=3,m=2,dtype=f16")
    layer = workloads.suite("resnet50")[0]
    changed = run_json("workloads", f"resnet50/{layer.name},n=2")
    assert changed["gflop"] == 2 * layer.workload.flops() / 1e9


def test_kernels(run_text: Run, run_json: Run) -> None:
    everything = run_json("kernels")
    assert [entry["variant"] for entry in everything] == [variant.key for variant in kernels.variants()]
    (shown,) = run_json("kernels", "softmax/numba_cpu")
    variant = kernels.variant("softmax/numba_cpu")
    assert shown["space_size"] == variant.space.size
    assert [p["name"] for p in shown["parameters"]] == list(variant.space.names)
    assert {entry["variant"] for entry in run_json("kernels", "softmax")} == {
        variant.key for variant in kernels.variants("softmax")
    }
    text = run_text("kernels", "softmax/numba_cpu")
    assert all(parameter.about in text for parameter in variant.space.parameters)


def test_db_upgrade_makes_a_database_and_stats_reads_it(run_text: Run, run_json: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "new.db")
    made = run_json("db", "upgrade", "--db", path)
    assert (made["database"], made["before"]) == (path, None)
    assert "already" in run_text("db", "upgrade", "--db", path)
    stats = run_json("db", "stats", "--db", path)
    assert (stats["revision"], stats["trials"], stats["outcomes"]) == (made["after"], 0, {})
    assert "measurements" in run_text("db", "stats", "--db", path)


def test_db_uses_the_variable_where_no_option_is_given(
    run_json: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "named.db"))
    assert run_json("db", "upgrade")["database"] == str(tmp_path / "named.db")
    assert (tmp_path / "named.db").is_file()


def not_a_database(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("these are notes, and longer than the header of a database, which is 100 bytes\n" * 3)
    return path


def of_another_program(folder: Path) -> Path:
    path = folder / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE invoice (id INTEGER)")
    connection.close()
    return path


def of_a_later_version(folder: Path) -> Path:
    path = folder / "later.db"
    assert cli.run(["db", "upgrade", "--db", str(path)]) == 0
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    return path


def nowhere(folder: Path) -> Path:
    return folder / "missing" / "x.db"


@pytest.mark.parametrize("make", [not_a_database, of_another_program, of_a_later_version, nowhere])
@pytest.mark.parametrize("command", ["upgrade", "stats"])
def test_unusable_database_is_one_line_of_error_and_unchanged(
    make: Any, command: str, tmp_path: Path, run_refused: Run
) -> None:
    path = make(tmp_path)
    before = path.read_bytes() if path.exists() else None
    assert path.name in run_refused("db", command, "--db", str(path), exit_code=4)
    assert (path.read_bytes() if path.exists() else None) == before


def test_doctor_reports_installed_components(run_text: Run, run_json: Run) -> None:
    checks = {check["subject"]: check for check in run_json("doctor")}
    assert (
        checks["Python"]["status"]
        == checks["core packages"]["status"]
        == checks["database"]["status"]
        == "ok"
    )
    assert "numpy" in checks["core packages"]["found"]
    assert checks["database"]["found"].endswith("does not exist yet; the first `tunebench tune` creates it")
    assert {"GPU", "C++ compiler", "extra cuda", "extra torch", "extra postgres"} <= set(checks)
    for check in checks.values():
        assert check["status"] == "ok" or check["remedy"]
    text = run_text("doctor", "--verbose")
    assert all(f"{check['subject']} " in text and check["found"] in text for check in checks.values())


def test_doctor_is_short_and_names_what_is_missing(run_text: Run, run_json: Run) -> None:
    checks = run_json("doctor")
    passed, *rest = run_text("doctor").splitlines()
    assert passed.startswith("ok ")
    assert all(check["subject"] in passed for check in checks if check["status"] == "ok")
    failed = [check for check in checks if check["status"] != "ok"]
    assert len(rest) == 2 * len(failed)  # what is missing, and the remedy
    for check, fault, remedy in zip(failed, rest[::2], rest[1::2], strict=True):
        assert check["found"] in fault
        assert remedy.strip() == check["remedy"]


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, run_json: Run) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)
    checks = {check["subject"]: check for check in run_json("doctor")}
    assert checks["extra cuda"]["remedy"] == install_command("cuda")
    assert "g++" in checks["C++ compiler"]["remedy"]
    assert "--arch sm_90" in checks["GPU"]["remedy"]
    assert {checks[name]["status"] for name in ("extra cuda", "C++ compiler", "GPU")} == {"absent"}


BROKEN = "numba-cuda 1 does not work with numpy 2 (AttributeError: row_stack); run: pip install 'numpy<2'"


def test_doctor_reports_packages_that_do_not_work_together(
    monkeypatch: pytest.MonkeyPatch, run_json: Run
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "1")
    monkeypatch.setattr("tunebench.compile.unavailable", {"cuda": None, "numba-cuda": BROKEN}.get)
    (check,) = (c for c in run_json("doctor") if c["subject"] == "extra cuda")
    assert check["status"] == "absent"
    assert f"{check['found']}; {check['remedy']}" == BROKEN


@pytest.mark.parametrize(
    "selection",
    [
        ("softmax:rows=8,cols=64,dtype=f32", "--variant", "numba_cuda"),
        ("softmax:rows=8,cols=64,dtype=f32",),
        ("--suite", "llama-3-8b-decode"),
    ],
)
def test_tune_without_a_compiler_of_a_wanted_variant_exits_with_6(
    selection: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, run_refused: Run
) -> None:
    monkeypatch.setattr("tunebench.tuning.tunable.unavailable", lambda language: BROKEN)
    refused = run_refused("tune", *selection, "--device", "h100-sxm", "--trials", "1", exit_code=6)
    assert BROKEN in refused


def test_doctor_reports_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, run_json: Run) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (check,) = (c for c in run_json("doctor") if c["subject"] == "C++ compiler")
    assert check["status"] == "absent"
    assert "no-such-compiler" in check["found"]


def test_doctor_fails_if_a_core_package_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: {"": ["numpy", "no-such-package"]})
    assert cli.run(["doctor"]) == 1
    assert "no-such-package: No module named 'no_such_package'" in capsys.readouterr().out


def test_doctor_inspects_the_database(
    run_json: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["db", "upgrade", "--db", str(tmp_path / "x.db")]) == 0
    capsys.readouterr()
    (check,) = (c for c in run_json("doctor", "--db", str(tmp_path / "x.db")) if c["subject"] == "database")
    assert "0 trials" in check["found"]
    assert cli.run(["doctor", "--db", str(not_a_database(tmp_path))]) == 1


def test_doctor_reports_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, run_json: Run) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: "13.0")
    monkeypatch.setattr(doctor.device, "local_gpus", lambda: ())
    (check,) = (c for c in run_json("doctor") if c["subject"] == "GPU")
    assert check["status"] == "absent"
    assert "CUDA 13.0" in check["found"]


def _options() -> Iterator[tuple[str, Any]]:
    """Yield every option of every command, with the name of its command."""

    def walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
        for sub, subcommand in getattr(command, "commands", {}).items():
            yield from walk(f"{name} {sub}", subcommand)
        for option in command.params if not hasattr(command, "commands") else ():
            if option.param_type_name == "option":
                yield name, option

    for name in cli.COMMANDS:
        yield from walk(name, cli.load_command(name))


TWO_MEANINGS = {
    ("plan cluster", "--cluster"),  # the cluster to plan for is described; `tune` connects to one of Ray
    ("plan cluster", "--objective"),  # time, memory or cost of a plan; `tune` optimises quantities of kernels
    ("plan cluster", "--fix"),  # values of a plan; `db verify` repairs
}


def test_an_option_has_one_meaning_short_form_and_value_in_all_commands() -> None:
    meanings: dict[str, dict[tuple[Any, ...], str]] = {}
    for command, option in _options():
        if option.hidden or (command, option.opts[0]) in TWO_MEANINGS:
            continue
        assert option.help, f"{command} {option.opts} has no help"
        subject = re.split(r"[ :,;.]", option.help)[0]  # the noun that the help explains
        value = (option.metavar or "").split("|")[0]
        files = option.opts[0] == "--out"  # the metavar says whether it is a file or a folder
        meaning = (*option.opts, option.is_flag, *(() if files else (subject, value)))
        meanings.setdefault(option.opts[0], {})[meaning] = command
    assert {name: kinds for name, kinds in meanings.items() if len(kinds) > 1} == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("predict", "--model", "gpt2", "--seq", "8", "--device", "t4", "--mode", "train"), "--training"),
        (("compare", "-w", "softmax:rows=8,cols=8,dtype=f32", "--devices", "t4,l4"), "--device"),
    ],
)
def test_old_name_of_an_option_works_with_a_warning(
    old: tuple[str, ...], new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*old, "--json"]) == 0
    printed = capsys.readouterr()
    assert f"is deprecated; use {new}" in printed.err
    assert json.loads(printed.out)


@pytest.mark.parametrize(
    "command",
    ["lookup", "show", "predict", "compare", "workloads", "kernels", "explain", "export", "db verify"],
)
def test_commands_on_workloads_load_variant_files(command: str, run_refused: Run) -> None:
    named = ("--workload", "distance:n=1,m=1,dim=1")
    if command in ("workloads", "kernels", "db verify"):
        named = ()
    error = run_refused(*command.split(), *named, "--variant-file", "/no/such/file.py")
    assert "variant file /no/such/file.py: expected a Python file" in error


def test_unknown_operator_says_how_to_load_one(run_refused: Run) -> None:
    assert "needs its file: --variant-file" in run_refused("show", "--workload", "distance:n=1,m=1,dim=1")


class _BrokenPlugin:
    name, value = "theirs", "their_package.kernel"

    def load(self) -> None:
        raise SystemExit(0)


@pytest.fixture
def broken_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    entry_points = kernels.metadata.entry_points
    monkeypatch.setattr(
        kernels.metadata,
        "entry_points",
        lambda **group: (
            [_BrokenPlugin()] if group == {"group": kernels.ENTRY_POINTS} else entry_points(**group)
        ),
    )
    kernels.forget_plugins()
    yield
    kernels.forget_plugins()


@pytest.mark.usefixtures("broken_plugin")
def test_broken_plugin_is_skipped_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="plug-in theirs = their_package.kernel: SystemExit: 0") as caught:
        variants = (kernels.variants("softmax"), kernels.variants())
    assert len(variants[0]) > 1
    assert len(variants[1]) > 50
    assert len(caught) == 1


@pytest.mark.usefixtures("broken_plugin")
def test_doctor_names_a_broken_plugin() -> None:
    (check,) = (check for check in doctor.checks() if check.subject == "plug-ins")
    assert check.status == "broken"
    assert check.found.startswith("plug-in theirs = their_package.kernel: SystemExit: 0")


def test_operator_of_a_users_file_that_fails_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "examples" / "my_kernel.py").read_text()
    text = text.replace("return 3 * self.n", "raise SystemExit(0)  # ").replace('"distance"', '"ending"')
    file = tmp_path / "ending.py"
    file.write_text(text)
    with kernels.variant_file_scope():
        exit_code = cli.run(["workloads", "ending:n=1,m=1,dim=1", "--variant-file", str(file)])
    assert (exit_code, capsys.readouterr().err) == (1, f"error: SystemExit: 0 ({file}, line 40)\n")


@pytest.mark.parametrize("command", ["lookup", "show", "explain", "export"])
def test_database_that_does_not_exist_is_an_error_of_commands_that_read(
    command: str, tmp_path: Path, run_refused: Run
) -> None:
    more = ("--format", "cubin", "--out", str(tmp_path)) if command == "export" else ()
    named = ("--workload", "softmax:rows=8,cols=8,dtype=f32", "--db", str(tmp_path / "typo.db"))
    error = run_refused(command, *named, *more, exit_code=4)
    assert f"database {tmp_path / 'typo.db'} does not exist" in error


def test_model_is_not_a_suite_and_the_message_says_what_shows_it(run_refused: Run) -> None:
    error = run_refused("workloads", "gpt2-large")
    assert "gpt2-large is a model" in error
    assert "tunebench predict --model gpt2-large" in error


def test_rates_and_sizes_are_printed_without_powers_of_ten(run_text: Run) -> None:
    assert "f16 1070, bf16 1070, e4m3 2140" in run_text("devices")
    for arguments in (("devices",), ("workloads", "gemm:m=999999,n=99999,k=99999,dtype=f16")):
        assert "e+" not in run_text(*arguments)


def test_ambiguous_device_name_is_refused_with_its_products(run_refused: Run) -> None:
    error = run_refused("lookup", "--workload", "softmax:rows=8,cols=8,dtype=f32", "--device", "a100")
    assert "'a100' may be a100-40-sxm, a100-40-pcie, a100-80-sxm or a100-80-pcie: name one of them" in error


def test_spaces_after_commas_are_ignored(run_text: Run) -> None:
    assert "gemm:m=64,n=32,k=16,dtype=f16\n" in run_text("workloads", "gemm:m=64, n=32, k = 16, dtype=f16")


@pytest.mark.parametrize("device", ["mi300x", "p4"])
@pytest.mark.parametrize("command", ["tune", "lookup", "explain"])
def test_device_that_runs_no_variant_is_named_at_once(command: str, device: str, run_refused: Run) -> None:
    named = ("--workload", "softmax:rows=8,cols=8,dtype=f32", "--device", device)
    error = run_refused(command, *named, exit_code=3 if command == "lookup" else 2)
    assert "runs no variant, all need an NVIDIA GPU of sm_75 or later" in error
    assert len(error) < 500


def test_workload_larger_than_the_memory_of_the_device_is_refused(run_refused: Run) -> None:
    huge = "gemm:m=2147483646,n=2147483646,k=2147483646,dtype=f16"
    error = run_refused("tune", "--workload", huge, "--device", "offline", "--arch", "sm_80")
    assert "GiB, and a100-80-sxm has 80 GiB" in error


def test_strict_lookup_for_an_absent_device_does_not_advise_to_predict(run_refused: Run) -> None:
    named = ("--workload", "softmax:rows=8,cols=8,dtype=f32", "--device", "a100-80-sxm")
    error = run_refused("lookup", "--strict", *named, exit_code=3)
    assert "run, where that device is: tunebench tune" in error
    assert "offline" not in error


@pytest.mark.parametrize("command", [pytest.param("export", marks=needs_nvrtc), "predict"])
def test_unwritable_output_is_named_with_the_exit_code_of_an_invalid_argument(
    command: str, tmp_path: Path, run_refused: Run
) -> None:
    table = tmp_path / "in.csv"
    table.write_text("workload\nsoftmax:rows=8,cols=8,dtype=f32\n")
    workload = ("--workload", "softmax:rows=64,cols=64,dtype=f32") if command == "export" else ()
    more = workload or ("--workloads", str(table))
    out = "/proc/no-such-folder/out.csv"
    error = run_refused(command, *more, "--device", "a100-80-sxm", "--out", out)
    assert "/proc/no-such-folder" in error
    assert ".out.csv." not in error


def test_workload_needs_no_option(run_json: Run, run_refused: Run) -> None:
    text, device = "softmax:rows=8,cols=8,dtype=f32", ("--device", "h100-sxm")
    assert run_json("lookup", text, *device) == run_json("lookup", *device, "--workload", text)
    two = run_json("predict", text, *device, "softmax:rows=16,cols=8,dtype=f32")
    assert [shown["workload"] for shown in two] == [text, "softmax:rows=16,cols=8,dtype=f32"]
    assert "unexpected extra argument" in run_refused("lookup", text, "more", *device)


@pytest.mark.parametrize(
    "words", [["gemm:typo=3"], ["gemm:m=1..8,n=64,k=64,typo=3"], ["--suite", "typo"]], ids=" ".join
)
def test_tune_checks_the_work_before_it_says_anything_about_devices(
    words: list[str], run_refused: Run
) -> None:
    assert "typo" in run_refused("tune", *words)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("softmax:rows=8,cols=8,dtype=f32", "--variant", "nope"), "unknown variant of softmax 'nope'"),
        (("softmax:rows=1..8,cols=8,dtype=f32", "--variant", "nope"), "unknown variant of softmax 'nope'"),
        (("gpt2/attention", "--variant", "nope"), "unknown variant of attention 'nope'"),
        (("--suite", "gpt2", "--variant", "nope"), "unknown variant 'nope'"),
        (("--from-profile", "--variant", "softmax/nope"), "unknown variant 'softmax/nope'"),
        (("--suite", "gtp2"), "unknown suite 'gtp2'. Did you mean 'gpt2'"),
        (("softmx:rows=8",), "unknown operator 'softmx'. Did you mean 'softmax'"),
        (("softmx:rows=1..8",), "unknown operator 'softmx'. Did you mean 'softmax'"),
        (("softmax:rows=8,cols=8,dtype=f32", "--sampler", "nope"), "unknown sampler 'nope'"),
        (("softmax:rows=8,cols=8,dtype=f32", "--cache", "hot"), "unknown cache state 'hot'"),
        (("softmax:rows=8,cols=8,dtype=f99",), "unknown value of softmax dimension dtype 'f99'"),
    ],
)
def test_unknown_names_of_tune_are_reported_before_anything_about_devices(
    words: tuple[str, ...], error: str, run_refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.device.local_gpus", lambda: pytest.fail("asked for devices"))
    for more in ((), ("--device", "nope")):
        assert error in run_refused("tune", *words, *more)


def test_unknown_variant_is_reported_before_a_search_is_imported() -> None:
    code = (
        "import sys; from tunebench import cli; "
        "status = cli.run(['tune', 'softmax:rows=8,cols=8,dtype=f32', '--variant', 'nope']); "
        "print(status, *{'optuna', 'sqlalchemy', 'numba'} & set(sys.modules))"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout == "2\n"
