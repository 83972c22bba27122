"""Coverage of architectures: what is in operators of tunebench, and what is left to torch."""

from __future__ import annotations

import argparse

import pytest

pytest.importorskip("torch", reason="the extra `torch` is not installed")
pytest.importorskip("highspy", reason="the extra `torch` is not installed")

import torch
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


def test_reference_gradients_of_one_image_are_those_of_the_formulas() -> None:
    """On processors, torch 2.13 computes others from a gradient that is channels last for one image."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).flatten(2).transpose(1, 2)

    x = torch.randn(1, 4, 3, 3, dtype=torch.float64)
    rest = architectures._results(architectures._as_double(Tokens()), [x])
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(1, 9, 4) / x.numel()
    centred = x - x.mean((0, 2, 3), keepdim=True)
    normal = centred / torch.sqrt(centred.square().mean((0, 2, 3), keepdim=True) + 1e-5)
    torch.testing.assert_close(rest[1], (normal.flatten(2).transpose(1, 2) * weights).sum((0, 1)))
    torch.testing.assert_close(rest[2], weights.sum((0, 1)))
