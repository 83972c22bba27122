"""`tunebench plan memory`: its output, its files, and mistakes."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tunebench import cli

torch = pytest.importorskip("torch")
pytest.importorskip("highspy", reason="the extra `torch` is not installed")

from tunebench.training.fitting import model_plan  # noqa: E402
from tunebench.training.memory import PlanEffort, planner, read_plan  # noqa: E402

pytestmark = pytest.mark.torch

EFFORT = PlanEffort(exact_operations=0, rounds=1)

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh().sin()
        return x.sum()

class Branching(Net):
    def forward(self, x):
        return x if x.sum() > 0 else self.layers[0](x)

class Rows(Net):
    def forward(self, x):
        return self.layers[0](x)

make, broken, rows = Net, Branching, Rows

def frozen():
    return Net().requires_grad_(False)

def raises():
    raise ValueError("no weights")
"""


@pytest.fixture(scope="module")
def traced_once() -> Callable[..., Any]:
    """The function that profiles a model, which traces each batch of the model of this file once."""
    profiles: dict[Any, Any] = {}
    real = model_plan.profile_step

    @functools.wraps(real)
    def profile(model: Any, args: Any, **arguments: Any) -> Any:
        link = arguments["link"]
        key = (type(model).__name__, args[0].shape, arguments["device"].name, link, arguments["other_bytes"])
        if key not in profiles:
            profiles[key] = real(model, args, **arguments)
        return profiles[key]

    return profile


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced_once: Callable[..., Any]) -> str:
    monkeypatch.setattr(model_plan, "profile_step", traced_once)
    monkeypatch.setattr(planner, "PlanEffort", lambda: EFFORT)
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def typed(net: str, *more: str, device: str = "h100-sxm") -> list[str]:
    return ["plan", "memory", f"{net}:make", "--input", "131072x64:f32", "--device", device, *more]


def test_a_plan_states_memory_and_time_in_total_and_by_layer(net: str, run_json: Run, run_text: Run) -> None:
    asked = typed(net, "--budget", "60%")
    shown = run_json(*asked)
    plain, planned = shown["without_plan"], shown["with_plan"]
    assert (shown["model"], shown["host_link"], shown["fits"]) == ("Net", "pcie5", True)
    assert shown["budget_bytes"] == int(0.6 * plain["peak_bytes"])
    assert planned["peak_bytes"] <= planned["reserved_bytes"] <= shown["budget_bytes"] < plain["peak_bytes"]
    assert planned["step_us"] == pytest.approx(planned["compute_us"] + planned["stall_us"])
    assert shown["lower_us"] <= planned["step_us"]
    # Tensors are 32 MiB. Backward reads the three results of tanh, and the inputs of the last two layers.
    saved = [
        layer[f"{treatment}_bytes"]
        for layer in shown["layers"]
        for treatment in ("kept", "recomputed", "swapped")
    ]
    assert sum(saved) == 5 * 2**25
    assert {layer["layer"] for layer in shown["layers"]} == {"", *(f"layers.{index}" for index in range(3))}
    assert sum(layer["first_us"] for layer in shown["layers"]) == pytest.approx(plain["step_us"])
    text = run_text(*asked)
    for expected in (
        "training step of Net on h100-sxm",
        "peak memory, reserved",
        "layers.2",
        "optimality gap",
    ):
        assert expected in text


def test_a_plan_file_and_a_plot_are_written(net: str, run_json: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    out, plot = tmp_path / "plan.json", tmp_path / "memory.svg"
    shown = run_json(*typed(net, "--budget", "60%", "--out", str(out), "--plot", str(plot)))
    assert shown["written"] == [str(out), str(plot)]
    assert "<svg" in plot.read_text()
    plan = read_plan(out, _profile(net))
    assert plan.simulation.step_us == shown["with_plan"]["step_us"]
    assert plan.budget_bytes == shown["budget_bytes"]


def _profile(net: str) -> Any:
    """Return the step of the command's model."""
    from tunebench import device
    from tunebench.graph import InputSpec, load_factory
    from tunebench.training.memory import host_link

    target = device.find("h100-sxm")
    inputs = [InputSpec.parse("131072x64:f32")]
    factory = load_factory(f"{net}:make")
    return model_plan.ModelProfiler(factory, inputs, target, link=host_link("pcie5")).profile().step


def test_the_curve_falls_with_the_budget(net: str, run_json: Run) -> None:
    curve = run_json(*typed(net, "--budget", "60%", "--curve"))["curve"]
    assert len(curve) > 5
    assert [point["budget_bytes"] for point in curve] == sorted(point["budget_bytes"] for point in curve)
    assert [point["step_us"] for point in curve] == sorted(
        (point["step_us"] for point in curve), reverse=True
    )
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in curve)


def test_the_largest_batch_is_larger_with_a_plan_and_too_large_without_one(net: str, run_json: Run) -> None:
    shown = run_json(*typed(net, "--budget", "1GB", "--max-batch", "--optimizer", "none"))
    plain, planned = shown["max_batch"]["without_plan"], shown["max_batch"]["with_plan"]
    assert planned["batch"] > 1.5 * plain["batch"] > 131072
    assert planned["sample_us"] == pytest.approx(planned["step_us"] / planned["batch"])
    assert shown["with_plan"]["reserved_bytes"] <= shown["budget_bytes"] == 10**9
    assert shown["without_plan"]["reserved_bytes"] > 10**9


def test_states_of_the_optimizer_take_memory(net: str, run_json: Run) -> None:
    peaks = {
        name: run_json(*typed(net, "--optimizer", name))["without_plan"]["peak_bytes"]
        for name in ("adamw", "sgd", "none")
    }
    parameter_bytes = 3 * (64 * 64 + 64) * 4
    assert peaks["adamw"] - peaks["sgd"] == 2 * parameter_bytes
    assert peaks["sgd"] == peaks["none"]


def test_a_processor_has_no_allocator_and_no_link(net: str, run_json: Run) -> None:
    shown = run_json(*typed(net, "--budget", "70%", device="cpu"))
    assert shown["host_link"] is None
    assert shown["with_plan"]["reserved_bytes"] is None
    assert shown["with_plan"]["stall_us"] == 0


def test_an_impossible_budget_states_the_least(net: str, run_refused: Run) -> None:
    error = run_refused(*typed(net, "--budget", "1MB"))
    assert "no plan of this step fits a budget of 1 MB; the least possible budget is" in error
    assert "parameters 49.92 kB, gradients 49.92 kB" in error
    assert "The operation that needs most" in error
    assert "net.py:1" in error


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (("--device", "h100-sxn"), "Did you mean 'h100-sxm'"),
        (("--budget", "0"), "budget '0' is no size"),
        (("--budget", "0GB"), "budget '0GB' is no size"),
        (("--budget", "150%"), "'150%' is above the peak without a plan"),
        (("--budget", "24XB"), "expected a size above 0 such as 24GB"),
        (("--host-link", "pcie9"), "unknown host link 'pcie9'"),
        (("--host-link", "0"), "positive rates"),
        (("--optimizer", "adam"), "unknown optimizer 'adam'. Did you mean 'adamw'"),
        (("--max-batch", "--budget", "80%"), "--max-batch needs a --budget in bytes"),
        (("--out", "/no/such/folder/plan.json"), "there is no folder /no/such/folder"),
        (("--out", "/dev/full"), "/dev/full must be a regular file"),
        (("--plot", "/"), "it is a folder, expected the name of a file"),
        (("--device", "cpu"), "add --budget SIZE"),
        (("--device", "rtx-3060-laptop"), "name one of pcie3, pcie4, pcie5, nvlink-c2c"),
        (("--input", "8x64:f32", "--max-batch"), "the same first extent in all inputs"),
        (("--input", "8x64x"), "is not SHAPE:TYPE"),
        (("--input", "99999999999999999999x64:f32"), "has too many elements: expected at most"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_are_refused_before_the_model_is_traced(
    net: str, run_refused: Run, monkeypatch: pytest.MonkeyPatch, changed: tuple[str, ...], expected: str
) -> None:
    monkeypatch.setattr(model_plan, "profile_step", None)
    assert expected in run_refused(*typed(net, *changed))


def test_mistakes_in_the_model_are_named(net: str, run_refused: Run) -> None:
    assert "add --input" in run_refused("plan", "memory", f"{net}:make")
    arguments = ("--input", "8x64:f32", "--device", "t4")
    assert "net.py has no function none. Its functions: Net, Branching, Rows, make, " in run_refused(
        "plan", "memory", f"{net}:none", *arguments
    )
    assert "no.py does not exist: expected FILE.py:FUNCTION" in run_refused(
        "plan", "memory", "no.py:make", *arguments
    )
    assert "cannot make the model: ValueError: no weights" in run_refused(
        "plan", "memory", f"{net}:raises", *arguments
    )
    assert "Branching cannot be traced as a whole" in run_refused(
        "plan", "memory", f"{net}:broken", *arguments
    )
    assert "Rows returns no loss: expected a result of one element" in run_refused(
        "plan", "memory", f"{net}:rows", *arguments
    )
    assert "Net returns nothing that requires a gradient: return the loss, with" in run_refused(
        "plan", "memory", f"{net}:frozen", *arguments
    )


def test_a_plot_of_unknown_format_is_refused_before_the_model_is_traced(
    net: str, run_refused: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    monkeypatch.setattr(model_plan, "profile_step", None)
    plot = ("--plot", str(tmp_path / "memory.txt"))
    known = ("plan", "pipeline", "--forward-us", "1", "--stages", "2", "--microbatches", "2")
    explained = ("explain", "gemm:m=64,n=64,k=64,dtype=f16", "--arch", "sm_90")
    for command in (typed(net), known, explained):
        assert "the suffix of a plot must be one of" in run_refused(*command, *plot)


def test_a_file_that_cannot_be_written_does_not_lose_the_plan(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    monkeypatch.setattr("tunebench.training.memory.plot.draw", _full_disk)
    assert cli.run(typed(net, "--budget", "60%", "--plot", str(tmp_path / "memory.svg"))) == 2
    printed = capsys.readouterr()
    assert "peak memory" in printed.out
    assert "cannot write the plot" in printed.err


def _full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_inputs_of_an_absent_device_take_no_memory_here(net: str, run_json: Run) -> None:
    command = [argument.replace("131072x", "9999999999x") for argument in typed(net, "--budget", "100%")]
    assert run_json(*command)["without_plan"]["peak_bytes"] > 9999999999 * 64 * 4


def test_ctrl_c_while_planning_ends_cleanly(
    net: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tunebench.training import memory

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "plan_on_device", interrupted)
    out = tmp_path / "plan.json"
    assert cli.run(typed(net, "--budget", "60%", "--out", str(out))) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
    assert not out.exists()
