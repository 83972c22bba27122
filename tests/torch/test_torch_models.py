"""Benchmark models: result shapes, and the published numbers of parameters."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")


from benchmarks import models  # noqa: E402
from benchmarks.torch_models import DenseNet, Gpt2, MobileNetV2, Size, UNet, Vgg  # noqa: E402


def test_mobilenet_returns_one_logit_per_class() -> None:
    model = MobileNetV2([(1, 8, 1, 1), (6, 8, 2, 2)], first=8, last=16, classes=5).eval()
    assert model(torch.zeros(2, 3, 32, 24)).shape == (2, 5)
    assert [block.adds for block in model.layers if hasattr(block, "adds")] == [True, False, True]


def test_mobilenet_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in MobileNetV2().parameters())
    assert count == 3_504_872


@pytest.mark.parametrize(("made", "expected"), [(Vgg, 143_667_240), (DenseNet, 7_978_856)])
def test_vgg19_and_densenet121_have_the_published_numbers_of_parameters(made: type, expected: int) -> None:
    with torch.device("meta"):
        count = sum(weight.numel() for weight in made().parameters())
        assert made()(torch.zeros(2, 3, 224, 224)).shape == (2, 1000)
    assert count == expected


@pytest.mark.parametrize("levels", [1, 3])
def test_unet_returns_one_logit_per_class_and_pixel(levels: int) -> None:
    model = UNet(width=4, levels=levels, channels=2, classes=3).eval()
    assert model(torch.zeros(2, 2, 16, 8)).shape == (2, 3, 16, 8)


def test_unet_uses_its_skip_connections() -> None:
    model = UNet(width=4, levels=2).eval()
    images = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    whole = model(images)
    with torch.no_grad():
        for enlarge in model.enlarge:
            enlarge.weight.zero_()
            enlarge.bias.zero_()
    assert model(images).std() > 0
    assert not torch.equal(model(images), whole)


def test_models_benchmark_has_one_row_per_step_and_device() -> None:

    tiny = Size(layers=1, width=32, heads=2, inner=64, words=50, longest=16)
    case = models.ModelCase(make=lambda: Gpt2(tiny), large="2x8:i64", small=(1, 8), words=50)
    rows = [row.split("|")[1:-1] for row in models.predicted("tiny", case, argparse.Namespace())]
    columns = models.PREDICTED.splitlines()[0].split("|")[1:-1]
    assert [(row[1].strip(), row[2].strip()) for row in rows] == [
        (step, device) for step in ("inference", "training") for device in models.DEVICES
    ]
    assert {len(row) for row in rows} == {len(columns)}
    assert all(int(row[4]) < int(row[3]) for row in rows)  # fewer groups than operations
