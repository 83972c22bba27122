"""Coverage of architectures: what is in operators of tunebench, and what is left to torch."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
pytest.importorskip("highspy", reason="the extra `torch` is not installed")

from torch import nn

from benchmarks import architectures
from benchmarks.architecture_models import PUBLISHED, SMALL, Architecture


def test_covered_and_left_fractions_of_the_time_sum_to_one() -> None:
    toy = Architecture(
        make=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Softplus()),
        inputs=("16x32:f16",),
    )
    options = argparse.Namespace(device=["h100-sxm"])
    rows = list(architectures.coverage("toy", toy, options))
    for row, step in zip(rows, ("inference", "training"), strict=True):
        covered = float(row.split("|")[6].strip().removesuffix("%")) / 100
        left_to_torch = architectures._left[step]["toy"]
        assert covered + sum(left_to_torch.values()) == pytest.approx(1, abs=1e-3)
    assert any("softplus" in row for row in architectures.left_table())


def test_each_architecture_has_inputs_that_can_be_read() -> None:
    assert len(SMALL) >= 60
    assert len(PUBLISHED) >= 30
    for architecture in (*SMALL.values(), *PUBLISHED.values()):
        assert len(architecture.specs()) == len(architecture.inputs)
