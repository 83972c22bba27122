"""attention by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench.measure.libraries import Call, single
from tunebench.measure.libraries import _attention_forward as forward
from tunebench.workloads.operators.attention import Attention

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]


def numpy_call(workload: Attention, inputs: Mapping[str, Array]) -> Call | None:
    """Multiply by NumPy, all scores at once."""
    if workload.direction != "forward":
        return None
    tensors = single(inputs)
    return lambda: forward.by_numpy(workload, tensors)


def torch_calls(workload: Attention, t: Tensors) -> dict[str, Call]:
    """Return torch's own programs for attention."""
    return forward.by_torch(workload, t) if workload.direction == "forward" else {}
