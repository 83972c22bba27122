"""Running what is known where the memory already is: which kernel, whether it or a library's, and its call.

`bind` makes a kernel that is called with arrays or addresses; `choose` says whether it or a library's own
runs a problem, and why; `prefer` changes that; `watching` tells of every call. Frameworks are served on top
of this (`tunebench.torch`, `tunebench.numba`).
"""

from __future__ import annotations

from tunebench.dispatch.choice import Choice, Problem, choose, problem
from tunebench.dispatch.cpu import CpuKernel
from tunebench.dispatch.freshness import forget
from tunebench.dispatch.gpu import GpuKernel
from tunebench.dispatch.kernel import Kernel, bind
from tunebench.dispatch.preference import PREFERENCES, Preference, prefer, preference, set_preference
from tunebench.dispatch.watch import Call, watching

__all__ = [
    "PREFERENCES",
    "Call",
    "Choice",
    "CpuKernel",
    "GpuKernel",
    "Kernel",
    "Preference",
    "Problem",
    "bind",
    "choose",
    "forget",
    "prefer",
    "preference",
    "problem",
    "set_preference",
    "watching",
]
