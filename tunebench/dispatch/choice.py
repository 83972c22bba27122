"""Choice between a tuned kernel and torch for a workload on a device."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tunebench.answer import HERE, Answer, lookup_workload, timed
from tunebench.compile import unavailable
from tunebench.device import Device
from tunebench.dispatch import freshness
from tunebench.dispatch._preference import Preference, is_deterministic, preference
from tunebench.dispatch.binding import bind
from tunebench.dispatch.cpu import forked
from tunebench.dispatch.kernel import BoundKernel
from tunebench.dispatch.watch import DispatchedCall, notify
from tunebench.errors import LookupMiss, TunebenchError
from tunebench.kernels import variant as find_variant
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Dispatcher", "KernelChoice", "choose", "dispatcher"]

LIBRARY = "torch"
"""Baseline that decides between a tuned kernel and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """The kernel that runs a workload.

    Attributes:
        workload: The workload.
        reason: Reason for the choice.
        variant: Variant of the tuned kernel; None for torch.
        config: Its configuration; None for torch.
    """

    workload: Workload
    reason: str
    variant: Variant[Any] | None = None
    config: Config | None = None

    @property
    def by(self) -> Literal["tunebench", "torch"]:
        """Whose kernel runs."""
        return "torch" if self.variant is None else "tunebench"


def choose(workload: Workload, device: Device, preferred: Preference | None = None) -> KernelChoice:
    """Choose the kernel of a workload; nothing is compiled.

    Args:
        workload: The workload.
        device: The device.
        preferred: Overrides the current preference.

    Returns:
        With `faster`, a tuned kernel only if measurements on this device show that it is faster than torch,
        for this workload or, with a margin, for its neighbours. With `tunebench`, the answer of `lookup`.
        With `torch`, torch. With ``torch.use_deterministic_algorithms(True)``, no configuration whose results
        differ from run to run.
    """
    preferred, reproducible = preferred or preference(), is_deterministic()
    if preferred == "torch":
        return KernelChoice(workload=workload, reason="torch is preferred")
    try:
        if preferred == "faster":
            return _if_faster(workload, timed(workload, device=device, reproducible=reproducible))
        answer = lookup_workload(workload, device=device, quiet=True, reproducible=reproducible)
        return _of(workload, answer, f"best known, {answer.how}")
    except LookupMiss as miss:
        return KernelChoice(workload=workload, reason=str(miss))
    except TunebenchError as error:
        return KernelChoice(workload=workload, reason=f"the database cannot be read: {error}")


def _if_faster(workload: Workload, answer: Answer | None) -> KernelChoice:
    if answer is None:
        return KernelChoice(
            workload=workload, reason="neither it nor a comparable workload was measured here"
        )
    versus = answer.baselines.get(LIBRARY)
    if answer.how not in (*HERE, "neighbour"):
        reason = f"it was not measured on this device ({answer.how})"
    elif versus is None:
        reason = f"{answer.variant} was not compared with {LIBRARY}"
    elif not versus.faster:
        high = "any" if versus.high is None else f"{versus.high:.2f}"
        taken = f"{LIBRARY} takes {versus.ratio:.2f} times as long ({versus.low:.2f} to {high})"
        reason = f"{answer.variant} is not known to be faster: {taken}"
    else:
        near = "" if answer.exact else f"; {answer.because}"
        return _of(workload, answer, f"{LIBRARY} takes {versus.ratio:.2f} times as long{near}")
    return KernelChoice(workload=workload, reason=reason)


def _of(workload: Workload, answer: Answer, reason: str) -> KernelChoice:
    variant = find_variant(answer.variant)
    missing = unavailable(variant.language)
    if missing is not None:
        return KernelChoice(workload=workload, reason=missing)
    return KernelChoice(workload=workload, reason=reason, variant=variant, config=answer.config)


# -- dispatchers -------------------------------------------------------------------------------------


class BoundChoice(NamedTuple):
    """A choice with its loaded kernel, and the `generation` of the answers it was made from."""

    generation: int
    choice: KernelChoice
    kernel: BoundKernel | None

    @property
    def is_reproducible(self) -> bool:
        """Whether equal inputs give equal bits in every run."""
        kernel = self.kernel
        return kernel is None or kernel.variant.is_reproducible(kernel.workload, kernel.config)


class Dispatcher:
    """Dispatcher of one workload on one device; chooses and binds the kernel at first use.

    The choice is repeated when the database has changed. Thread-safe.

    Args:
        workload: The workload.
        device: The device.
        ordinal: Index of the GPU on this machine.
    """

    __slots__ = ("_made", "device", "ordinal", "workload")

    def __init__(self, workload: Workload, device: Device, ordinal: int = 0) -> None:
        self.workload, self.device, self.ordinal = workload, device, ordinal
        self._made: dict[tuple[Preference, bool], BoundChoice] = {}

    def bound_choice(self, preferred: Preference | None = None) -> BoundChoice:
        """Return the current choice with its kernel.

        Args:
            preferred: Overrides the current preference.
        """
        key = (preferred or preference(), is_deterministic())
        made = self._made.get(key)
        if made is not None and made.generation == freshness.generation():
            return made
        return self._make(key)

    def _make(self, key: tuple[Preference, bool]) -> BoundChoice:
        with _lock:
            generation, before = freshness.generation(), self._made.get(key)
            if before is not None and before.generation == generation:
                return before  # another thread has bound it meanwhile
            choice = choose(self.workload, self.device, key[0])
            made = BoundChoice(generation, *self._bound(choice, before))
            self._made[key] = made
            return made

    def _bound(
        self, choice: KernelChoice, before: BoundChoice | None
    ) -> tuple[KernelChoice, BoundKernel | None]:
        """Return a choice with its kernel; if it cannot be bound, torch with the reason."""
        if choice.variant is None or choice.config is None:
            return choice, None
        reason = forked() if self.device.kind == "cpu" else None
        if reason is None and before is not None and before.choice == choice:
            return before.choice, before.kernel
        if reason is None:
            try:
                asked = (choice.workload, choice.variant, choice.config, self.device)
                return choice, bind(*asked, ordinal=self.ordinal)
            except TunebenchError as error:
                reason = f"{choice.variant.key} cannot be bound: {error}"
        return KernelChoice(workload=choice.workload, reason=reason), None

    def notify(self, made: BoundChoice) -> None:
        """Report a call to the watchers.

        Args:
            made: The choice that runs.
        """
        choice = made.choice
        key = None if choice.variant is None else choice.variant.key
        notify(
            DispatchedCall(
                function=self.workload.operator,
                workload=self.workload,
                by=choice.by,
                reason=choice.reason,
                variant=key,
                config=choice.config,
            )
        )


_dispatchers: dict[tuple[Workload, str, int], Dispatcher] = {}
_lock = threading.RLock()


def dispatcher(workload: Workload, device: Device, ordinal: int = 0) -> Dispatcher:
    """Return the `Dispatcher` of a workload on a device of this machine; the same one every time."""
    key = (workload, device.key, ordinal)
    cached = _dispatchers.get(key)
    if cached is None:
        with _lock:
            cached = _dispatchers.setdefault(key, Dispatcher(workload, device, ordinal))
    return cached


def _after_fork() -> None:
    """Replace the lock, which a thread of the parent process may have held, and repeat all choices."""
    global _lock
    _lock = threading.RLock()
    freshness.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
