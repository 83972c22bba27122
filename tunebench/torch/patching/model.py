"""`patch`: replacement of a model's modules by modules that dispatch to tuned kernels, and its reversal."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized, type_before_parametrizations

from tunebench.errors import InputError
from tunebench.torch.patching.modules import TUNED_MODULES, may_fuse

__all__ = ["PatchReport", "PatchedModule", "SkippedModule", "patch", "unpatch"]

ORIGINAL: dict[type, type] = {ours: theirs for theirs, ours in TUNED_MODULES.items()}


@dataclass(frozen=True, slots=True)
class PatchedModule:
    """A module that dispatches to tuned kernels.

    Attributes:
        name: Path in the model; empty for the model itself.
        kind: Class before.
        served: Class now.
    """

    name: str
    kind: str
    served: str


@dataclass(frozen=True, slots=True)
class SkippedModule:
    """A module that was left unchanged.

    Attributes:
        name: Path in the model.
        kind: Its class.
        reason: Why it was left unchanged.
    """

    name: str
    kind: str
    reason: str


class PatchReport:
    """Result of `patch`; a context manager that undoes it on exit.

    Attributes:
        swapped: Modules that dispatch to tuned kernels.
        left: Modules that were left unchanged, each with the reason.
    """

    def __init__(
        self, modules: tuple[Any, ...], swapped: tuple[PatchedModule, ...], left: tuple[SkippedModule, ...]
    ) -> None:
        self._modules, self.swapped, self.left = modules, swapped, left

    def undo(self) -> None:
        """Restore the classes of all modules; modules that were restored before are ignored."""
        _restore(self._modules)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "swapped": [dataclasses.asdict(module) for module in self.swapped],
            "left": [dataclasses.asdict(module) for module in self.left],
        }

    def __str__(self) -> str:
        """Return one line per class: the number of patched and of unchanged modules, with reasons."""
        served = Counter(module.kind for module in self.swapped).most_common()
        reasons = Counter((module.kind, module.reason) for module in self.left).most_common()
        return "\n".join(
            (
                f"{len(self.swapped)} modules patched",
                *(f"{count:>6}  {kind}" for kind, count in served),
                f"{len(self.left)} modules left unchanged",
                *(f"{count:>6}  {kind}: {reason}" for (kind, reason), count in reasons),
            )
        )


def patch(model: nn.Module) -> PatchReport:
    """Let a model's modules dispatch to tuned kernels where these are known to be faster.

    Patched are Linear, Conv2d, LayerNorm, RMSNorm, Softmax, LogSoftmax, CrossEntropyLoss and
    MultiheadAttention. In a Sequential, a Linear is fused with the GELU, ReLU, SiLU or Hardswish after it,
    and a Conv2d with the BatchNorm2d (in eval mode) and the ReLU after it. Only the class of a module
    changes: parameters, state dict keys, hooks, device moves, copies and pickles work as before. Outputs and
    gradients are equal up to rounding. torch runs what no kernel computes.

    `patched_calls` dispatches functions that the model calls directly.

    Args:
        model: The model, changed in place.

    Returns:
        The patched modules, and the unchanged ones with reasons; `PatchReport.undo` restores all of them.

    Raises:
        InputError: if it is not a module.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    chosen: list[Any] = []
    swapped: list[PatchedModule] = []
    skipped: list[SkippedModule] = []
    for name, module in model.named_modules():
        kind = type(module)
        reason = _refusal(module)
        if reason is None:
            chosen.append(module)
            swapped.append(PatchedModule(name, kind.__name__, TUNED_MODULES[kind].__name__))
        elif reason:
            skipped.append(SkippedModule(name, kind.__name__, reason))
    try:
        for module in chosen:
            module.__class__ = TUNED_MODULES[type(module)]
    except BaseException:
        _restore(chosen)
        raise
    return PatchReport(tuple(chosen), tuple(swapped), tuple(skipped))


def unpatch(model: nn.Module) -> int:
    """Restore the classes of all patched modules of a model, also in a copy of a patched model.

    Args:
        model: The model, changed in place.

    Returns:
        The number of restored modules.
    """
    return _restore(model.modules())


def _restore(modules: Any) -> int:
    count = 0
    for module in modules:
        kind = type_before_parametrizations(module)
        if kind not in ORIGINAL:
            continue
        original = ORIGINAL[kind]
        if type(module) is not kind:  # torch's subclass, with a property for each parametrized tensor
            original = type(f"Parametrized{original.__name__}", (original,), dict(vars(type(module))))
        module.__class__ = original
        count += 1
    return count


# -- reasons to leave a module unchanged ------------------------------------------------------------------


def _refusal(module: Any) -> str | None:
    """Return why a module is not patched; None if it is, empty if the report need not mention it."""
    kind = type(module)
    if type_before_parametrizations(module) in ORIGINAL:
        return "it is already patched"
    if is_parametrized(module) and type_before_parametrizations(module) in TUNED_MODULES:
        return "its parameters are parametrized; patched modules can be parametrized"
    if kind is ParametrizationList:
        return ""  # computes a parameter
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "its sizes are unknown before its first call"
    if kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return ""  # a MultiheadAttention reads its weights and never calls it
    if kind in TUNED_MODULES:
        return _REFUSALS[kind](module) if kind in _REFUSALS else None
    tuned_base = next(
        (base for base in kind.__mro__ if base in TUNED_MODULES and base is not nn.Sequential), None
    )
    if tuned_base is not None:
        return f"it is of a subclass of {tuned_base.__name__}"
    if kind in (nn.TransformerEncoderLayer, nn.TransformerEncoder):
        return (
            "in eval mode without gradients torch uses a fast path that skips its modules, "
            "unless torch.backends.mha.set_fastpath_enabled(False) is set"
        )
    has_state = any(True for _ in module.parameters(recurse=False))
    return "no kernel of tunebench computes it" if has_state else ""


def _sequential(module: nn.Sequential) -> str | None:
    return None if may_fuse(tuple(module)) else ""


def _linear(module: nn.Linear) -> str | None:
    return _wrong_type(module.weight)


def _conv2d(module: nn.Conv2d) -> str | None:
    for name in ("stride", "dilation"):
        if len(set(getattr(module, name))) > 1:
            return f"its {name} differs between the axes"
    zeros = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    if zeros and len(set(module.padding)) > 1:
        return "its padding differs between the axes"
    return _wrong_type(module.weight)


def _norm(module: Any) -> str | None:
    if module.eps is None or module.eps <= 0:
        return f"its eps is {module.eps}, and kernels need a positive number"
    if module.weight is None or getattr(module, "bias", module.weight) is None:
        return "it has no weight" if module.weight is None else "it has no bias"
    return _wrong_type(module.weight)


def _softmax(module: Any) -> str | None:
    return "its axis is not given" if module.dim is None else None


def _cross_entropy(module: nn.CrossEntropyLoss) -> str | None:
    if module.weight is not None:
        return "its classes have weights"
    return "its labels are smoothed" if module.label_smoothing else None


def _attention(module: nn.MultiheadAttention) -> str | None:
    if not module._qkv_same_embed_dim:
        return "its keys and values have different sizes than its queries"
    if module.bias_k is not None or module.add_zero_attn:
        return "it adds a bias or zeros to keys and values"
    return _wrong_type(module.in_proj_weight)


def _wrong_type(weight: Any) -> str | None:
    supported = (torch.float32, torch.float16, torch.bfloat16)
    return None if weight.dtype in supported else f"its weights are {weight.dtype}"


_REFUSALS: dict[type, Callable[[Any], str | None]] = {
    nn.Sequential: _sequential,
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.CrossEntropyLoss: _cross_entropy,
    nn.MultiheadAttention: _attention,
}
