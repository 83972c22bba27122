"""Dispatch of workloads to tuned kernels or to torch, on tensors where they are.

`bind` compiles and loads a kernel that is called with arrays or addresses. `choose` decides between that
kernel and torch, and returns the reason. `prefer` changes the preference. `watching` reports every call.
`tunebench.torch` and `tunebench.numba` are built on this package.
"""

from __future__ import annotations

from tunebench._deprecation import renamed
from tunebench.dispatch._preference import (
    PREFERENCES,
    Preference,
    is_deterministic,
    prefer,
    preference,
    set_preference,
)
from tunebench.dispatch.binding import bind
from tunebench.dispatch.choice import Dispatcher, KernelChoice, choose, dispatcher
from tunebench.dispatch.cpu import CpuKernel, LibraryKernel
from tunebench.dispatch.freshness import forget
from tunebench.dispatch.gpu import GpuKernel
from tunebench.dispatch.kernel import BoundKernel
from tunebench.dispatch.watch import DispatchedCall, watching

__all__ = [
    "PREFERENCES",
    "BoundKernel",
    "CpuKernel",
    "DispatchedCall",
    "Dispatcher",
    "GpuKernel",
    "KernelChoice",
    "LibraryKernel",
    "Preference",
    "bind",
    "choose",
    "dispatcher",
    "forget",
    "is_deterministic",
    "prefer",
    "preference",
    "set_preference",
    "watching",
]


__getattr__ = renamed(
    __name__,
    {
        "Call": "DispatchedCall",
        "Choice": "KernelChoice",
        "Kernel": "BoundKernel",
        "Problem": "Dispatcher",
        "problem": "dispatcher",
    },
)
