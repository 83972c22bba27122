"""Problems that are tuned together: those of a suite, of a file, or of a model's own list."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunebench.db.record import Record
from tunebench.errors import InputError, UnknownName
from tunebench.kernels import variants
from tunebench.tuning import candidate
from tunebench.tuning.budget_scheduler import TaskState
from tunebench.tuning.candidate import Candidate, Target
from tunebench.tuning.plan import Plan
from tunebench.tuning.session import Session
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads import suite as layers_of

__all__ = ["Member", "Suite", "look", "suite_of"]


@dataclass(slots=True, kw_only=True)
class Member:
    """One problem of a suite, and what is known of it.

    Attributes:
        problem: The problem.
        count: How often the suite runs it.
        layers: Names of the layers that it is.
        found: The variants that can do it, the one that is predicted fastest first.
        skipped: Why others cannot.
        session: Its run, once that is begun.
        account: What the allotment knows of it, from then on.
        before: What a lookup would have served at the beginning, if anything.
        refused: Why no variant can do it.
        error: What ended its run.
    """

    problem: Workload
    count: int
    layers: tuple[str, ...]
    found: list[Candidate] = field(default_factory=list)
    skipped: Mapping[str, str] = field(default_factory=dict)
    session: Session | None = None
    account: TaskState | None = None
    before: Record | None = None
    refused: str = ""
    error: str = ""

    def look(self, target: Target, plan: Plan, names: Sequence[str], *, compilable: bool) -> None:
        """Find what can do it; that nothing can is no error."""
        mine = [n for n in names if n in _names_of(self.problem)]
        try:
            self.found, self.skipped = candidate.find(
                self.problem, target.device, mine, cache=plan.protocol.cache, compilable=compilable
            )
        except InputError as error:
            self.refused = str(error)
            return
        self.found.sort(key=lambda one: one.predicted_us(one.fastest()))

    @property
    def expected_us(self) -> float:
        """What the best configuration is predicted to take."""
        return self.found[0].predicted_us(self.found[0].fastest())

    @property
    def best_us(self) -> float:
        """The best time so far; infinite if there is none."""
        searches = self.session.searches if self.session is not None else ()
        return min((search.best_us for search in searches), default=math.inf)

    @property
    def now_us(self) -> float:
        """What the suite spends on it now: by its best time, or the predicted one while there is none."""
        return self.count * (self.best_us if math.isfinite(self.best_us) else self.expected_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Problems that are tuned together; each is there once."""

    name: str
    members: tuple[Member, ...]


def suite_of(suite: str | Path | Mapping[Workload | str, int], batch: int) -> Suite:
    """Return the problems of a suite, of a file of one, or those that are given with their counts.

    Raises:
        InputError: if it cannot be read, has no problem, or a count is not 1 or more.
    """
    if isinstance(suite, Mapping):
        if batch != 1:
            raise InputError("a batch goes with a suite or a file; problems that are given have their sizes")
        name = f"{len(suite)} problems"
        given = [(parse(one) if isinstance(one, str) else one, count, "") for one, count in suite.items()]
    else:
        name = str(suite)
        given = [(layer.workload, layer.count, layer.name) for layer in layers_of(suite, batch)]
    members: dict[str, Member] = {}
    for problem, count, layer in given:
        if count < 1:
            raise InputError(f"{problem}: its count must be 1 or more, got {count}")
        member = members.setdefault(str(problem), Member(problem=problem, count=0, layers=()))
        member.count += count
        member.layers += (layer,) if layer else ()
    if not members:
        raise InputError("there is no problem to tune: give at least one")
    return Suite(name=name, members=tuple(members.values()))


def look(
    suite: Suite, target: Target, plan: Plan, names: Sequence[str], *, compilable: bool = True
) -> list[Candidate]:
    """Find what can do each problem, and return all of it.

    Args:
        suite: The problems.
        target: Where they are to be tuned.
        plan: How.
        names: Names or keys of variants: problems that one of them can be of are tuned with those alone.
        compilable: Whether what cannot be compiled here is left out.

    Raises:
        UnknownName: if a name is of no variant of any problem.
        InputError: if no variant can do any problem.
    """
    known = {name: None for member in suite.members for name in _names_of(member.problem)}
    for name in names:
        if name not in known:
            raise UnknownName("variant", name, known)
    for member in suite.members:
        member.look(target, plan, names, compilable=compilable)
    if not any(member.found for member in suite.members):
        raise InputError(f"nothing of {suite.name} can be tuned: {suite.members[0].refused}")
    return [one for member in suite.members for one in member.found]


def _names_of(problem: Workload) -> list[str]:
    return [name for variant in variants(problem) for name in (variant.name, variant.key)]
