"""Configurations that succeeded, and what timing the best of them again has shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tunebench.db.record import Verdict, VersusDefault
from tunebench.measure.comparison import Comparison, compare
from tunebench.measure.timing import median_interval
from tunebench.outcome import Effort, Measured, Result
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config

__all__ = ["ROUNDS", "Settled", "Timed", "choose", "settle", "verdict"]

ROUNDS = 4
"""Finalists are timed in turn so many times: a drift of the machine meets all alike, and what varies from
round to round is the noise they are compared in. With four, 1.6 times that noise is a difference.
"""


@dataclass(slots=True, eq=False)
class Timed:
    """A configuration that succeeded in the search, with the results of the finalist rounds.

    Attributes:
        search: The search it belongs to.
        config: The configuration.
        search_us: Its time in the search; infinite for a default that was aborted.
        ci_us: 95 % interval of that, if it was measured.
        interval_us: What nine of ten times lie between, if it was predicted and its record tells.
        is_default: Whether it is what its variant would ship untuned.
        again: The results of the finalist rounds in which it succeeded, by round.
        failed: Whether it failed in one of them.
    """

    search: VariantSearch
    config: Config
    search_us: float
    ci_us: tuple[float, float] | None = None
    interval_us: tuple[float, float] | None = None
    is_default: bool = False
    again: dict[int, Result] = field(default_factory=dict)
    failed: bool = False

    @property
    def row(self) -> int:
        """Its row in the table of its search."""
        row = self.search.table.row(self.config)
        assert row is not None, self.config
        return row

    @property
    def bound_us(self) -> float:
        """No run of it can be faster."""
        return float(self.search.bounds_us[self.row])

    def samples_us(self, turn: int) -> tuple[float, ...]:
        """Return its samples in one round."""
        samples: tuple[float, ...] = self.again[turn].outcome.samples_us  # type: ignore[union-attr]
        return samples

    def median(self) -> tuple[float, tuple[float, float] | None]:
        """Return the median of all finalist samples with its interval, or that of the search alone."""
        samples = [us for turn in self.again for us in self.samples_us(turn)]
        return median_interval(samples) if samples else (self.search_us, self.ci_us)

    def pooled(self) -> Result:
        """Return the finalist rounds as one result: a drift of the machine is in its interval."""
        results = list(self.again.values())
        last = results[-1]
        assert isinstance(last.outcome, Measured)
        samples = tuple(us for turn in self.again for us in self.samples_us(turn))
        median_us, ci_us = median_interval(samples)
        efforts = [result.effort for result in results]
        effort = Effort(
            **{name: sum(getattr(e, name) for e in efforts) for name in Effort.__dataclass_fields__}
        )
        outcome = dataclasses.replace(last.outcome, median_us=median_us, ci_us=ci_us, samples_us=samples)
        return dataclasses.replace(last, outcome=outcome, effort=effort)

    def against(self, other: Timed) -> Comparison | None:
        """Compare it with another by the rounds of both; None if they have none in common."""
        turns = [turn for turn in self.again if turn in other.again]
        if not turns:
            return None
        return compare([self.samples_us(t) for t in turns], [other.samples_us(t) for t in turns])

    def tied(self, other: Timed) -> bool:
        """Tell whether neither is faster beyond noise: by common rounds, or where intervals meet."""
        comparison = self.against(other)
        if comparison is not None:
            return comparison.tied
        mine, theirs = self.median()[1], other.median()[1]
        return mine is not None and theirs is not None and mine[0] <= theirs[1] and theirs[0] <= mine[1]

    def beats(self, other: Timed) -> bool:
        """Tell whether it is faster beyond noise."""
        return self.median()[0] < other.median()[0] and not self.tied(other)


def choose(timed: Sequence[Timed], count: int) -> list[Timed]:
    """Return the fastest of the search, and the defaults of their variants beside them."""
    best = sorted(timed, key=lambda one: one.search_us)[:count]
    searches = {id(one.search) for one in best}
    defaults = [one for one in timed if one.is_default and id(one.search) in searches and one not in best]
    return [*best, *defaults]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What comparing has come to.

    Attributes:
        best: The fastest of those that beat their variant's default beyond noise, or such a default itself.
        default: The default of the best's variant, if it succeeded.
        versus: How the best stands to the `default` and to the `runner_up`, where rounds tell.
    """

    best: Timed
    default: Timed | None
    versus: Mapping[str, Comparison]


def settle(timed: Sequence[Timed]) -> Settled | None:
    """Decide on the best of configurations that were all timed alike; None if there are none.

    A tuned configuration stands back for its variant's default unless it beats it beyond noise: what was
    tuned must not lose against what was there before. The view `answer_v1` serves by the same rule.
    """
    defaults = _defaults(timed)
    eligible = [one for one in timed if _verdict(one, defaults) != "not faster"]
    best = min(eligible, key=lambda one: one.median()[0], default=None)
    if best is None:
        return None
    others = sorted((one for one in timed if one is not best), key=lambda one: one.median()[0])
    default = defaults.get(id(best.search))
    rivals = {"default": default if default is not best else None, "runner_up": others[0] if others else None}
    compared = {name: best.against(rival) for name, rival in rivals.items() if rival is not None}
    return Settled(
        best=best,
        default=default,
        versus={name: found for name, found in compared.items() if found is not None},
    )


def verdict(
    one: Timed, timed: Sequence[Timed], settled: Settled, libraries: Mapping[str, Comparison]
) -> Verdict:
    """Return what is stored of a finalist's comparisons; of the best, also that with the runner-up.

    Args:
        one: The finalist.
        timed: All of them.
        settled: What comparing them has come to.
        libraries: How it stands to each library that was timed in the same rounds.
    """
    defaults = _defaults(timed)
    default = defaults.get(id(one.search))
    told = dict(settled.versus) if one is settled.best else {}
    if default is not None and default is not one and (found := one.against(default)) is not None:
        told["default"] = found
    comparison: dict[str, Any] = {name: found.to_json() for name, found in told.items()}
    if libraries:
        comparison["libraries"] = {name: found.to_json() for name, found in libraries.items()}
    return Verdict(versus_default=_verdict(one, defaults), comparison=comparison)


def _defaults(timed: Sequence[Timed]) -> dict[int, Timed]:
    """Return the default of each search that has one here."""
    return {id(one.search): one for one in timed if one.is_default}


def _verdict(one: Timed, defaults: Mapping[int, Timed]) -> VersusDefault | None:
    default = defaults.get(id(one.search))
    if default is None:
        return None
    if default is one:
        return "itself"
    return "faster" if one.beats(default) else "not faster"
