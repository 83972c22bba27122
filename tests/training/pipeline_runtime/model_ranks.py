"""Ranks of a pipeline that `pipelined_model` makes of whole models, one process each.

    python -m tests.training.pipeline_runtime.model_ranks FOLDER CASE,CASE… CASE…

As `pipeline_ranks`, with other cases.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import os
import signal
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.plan_pipeline_measured import counted_peak
from tests.training.pipeline_runtime.pipeline_ranks import Block, Tracker, main
from tunebench.training import PipelinedModel, pipelined_model
from tunebench.training.pipeline import read_stages
from tunebench.training.pipeline_runtime.partition import LayerCost, measure_layers
from tunebench.training.schedules import simulate_pipeline

WORDS, WIDTH, MICROBATCHES = 32, 64, 8


class Gpt(nn.Module):
    """A GPT whose head has the weights of the embedding, and which returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(0.0)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor, scale: Tensor) -> dict[str, Any]:
        x = self.drop(self.embedding(words))
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x) * scale, "name": None}


class UNet(nn.Module):
    """Convolutions with skip connections, activations in place, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        channels = (3, 8, 16)
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
            )
            for before, after in itertools.pairwise(channels)
        )
        self.middle = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width // 2, 3, padding=1) for width in (16, 8))

    def forward(self, image: Tensor) -> Tensor:
        kept, x = [], image
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for layer in self.up:
            x = nn.functional.interpolate(x, scale_factor=2)
            x = layer(torch.cat([x, kept.pop()], 1)).relu_()
        return x


def sequential() -> nn.Sequential:
    layers = [
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(inplace=True), nn.Linear(64, 64))
        for _ in range(6)
    ]
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*layers), nn.BatchNorm1d(64), nn.Linear(64, 8))


def word_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    assert output["name"] is None
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Problem:
    """A model to train, and its batch."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    target: Callable[[], Tensor]
    loss_fn: Callable[[Any, Tensor], Tensor] = nn.functional.mse_loss
    schedule: str = "1f1b"
    on_meta: bool = False
    """Whether ranks other than 0 have the model on `meta`."""
    layer_times_us: tuple[float, ...] = (1e6,)
    """Times of the layers, in turn (see `given_layer_times`)."""


PROBLEMS = {
    "sequential": Problem(sequential, lambda: torch.randn(512, 16), lambda: torch.randn(512, 8)),
    "interleaved": Problem(
        sequential,
        lambda: torch.randn(512, 16),
        lambda: torch.randn(512, 8),
        schedule="interleaved-1f1b",
        on_meta=True,
        layer_times_us=(1e3, 5e3, 2e3),
    ),
    "gpt": Problem(
        Gpt,
        lambda: {"words": torch.randint(0, WORDS, (16, 24)), "scale": torch.ones(16, 1, 1)},
        lambda: torch.randint(0, WORDS, (16, 24)),
        word_loss,
    ),
    "u-net": Problem(
        UNet, lambda: torch.randn(16, 3, 16, 16), lambda: torch.randn(16, 4, 16, 16), on_meta=True
    ),
}


@contextlib.contextmanager
def given_layer_times(times_us: Sequence[float] = (1e6,)) -> Iterator[None]:
    """Divide models by these times of their layers within the context, whatever is measured.

    On a busy machine, measured times may give a rank a stage of few parameters or none, whose memory is
    mostly messages. How many of them exist at once depends on when they arrive.
    """
    module = importlib.import_module("tunebench.training.pipeline_runtime.pipelined_model")

    def measure(*args: Any, **options: Any) -> list[LayerCost]:
        costs = zip(measure_layers(*args, **options), itertools.cycle(times_us), strict=False)
        return [replace(cost, compute_us=time_us) for cost, time_us in costs]

    with unittest.mock.patch.object(module, "measure_layers", measure):
        yield


def one_process(problem: Problem, model: nn.Module, batches: Sequence[Any]) -> list[float]:
    """Train a model; return the losses. The gradients are those of the last step."""
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for inputs, target in batches:
        optimizer.zero_grad()
        step_losses = []
        for share, expected in zip(shares_of(inputs), target.chunk(MICROBATCHES), strict=True):
            output = model(**share) if isinstance(share, dict) else model(share)
            loss = problem.loss_fn(output, expected)
            loss.backward()
            step_losses.append(loss.detach())
        for parameter in model.parameters():
            parameter.grad.div_(MICROBATCHES)
        losses.append(torch.stack(step_losses).mean().item())
        optimizer.step()
    return losses


def shares_of(inputs: Any) -> list[Any]:
    """Return the micro-batches of a batch."""
    if not isinstance(inputs, dict):
        return list(inputs.chunk(MICROBATCHES))
    chunks = {name: value.chunk(MICROBATCHES) for name, value in inputs.items()}
    return [{name: values[index] for name, values in chunks.items()} for index in range(MICROBATCHES)]


def measured_peak(run: PipelinedModel, inputs: Any, target: Tensor) -> int:
    """Return the largest memory of this rank in a step, without the batch."""
    tracker = Tracker()
    tracker.track_external(*run.stages.values(), run.optimizer)
    with tracker:
        run.step(inputs, target)
    measured: int = sum(kinds["Total"] for kinds in tracker.get_tracker_snapshot("peak").values())
    tensors = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
    batch_bytes = sum(tensor.nbytes for tensor in tensors) * (0 in run.stages)
    return measured - batch_bytes - target.nbytes * (run.run.schedule.stages - 1 in run.stages)


def late_peak(run: PipelinedModel, inputs: Any, target: Tensor) -> int:
    """Return the most bytes of storages of this rank without the batch, if one rank after another is late."""
    batch = [*tree_leaves(inputs), target]
    parameters = [parameter for stage in run.stages.values() for parameter in stage.parameters()]
    state = [*tree_leaves(dict(run.optimizer.state)), *(parameter.grad for parameter in parameters)]
    state += [*parameters, *(buffer for stage in run.stages.values() for buffer in stage.buffers())]
    held = [tensor for tensor in state if isinstance(tensor, Tensor)]
    peaks = []
    for late in range(dist.get_world_size()):

        @contextlib.contextmanager
        def observer(action: Any, late: int = late) -> Iterator[None]:
            time.sleep(0.003 * (late == dist.get_rank()))
            yield

        run.run.observer = observer
        dist.barrier()
        peaks.append(counted_peak([*held, *batch], lambda: run.step(inputs, target)))
    return max(peaks) - sum(tensor.nbytes for tensor in batch)


def comparison(
    run: PipelinedModel, rank: int, reference: nn.Module, batch: tuple[Any, Tensor]
) -> dict[str, Any]:
    """Return how this rank differs from one process after the same steps, and its peaks."""
    tensors = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers())
    own = {
        key: tensor
        for stage in run.stages.values()
        for key, tensor in (*stage.named_parameters(), *stage.named_buffers())
    }
    grads = [(key, tensor.grad, tensors[key].grad) for key, tensor in own.items() if tensor.grad is not None]
    return {
        "names": sorted(own),
        "parameters": sum(1 for stage in run.stages.values() for _ in stage.parameters()),
        "unequal": [key for key, grad, other in grads if not torch.equal(grad, other)]
        + [key for key, tensor in own.items() if not torch.equal(tensor, tensors[key])],
        "difference": max(
            (float((grad - other).abs().max() / other.abs().max()) for _, grad, other in grads), default=0.0
        ),
        "measured": measured_peak(run, *batch),
        "planned": run.simulation.peak_bytes[rank],
        "most": run.most_bytes[rank],
        "late": late_peak(run, *batch),
    }


def whole_model(name: str, rank: int) -> dict[str, Any]:
    """Train a model for two steps, and compare."""
    problem = PROBLEMS[name]
    torch.manual_seed(0)
    model, batch = problem.model(), (problem.inputs(), problem.target())
    reference = copy.deepcopy(model)
    expected = one_process(problem, reference, [batch] * 2)
    if problem.on_meta and rank:
        with torch.device("meta"):
            model = problem.model()
    state = torch.get_rng_state()
    with given_layer_times(problem.layer_times_us):
        run = pipelined_model(
            model,
            *batch,
            loss_fn=problem.loss_fn,
            microbatches=MICROBATCHES,
            schedule=problem.schedule,
            costs_file=f"{name}.toml",
            timeout_s=30,
        )
    unchanged = torch.equal(state, torch.get_rng_state())
    losses = []
    for _ in range(2):
        run.optimizer.zero_grad()
        loss = run.step(*batch)
        run.optimizer.step()
        losses.append(None if loss is None else loss.item())
    dist.barrier()
    costs = read_stages(f"{name}.toml").costs(run.run.schedule.placement)
    return {
        **comparison(run, rank, reference, batch),
        "losses": losses,
        "expected": expected,
        "made": sum(not tensor.is_meta for tensor in model.parameters()),
        "random numbers unchanged": unchanged,
        "planned from file": simulate_pipeline(run.run.schedule, costs).peak_bytes[rank],
    }


# --------------------------------------------------------------------------------- example of the guide


class Dying(nn.Module):
    """A layer that ends the process in its next forward pass once it is armed on a rank."""

    armed: int | None = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
        output: Tensor = self.layer(x)
        return output


class Batches(list[Any]):
    """Batches of which the second one is fatal to a rank."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index == 1:
                Dying.armed = DEATHS["step"]
            yield self[index]


DEATHS = {"division": 0, "measurement": 2, "step": 2}
"""Rank that is killed in each part of the example."""


def example(name: str, rank: int) -> dict[str, Any]:
    """Run the example of the guide; compare it with one process, or return its error and duration."""
    model_block, script_block = json.loads(os.environ["EXAMPLE"])
    user: dict[str, Any] = {}
    exec(model_block, user)
    reference, batches = copy.deepcopy(user["model"]), user["batches"]
    if name in DEATHS:
        user["model"] = nn.Sequential(*map(Dying, user["model"]))
        if name == "step":
            user["batches"] = Batches(batches)
        else:
            Dying.armed = DEATHS[name]
    sys.modules["my_model"] = SimpleNamespace(**user)  # type: ignore[assignment]
    script: dict[str, Any] = {}
    began = time.monotonic()
    try:
        with given_layer_times():
            exec(script_block, script)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    # The script clears the gradients after each update.
    script["run"].step(*batches[0])
    losses = one_process(Problem(nn.Module, list, list, user["loss_fn"]), reference, [*batches, batches[0]])
    for parameter in script["run"].optimizer.param_groups[0]["params"]:
        assert parameter.grad is not None
    script["run"].optimizer.step()
    loss = script["loss"]
    return {
        **comparison(script["run"], rank, reference, batches[0]),
        "losses": [None if loss is None else loss.item()],
        "expected": losses[-2:-1],
    }


CASES = {**dict.fromkeys(PROBLEMS, whole_model), "example": example, **dict.fromkeys(DEATHS, example)}

if __name__ == "__main__":
    # Modules that the first trace imports are imported once, before the processes are forked.
    torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),), strict=False)
    main(CASES, ("example", *DEATHS))
