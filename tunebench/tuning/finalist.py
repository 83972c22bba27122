"""Configurations that succeeded, and what timing the best of them again has shown."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from tunebench.measure.timing import median_interval
from tunebench.outcome import Effort, Measured, Result
from tunebench.search.loop import VariantSearch
from tunebench.space import Config

__all__ = ["ROUNDS", "Timed", "choose"]

ROUNDS = 2
"""Finalists are timed in turn so many times, so that a drift of the machine meets all alike."""


@dataclass(slots=True)
class Timed:
    """A configuration that succeeded in the search, with the results of the finalist rounds.

    Attributes:
        search: The search it belongs to.
        config: The configuration.
        search_us: Its time in the search.
        again: The results of the finalist rounds.
    """

    search: VariantSearch
    config: Config
    search_us: float
    again: list[Result] = field(default_factory=list)

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

    def median(self) -> tuple[float, tuple[float, float] | None]:
        """Return the median of all finalist samples with its interval, or that of the search alone."""
        samples = [us for result in self.again for us in getattr(result.outcome, "samples_us", ())]
        return median_interval(samples) if samples else (self.search_us, None)

    def pooled(self) -> Result:
        """Return the finalist rounds as one result: a drift of the machine is in its interval."""
        last = self.again[-1]
        assert isinstance(last.outcome, Measured)
        samples = tuple(us for result in self.again for us in getattr(result.outcome, "samples_us", ()))
        median_us, ci_us = median_interval(samples)
        efforts = [result.effort for result in self.again]
        effort = Effort(
            **{name: sum(getattr(e, name) for e in efforts) for name in Effort.__dataclass_fields__}
        )
        outcome = dataclasses.replace(last.outcome, median_us=median_us, ci_us=ci_us, samples_us=samples)
        return dataclasses.replace(last, outcome=outcome, effort=effort)


def choose(timed: list[Timed], count: int, default: Timed | None) -> list[Timed]:
    """Return the fastest of the search, and the default beside them."""
    best = sorted(timed, key=lambda one: one.search_us)[:count]
    return best if default is None or default in best else [*best, default]
