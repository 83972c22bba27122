"""The model: blending of experts, width of intervals, and the model file."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from tests.forecast.hand_made import forked, knowing
from tunebench import device
from tunebench.device import Device
from tunebench.errors import UnknownName
from tunebench.forecast.library import model as of_model
from tunebench.forecast.library.model import (
    DISTANCE_OFFSET,
    DISTANCE_POWER,
    WIDENING_EXTRAPOLATED,
    WIDENING_PROXY,
    ForecastModel,
    Skill,
    Spread,
    bundled_model,
    is_attention,
    skill_of,
)
from tunebench.forecast.library.roofline_model import LAUNCH_US, RooflineModel, coordinates

A100, H100, B200, P4 = map(device.find, ("a100-80-sxm", "h100-sxm", "b200", "p4"))
FAR = Spread(-0.5, 1.0)


def roofline_of(*features: Any, even: Sequence[bool] | None = None) -> RooflineModel:
    """Return kernels of 7 us with these features: a number, or one per column."""
    us, rows = np.full(len(features), 7.0), np.array(features).reshape(len(features), -1)
    even = np.zeros(len(us), dtype=bool) if even is None else np.array(even)
    return RooflineModel(compute_us=us, memory_us=us / 2, features=rows, even=even)


def model(*experts: Any) -> ForecastModel:
    return ForecastModel({"norm": experts}, {"norm": FAR})


def squared(a: Device, b: Device) -> float:
    return float(np.sum((np.array(coordinates(a, "bf16")) - np.array(coordinates(b, "bf16"))) ** 2))


@pytest.mark.parametrize(
    ("family", "arithmetic", "skill"),
    [
        ("product", "f32", "product f32"),
        ("product", "tf32", "product 16-bit"),
        ("product", "f16", "product 16-bit"),
        ("product", "e4m3", "product 8-bit"),
        ("product", "i8", "product 8-bit"),
        ("attention", "f32", "attention"),
        ("decode attention", "bf16", "decode attention"),
        ("encoder attention", "bf16", "encoder attention"),
        ("norm", "f32", "norm"),
    ],
)
def test_kind_of_kernel_follows_from_family_and_arithmetic(
    family: Any, arithmetic: Any, skill: Skill
) -> None:
    assert skill_of(family, arithmetic) == skill


def test_measured_device_is_predicted_by_its_own_expert() -> None:
    asked = model(knowing(A100, np.log(2)), knowing(B200, np.log(8)))
    for on, times, name in ((A100, 2, "a100-80-sxm"), (B200, 8, "b200")):
        blend = asked.blend("norm", roofline_of(0.0), on, "bf16")
        assert blend.us == pytest.approx(times * (7 + LAUNCH_US))  # the weight of the other is negligible
        assert (blend.nearest, blend.near) == (name, True)


def test_experts_are_weighted_by_distance() -> None:
    measured_devices, excesses = (A100, B200, P4), np.array([0.4, 1.4, 9.0])
    asked = model(*(knowing(end, excess) for end, excess in zip(measured_devices, excesses, strict=True)))
    blend = asked.blend("norm", roofline_of(0.0, 1.0), H100, "bf16")
    weights = np.array(
        [(squared(H100, end) + DISTANCE_OFFSET) ** -DISTANCE_POWER for end in measured_devices]
    )
    weights /= weights.sum()
    assert 0.01 < weights.min() < 0.03
    expected = np.exp(weights @ excesses) * (7 + LAUNCH_US)
    assert blend.us == pytest.approx([expected, expected])
    assert (blend.nearest, blend.near) == ("a100-80-sxm", False)


def test_experts_predict_each_row() -> None:
    expert = dataclasses.replace(knowing(A100, 0.0, columns=2), forest=forked())
    roofline = roofline_of([0.0, 0.0], [2.0, -3.0])
    predicted_us = model(expert).blend("norm", roofline, A100, "bf16").us
    assert np.log(predicted_us / roofline.us) == pytest.approx([110.5, 120.5])


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, -0.1, 0.2), (0.25, -0.2, 0.4), (1.0, -0.5, 1.0)])
def test_intervals_widen_with_distance(share: float, low: float, high: float) -> None:
    """Expect a quarter of the way for memory faster by half an octave, whose square is a quarter."""
    on = dataclasses.replace(A100, dram_gb_s=A100.dram_gb_s * 2**share**0.5) if share < 1 else P4
    blend = model(knowing(A100, 0.3)).blend("norm", roofline_of(0.0), on, "bf16")
    assert np.log(blend.low_us / blend.us) == pytest.approx(low)
    assert np.log(blend.high_us / blend.us) == pytest.approx(high)
    assert blend.near == (share < 1)


@pytest.mark.parametrize(("skill", "share"), [("norm", 0.1), ("decode attention", 0.15)])
def test_interval_of_another_board_is_wider_than_that_of_the_measured_one(skill: Any, share: float) -> None:
    on = dataclasses.replace(A100, dram_gb_s=A100.dram_gb_s * 1.01)
    forecast = ForecastModel({skill: (knowing(A100, 0.3),)}, {skill: of_model.Spread(-0.5, 1.0)})
    blend = forecast.blend(skill, roofline_of(0.0), on, "bf16")
    assert np.log(blend.low_us / blend.us) == pytest.approx(-0.1 - 0.4 * share)


@pytest.mark.parametrize(("skill", "rates_count"), [("norm", True), ("grouped product", False)])
def test_rates_of_a_device_do_not_count_for_kernels_that_read_weights(skill: Any, rates_count: bool) -> None:
    """Expect the same mean of both experts for any bandwidth if only generations count."""
    forecast = ForecastModel(
        {skill: (knowing(A100, 0.0), knowing(H100, 1.0))}, {skill: of_model.Spread(-0.5, 1.0)}
    )
    slow, fast = (
        forecast.blend(skill, roofline_of(0.0), dataclasses.replace(A100, dram_gb_s=gb_s), "bf16").us
        for gb_s in (A100.dram_gb_s, 4 * A100.dram_gb_s)
    )
    assert (slow.tolist() != fast.tolist()) == rates_count


def test_intervals_widen_outside_the_measured_range() -> None:
    margin = of_model.FEATURE_MARGIN
    features = (10.0, 10 + 0.99 * margin, 10 + 1.01 * margin, -10 - 0.99 * margin, -10 - 1.01 * margin)
    blend = model(knowing(A100, 0.3)).blend("norm", roofline_of(*features), A100, "bf16")
    assert blend.extrapolated.tolist() == [False, False, True, False, True]
    widening = np.where(blend.extrapolated, WIDENING_EXTRAPOLATED, 1)
    assert np.log(blend.low_us / blend.us) == pytest.approx(widening * -0.1)
    assert np.log(blend.high_us / blend.us) == pytest.approx(widening * 0.2)


def test_kernels_shorter_than_any_measured_one_are_extrapolated() -> None:
    """A prediction of 10 us counts as inside if the shortest kernel took less than twice as long."""
    for least_us, extrapolated in ((10.0, False), (19.0, False), (21.0, True)):
        expert = dataclasses.replace(knowing(A100, 0.0), least_us=least_us)
        blend = model(expert).blend("norm", roofline_of(0.0), A100, "bf16")
        assert blend.extrapolated.tolist() == [extrapolated]


def test_intervals_widen_for_proxies() -> None:
    roofline, proxy = roofline_of(0.0, 0.0, 99.0), np.array([False, True, True])
    blend = model(knowing(A100, 0.3)).blend("norm", roofline, A100, "bf16", proxy=proxy)
    widening = np.where(proxy, WIDENING_PROXY, 1)
    assert np.log(blend.high_us / blend.us) == pytest.approx(widening * 0.2)
    assert np.log(blend.low_us / blend.us) == pytest.approx(widening * -0.1)


def test_range_of_any_expert_counts_as_measured() -> None:
    asked = model(knowing(A100, 0.3, within=1.0), knowing(B200, 0.3, within=20.0))
    assert asked.blend("norm", roofline_of(15.0, 25.0), A100, "bf16").extrapolated.tolist() == [False, True]


def test_spread_interpolates_between_two() -> None:
    assert Spread(-1.0, 2.0).towards(Spread(-3.0, 2.0), 0.5) == Spread(-2.0, 2.0)


def test_without_a_device_the_other_experts_predict() -> None:
    whole = model(knowing(A100, 0.4), knowing(B200, 1.4))
    rest = whole.without("a100-80-sxm")
    blend = rest.blend("norm", roofline_of(0.0), A100, "bf16")
    assert (blend.nearest, blend.near) == ("b200", False)
    assert blend.us == pytest.approx(np.exp(1.4) * (7 + LAUNCH_US))
    assert np.log(blend.high_us / blend.us) == pytest.approx(FAR.high)
    assert len(whole.experts["norm"]) == 2


def test_unknown_kind_of_kernel_lists_known_ones() -> None:
    alone = ForecastModel(
        {"norm": (knowing(A100, 0.4),), "softmax": (knowing(B200, 0.4),)}, {"norm": FAR, "softmax": FAR}
    )
    with pytest.raises(UnknownName, match=r"'attention'.*norm, softmax"):
        alone.blend("attention", roofline_of(0.0), A100, "bf16")
    with pytest.raises(UnknownName, match=r"Known: softmax"):
        alone.without("a100-80-sxm").blend("norm", roofline_of(0.0), A100, "bf16")


# ---------------------------------------------------------------------------------------------- its file


def written(forecast: ForecastModel) -> bytes:
    file = io.BytesIO()
    forecast.save(file)
    return file.getvalue()


def made() -> ForecastModel:
    hand = dataclasses.replace(knowing(A100, 0.0, columns=2), forest=forked())
    return ForecastModel(
        {"norm": (hand, knowing(B200, 1.4, columns=2)), "softmax": (hand,)}, {"norm": FAR, "softmax": FAR}
    )


def test_model_round_trips_through_its_file(tmp_path: Path) -> None:
    whole = made()
    whole.save(tmp_path / "model.npz")
    reread = ForecastModel.load(tmp_path / "model.npz")
    assert written(reread) == written(whole) == (tmp_path / "model.npz").read_bytes()
    assert reread.far == whole.far
    rows = roofline_of([0.0, 0.0], [2.0, -11.0])
    for skill in ("norm", "softmax"):
        got, expected = (forecast.blend(skill, rows, H100, "bf16") for forecast in (reread, whole))
        assert got.us.tolist() == expected.us.tolist()
        assert got.low_us.tolist() == expected.low_us.tolist()
        assert got.extrapolated.tolist() == expected.extrapolated.tolist() == [False, True]


@pytest.mark.parametrize(("name", "value"), [("FORMAT", 1), ("LAUNCH_US", 4.0)])
def test_model_of_another_format_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(of_model, name, value)
        file = written(made())
    with pytest.raises(ValueError, match=f"{value}.*{getattr(of_model, name)}"):
        ForecastModel.load(io.BytesIO(file))


def test_model_file_with_pickled_objects_is_rejected(tmp_path: Path) -> None:
    about = np.frombuffer(json.dumps({"format": 1}).encode(), dtype=np.uint8)
    np.savez(tmp_path / "model.npz", about=about, objects=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        ForecastModel.load(tmp_path / "model.npz")


def test_archive_without_a_model_is_rejected(tmp_path: Path) -> None:
    np.savez(tmp_path / "model.npz", weights=np.zeros(3))
    with pytest.raises(ValueError, match="not a model file"):
        ForecastModel.load(tmp_path / "model.npz")


# ------------------------------------------------------------------------------------------- the shipped


def test_bundled_model_has_every_kind_of_kernel() -> None:
    assert set(bundled_model().experts) == set(bundled_model().far) == set(get_args(Skill))
    assert bundled_model() is bundled_model()


@pytest.mark.parametrize("skill", get_args(Skill))
def test_bundled_experts_are_valid(skill: Skill) -> None:
    types = {"product 16-bit": "bf16", "product 8-bit": "e4m3"}
    arithmetic: Any = (
        "bf16" if "attention" in skill or skill == "grouped product" else types.get(skill, "f32")
    )
    experts = bundled_model().experts[skill]
    assert len({expert.device for expert in experts}) == len(experts) >= 2
    for expert in experts:
        expected = coordinates(device.find(expert.device), arithmetic, attention=is_attention(skill))
        assert expert.coordinates == pytest.approx(expected)
        assert -1.5 < expert.near.low <= 0 <= expert.near.high < 1.5
        assert (expert.least <= expert.most).all()
        assert expert.least_us > 1
        assert np.isfinite([expert.least, expert.most]).all()
        trees = expert.forest
        leaf = trees.feature < 0
        assert trees.feature.max() < len(expert.least)
        assert np.array_equal(leaf, trees.left == 0)
        assert np.array_equal(leaf, trees.right == 0)
        assert (trees.left[~leaf] > 0).all()
        assert (trees.right[~leaf] > 0).all()
        tree_ends = np.append(trees.roots[1:], len(leaf))  # children are in the same tree
        end = np.repeat(tree_ends, tree_ends - trees.roots)
        assert (np.arange(len(leaf)) + np.maximum(trees.left, trees.right) < end).all()


def test_bundled_model_saves_to_the_same_bytes() -> None:
    file = Path(of_model.__file__).with_name("model.npz")
    with np.load(file) as bundled, np.load(io.BytesIO(written(bundled_model()))) as rewritten:
        assert sorted(bundled.files) == sorted(rewritten.files)
        assert all(np.array_equal(bundled[name], rewritten[name]) for name in bundled.files)


def test_experts_of_random_sizes_are_corrected_for_sizes_of_models() -> None:
    expert = dataclasses.replace(knowing(device.find("h100-sxm"), 0.3), even=-0.1)
    assert expert.excess(roofline_of(0.0, 0.0, even=[True, False])) == pytest.approx([0.2, 0.3])
