"""Costs of stages from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline import GivenStages, read_stages
from tunebench.training.schedules import StageCosts

FILE = """
ranks = 2

[[stage]]
forward_us = 10
backward_us = 30
activation_bytes = "2kB"
send_bytes = 64
static_bytes = "1KiB"

[[stage]]
count = 3
forward_us = 12
input_gradient_us = 14
weight_gradient_us = 10
activation_bytes = 1000
retained_bytes = 400
send_bytes = 64

[interconnect]
link = "25:2"
ranks_per_node = 1
network = "10:5"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "costs.toml"
    file.write_text(FILE)
    return file


def test_a_file_gives_the_costs_of_any_division(path: Path) -> None:
    stages = read_stages(path)
    assert (stages.name, stages.ranks, len(stages.parts)) == ("costs", 2, 4)
    whole = stages.costs((0, 1))
    first, last = whole.stages
    assert (first.forward_us, first.full_backward_us) == (22, 54)
    assert (first.activation_bytes, first.retained, first.static_bytes) == (3000, 2400, 1024)
    assert (first.send_bytes, last.send_bytes) == (64, 0)
    assert whole.interconnect is not None
    assert whole.interconnect.nodes == (0, 1)
    assert whole.interconnect.transfer_us(10**6, 0, 1) > 10**6 / 10e3
    assert [stage.forward_us for stage in stages.costs((0, 1, 0, 1)).stages] == [10, 12, 12, 12]
    assert read_stages(path, 4).ranks == 4
    with pytest.raises(InputError, match="give the costs of a multiple of 8 parts"):
        read_stages(path, 4).costs((0, 1, 2, 3) * 2)


def test_json_gives_the_same_costs(tmp_path: Path) -> None:
    stage = {"forward_us": 1, "backward_us": 2, "count": 2}
    json_file = tmp_path / "costs.json"
    json_file.write_text(json.dumps({"stage": [stage]}))
    assert [stage.full_backward_us for stage in read_stages(json_file).costs((0, 1)).stages] == [2, 2]


def test_equal_ranks_can_be_halved() -> None:
    stage = StageCosts(
        forward_us=10, input_gradient_us=8, weight_gradient_us=6, activation_bytes=100, send_bytes=7
    )
    stages = GivenStages.uniform(stage, 3)
    assert stages.costs(range(3)).stages[0].forward_us == 10
    half = stages.costs((0, 1, 2, 2, 1, 0)).stages[0]
    assert (half.forward_us, half.full_backward_us, half.activation_bytes, half.send_bytes) == (5, 7, 50, 7)


@pytest.mark.parametrize(
    ("found", "changed", "expected"),
    [
        ("forward_us = 10", "", "stage 0: forward_us is missing"),
        ("forward_us = 10", "forward_ms = 10", r"unknown key of stage in .* 'forward_ms'"),
        ("forward_us = 10", "forward_us = 'fast'", "forward_us must be microseconds, found 'fast'"),
        ("forward_us = 10", "forward_us = -1", "finite number of at least 0"),
        ("backward_us = 30", "weight_gradient_us = 3", "give backward_us, or both"),
        ('"2kB"', '"2%"', "activation_bytes '2%' is no size: expected a size above 0 such as"),
        ("count = 3", "count = 0", "expected a count of 1 to 9999 parts, found 0"),
        ("count = 3", "count = 2", "3 parts cannot be divided among 2 ranks"),
        ("ranks = 2", "ranks = 'two'", "ranks must be a number from 1 to 10000"),
        ("ranks = 2", "[", "is not valid TOML"),
        ("[[stage]]", "[[stages]]", "unknown key of file"),
        ('link = "25:2"', 'link = "ether"', "unknown link 'ether'"),
    ],
)
def test_mistakes_name_the_place(path: Path, found: str, changed: str, expected: str) -> None:
    assert found in FILE
    path.write_text(FILE.replace(found, changed))
    with pytest.raises(InputError, match=expected):
        read_stages(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"costs of stages .*absent\.toml"):
        read_stages(tmp_path / "absent.toml")
