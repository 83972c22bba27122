"""Running what is known where the memory already is: which kernel, whether it or a library's, and its call.

`bind` makes a kernel that is called with arrays or addresses; `choose` says whether it or a library's own
runs a problem, and why; `prefer` changes that; `watching` tells of every call. Frameworks are served on top
of this (`tunebench.torch`, `tunebench.numba`).
"""

from __future__ import annotations

from tunebench.serving.choice import Choice, Problem, choose, problem
from tunebench.serving.cpu import CpuKernel
from tunebench.serving.freshness import forget
from tunebench.serving.gpu import GpuKernel
from tunebench.serving.kernel import Kernel, bind
from tunebench.serving.preference import PREFERENCES, Preference, prefer, preference, set_preference
from tunebench.serving.watch import Call, watching

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
