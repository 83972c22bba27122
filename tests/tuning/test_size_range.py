"""Size ranges: the sizes in a range, and one call that tunes and looks up all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench import Unmeasured, cli, lookup, parse_size_range
from tunebench.errors import InputError


def rows(text: str) -> list[int]:
    return [problem.rows for problem in parse_size_range(text)]  # type: ignore[attr-defined]


def test_a_range_is_its_ends_and_the_powers_of_two_between() -> None:
    assert sorted(rows("softmax:rows=1..8192,cols=8,dtype=f32")) == [1 << e for e in range(14)]
    assert sorted(rows("softmax:rows=100..1000,cols=8,dtype=f32")) == [100, 128, 256, 512, 1000]
    assert rows("softmax:rows=7..7,cols=8,dtype=f32") == [7]
    assert rows("softmax:rows=7,cols=8,dtype=f32") == [7]


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_no_size_is_more_than_twice_the_one_before(low: int, more: int) -> None:
    sizes = rows(f"softmax:rows={low}..{low + more},cols=8,dtype=f32")
    assert set(sizes[:2]) == {low, low + more}  # the ends come first
    ordered = sorted(sizes)
    assert all(b <= 2 * a for a, b in itertools.pairwise(ordered))


def test_ranges_multiply_up_to_a_limit() -> None:
    assert len(parse_size_range("gemm:m=1..4,n=16..32,k=8,dtype=f32")) == 6
    with pytest.raises(InputError, match="has 2744 workloads"):
        parse_size_range("gemm:m=1..8192,n=1..8192,k=1..8192,dtype=f32")


@pytest.mark.parametrize("text", ["softmax:rows=8..4,cols=8,dtype=f32", "softmax:rows=0..4,cols=8,dtype=f32"])
def test_an_empty_range_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"such as 1\.\.8192"):
        parse_size_range(text)


def test_dots_in_an_expression_are_no_range() -> None:
    (problem,) = parse_size_range("elementwise:rows=2,cols=3,dtype=f32,expression=x*1.5")
    assert str(problem) == "elementwise:rows=2,cols=3,dtype=f32,expression=x*1.5"


def test_one_call_tunes_a_size_range_and_looks_up_every_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db, text = str(tmp_path / "family.db"), "softmax:rows=16..32,cols=64,dtype=f32"
    options = "--device cpu --trials 1 --finalists 1 --no-baselines --json"
    assert cli.run(("tune", "--workload", text, "--db", db, *options.split())) == 0
    printed = capsys.readouterr()
    assert [report["workload"] for report in json.loads(printed.out)] == [
        str(workload) for workload in parse_size_range(text)
    ]
    assert "2/2 softmax:rows=16,cols=64,dtype=f32 search" in printed.err
    assert lookup("softmax", rows=32, cols=64, dtype="f32", device="cpu", db=db).exact
    for size in (17, 31):
        with pytest.warns(Unmeasured):
            answer = lookup("softmax", rows=size, cols=64, dtype="f32", device="cpu", db=db)
        assert answer.how == "neighbour"
