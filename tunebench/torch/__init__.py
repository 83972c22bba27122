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

from tunebench.serving import prefer, set_preference, watching
from tunebench.torch.attention import scaled_dot_product_attention
from tunebench.torch.chain import elementwise
from tunebench.torch.convolution import conv2d
from tunebench.torch.gating import gated_linear
from tunebench.torch.loss import cross_entropy
from tunebench.torch.normalisation import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tunebench.torch.probability import log_softmax, softmax
from tunebench.torch.product import linear, matmul
from tunebench.torch.reduction import reduce
from tunebench.torch.telling import explain

if TYPE_CHECKING:
    from tunebench.torch._calls import patched_calls
    from tunebench.torch.compiling import compile, plans  # noqa: A004 - torch has one of this name
    from tunebench.torch.patching import PatchReport, patch, unpatch
    from tunebench.torch.recording import Recording, record
    from tunebench.torch.timing import ModelTimes, time_model

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
    "ModelTimes": "timing",
    "PatchReport": "patching",
    "compile": "compiling",
    "plans": "compiling",
    "Recording": "recording",
    "patch": "patching",
    "patched_calls": "_calls",
    "record": "recording",
    "time_model": "timing",
    "unpatch": "patching",
}
"""What serving does without, and the modules that define it; each is imported when it is first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
