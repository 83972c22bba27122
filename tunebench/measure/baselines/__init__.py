"""How libraries compute what operators say: one module an operator, of its name.

A module has either function, or both:

- ``numpy_call(workload, inputs)``: a NumPy program that computes the workload, or None.
- ``torch_calls(workload, tensors)``: torch's own programs by name, ``"torch"`` for what its users would
  write; empty where it has none.

What a program needs beforehand (views, transposes without a copy) is done when it is asked for; what its
library may refuse, in its first call. It computes everything anew at each call, and returns the output, or a
tuple of them in the order of `Workload.outputs`; one that the library keeps to itself is left out at the
end. A problem that a program's library refuses makes it raise: whoever calls it keeps the reason.
Operators without a module, such as users' own, have no libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import DType
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["BaselineCall", "numpy_call", "single", "torch_calls", "torch_type"]

BaselineCall = Callable[[], Any]


def numpy_call(workload: Workload, inputs: Mapping[str, Array]) -> BaselineCall | None:
    """Return a NumPy program for the workload, or None.

    Args:
        workload: What to compute.
        inputs: An array for each input by name, in its stored type.
    """
    call: Callable[..., BaselineCall | None] | None = getattr(_module(workload), "numpy_call", None)
    return call(workload, inputs) if call is not None else None


def torch_calls(workload: Workload, tensors: Mapping[str, Any]) -> Mapping[str, BaselineCall]:
    """Return torch's own programs for a workload by name; empty if torch has none.

    Args:
        workload: What to compute.
        tensors: A torch tensor for each input by name; a number for one of shape `()`.
    """
    calls: Callable[..., Mapping[str, BaselineCall]] | None = getattr(_module(workload), "torch_calls", None)
    return calls(workload, tensors) if calls is not None else {}


def single(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return inputs in f32: half types are not what NumPy is fast at."""
    return {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}


def torch_type(dtype: DType) -> Any:
    """Return torch's type of the outputs that are stored so."""
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}[dtype]


def _module(workload: Workload) -> ModuleType | None:
    name = f"{__name__}.{workload.operator}"
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
