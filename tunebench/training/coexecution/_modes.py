"""Modes of torch that decide what a call does: read and enter them, and leave those of no path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["enter", "thread_state", "without_modes"]


def thread_state() -> tuple[Any, ...]:
    """Return the modes of this thread that decide what a call does.

    These are whether gradients are enabled, the type of autocast or None, and a mode in which no call of a
    path runs, or None.
    """
    autocast = torch.is_autocast_enabled("cpu")
    other = None
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        other = "saved-tensor hooks are active"
    elif torch.is_inference_mode_enabled():
        other = "inference mode is active"
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        other = "a transform of functions is active"
    return torch.is_grad_enabled(), torch.get_autocast_dtype("cpu") if autocast else None, other


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave the modes of this thread in which no call of a path runs, and enter them again."""
    top = torch._C._autograd._top_saved_tensors_default_hooks
    hooks = []
    with temporarily_clear_interpreter_stack(), _disable_current_modes(), torch.inference_mode(False):
        while (pair := top(True)) is not None:
            hooks.append(pair)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            for pair in reversed(hooks):
                torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def enter(state: tuple[Any, ...]) -> None:
    """Set the modes of this thread that decide what a call does."""
    enabled, autocast, _ = state
    torch._C._set_grad_enabled(enabled)
    if (torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None) is not autocast:
        if not torch._C._is_any_autocast_enabled() or autocast is None:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cpu", autocast is not None)
        if autocast is not None:
            torch.set_autocast_dtype("cpu", autocast)
