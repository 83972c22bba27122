"""Running what is known where the memory already is: which kernel, whether it or a library's, and its call.

`bind` makes a kernel that is called with arrays or addresses; `choose` says whether it or a library's own
runs a problem, and why; `prefer` changes that; `watching` tells of every call. Frameworks are served on top
of this (`tunebench.torch`, `tunebench.numba`).
"""

from __future__ import annotations

from tunebench._deprecation import renamed
from tunebench.dispatch._preference import PREFERENCES, Preference, prefer, preference, set_preference
from tunebench.dispatch.binding import bind
from tunebench.dispatch.choice import Dispatcher, KernelChoice, choose, dispatcher
from tunebench.dispatch.cpu import CpuKernel
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
    "Preference",
    "bind",
    "choose",
    "dispatcher",
    "forget",
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
