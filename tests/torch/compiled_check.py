"""Comparison of compiled modules with torch in float64, whose groups run by references of their workloads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import tunebench.torch as served
from tests.torch.generated_modules import CHANGES
from tests.torch.reference_kernels import reference_kernels

__all__ = ["Function", "check", "results"]


class Function(nn.Module):
    """A function of inputs, then parameters."""

    def __init__(self, function: Callable[..., Any], *parameters: Tensor) -> None:
        super().__init__()
        self.function, self.p = (
            function,
            nn.ParameterList([nn.Parameter(parameter) for parameter in parameters]),
        )

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.p)


def results(model: nn.Module, inputs: Sequence[Tensor], *, training: bool) -> list[Tensor | None]:
    """Return the results of a step, and for training the gradients of a weighted sum of them."""
    with torch.set_grad_enabled(training):
        returned = model(*inputs)
        tensors = [
            tensor
            for tensor in (returned if isinstance(returned, tuple) else (returned,))
            if tensor is not None
        ]
        parts = [
            (tensor * torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)).sum()
            for tensor in tensors
            if training and tensor.requires_grad
        ]
        trained = [tensor for tensor in (*inputs, *model.parameters()) if tensor.requires_grad]
        gradients = torch.autograd.grad(sum(parts), trained, allow_unused=True) if parts else ()
    return [None if tensor is None else tensor.detach() for tensor in (*tensors, *gradients)]


def exact(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error relative to the largest element; 0 for an empty tensor."""
    if not actual.numel():
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return float(difference / (expected.double().abs().max() + 1e-6))


def check(
    model: nn.Module, inputs: Sequence[Tensor], *, training: bool, change: str = "", say: str = ""
) -> set[str]:
    """Compare a compiled model with float64; return the operators that ran as groups.

    Args:
        model: The model.
        inputs: Its inputs.
        training: Whether to compare gradients too.
        change: Change of the parameters before a second call; none by default.
        say: Description of the model for the message of a failure.
    """
    torch._dynamo.reset()
    models = {"ours": model, "eager": copy.deepcopy(model), "exact": copy.deepcopy(model).double()}
    steps: dict[str, list[list[Tensor | None]]] = {}
    operators: set[str] = set()
    for name, step_model in models.items():
        tensors_given = list(map(exact, inputs)) if name == "exact" else inputs
        with reference_kernels() as ran, served.prefer("tunebench"):
            called = served.compile(step_model) if name == "ours" else step_model
            steps[name] = [results(called, tensors_given, training=training)]
            if change:
                CHANGES[change](step_model)
                steps[name].append(results(called, tensors_given, training=training))
        if name == "ours":
            operators = {workload.operator for workload in ran}
    for call, (ours, eager, expected) in enumerate(zip(*steps.values(), strict=True)):
        for index, tensors in enumerate(zip(ours, eager, expected, strict=True)):
            where = f"call {call}, result {index} of {len(ours)}\n{say}"
            _assert_close(*tensors, where)
    return operators


def _assert_close(ours: Tensor | None, eager: Tensor | None, expected: Tensor | None, where: str) -> None:
    if ours is None or eager is None or expected is None:
        assert ours is eager is expected is None, where
        return
    assert (ours.shape, ours.dtype) == (eager.shape, eager.dtype), where
    if torch.isfinite(expected).all():
        allowed = (3e-3 if ours.dtype == torch.float32 else 0.3) + 10 * error(eager, expected)
        assert error(ours, expected) <= allowed, f"error {error(ours, expected):.1e} of {where}"
