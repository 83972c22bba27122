"""Pipelines of whole models of transformers and timm: gradients, memory of each rank, and time.

    python -m benchmarks.plan_pipeline_models [--model gpt2 …] [--schedule 1f1b …] [--ranks 4] [--out FILE]

`pipelined_model` divides each model, whose code is that of its package, into stages of about equal time,
measures the stages and runs training steps of AdamW by ranks that are processes of this machine, one thread
each, connected by Gloo over the loopback interface. Nothing runs on a GPU.

- Gradients and buffers are compared with those of one process that runs the same micro-batches.
- The peak of a rank is that of all its storages in a step, with parameters, gradients, states of the
  optimizer and buffers, without the batch, over the planned one; the table has the lowest and the highest of
  the ranks.
- The time of a step is the median from the first start to the last end of a rank, over that of the simulation
  with passes that were timed alone, and with the mean times of passes in the timed steps.

It needs `transformers` and `timm`, which no extra of this package installs.
"""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.plan_pipeline_measured import counted_peak, median_ms, run_ranks, table, timed, with_passes
from tunebench.training import PipelinedModel, pipelined_model
from tunebench.training.schedules import ActionKind, simulate_pipeline

__all__ = ["MODELS", "main"]

MICROBATCHES = 8
WORDS = 128


@dataclass(frozen=True, slots=True)
class Problem:
    """A model to train, and its batch.

    Attributes:
        model: Makes the model.
        inputs: Makes the inputs of a batch.
        target: Makes its targets.
        loss: Returns the loss of an output and a target.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    target: Callable[[], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def _word_loss(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def _words() -> Tensor:
    return torch.randint(2, WORDS, (2 * MICROBATCHES, 64))


def _text_model(kind: str, **options: Any) -> Problem:
    def make() -> nn.Module:
        model_class = getattr(transformers, kind)
        config = model_class.config_class(vocab_size=WORDS, use_cache=False, **options)
        for name in (name for name in vars(config) if "drop" in name and getattr(config, name)):
            setattr(config, name, 0.0)
        model: nn.Module = model_class(config)
        return model

    return Problem(make, lambda: {"input_ids": _words()}, _words, _word_loss)


def _picture_model(name: str, **options: Any) -> Problem:
    return Problem(
        lambda: timm.create_model(name, num_classes=10, **options),
        lambda: torch.randn(4 * MICROBATCHES, 3, 64, 64),
        lambda: torch.randint(0, 10, (4 * MICROBATCHES,)),
        functional.cross_entropy,
    )


MODELS = {
    "gpt2": _text_model("GPT2LMHeadModel", n_layer=8, n_embd=128, n_head=4, n_positions=64),
    "bert": _text_model(
        "BertForMaskedLM", num_hidden_layers=8, hidden_size=128, num_attention_heads=4, intermediate_size=512
    ),
    "vit": _picture_model("vit_tiny_patch16_224", img_size=64, patch_size=8, depth=8, embed_dim=96),
    "resnet": _picture_model("resnet18"),
    "convnext": _picture_model("convnext_atto"),
}
"""Models, by name."""


def model_result(rank: int, name: str, schedule: str, steps: int) -> dict[str, Any]:
    """Return how a rank of a model differs from one process, its peaks, and times."""
    problem = MODELS[name]
    torch.manual_seed(0)
    model, inputs, target = problem.model(), problem.inputs(), problem.target()
    reference = copy.deepcopy(model)
    run = pipelined_model(
        model,
        inputs,
        target,
        loss_fn=problem.loss,
        microbatches=MICROBATCHES,
        schedule=schedule,
        timeout_s=120,
    )
    run.step(inputs, target)
    differences = _differences(run, reference, problem, inputs, target)
    run.optimizer.step()
    held = _state(run)
    batch = [*tree_leaves(inputs), target]
    batch_bytes = sum(tensor.nbytes for tensor in batch)
    measured = counted_peak([*held, *batch], functools.partial(run.step, inputs, target)) - batch_bytes
    spans: list[tuple[float, float]] = []
    passes: dict[Any, list[float]] = collections.defaultdict(list)
    run.run.observer = functools.partial(timed, passes)
    for _ in range(steps):
        dist.barrier()
        began = time.monotonic()
        run.step(inputs, target)
        spans.append((began, time.monotonic()))
    within = simulate_pipeline(run.run.schedule, with_passes(run.costs, passes))
    return {
        "difference": differences,
        "evictions": sum(action.kind is ActionKind.EVICT for action in run.run.schedule.actions[rank]),
        "planned": run.simulation.peak_bytes[rank],
        "measured": measured,
        "spans": spans,
        "simulated": run.simulation.step_us / 1e3,
        "within": within.step_us / 1e3,
    }


def _state(run: PipelinedModel) -> list[Tensor]:
    """Return parameters, gradients, buffers and states of the optimizer."""
    stages = run.stages.values()
    tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
    gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
    states = [leaf for leaf in tree_leaves(dict(run.optimizer.state)) if isinstance(leaf, Tensor)]
    return [*tensors, *gradients, *states]


def _differences(
    run: PipelinedModel, reference: nn.Module, problem: Problem, inputs: Any, target: Tensor
) -> float:
    """Return the largest difference of gradients and buffers from one process, over the largest magnitude."""
    for index, expected in enumerate(target.chunk(MICROBATCHES)):
        share = tree_map(lambda tensor, index=index: tensor.chunk(MICROBATCHES)[index], inputs)
        output = reference(**share) if isinstance(share, dict) else reference(share)
        problem.loss(output, expected).backward()
    expected_of = dict(reference.named_parameters(remove_duplicate=False)) | dict(reference.named_buffers())
    largest = 0.0
    for stage in run.stages.values():
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                largest = max(largest, _difference(parameter.grad, expected_of[name].grad / MICROBATCHES))
        for name, buffer in stage.named_buffers():
            largest = max(largest, _difference(buffer, expected_of[name]))
    return largest


def _difference(actual: Tensor, expected: Tensor) -> float:
    if torch.equal(actual, expected):
        return 0.0
    return float((actual - expected).abs().max() / expected.abs().max())


HEADER = (
    "model | schedule | evictions | largest difference of gradients and buffers from one process "
    "| planned peaks of ranks, MB | measured over planned, lowest to highest | measured step, ms "
    "| simulated over measured, passes timed alone | passes timed in the step"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all models and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: all)"
    )
    parser.add_argument("--schedule", nargs="+", default=["1f1b", "interleaved-1f1b"], help="schedules")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps; the median counts (default: 5)")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    lines = []
    for name in options.model:
        for schedule in options.schedule:
            case = functools.partial(model_result, name=name, schedule=schedule, steps=options.steps)
            ranks, _, _ = run_ranks(options.ranks, lambda rank, _, case=case: case(rank))
            ratios = [row["measured"] / row["planned"] for row in ranks]
            step_ms = median_ms(ranks)
            difference = max(row["difference"] for row in ranks)
            planned = " ".join(f"{row['planned'] / 1e6:.2f}" for row in ranks)
            equality = "bits equal" if difference == 0 else f"{difference:.0e}"
            lines.append(
                f"{name} | {schedule} | {sum(row['evictions'] for row in ranks)} | "
                f"{equality} | {planned} | "
                f"{min(ratios):.4f} to {max(ratios):.4f} | {step_ms:.0f} | "
                f"{ranks[0]['simulated'] / step_ms:.2f} | {ranks[0]['within'] / step_ms:.2f}"
            )
            print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(table(HEADER, lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
