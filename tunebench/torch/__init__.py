"""Tuned kernels as torch's functions: same signatures, with gradients, also under `torch.compile`.

A call is run by our kernel where it is known to be faster than torch's on this device, and by torch
otherwise; `prefer` changes that, `watching` tells of every call, `explain` of one.

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

from tunebench.errors import MissingDependency

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingDependency("torch", "torch") from error

from tunebench.dispatch import prefer, set_preference, watching
from tunebench.torch.operators.attention import scaled_dot_product_attention
from tunebench.torch.operators.chain import elementwise
from tunebench.torch.operators.convolution import conv2d
from tunebench.torch.operators.gating import gated_linear
from tunebench.torch.operators.loss import cross_entropy
from tunebench.torch.operators.normalisation import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tunebench.torch.operators.probability import log_softmax, softmax
from tunebench.torch.operators.product import linear, matmul
from tunebench.torch.operators.reduction import reduce
from tunebench.torch.operators.telling import explain

if TYPE_CHECKING:
    from tunebench.torch.compiler.compiling import compile, plans
    from tunebench.torch.compiler.timing import ModelTimes, time_model
    from tunebench.torch.operators._calls import patched_calls
    from tunebench.torch.patching.patching import PatchReport, patch, unpatch
    from tunebench.torch.profiling.demand import Recording, record

__all__ = [
    "ModelTimes",
    "PatchReport",
    "Recording",
    "add_layer_norm",
    "add_rms_norm",
    "compile",
    "conv2d",
    "cross_entropy",
    "elementwise",
    "explain",
    "gated_linear",
    "layer_norm",
    "linear",
    "log_softmax",
    "matmul",
    "patch",
    "patched_calls",
    "plans",
    "prefer",
    "record",
    "reduce",
    "rms_norm",
    "scaled_dot_product_attention",
    "set_preference",
    "softmax",
    "time_model",
    "unpatch",
    "watching",
]

_LATER = {
    "ModelTimes": "compiler.timing",
    "PatchReport": "patching.patching",
    "compile": "compiler.compiling",
    "plans": "compiler.compiling",
    "Recording": "profiling.demand",
    "patch": "patching.patching",
    "patched_calls": "operators._calls",
    "record": "profiling.demand",
    "time_model": "compiler.timing",
    "unpatch": "patching.patching",
}
"""What serving does without, and the modules that define it; each is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
