"""Defaults of options from `tunebench.toml` and `pyproject.toml`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tunebench import _environment, cli
from tunebench.cli import _defaults

WORKLOAD = "softmax:rows=8,cols=8,dtype=f32"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an inner folder of an empty one, and return the outer one."""
    for name in ("TUNEBENCH_CONFIG", "TUNEBENCH_DB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "outer" / "inner")
    return tmp_path / "outer"


def predicted(run_json: Run, *options: str) -> str:
    """Return the name of the device that `predict` predicts for."""
    key: str = run_json("predict", WORKLOAD, *options)[0]["device"]
    return key.partition(":")[2].partition(",")[0]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_is_an_option_of_its_commands() -> None:
    for name, key in _defaults.KEYS.items():
        for command in key.commands:
            group, _, sub = command.partition(" ")
            command_object = cli.load_command(group)
            command_object = command_object.commands[sub] if sub else command_object
            options = {option for param in command_object.params for option in param.opts}
            assert f"--{name}" in options, command


def test_nearest_file_is_used_and_the_command_line_precedes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run_json: Run
) -> None:
    outer = write(folder / "tunebench.toml", 'device = "t4"\ndb = "a.db"\n')
    find = _defaults.find()
    assert find is not None
    assert (find.path, find.values["db"]) == (outer, str(folder / "a.db"))
    assert predicted(run_json) == "t4"
    assert predicted(run_json, "--device", "l4") == "l4"
    assert predicted(run_json, "--arch", "sm_90").startswith("h100")
    write(folder / "inner" / "pyproject.toml", "[tool.other]\nx = 'tunebench'\n")
    assert predicted(run_json) == "t4"
    write(folder / "inner" / "pyproject.toml", "[tool.tunebench]\ndevice = 'a100-80-sxm'\n")
    assert predicted(run_json) == "a100-80-sxm"
    monkeypatch.setenv("TUNEBENCH_CONFIG", str(outer))
    assert predicted(run_json) == "t4"
    monkeypatch.setenv("TUNEBENCH_CONFIG", "none")
    assert _defaults.find() is None


def test_database_of_the_file_yields_to_the_environment_and_ends_with_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run_refused: Run
) -> None:
    write(folder / "tunebench.toml", 'db = "a.db"')
    assert str(folder / "a.db") in run_refused("db", "stats", exit_code=4)
    assert _environment.database() is None
    monkeypatch.setenv("TUNEBENCH_DB", "b.db")
    assert "b.db does not exist" in run_refused("db", "stats", exit_code=4)


def test_prices_of_other_devices_are_ignored(folder: Path, run_json: Run, run_refused: Run) -> None:
    write(folder / "tunebench.toml", "[price]\nt4 = 0.5\nl4 = 0.8\n")
    (compared,) = run_json("compare", WORKLOAD, "--device", "t4")
    assert compared["price_per_hour"] == 0.5
    assert "device with a price" in run_refused("compare", WORKLOAD, "--device", "t4", "--price", "l4=1")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("trails = 3", "unknown key in {file}: 'trails'. Did you mean 'trials'? Known: audit,"),
        ("trials = '3'", "{file}: trials must be a whole number, got '3'"),
        ("warm = 1", "{file}: warm must be true or false, got 1"),
        ("price.t4 = -1", "{file}: the price of t4 must be a positive number, got -1"),
        ("variant-file = 'evil.py'", "unknown key in {file}: 'variant-file'"),
        ("cluster = 'ray://evil:1'", "unknown key in {file}: 'cluster'"),
        ("db = 'postgresql://evil/d'", "{file}: db must be a file"),
        ("db = 'host=evil'", "{file}: db must be a file"),
        ("trials =", "{file} is not valid TOML"),
        ("a = " + "[" * 3000, "{file} is nested more than"),
        ("a = " + "[" * 300 + "]" * 300, "{file} is nested more than"),
        ("trials = 100000000000000000000000", "{file} has the number 1"),
        ("minutes = nan", "{file} has the number nan"),
    ],
)
def test_bad_files_are_one_error(text: str, error: str, folder: Path, run_refused: Run) -> None:
    file = write(folder / "tunebench.toml", text)
    assert error.format(file=file) in run_refused("devices")


def test_files_that_others_may_have_written_are_skipped_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reachable = write(folder / "tunebench.toml", 'device = "t4"')
    inner = write(folder / "inner" / "tunebench.toml", 'device = "l4"')
    inner.chmod(0o666)
    with pytest.warns(UserWarning, match=rf"{inner} is ignored: it can be written by other users"):
        find = _defaults.find()
    assert find is not None
    assert find.path == reachable
    inner.unlink()
    project = write(folder / "inner" / "pyproject.toml", "[tool.tunebench]\ndevice = 'l4'\n")
    project.chmod(0o666)
    with pytest.warns(UserWarning, match="pyproject.toml is ignored"):
        assert _defaults.find() == find
    project.write_text("[tool.other]\n")  # nothing to warn about
    assert _defaults.find() == find
    project.unlink()
    if os.geteuid() == 0:
        os.chown(reachable, 4321, 4321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    with pytest.warns(UserWarning, match="belongs to user"):
        assert _defaults.find() is None
    os.mkfifo(project)
    assert _defaults.is_trusted(project) is False


@pytest.mark.parametrize("text", ['device = "p.toml"', 'db = "p.toml"', 'db = "/dev/zero"'])
def test_pipes_and_devices_are_refused_at_once(text: str, folder: Path, run_refused: Run) -> None:
    write(folder / "tunebench.toml", text)
    os.mkfifo(folder / "p.toml")
    for words in (("lookup", WORKLOAD), ("show", WORKLOAD), ("db", "stats"), ("tune", WORKLOAD, "-q")):
        if "device" not in text or words[0] in ("lookup", "tune"):
            run_refused(*words, exit_code=4 if "db" in text else 2)


def test_own_files_may_name_a_server_and_doctor_shows_the_values(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        folder.parent / "config" / "tunebench" / "tunebench.toml", 'db = "postgresql://u:secret@h:1/d"'
    )
    defaults = _defaults.find()
    assert defaults is not None
    assert (defaults.path, defaults.values["db"]) == (path, "postgresql://u:secret@h:1/d")
    monkeypatch.setenv("TUNEBENCH_DB", "b.db")
    assert cli.run(["doctor", "--verbose"]) == 0
    assert "db = postgresql://u:***@h:1/d" in capsys.readouterr().out
    write(folder / "tunebench.toml", 'device = "t4"\ndb = "a.db"')
    assert cli.run(["doctor", "-v"]) == 0
    shown = capsys.readouterr().out
    assert f"{folder / 'tunebench.toml'}: device = t4, db = {folder / 'a.db'} (TUNEBENCH_DB is used" in shown
    write(folder / "tunebench.toml", "x = 1")
    assert cli.run(["doctor"]) == 1
    assert cli.run(["completion", "bash"]) == 0
