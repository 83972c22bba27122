"""Compiled code, and what the compiler really used for it."""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.errors import TunebenchError
from tunebench.outcome import Resources
from tunebench.variant import Language

__all__ = ["Binary", "CompileError"]


class CompileError(TunebenchError):
    """The compiler refused a configuration; the message is what it said, shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """Machine code of one configuration; workloads that differ only in run-time sizes share it.

    Attributes:
        key: Hash of exactly what reached the compiler: source, flags, target, compiler version.
        language: How the variant is written, which decides how the payload is loaded.
        target: What it was compiled for: ``"sm_90a"``, or LLVM's name of a CPU.
        payload: A cubin; for Numba on the CPU its serialised object code.
        entries: Symbol to call for each launch, in order.
        resources: Real usage; the largest of each figure over the entries.
    """

    key: str
    language: Language
    target: str
    payload: bytes
    entries: tuple[str, ...] = ()
    resources: Resources = Resources()
