"""Which kernel runs a problem on a device: ours, with a configuration, or a library's own; and why."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tunebench.answer import Answer, lookup_workload, timed
from tunebench.compile import unavailable
from tunebench.device import Device
from tunebench.dispatch import freshness
from tunebench.dispatch._preference import Preference, preference
from tunebench.dispatch.binding import bind, unusable
from tunebench.dispatch.kernel import BoundKernel
from tunebench.dispatch.watch import DispatchedCall, notify
from tunebench.errors import LookupMiss, TunebenchError
from tunebench.kernels import variant as find_variant
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Dispatcher", "KernelChoice", "choose", "dispatcher"]

LIBRARY = "torch"
"""Whose comparison with ours decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChoice:
    """What runs a problem, and why.

    Attributes:
        workload: The problem.
        reason: Why it is this and no other, in words.
        variant: Our implementation; None where a library's own runs it.
        config: Its configuration.
    """

    workload: Workload
    reason: str
    variant: Variant[Any] | None = None
    config: Config | None = None

    @property
    def by(self) -> Literal["tunebench", "torch"]:
        """Whose kernel it is."""
        return "torch" if self.variant is None else "tunebench"


def choose(workload: Workload, device: Device, preferred: Preference | None = None) -> KernelChoice:
    """Choose what runs a problem; nothing is compiled here.

    Args:
        workload: The problem.
        device: Where it runs.
        preferred: Instead of the preference in force.

    Returns:
        With `faster`, ours only if measurements on this very device know it to be faster than the library's,
        for this problem or, with a margin, for its neighbours; with `tunebench`, what `lookup` answers; with
        `torch`, the library's.
    """
    preferred = preferred or preference()
    if preferred == "torch":
        return KernelChoice(workload=workload, reason="torch is preferred")
    try:
        if preferred == "faster":
            return _if_faster(workload, timed(workload, device=device))
        known = lookup_workload(workload, device=device, quiet=True)
        return _of(workload, known, f"best known, {known.how}")
    except LookupMiss as miss:
        return KernelChoice(workload=workload, reason=str(miss))
    except TunebenchError as error:
        return KernelChoice(workload=workload, reason=f"the database cannot be asked: {error}")


def _if_faster(workload: Workload, known: Answer | None) -> KernelChoice:
    if known is None:
        return KernelChoice(workload=workload, reason="neither it nor anything near it was timed here")
    versus = known.baselines.get(LIBRARY)
    if known.how not in ("measured here", "neighbour"):
        reason = f"it was not measured on this device ({known.how})"
    elif versus is None:
        reason = f"{known.variant} was not compared with {LIBRARY}"
    elif not versus.faster:
        high = "any" if versus.high is None else f"{versus.high:.2f}"
        taken = f"{LIBRARY} takes {versus.ratio:.2f} times as long ({versus.low:.2f} to {high})"
        reason = f"{known.variant} is not known to be faster: {taken}"
    else:
        near = "" if known.exact else f"; {known.because}"
        return _of(workload, known, f"{LIBRARY} takes {versus.ratio:.2f} times as long{near}")
    return KernelChoice(workload=workload, reason=reason)


def _of(workload: Workload, known: Answer, reason: str) -> KernelChoice:
    variant = find_variant(known.variant)
    missing = unavailable(variant.language)
    if missing is not None:
        return KernelChoice(workload=workload, reason=missing)
    return KernelChoice(workload=workload, reason=reason, variant=variant, config=known.config)


# -- what was chosen, kept -----------------------------------------------------------------------------------


class BoundChoice(NamedTuple):
    """A choice with its kernel, and when it was made."""

    generation: int
    choice: KernelChoice
    kernel: BoundKernel | None


class Dispatcher:
    """One problem on one device, with what runs it: chosen and bound at its first use.

    It is chosen anew when the database has changed. Threads may share it.

    Args:
        workload: The problem.
        device: Where it runs.
        ordinal: Which of this machine's GPUs that is.
    """

    __slots__ = ("_made", "device", "ordinal", "workload")

    def __init__(self, workload: Workload, device: Device, ordinal: int = 0) -> None:
        self.workload, self.device, self.ordinal = workload, device, ordinal
        self._made: dict[Preference, BoundChoice] = {}

    def bound_choice(self, preferred: Preference | None = None) -> BoundChoice:
        """Return what runs it now.

        Args:
            preferred: Instead of the preference in force.
        """
        preferred = preferred or preference()
        made = self._made.get(preferred)
        if made is not None and made.generation == freshness.generation():
            return made
        return self._make(preferred)

    def _make(self, preferred: Preference) -> BoundChoice:
        with _lock:
            generation, before = freshness.generation(), self._made.get(preferred)
            if before is not None and before.generation == generation:
                return before  # another thread was faster
            choice = choose(self.workload, self.device, preferred)
            made = BoundChoice(generation, *self._bound(choice, before))
            self._made[preferred] = made
            return made

    def _bound(
        self, choice: KernelChoice, before: BoundChoice | None
    ) -> tuple[KernelChoice, BoundKernel | None]:
        """Return a choice with its kernel; a library's with the reason, if there is none to be had."""
        if choice.variant is None or choice.config is None:
            return choice, None
        reason = unusable(self.device)
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
        """Tell watchers that it is run by what was made of it."""
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
    """Return the one `Dispatcher` of a workload on a device of this machine."""
    key = (workload, device.key, ordinal)
    found = _dispatchers.get(key)
    if found is None:
        with _lock:
            found = _dispatchers.setdefault(key, Dispatcher(workload, device, ordinal))
    return found


def _after_fork() -> None:
    """Let no lock be held by a thread that the child does not have, and choose again: threads may be gone."""
    global _lock
    _lock = threading.RLock()
    freshness.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
