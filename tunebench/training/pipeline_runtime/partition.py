"""Division of a model's layers into stages of about equal time, as measured on one rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError
from tunebench.training.fitting.operation_time import ThreadClock
from tunebench.training.pipeline_runtime.layers import ModelLayers
from tunebench.training.schedules.costs import TransferTime

__all__ = ["LayerCost", "divide_layers", "measure_layers", "require_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Time and output of one layer, per micro-batch.

    Attributes:
        compute_us: Forward and backward pass.
        send_bytes: Output, and so the gradient of it that comes back.
        changes_input: Whether the layer changes its input in place, so that no stage can begin with it.
    """

    compute_us: float
    send_bytes: int = 0
    changes_input: bool = False


def measure_layers(
    layers: ModelLayers, inputs: Sequence[Any], loss_of: Callable[[Any], Tensor], *, repeats: int
) -> list[LayerCost]:
    """Return the costs of each layer for one micro-batch. Gradients of the model are cleared.

    Times do not count waits for a processor that other programs use.

    Args:
        layers: The layers.
        inputs: Inputs of the first layer.
        loss_of: Returns the loss, given what the last layer returns; its time is part of the last layer.
        repeats: Runs of which the median counts, besides a first one that does not.
    """
    costs, values = [], tuple(inputs)
    for index in range(layers.count):
        module = layers.module(index, index + 1)
        ends_model = index == layers.count - 1
        runs = [_run(module, values, loss_of if ends_model else None) for _ in range(repeats + 1)]
        module.zero_grad(set_to_none=True)
        values = runs[-1].outputs
        costs.append(
            LayerCost(
                compute_us=statistics.median(run.compute_us for run in runs[1:]),
                send_bytes=sum(value.nbytes for value in values),
                changes_input=runs[0].changes_input,
            )
        )
    return costs


@dataclass(frozen=True, slots=True)
class _LayerRun:
    """One run of a layer.

    Attributes:
        compute_us: Time of both passes, in microseconds.
        outputs: The tensors that the layer returns.
        changes_input: Whether an input was changed in place.
    """

    compute_us: float
    outputs: tuple[Tensor, ...]
    changes_input: bool


def _run(module: nn.Module, values: Sequence[Any], loss_of: Callable[[Any], Tensor] | None) -> _LayerRun:
    """Run a layer forward and backward on copies of its inputs, which it may change in place."""
    inputs = [_input(value) for value in values]
    versions = [value._version for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    began = _now(inputs)
    output = module(*inputs)
    loss = loss_of(output) if loss_of is not None else None
    forward_us = _now(inputs) - began
    outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    roots = [loss] if loss is not None else [leaf for leaf in outputs if leaf.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    began = _now(inputs)
    if roots:
        torch.autograd.backward(roots, gradients)
    backward_us = _now(inputs) - began
    detached = tuple(leaf.detach().requires_grad_(leaf.requires_grad) for leaf in outputs)
    after = [value._version for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    return _LayerRun(forward_us + backward_us, detached, versions != after)


def _input(value: Any) -> Any:
    """Return a copy of an input that is no leaf, so that the layer may change it in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _now(values: Sequence[Any]) -> float:
    """Return the time in microseconds when the operations so far have ended."""
    devices = {leaf.device for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda}
    for device in devices:
        torch.cuda.synchronize(device)
    return ThreadClock().now_s() * 1e6


# ----------------------------------------------------------------------------------------------- division

TOLERANCE = 0.02
"""Share by which the slowest stage may be slower if the others become more equal."""


def divide_layers(costs: Sequence[LayerCost], stages: int, transfer_us: TransferTime) -> tuple[int, ...]:
    """Return the first layer of each stage: the slowest stage is as fast as possible, the others about equal.

    The time of a stage is that of its layers, of sending its output, and of receiving the gradient of it.
    All divisions are compared, by dynamic programming over the stages.

    Args:
        costs: Costs of the layers in their order.
        stages: Number of stages.
        transfer_us: Time to send bytes to the next stage, in microseconds.

    Raises:
        InputError: if there are fewer layers with which a stage can begin than stages.
    """
    begins = [layer for layer, cost in enumerate(costs) if layer == 0 or not cost.changes_input]
    require_layers(len(begins), stages)
    ends = np.array([*begins[1:], len(costs)])
    layers_us = np.cumsum([0.0, *(cost.compute_us for cost in costs)])
    sends_us = np.array([2 * transfer_us(costs[end - 1].send_bytes) for end in ends])
    sends_us[-1] = 0.0
    # stage_us[i, j]: the stage from the i-th to the j-th candidate, inclusive; infinite if it were empty.
    stage_us = layers_us[ends][None, :] - layers_us[begins][:, None] + sends_us[None, :]
    stage_us[np.tril_indices(len(begins), -1)] = np.inf
    slowest_us = _best(stage_us, stages, np.maximum)[0]
    limited = np.where(stage_us <= slowest_us * (1 + TOLERANCE) + 1e-9, stage_us**2, np.inf)
    return tuple(begins[position] for position in _best(limited, stages, np.add)[1])


def require_layers(layers: int, stages: int) -> None:
    """Raise InputError unless there are enough layers with which a stage can begin."""
    if layers < stages:
        raise InputError(
            f"{stages} stages need at least as many layers, and the model has {layers} with which a "
            "stage can begin: use fewer ranks or stages, or a torch.nn.Sequential of more layers"
        )


def _best(
    prices: np.ndarray[Any, Any], stages: int, combine: Callable[[Any, Any], Any]
) -> tuple[float, list[int]]:
    """Return the least combined price of a division into stages, and the first candidate of each stage."""
    count = len(prices)
    best = prices[0]
    choices: list[np.ndarray[Any, Any]] = []
    for _ in range(1, stages):
        # The last stage begins at candidate i, and the stages before end at the candidate before it.
        before = np.concatenate(([np.inf], best[:-1]))
        combined = combine(before[:, None], prices)
        choices.append(combined.argmin(axis=0))
        best = combined.min(axis=0)
    position, firsts = count - 1, []
    for choice in reversed(choices):
        firsts.append(int(choice[position]))
        position = firsts[-1] - 1
    return float(best[-1]), [0, *reversed(firsts)]
