"""Compiled code and the resources it uses."""

from __future__ import annotations

from dataclasses import dataclass

from tunebench.errors import TunebenchError
from tunebench.outcome import Resources
from tunebench.variant import Language

__all__ = ["Binary", "CompileError"]


class CompileError(TunebenchError):
    """The compiler rejected a configuration; the message is the compiler's, shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """Machine code of one configuration; workloads that differ only in run-time sizes share it.

    Attributes:
        key: Hash of exactly what reached the compiler: source, flags, target, compiler version; that of a
            carried binary has no version.
        language: Language of the variant; it decides how the payload is loaded.
        target: Compilation target: ``"sm_90a"``, or LLVM's name of a CPU.
        payload: A cubin, or serialised object code of Numba on the CPU.
        entries: Symbol of each launch, in launch order.
        resources: Resources in use: the maximum of each over the entries.
        notes: What ptxas noted; `tunebench.binary.ptxas_note` says what they mean.
        compiler: The compiler with its version; empty if a former version stored the binary.
    """

    key: str
    language: Language
    target: str
    payload: bytes
    entries: tuple[str, ...] = ()
    resources: Resources = Resources()
    notes: tuple[str, ...] = ()
    compiler: str = ""
