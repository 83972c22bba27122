"""A kernel whose results are right, as the reference of another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ReferenceKernel"]


@dataclass(frozen=True, kw_only=True)
class ReferenceKernel:
    """A simple kernel in CUDA C++ whose results are right: the reference of another one.

    It takes the arguments of the other kernel, and is emulated on the processor. Names of sizes may be used.

    Attributes:
        source: As in `KernelDescription`.
        name: As in `KernelDescription`.
        parameters: Value of each parameter: a macro or a template argument.
        grid: As in `KernelDescription`.
        block: As in `KernelDescription`.
        smem_bytes: As in `KernelDescription`.
    """

    source: Any
    name: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    grid: Any
    block: Any = None
    smem_bytes: Any = 0
