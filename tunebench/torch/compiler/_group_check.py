"""Comparison of a group's results by tuned kernels with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tunebench._figure import significant
from tunebench.torch.compiler._fused_call import FusedCall

__all__ = ["difference"]

MOST_TURNED = 1e-3
"""Allowed fraction of differing elements in a result of integers or truth values."""


def difference(call: FusedCall) -> str:
    """Return how the results of a group's kernels differ from torch's; empty if they differ by rounding only.

    The inputs are random, with the strides that they have in the model. The exact results are torch's in
    float64, or in the group's types if torch lacks an operator for float64.
    """
    with torch.no_grad():
        results = _results(call, call.drawn_inputs())
        if not all(torch.isfinite(tensor).all() for tensor in results[2]):
            # Negative numbers, for example, have no square root: draw from [0, 1) instead.
            results = _results(call, call.drawn_inputs(torch.rand))
        error = max((_excess(*tensors) for tensors in zip(*results, strict=True)), default=0.0)
    return (
        f"its results differ from torch's by {significant(error, 3)} times the allowed error"
        if error > 1
        else ""
    )


def _results(call: FusedCall, tensors: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Return the results of the kernels, of torch, and of torch in float64 where it has the operators."""
    ours, by_torch = _listed(call(*tensors)), _listed(call.by_torch(*tensors))
    try:
        return ours, by_torch, _listed(call.by_torch(*map(_as_double, tensors)))
    except (RuntimeError, ValueError):  # products of 8-bit floats raise the latter
        return ours, by_torch, by_torch


def _as_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _excess(ours: Tensor, by_torch: Tensor, exact: Tensor) -> float:
    """Return the error of a result as a multiple of the allowed error.

    The allowed error is 4 times torch's plus 64 roundings of the largest element, or plus 1 for whole
    numbers. The multiple is infinite if the result and the exact result are finite in different places.
    """
    if ours.dtype == torch.bool:  # rounding can change a comparison of two close numbers
        return float((ours != by_torch).double().mean()) / MOST_TURNED
    is_whole = not ours.is_floating_point()
    rounding = 0.0 if is_whole else torch.finfo(ours.dtype).eps
    ours, by_torch, exact = ours.double(), by_torch.double(), exact.double()
    is_finite = torch.isfinite(exact)
    if not torch.equal(torch.isfinite(ours), is_finite):
        return float("inf")
    ours, by_torch, exact = (torch.where(is_finite, tensor, 0.0) for tensor in (ours, by_torch, exact))
    # Rounding can change which whole number is nearest.
    allowed = 4 * (by_torch - exact).abs().max() + 64 * rounding * exact.abs().max() + is_whole
    difference = (ours - exact).abs().max()
    return float(difference / allowed) if difference > 0 else 0.0
