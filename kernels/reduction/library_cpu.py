"""reductions by libraries of the processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu, bound_baseline
from tunebench.libraries import Tensors
from tunebench.libraries.reduction import torch_call_into
from tunebench.workloads.operators.reduction import Reduction


def _bound(workload: Reduction, inputs: Tensors, output: Any) -> Callable[[], object]:
    """Return torch's program for f32 inputs and an output, into which it writes or is copied."""
    return torch_call_into(workload, inputs, output) or bound_baseline(workload, inputs, output)


class LibraryReduction(LibraryCpu[Reduction]):
    """reductions by torch."""

    operator = Reduction
    programs = {"torch": dataclasses.replace(TORCH, bind=_bound)}


VARIANT = LibraryReduction()
