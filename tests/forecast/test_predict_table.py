"""Prediction of a CSV file of workloads."""

from __future__ import annotations

import csv
import stat
from pathlib import Path
from typing import Any

import pytest

from tunebench import device
from tunebench.errors import InputError
from tunebench.forecast import table
from tunebench.forecast.library import predict, predict_all
from tunebench.forecast.table import ADDED, predict_table
from tunebench.workloads import parse

T4 = device.find("t4")
GEMM = "gemm:m=64,n=96,k=128,dtype=f16"
ROWS = "softmax:rows=8192,cols=1024,dtype=f32"


def run(folder: Path, text: str | bytes, **options: Any) -> tuple[table.TableResult, list[dict[str, str]]]:
    """Predict a table and return the result with the rows written."""
    source, out = folder / "in.csv", folder / "out.csv"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = predict_table(source, T4, out, **options)
    return result, read(out)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.DictReader(file))


def test_every_row_gets_its_figures_and_keeps_its_columns(tmp_path: Path) -> None:
    result, rows = run(tmp_path, f'id,workload,note\n7,"{GEMM}","a, b"\n8,"{ROWS}",tschüß\n')
    assert (result.rows, result.rejected, result.interrupted) == (2, 0, False)
    assert list(rows[0]) == ["id", "workload", "note", *ADDED]
    assert [row["note"] for row in rows] == ["a, b", "tschüß"]
    for row, text in zip(rows, (GEMM, ROWS), strict=True):
        expected = predict(parse(text), T4)
        assert float(row["predicted_us"]) == pytest.approx(expected.time_us, rel=1e-5)
        assert float(row["low_us"]) == pytest.approx(expected.low_us, rel=1e-5)
        assert float(row["high_us"]) == pytest.approx(expected.high_us, rel=1e-5)
        assert float(row["bound_us"]) == pytest.approx(expected.bound_us, rel=1e-5)
        assert (row["basis"], row["error"], row["workload"]) == (expected.basis, "", text)


def test_rejected_row_keeps_its_place(tmp_path: Path) -> None:
    result, rows = run(
        tmp_path,
        f'workload,note\n"{GEMM}",1\n"gemm:m=64",2\n\n"no:such",3\n{GEMM},4\n"{ROWS}"\n"elementwise:\nx",6\n',
    )
    assert (result.rows, result.rejected) == (6, 4)
    assert [row["predicted_us"] != "" for row in rows] == [True, False, False, False, True, False]
    assert [fault.line for fault in result.faults] == [
        3,
        5,
        6,
        8,
    ]  # blank lines are skipped; quoted fields span lines
    assert "missing n, k, dtype" in rows[1]["error"]
    assert "unknown operator 'no'" in rows[2]["error"]
    assert "5 fields where the header has 2: put double quotes" in rows[3]["error"]
    assert str(result.faults[0]).startswith("line 3: gemm: missing")
    assert all(row["basis"] == row["bound_us"] == "" for row in rows if row["error"])
    # Cells beyond the header follow all columns.
    assert rows[3][None] == ["k=128", "dtype=f16", "4"]  # type: ignore[index]


def test_a_file_of_workloads_alone_needs_no_quotes(tmp_path: Path) -> None:
    result, rows = run(tmp_path, f"workload\n{GEMM}\n{ROWS}\n")
    assert (result.rows, result.rejected) == (2, 0)
    assert [row["workload"] for row in rows] == [GEMM, ROWS]


def test_tsv_files_are_separated_by_tabs(tmp_path: Path) -> None:
    source = tmp_path / "in.tsv"
    source.write_text(f"id\tworkload\n1\t{GEMM}\n")
    assert predict_table(source, T4, tmp_path / "out.csv").rejected == 0
    assert read(tmp_path / "out.csv")[0]["workload"] == GEMM


def test_invalid_utf8_is_copied_unchanged(tmp_path: Path) -> None:
    _, rows = run(tmp_path, b'\xef\xbb\xbfworkload,note\n"' + GEMM.encode() + b'",\xff\xfe\n\xff,\n')
    assert rows[0]["note"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert rows[0]["predicted_us"]
    assert rows[1]["error"]
    assert b",\xff\xfe," in (tmp_path / "out.csv").read_bytes()


def test_rows_are_predicted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHUNK", 10)
    asked: list[int] = []
    monkeypatch.setattr(table, "predict_fitting", lambda w, d: asked.append(len(w)) or predict_all(w, d))
    reports: list[tuple[int, float]] = []
    texts = [f"softmax:rows={n},cols=64,dtype=f32" for n in range(1, 36)]
    result, rows = run(
        tmp_path,
        "workload\n" + "\n".join(texts),
        watcher=lambda result, share: reports.append((result.rows, share)),
    )
    assert [row["workload"] for row in rows] == texts
    assert asked == [10, 10, 10, 5]
    assert [count for count, _ in reports] == [10, 20, 30, 35]
    assert reports[-1][1] == 1.0
    assert result.rows == 35


def test_a_workload_that_cannot_be_predicted_is_found_among_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def some(workloads: Any, where: Any) -> Any:
        if any(workload.operator == "softmax" for workload in workloads):
            raise InputError("not this\none")
        return predict_all(workloads, where)

    monkeypatch.setattr(table, "predict_fitting", some)
    result, rows = run(tmp_path, f"workload\n{GEMM}\n{ROWS}\n{GEMM}\n")
    assert [row["error"] for row in rows] == ["", "not this one", ""]
    assert rows[0]["predicted_us"] == rows[2]["predicted_us"] != ""
    assert (result.rejected, result.faults[0].line) == (1, 3)


def test_ctrl_c_keeps_the_rows_predicted_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHUNK", 3)

    def stop(result: table.TableResult, share: float) -> None:
        if result.rows == 6:
            raise KeyboardInterrupt

    result, rows = run(tmp_path, "workload\n" + f"{GEMM}\n" * 10, watcher=stop)
    assert result.interrupted
    assert result.rows == len(rows) == 6
    assert all(row["predicted_us"] for row in rows)


def test_incomplete_chunk_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHUNK", 3)
    write, count = table.TargetFile.write, 0

    def torn(self: Any, data: bytes) -> None:
        nonlocal count
        count += 1
        write(self, data if count < 3 else data[:20])
        if count == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(table.TargetFile, "write", torn)
    result, rows = run(tmp_path, "workload\n" + f"{GEMM}\n" * 10)
    assert result.interrupted
    assert len(rows) == result.rows == 3


def test_an_error_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.csv").write_text("precious")

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(table, "predict_fitting", fail)
    with pytest.raises(RuntimeError, match="luck"):
        run(tmp_path, f"workload\n{GEMM}\n")
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_output_file_has_default_permissions(tmp_path: Path) -> None:
    run(tmp_path, f"workload\n{GEMM}\n")
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "out.csv").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "other").stat().st_mode
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"the first line must name the columns, one of them workload; got \[\]"),
        ("work,load\n1,2\n", r"one of them workload; got \['work', 'load'\]"),
        ("workload,error,low_us\n", "the output adds columns with the same names: error, low_us"),
        ('workload\n"' + "x" * 200_000 + '"\n', "line 2: field larger than field limit"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path, text)
    assert not (tmp_path / "out.csv").exists()


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    with pytest.raises(InputError, match=r"in\.csv: No such file"):
        predict_table(source, T4, tmp_path / "out.csv")
    source.write_text(f"workload\n{GEMM}\n")
    with pytest.raises(InputError, match="No such file"):
        predict_table(source, T4, tmp_path / "none" / "out.csv")
    with pytest.raises(InputError, match="must differ"):
        predict_table(source, T4, source)
    assert source.read_text() == f"workload\n{GEMM}\n"
