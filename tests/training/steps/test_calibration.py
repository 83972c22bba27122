"""Efficiencies of software stacks, and predictions moved by measured steps."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.predict_stacks import POPULATIONS
from tunebench import device as devices
from tunebench.errors import InputError, UnknownName
from tunebench.forecast.network import predict_network
from tunebench.stack import STACKS, Efficiency, efficiency_of
from tunebench.training.interconnect.cluster import Cluster
from tunebench.training.steps.calibration import MeasuredStep, calibrate
from tunebench.training.steps.measured_file import read_measured
from tunebench.training.steps.step import Parallelism, StepPrediction, predict_step
from tunebench.workloads.networks import NetworkRun, network

A100 = devices.find("a100-80-sxm")
PAGE = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "predict" / "stacks.md"

MEASURED = """
model = "gpt2"
stack = "megatron@2022"
dtype = "bf16"
device = "a100-80-sxm"
seq = 512
batch = 8
[[step]]
time_s = 0.2
data = 2
"""


def step(stack: str = "megatron@2022", link: str | None = None, **division: Any) -> StepPrediction:
    parallelism = Parallelism(**division)
    run = NetworkRun(batch=8, seq=512, mode="train", dtype="bf16", optimizer="adamw", stack=stack)
    cluster = Cluster.of(A100, devices=parallelism.devices, link=link)
    return predict_step(network("gpt2"), A100, run, cluster, parallelism)


def measured(prediction: StepPrediction, ratio: float) -> MeasuredStep:
    return MeasuredStep(seconds=prediction.modelled.us * ratio / 1e6, prediction=prediction)


def test_sources_count_alike_and_their_number_widens_the_interval() -> None:
    efficiency = Efficiency.of_sources({"a": [0.1, 0.1, 0.1, 0.1], "b": [0.2, 0.4]})
    assert efficiency.mean == pytest.approx(0.2)
    assert efficiency.between == pytest.approx(math.sqrt(0.02))
    assert efficiency.within == pytest.approx(math.sqrt(0.005))
    more = Efficiency(mean=0.2, between=efficiency.between, within=efficiency.within, sources=20)
    assert more.width < efficiency.width / 2
    with pytest.raises(InputError, match="at least 2 sources"):
        Efficiency.of_sources({"a": [0.1]})


def test_bundled_efficiencies_are_those_of_the_page() -> None:
    learned = PAGE.read_text(encoding="utf-8").partition("## Sources left out")[0]
    lines = {
        name: line.split(" | ")
        for line in learned.splitlines()
        for name in POPULATIONS
        if line.startswith(f"| {name} | ")
    }
    assert lines.keys() == POPULATIONS.keys()
    for name, bundled in POPULATIONS.items():
        mean, between, within = map(float, lines[name][2:5])
        assert (bundled.between, bundled.within) == (between, within)
        assert bundled.mean == (0.0 if name == "megatron, tuned" else mean)
        assert bundled.sources == len(re.findall(r"[+-]0\.\d{3}", lines[name][1]))


def test_a_stack_of_2022_takes_longer_by_its_mean_and_its_parts_add_up() -> None:
    now, then = step("megatron", data=2), step(data=2)
    assert then.time_us == pytest.approx(now.time_us * math.exp(efficiency_of("megatron@2022").mean))
    assert then.low_us / then.time_us < now.low_us / now.time_us
    parts = then.compute + then.communication + then.bubble + then.software
    assert parts.us == pytest.approx(then.time_us)
    assert step("megatron@2022", data=2).time == then.time


@pytest.mark.parametrize("changes", [{"mode": "infer", "optimizer": "none"}, {"dtype": "f32"}])
def test_other_runs_have_no_efficiency(changes: dict[str, Any]) -> None:
    values: dict[str, Any] = {"batch": 2, "seq": 128, "mode": "train", "dtype": "bf16", "optimizer": "adamw"}
    run = NetworkRun(**values | changes)
    assert predict_network(network("gpt2"), A100, run).software_us == 0.0


def test_unknown_stacks_and_tunings_are_refused() -> None:
    with pytest.raises(UnknownName, match=r"megatron@2022"):
        NetworkRun(stack="megatron@2021")
    with pytest.raises(UnknownName, match="tuned, typical"):
        NetworkRun(stack="megatron", tuning="best")
    with pytest.raises(InputError, match="leave tuning=tuned out"):
        NetworkRun(stack="eager", tuning="tuned")
    assert NetworkRun(stack="megatron", tuning="typical").efficiency is None  # no training step
    assert {stack.kernels for stack in STACKS.values()} == {"eager", "compiled", "megatron"}


@pytest.mark.parametrize("ratio", [0.9, 1.1, 1.5])
def test_a_measured_step_moves_others_towards_it_and_narrows_their_interval(ratio: float) -> None:
    prediction = step(data=2)
    other = step(data=4)
    moved = calibrate([measured(prediction, ratio)]).calibrated(other)
    before, after = other.time_us / other.modelled.us, moved.time_us / other.modelled.us
    assert min(before, ratio) < after < max(before, ratio)
    assert moved.high_us / moved.low_us < other.high_us / other.low_us
    thrice = calibrate([measured(prediction, ratio)] * 3).calibrated(other)
    assert abs(thrice.time_us / other.modelled.us - ratio) < abs(after - ratio)


def test_communication_is_slower_where_steps_with_more_of_it_are() -> None:
    little, much = step(data=2), step(link="5", data=8, overlap=False)
    assert much.communication.us / much.time_us > 2 * little.communication.us / little.time_us
    kernels, communication = calibrate([measured(little, 1.15), measured(much, 1.6)]).factors
    assert communication > 1.3 * kernels


def test_measured_steps_say_nothing_about_another_device_or_stack() -> None:
    calibration = calibrate([measured(step(data=2), 1.2)])
    with pytest.raises(
        InputError, match="measured with stack megatron@2022 says nothing about stack megatron:"
    ):
        calibration.calibrated(step("megatron", data=2))
    with pytest.raises(InputError, match="at least one measured step"):
        calibrate([])


def test_a_file_of_measured_steps(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(MEASURED)
    (only,) = read_measured(path)
    assert only.seconds == 0.2
    assert isinstance(only.prediction, StepPrediction)
    assert only.prediction.modelled == step(data=2).modelled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no measured step: expected a table \[\[step\]\]"),
        ("step = 1", "no measured step"),
        ("[[step]", "is not TOML"),
        (MEASURED.replace("time_s", "times"), "step 1: unknown key 'times'. Did you mean"),
        (MEASURED.replace("0.2", '"0.2 s"'), "time_s must be a number of seconds, got '0.2 s'"),
        (MEASURED.replace("0.2", "-1"), "must take more than 0 seconds"),
        (MEASURED.replace("0.2", "200"), "expected seconds of a whole step"),
        (MEASURED.replace("seq = 512\n", ""), "step 1: expected seq, which the file leaves out"),
        (MEASURED.replace("batch = 8", 'batch = "8"'), "wrong type"),
        (MEASURED.replace("gpt2", "gpt9"), "gpt9"),
        (MEASURED.replace("data = 2", "data = 3"), "batch"),
        (MEASURED.replace('"bf16"', '"f32"'), "training steps in 16 bits"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        calibrate(read_measured(path))
    with pytest.raises(InputError, match="cannot read measured steps"):
        read_measured(tmp_path / "absent.toml")
