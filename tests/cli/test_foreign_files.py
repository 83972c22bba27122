"""Files of strangers: every command that reads one refuses what it cannot use, in one line and at once."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.fuzz import foreign_files
from tunebench import _foreign_file
from tunebench.errors import InputError

GEMM = "gemm:m=8,n=8,k=8,dtype=f32"
MODEL = ("predict", "--batch", "1", "--device", "h100-sxm", "--model")
DEVICE = ("predict", GEMM, "--device")
CLUSTER = ("plan", "cluster", "--model", "gpt2", "--batch", "8", "--cluster")
STAGES = ("plan", "pipeline", "--microbatches", "4", "--costs")
READERS = (
    *(
        (MODEL, "json"),
        (MODEL, "toml"),
        (MODEL, "csv"),
        (DEVICE, "json"),
        (DEVICE, "toml"),
        (CLUSTER, "toml"),
    ),
    *(
        (STAGES, "json"),
        (STAGES, "toml"),
        (("tune", "--device", "cpu", "--suite"), "toml"),
        (("check", "--baseline"), "jsonl"),
    ),
)
"""Commands that read a file, without its name, and the suffix of the file."""

LLAMA = foreign_files.KINDS["llama"][0]


@pytest.mark.parametrize(("words", "suffix"), READERS)
def test_pipes_and_devices_are_refused_at_once(
    words: tuple[str, ...], suffix: str, tmp_path: Path, run_refused: Run
) -> None:
    pipe, zeros = tmp_path / f"pipe.{suffix}", tmp_path / f"zeros.{suffix}"
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    for path in (pipe, zeros):
        assert str(path) in run_refused(*words, str(path))


@pytest.mark.parametrize(("words", "suffix"), READERS)
@pytest.mark.parametrize("text", ["[" * 3000, "a = " + "[" * 3000 + "]" * 3000, '{"a":' * 100_000])
def test_deep_nesting_is_refused_in_one_line(
    words: tuple[str, ...], suffix: str, text: str, tmp_path: Path, run_refused: Run
) -> None:
    path = tmp_path / f"deep.{suffix}"
    path.write_text(text)
    assert len(run_refused(*words, str(path))) < 1000


@pytest.mark.parametrize(
    "changed",
    [
        *({"num_attention_heads": 0}, {"hidden_size": "4096"}, {"hidden_size": 64.0}, {"vocab_size": True}),
        *(
            {"num_hidden_layers": 10**9},
            {"intermediate_size": -1},
            {"hidden_act": ["silu"]},
            {"model_type": {}},
        ),
        *({"num_key_value_heads": 0}, {"head_dim": 0}, {"rms_norm_eps": "small"}, {"hidden_size": 10**40}),
        {"tie_word_embeddings": "yes"},
    ],
    ids=str,
)
def test_configuration_with_a_wrong_value_is_refused(
    changed: dict[str, Any], tmp_path: Path, run_refused: Run
) -> None:
    path = foreign_files.written(tmp_path, "llama", LLAMA | changed)
    message = run_refused(*MODEL, str(path))
    assert re.search(r"^error: .*(must be|expected|unknown|larger than)", message), message


@pytest.mark.parametrize("kind", foreign_files.KINDS)
def test_valid_files_are_read(kind: str, tmp_path: Path) -> None:
    content, _, read = foreign_files.KINDS[kind]
    read(str(foreign_files.written(tmp_path, kind, content)))


@pytest.mark.slow
def test_corrupt_files_are_read_or_refused(tmp_path: Path) -> None:
    outcomes = foreign_files.fuzz(tmp_path, 0, range(800))
    assert outcomes["failed"] == 0
    assert min(outcomes["read"], outcomes["refused"]) > 50


def test_failing_file_is_reported_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: str) -> None:
        raise ZeroDivisionError(path)

    kinds = {"llama": (LLAMA, "json", fail)}
    monkeypatch.setattr(foreign_files, "KINDS", kinds)
    assert foreign_files.fuzz(tmp_path, 0, range(3), tmp_path / "kept")["failed"] == 3
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert len(list((tmp_path / "kept").iterdir())) == 3


def test_limits_of_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content, reason in (
        ([], "must be an object"),
        ({"a": 1e999}, "not finite"),
        ({"a": [{"b": 10**30}]}, "larger than"),
        ({"a" * 2000: 1}, "has a text of 2000 characters"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=reason):
            _foreign_file.read_table(path)
    path.write_bytes(b"{}" + b" " * _foreign_file.LARGEST_BYTES)
    with pytest.raises(InputError, match="is larger than 4 MiB"):
        _foreign_file.read_table(path)
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="is not text in UTF-8"):
        _foreign_file.read_table(path)
    with pytest.raises(InputError, match="cannot be read"):
        _foreign_file.read_bytes("\0")
