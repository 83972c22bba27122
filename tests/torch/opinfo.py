"""PyTorch's OpInfo samples, run through `tunebench.torch` and compared with torch in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map

import tunebench.torch as served
from tunebench.dispatch import DispatchedCall

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "matmul": served.matmul,
    "nn.functional.linear": served.linear,
    "nn.functional.conv2d": served.conv2d,
    "softmax": served.softmax,
    "log_softmax": served.log_softmax,
    "nn.functional.layer_norm": served.layer_norm,
    "nn.functional.rms_norm": served.rms_norm,
    "nn.functional.cross_entropy": served.cross_entropy,
    "nn.functional.scaled_dot_product_attention": served.scaled_dot_product_attention,
}
"""Functions of tunebench.torch by the names of torch's samples."""

ERRORS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error of an element, relative to the largest element."""


def samples(name: str, dtype: torch.dtype) -> Iterator[Any]:
    """Yield every sample that torch has of an operator, the same ones each time."""
    torch.manual_seed(0)
    for info in op_db:
        if info.name == name and not info.variant_test_name:
            yield from info.sample_inputs("cpu", dtype, requires_grad=True)


def run(name: str, sample: Any) -> str:
    """Run one sample and its gradients; return ``"tunebench"``, or the reason why torch ran it.

    Raises:
        AssertionError: if a value or gradient is wrong, or tunebench and torch both ran parts of it.
    """
    calls: list[DispatchedCall] = []
    with served.watching(calls.append), served.prefer("tunebench"):
        y, gradients = _differentiated(FUNCTIONS[name], sample)
    if sample.kwargs.get("dropout_p"):  # random values: only the implementation is checked
        return calls[0].reason
    exact = sample.transform(lambda t: _exactly(t) if isinstance(t, torch.Tensor) else t)
    info = next(info for info in op_db if info.name == name)
    want, want_gradients = _differentiated(info.op, exact)
    for actual, expected in zip((y, *gradients), (want, *want_gradients), strict=True):
        _assert_near(actual, expected)
    by = {call.by for call in calls}
    assert len(by) == 1, [str(call) for call in calls]
    return "tunebench" if by == {"tunebench"} else calls[0].reason


def _exactly(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _differentiated(function: Callable[..., Any], sample: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a result, and the gradients of its weighted sum by all tensors that need one."""
    y = function(sample.input, *sample.args, **sample.kwargs)
    leaves: list[Any] = []
    tree_map(
        lambda t: leaves.append(t) if isinstance(t, torch.Tensor) and t.requires_grad else None,
        [sample.input, sample.args, sample.kwargs],
    )
    factors = torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype)
    return y, torch.autograd.grad(y, leaves, factors) if leaves and y.requires_grad else ()


def _assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    largest = max(1.0, float(expected.detach().nan_to_num(0).abs().max()))
    torch.testing.assert_close(
        actual.detach().double(),
        expected.detach(),
        rtol=0,
        atol=ERRORS[actual.dtype] * largest,
        equal_nan=True,
    )


def count(name: str, dtype: torch.dtype) -> Counter[str]:
    """Run every sample of an operator; count those that tunebench ran, and those that torch ran by reason."""
    return Counter(run(name, sample) for sample in samples(name, dtype))
