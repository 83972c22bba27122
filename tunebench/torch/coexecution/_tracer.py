"""A mode that records the operations of a thread below autograd, backward and optimizer included."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tunebench.torch.coexecution.trace_graph import TracedOperation

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose frames are no call sites."""


class OperationTracer(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Record every operation that runs while the mode is active, and run it as without the mode.

    Attributes:
        trace: The operations, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trace: list[TracedOperation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        self.trace.append(
            TracedOperation(
                operator=str(func.name()),
                attributes=_text([*args, *kwargs.items()]),
                site=_call_site(sys._getframe(1)),
            )
        )
        return func(*args, **kwargs)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each) for each in value)}]"
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)


def _call_site(frame: FrameType | None) -> tuple[str, ...]:
    """Return the call stack within the step without frames of torch, outermost first."""
    site: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.endswith("coexecute.py") and path.startswith(_HIDDEN[1]):
            break
        if not path.startswith(_HIDDEN):
            site.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(reversed(site))
