"""A user's own kernel, from a description: the operator and the variant are generated.

`KernelDescription` is checked and written as a module into the cache. Workers import that module, so that
they never run the user's program. `tunebench.tune_kernel` tunes it.
"""

from __future__ import annotations

from tunebench.own_kernel.argument import InOut, Input, Output, Scratch
from tunebench.own_kernel.description import KernelDescription
from tunebench.own_kernel.operator import UNVERIFIED
from tunebench.own_kernel.reference_kernel import ReferenceKernel
from tunebench.variant import Scalar, ceil_div

__all__ = [
    "UNVERIFIED",
    "InOut",
    "Input",
    "KernelDescription",
    "Output",
    "ReferenceKernel",
    "Scalar",
    "Scratch",
    "ceil_div",
]
