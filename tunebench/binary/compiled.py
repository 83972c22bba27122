"""Compiled code and the resources it uses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tunebench.errors import TunebenchError
from tunebench.outcome import Resources
from tunebench.variant import RESTORE_ENTRY, Language, Launch, Scalar

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
        threads: Threads of a block, if the compiler decides them; 0: those of the launch.
        omitted: Positions of arguments that the kernel does not take, because their values are compiled in.
        null_pointers: Pointers after the arguments that the kernel takes and does not use.
    """

    key: str
    language: Language
    target: str
    payload: bytes
    entries: tuple[str, ...] = ()
    resources: Resources = Resources()
    notes: tuple[str, ...] = ()
    compiler: str = ""
    threads: int = 0
    omitted: tuple[int, ...] = ()
    null_pointers: int = 0

    def launches(self, planned: tuple[Launch, ...]) -> tuple[Launch, ...]:
        """Return the launches of a variant with what its compiler decided.

        Args:
            planned: From `GpuVariant.launches`.
        """
        if self.language != "triton":
            return planned
        nulls = (Scalar("long long", 0),) * self.null_pointers
        return tuple(
            launch
            if launch.entry.startswith(RESTORE_ENTRY)
            else dataclasses.replace(
                launch,
                block=(self.threads, 1, 1),
                smem_bytes=self.resources.dynamic_smem_bytes or 0,
                arguments=(*(a for i, a in enumerate(launch.arguments) if i not in self.omitted), *nulls),
            )
            for launch in planned
        )
