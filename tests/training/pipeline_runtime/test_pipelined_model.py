"""Whole models in pipelines: gradients and peaks of real processes, the guide's example, and mistakes."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.docs.test_examples import ROOT, blocks  # noqa: E402
from tests.fork_server import Programs  # noqa: E402
from tunebench import cli  # noqa: E402
from tunebench.errors import InputError, RankFailed  # noqa: E402
from tunebench.training import pipelined_model  # noqa: E402
from tunebench.training.pipeline_runtime.layers import TracedLayers, layers_of  # noqa: E402
from tunebench.training.pipeline_runtime.partition import LayerCost, divide_layers, measure_layers  # noqa: E402

RANKS = 4
MODELS = ("sequential", "interleaved", "gpt", "u-net")
DEATHS = {"division": 0, "measurement": 2, "step": 2}

Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def run_cases(folder: Path, programs: Programs, *groups: str) -> Results:
    """Return what each rank wrote for each case; nothing if it was killed."""
    example = [
        block.body
        for block in blocks(ROOT / "docs/guide/pipeline.md")
        if block.body.startswith(("# file: my_model.py", "# file: train_model.py"))
    ]
    arguments = ["-m", "tests.training.pipeline_runtime.model_ranks", str(folder), *groups]
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "EXAMPLE": json.dumps(example)}
    done = programs.run(arguments, environment={**os.environ, **variables})
    by_case: Results = {}
    for case in ",".join(groups).split(","):
        rank_files = [folder / f"{case}.{rank}" for rank in range(RANKS)]
        assert any(path.exists() for path in rank_files), done.stderr
        by_case[case] = [json.loads(path.read_text()) if path.exists() else None for path in rank_files]
    return by_case


@pytest.fixture(scope="module")
def results(folder: Path, programs: Programs) -> Results:
    return run_cases(folder, programs, ",".join(MODELS), "example")


@pytest.fixture(scope="module")
def deaths(folder: Path, programs: Programs) -> Results:
    return run_cases(folder, programs, *DEATHS)


@pytest.mark.parametrize("case", [*MODELS, "example"])
def test_losses_gradients_and_buffers_are_those_of_one_process(results: Results, case: str) -> None:
    ranks = results[case]
    assert ranks[-1]["losses"] == pytest.approx(ranks[-1]["expected"], rel=1e-6 if case == "gpt" else 0)
    for result in ranks:
        if case == "gpt":  # the embedding and the head share weights, whose gradients are sums
            assert set(result["unequal"]) <= {"head.weight"}
            assert result["difference"] < 1e-6
        else:
            assert result["unequal"] == []


def test_names_of_parameters_are_those_of_the_model(results: Results) -> None:
    names = sorted(name for result in results["example"] for name in result["names"])
    assert {name.split(".")[0] for name in names} == {str(index) for index in range(10)}
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", ["example", "gpt"])
def test_peaks_are_those_of_the_plan(results: Results, case: str) -> None:
    for result in results[case]:
        assert result["measured"] == pytest.approx(result["planned"], rel=0.05)


@pytest.mark.parametrize("case", [*MODELS, "example"])
def test_no_rank_holds_more_than_it_can_if_messages_are_late(results: Results, case: str) -> None:
    for result in results[case]:
        assert result["planned"] <= result["most"]
        assert result["late"] <= 1.005 * result["most"]


def test_ranks_that_make_the_model_on_meta_have_their_stages_alone(results: Results) -> None:
    first, *others = results["interleaved"]
    assert first["made"] == sum(result["parameters"] for result in results["interleaved"])
    assert [result["made"] for result in others] == [result["parameters"] for result in others]
    # Stages of a traced model are modules of their own.
    assert [result["made"] for result in results["u-net"][1:]] == [0, 0, 0]
    assert all(result["parameters"] for result in results["u-net"])


def test_written_costs_give_the_same_plan(
    results: Results, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for result in results["gpt"]:
        assert result["planned from file"] == result["planned"]
        assert result["random numbers unchanged"]
    command = ["plan", "pipeline", "--costs", str(folder / "stages.toml"), "--microbatches", "8"]
    assert cli.run([*command, "--schedule", "1f1b"]) == 0
    assert "stages: 4 ranks, 8 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize("part", DEATHS)
def test_rank_that_is_killed_ends_the_example_on_all_ranks(deaths: Results, part: str) -> None:
    assert deaths[part][DEATHS[part]] is None
    for rank, result in enumerate(deaths[part]):
        if rank != DEATHS[part]:
            assert result["error"].startswith("RankFailed: rank")
            assert "ended or failed" in result["error"]
            assert result["seconds"] < 60


# ---------------------------------------------------------------------------------------------- division


@pytest.mark.parametrize("seed", range(20))
def test_slowest_stage_is_as_fast_as_that_of_any_division(seed: int) -> None:
    random = Random(seed)
    costs = [
        LayerCost(
            compute_us=random.randint(1, 9),
            send_bytes=random.randint(0, 3),
            changes_input=random.random() < 0.2,
        )
        for _ in range(9)
    ]

    def slowest(starts: Sequence[int]) -> float:
        ends = (*starts[1:], len(costs))
        return max(
            sum(cost.compute_us for cost in costs[start:end])
            + (2 * costs[end - 1].send_bytes if end < len(costs) else 0)
            for start, end in zip(starts, ends, strict=True)
        )

    begins = [layer for layer in range(1, 9) if not costs[layer].changes_input]
    best = min(slowest((0, *starts)) for starts in itertools.combinations(begins, 3))
    starts = divide_layers(costs, 4, float)
    assert len(starts) == 4
    assert set(starts[1:]) <= set(begins)
    assert slowest(starts) <= best * 1.02 + 1e-6


def test_stages_other_than_the_slowest_are_about_equal() -> None:
    costs = [LayerCost(compute_us=us) for us in (9, 1, 1, 1, 1, 1, 1)]
    assert divide_layers(costs, 3, float) == (0, 1, 4)


def test_fewer_layers_than_stages_are_refused() -> None:
    costs = [LayerCost(compute_us=1), LayerCost(compute_us=1, changes_input=True)]
    with pytest.raises(InputError, match="the model has 1 with which a stage can begin"):
        divide_layers(costs, 2, float)


# ------------------------------------------------------------------------------------------------ traces


class Branches(nn.Module):
    """A value that two later operations need, and one that is changed in place through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.first(x)
        late = self.second(early.tanh())
        late.view(-1)[0:2].mul_(2)
        return late + early, early


def test_every_division_of_a_trace_computes_what_the_model_computes() -> None:
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 4)
    layers = layers_of(model, (x,), {})
    assert isinstance(layers, TracedLayers)
    expected = model(x)
    for boundary in range(1, layers.count):
        values = layers.module(0, boundary)(x)
        values = layers.module(boundary, layers.count)(*(values if isinstance(values, tuple) else (values,)))
        for actual, reference in zip(layers.output(values), expected, strict=True):
            assert torch.equal(actual, reference)
    # No stage can begin between the second layer and the change of its result.
    operations = [str(node.target) for node in layers.module(0, layers.count).graph.nodes]
    assert layers.count < sum(operation.startswith("aten.") for operation in operations)


def test_long_trace_joins_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebench.training.pipeline_runtime.layers.MOST_LAYERS", 4)
    layers, x = layers_of(Branches(), (x := torch.randn(3, 4),), {}), x
    before = set(layers.starts)
    layers.join([x])
    assert layers.count <= 4
    assert set(layers.starts) <= before


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_full_backward_hook(lambda *_: None)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Waiting(nn.Module):
    """A layer that waits, as for a device or a file."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.1)
        return x + 1


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_time_of_a_layer_counts_what_it_waits_for() -> None:
    layers = layers_of(nn.Sequential(nn.Linear(4, 4), Waiting()), [torch.randn(2, 4)], {})
    costs = measure_layers(layers, [torch.randn(2, 4)], lambda y: y.sum(), repeats=1)
    assert costs[1].compute_us >= 1e5


@pytest.mark.usefixtures("one_rank")
def test_models_and_batches_that_do_not_fit_are_refused() -> None:
    x, linear = torch.randn(8, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    usual = {"loss_fn": nn.functional.mse_loss, "microbatches": 2}
    for model, inputs, arguments, message in (
        (Hooked(), x, {}, "module linear has backward hooks"),
        (Branching(), x, {}, "torch.export cannot trace Branching"),
        (linear, x, {"microbatches": 3}, "multiple of 3"),
        (linear, [1.0], {}, "must be tensors"),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to("meta"),
            x,
            {},
            "rank 0 measures .* on the device meta",
        ),
        (nn.Linear(4, 4, device="meta"), x, {}, "rank 0 measures .* on the device meta"),
        (linear, x, {"schedule": "2f2b"}, "2f2b"),
        (linear, x, {"memory": 100}, "1f1b needs 596 bytes .* 100 bytes are available"),
        (linear, x, {"memory": "80%"}, "memory '80%' is no size: expected a size above 0 such as 24GB"),
        (linear, x, {"repeats": 0}, "repeats must be a whole number of at least 1, got 0"),
        (linear, x, {"costs_file": "absent/stages.toml"}, "absent/stages.toml: there is no such folder"),
    ):
        with pytest.raises((InputError, RankFailed), match=message):
            pipelined_model(model, inputs, x, **{**usual, **arguments})


@pytest.mark.usefixtures("one_rank")
def test_more_stages_than_layers_are_refused_before_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[pipelined_model.__module__], "measure_layers", None)
    x = torch.randn(8, 4)
    with pytest.raises(InputError, match=r"2 stages .* the model has 1 with which"):
        pipelined_model(
            nn.Tanh(), x, x, loss_fn=nn.functional.mse_loss, microbatches=2, schedule="interleaved-1f1b"
        )


def test_call_needs_a_process_group() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        pipelined_model(nn.Linear(2, 2), None, loss_fn=nn.functional.mse_loss, microbatches=1)


@pytest.mark.usefixtures("one_rank")
def test_parameter_of_two_stages_of_a_rank_is_refused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(8, 4)
    model = nn.Sequential(linear, nn.Tanh(), linear)
    with pytest.raises(InputError, match="two stages of rank 0 share the parameter"):
        pipelined_model(
            model,
            x,
            x,
            loss_fn=nn.functional.mse_loss,
            microbatches=2,
            schedule="interleaved-1f1b",
        )
