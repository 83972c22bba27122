"""Functions of torch run by tuned kernels: the same signatures, with gradients, also under `torch.compile`.

A tuned kernel runs a call where it was measured to be faster than torch's on this device; torch runs all
other calls. `prefer` changes that choice, and `watching` and `dispatch_report` show it.

- `functional`: the functions, each a custom operator of torch
- `compiler`: `compile`, a backend of `torch.compile` that runs groups of operations by tuned kernels; its
  `saving` has `save` and `load`, which keep a compiled model in a file
- `patching`: `patch`, which replaces a model's modules, and `pack`, which packs their weights
- `profiling`: `profile`, which counts the workloads that a program runs

>>> import torch
>>> from tunebench.torch import linear, prefer
>>> with prefer("tunebench"):
...     y = linear(torch.ones(4, 8), torch.ones(16, 8), torch.ones(16), activation="relu")
>>> float(y[0, 0])
9.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunebench._deprecation import renamed, warn_renamed
from tunebench._lazy import lazy_names
from tunebench.errors import MissingDependency

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependency("torch", "torch") from error

from tunebench.dispatch import prefer, set_preference, watching
from tunebench.torch.functional.attention import scaled_dot_product_attention
from tunebench.torch.functional.convolution import conv2d
from tunebench.torch.functional.cross_entropy import cross_entropy
from tunebench.torch.functional.dispatch_log import dispatch_report
from tunebench.torch.functional.elementwise import elementwise
from tunebench.torch.functional.gated_linear import gated_linear
from tunebench.torch.functional.linear import linear, matmul
from tunebench.torch.functional.normalisation import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tunebench.torch.functional.reduction import reduce
from tunebench.torch.functional.softmax import log_softmax, softmax

if TYPE_CHECKING:
    from tunebench.torch.compiler.backend import compile, plans  # noqa: A004 - the name of torch.compile
    from tunebench.torch.compiler.saving.load import LoadedModel, load
    from tunebench.torch.compiler.saving.save import save
    from tunebench.torch.compiler.timing import ModelTimes, time_model
    from tunebench.torch.patching.functions import patched_calls
    from tunebench.torch.patching.model import PatchReport, patch, unpatch
    from tunebench.torch.patching.packing import PackReport, pack, unpack
    from tunebench.torch.profiling.profiler import DemandProfile, profile

__all__ = [
    "DemandProfile",
    "LoadedModel",
    "ModelTimes",
    "PackReport",
    "PatchReport",
    "add_layer_norm",
    "add_rms_norm",
    "compile",
    "conv2d",
    "cross_entropy",
    "dispatch_report",
    "elementwise",
    "gated_linear",
    "layer_norm",
    "linear",
    "load",
    "log_softmax",
    "matmul",
    "pack",
    "patch",
    "patched_calls",
    "plans",
    "prefer",
    "profile",
    "reduce",
    "rms_norm",
    "save",
    "scaled_dot_product_attention",
    "set_preference",
    "softmax",
    "time_model",
    "unpack",
    "unpatch",
    "watching",
]

_LAZY = {
    "DemandProfile": "profiling.profiler",
    "LoadedModel": "compiler.saving.load",
    "ModelTimes": "compiler.timing",
    "PackReport": "patching.packing",
    "PatchReport": "patching.model",
    "compile": "compiler.backend",
    "load": "compiler.saving.load",
    "pack": "patching.packing",
    "patch": "patching.model",
    "patched_calls": "patching.functions",
    "plans": "compiler.backend",
    "profile": "profiling.profiler",
    "save": "compiler.saving.save",
    "time_model": "compiler.timing",
    "unpack": "patching.packing",
    "unpatch": "patching.model",
}
"""Modules of the names that dispatch does not need; each is imported on first use."""


_MOVED = {
    "CoexecutionReport": "CoexecutionReport",
    "FittedStep": "FittedStep",
    "coexecute": "coexecute",
    "fit": "fit",
    "fitted_steps": "fitted_steps",
    "measure_pipeline": "measure_pipeline",
    "pipeline": "pipelined",
    "profile_step": "profile_step",
}
"""Names in `tunebench.training` of what was here before."""


def _get(name: str) -> Any:
    if name in _MOVED:
        warn_renamed(f"{__name__}.{name}", f"tunebench.training.{_MOVED[name]}", stacklevel=4)
        return getattr(importlib.import_module("tunebench.training"), _MOVED[name])
    return lazy_names(__name__, _LAZY)(name)


__getattr__ = renamed(
    __name__, {"Recording": "DemandProfile", "explain": "dispatch_report", "record": "profile"}, _get
)
