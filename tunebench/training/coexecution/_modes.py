"""Modes and settings of torch that decide what a call does: read, enter and leave them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "SETTERS",
    "current_settings",
    "eager_reason",
    "enter",
    "settings",
    "thread_state",
    "without_modes",
]

_SMALLEST_NORMAL = sys.float_info.min


def _flushes_denormals() -> bool:
    """Return whether this thread rounds denormal numbers to zero; torch has no function that returns it."""
    return _SMALLEST_NORMAL / 2 == 0.0


SETTERS: dict[tuple[Any, str], Callable[[], Any]] = {
    (torch, "set_num_threads"): torch.get_num_threads,
    (torch, "set_flush_denormal"): _flushes_denormals,
    (torch, "set_anomaly_enabled"): torch.is_anomaly_enabled,
    (torch._C, "_set_default_dtype"): torch.get_default_dtype,
    **{
        (torch._C, f"_set_{name}"): getattr(torch._C, f"_get_{name}")
        for name in (
            "mkldnn_enabled", "mkldnn_deterministic", "onednn_allow_tf32", "nnpack_enabled",
            "sdp_priority_order", "float32_matmul_precision", "deterministic_algorithms",
            "deterministic_fill_uninitialized_memory", "math_sdp_allow_fp16_bf16_reduction",
            "cpu_allow_fp16_reduced_precision_reduction",
        )
        if hasattr(torch._C, f"_set_{name}") and hasattr(torch._C, f"_get_{name}")
    },
    **{
        (torch._C, f"_set_sdp_use_{name}"): getattr(torch._C, f"_get_{name}_sdp_enabled")
        for name in ("flash", "math", "mem_efficient", "overrideable")
        if hasattr(torch._C, f"_set_sdp_use_{name}") and hasattr(torch._C, f"_get_{name}_sdp_enabled")
    },
}  # fmt: skip
"""Functions that change a setting of torch on which results depend, as owner and name, and their getters."""

_PRECISIONS = (("generic", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
"""Arguments of torch's getter of the precisions of f32 operations."""


def settings() -> tuple[Any, ...]:
    """Return the settings of torch on which results depend. A path is valid for those of its record."""
    return tuple(map(repr, current_settings()))


def current_settings() -> list[Any]:
    """Return these settings as they are; some are lists."""
    precision = getattr(torch._C, "_get_fp32_precision_getter", None)
    return [
        *[getter() for getter in SETTERS.values()],
        *([precision(*arguments) for arguments in _PRECISIONS] if precision is not None else ()),
        torch.backends.opt_einsum.enabled,
        torch.backends.opt_einsum.strategy,
        torch.is_autocast_cache_enabled(),
    ]


def eager_reason() -> str | None:
    """Return which setting of torch lets no path run, or None."""
    if _flushes_denormals():
        return "denormal numbers are rounded to zero in this thread only"
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
        return "autocast is active around the step, and may keep casts of weights for the next iteration"
    return "anomaly detection is active" if torch.is_anomaly_enabled() else None


def thread_state() -> tuple[Any, ...]:
    """Return the modes of this thread that decide what a call does.

    These are whether gradients are enabled, the type of autocast or None, and a mode in which no call of a
    path runs, or None.
    """
    autocast = torch.is_autocast_enabled("cpu")
    other = None
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        other = "saved-tensor hooks are active, as within checkpoint"
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
