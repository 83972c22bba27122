"""Configurations that succeeded, their times in the finalist rounds, and the choice of the best."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tunebench.db.figures import MOST_TIES, BaselineComparison, Figures, TiedConfig
from tunebench.db.record import Verdict, VersusDefault
from tunebench.measure.comparison import Comparison, compare
from tunebench.measure.timing import median_interval
from tunebench.outcome import Effort, Measured, Result
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config

__all__ = [
    "DISAGREEMENT",
    "ROUNDS",
    "FinalSelection",
    "TimedConfig",
    "comparison_with",
    "pick_finalists",
    "predicted_choices",
    "predicted_ties",
    "predicted_verdict",
    "select_best",
    "ties_of",
    "verdict",
    "with_time",
]

ROUNDS = 4
"""Rounds in which finalists are timed in turn. A drift of the machine affects all of them alike, and the
variation between rounds is the noise of the comparison: with four rounds, 1.6 times that noise is a
difference.
"""

DISAGREEMENT = 2.0
"""Factor between the times of search and finals above which the finals are repeated, and then marked."""


@dataclass(slots=True, eq=False)
class TimedConfig:
    """A configuration that succeeded in the search, with the results of the finalist rounds.

    Attributes:
        search: The search of its variant.
        config: The configuration.
        search_us: Its time in the search, in microseconds; infinite for a default that was aborted.
        ci_us: 95 % confidence interval of `search_us`, if measured.
        interval_us: 90 % prediction interval of `search_us`, if predicted and recorded.
        is_default: Whether it is the default of its variant.
        verified: Whether its result was verified; a prediction may lack it.
        rounds: The results of the finalist rounds in which it succeeded, by number of the round.
        failure: Why it failed in one of the rounds, or None.
    """

    search: VariantSearch
    config: Config
    search_us: float
    ci_us: tuple[float, float] | None = None
    interval_us: tuple[float, float] | None = None
    is_default: bool = False
    verified: bool = True
    rounds: dict[int, Result] = field(default_factory=dict)
    failure: str | None = None

    @property
    def failed(self) -> bool:
        """Whether it failed in one of the rounds."""
        return self.failure is not None

    @property
    def disagreement(self) -> float:
        """Ratio of its times in the search and in the rounds, at least 1; 1 if either is missing."""
        if not self.rounds or not math.isfinite(self.search_us):
            return 1.0
        ratio = self.median()[0] / self.search_us
        return max(ratio, 1 / ratio)

    @property
    def row(self) -> int:
        """Row in the table of the search."""
        row = self.search.table.row(self.config)
        assert row is not None, self.config
        return row

    @property
    def bound_us(self) -> float:
        """Lower bound, in microseconds."""
        return float(self.search.bounds_us[self.row])

    def samples_us(self, number: int) -> tuple[float, ...]:
        """Return the samples of one round, in microseconds."""
        samples: tuple[float, ...] = self.rounds[number].outcome.samples_us  # type: ignore[union-attr]
        return samples

    def median(self) -> tuple[float, tuple[float, float] | None]:
        """Return the median of all finalist samples and its interval; without rounds, those of the search."""
        samples = [us for number in self.rounds for us in self.samples_us(number)]
        return median_interval(samples) if samples else (self.search_us, self.ci_us)

    def pooled(self) -> Result:
        """Return all rounds as one result, whose confidence interval includes the drift between rounds."""
        results = list(self.rounds.values())
        last = results[-1]
        assert isinstance(last.outcome, Measured)
        samples = tuple(us for number in self.rounds for us in self.samples_us(number))
        median_us, ci_us = median_interval(samples)
        efforts = [result.effort for result in results]
        effort = Effort(
            **{name: sum(getattr(e, name) for e in efforts) for name in Effort.__dataclass_fields__}
        )
        marks = {
            name: worst(self.conditions(name))
            for name, worst in (("busy_elsewhere", max), ("interrupted", max), ("processor_share", min))
            if self.conditions(name)
        }
        if self.disagreement > DISAGREEMENT:
            marks["search_us"] = self.search_us
        outcome = dataclasses.replace(
            last.outcome,
            median_us=median_us,
            ci_us=ci_us,
            samples_us=samples,
            conditions={**last.outcome.conditions, **marks},
        )
        return dataclasses.replace(last, outcome=outcome, effort=effort)

    def conditions(self, name: str) -> list[float]:
        """Return a condition of each round that has it."""
        conditions_of_rounds = [getattr(result.outcome, "conditions", {}) for result in self.rounds.values()]
        return [conditions[name] for conditions in conditions_of_rounds if name in conditions]

    def against(self, rival: TimedConfig) -> Comparison | None:
        """Compare with another configuration by their common rounds; None if there are none."""
        common = [number for number in self.rounds if number in rival.rounds]
        if not common:
            return None
        return compare([self.samples_us(n) for n in common], [rival.samples_us(n) for n in common])

    def tied(self, rival: TimedConfig) -> bool:
        """Return whether neither is faster beyond noise: by common rounds, else by overlapping intervals."""
        comparison = self.against(rival)
        # In common rounds a drift of the machine affects both alike, so their ratio is more exact than times.
        if comparison is not None:
            return comparison.tied
        mine, theirs = self.median()[1], rival.median()[1]
        return mine is not None and theirs is not None and mine[0] <= theirs[1] and theirs[0] <= mine[1]

    def beats(self, rival: TimedConfig) -> bool:
        """Return whether this configuration is faster beyond noise."""
        return self.median()[0] < rival.median()[0] and not self.tied(rival)


def pick_finalists(
    timed: Sequence[TimedConfig], count: int, earlier: Collection[tuple[str, Config]] = ()
) -> list[TimedConfig]:
    """Return the `count` fastest configurations of the search, earlier finalists, and their defaults.

    Args:
        timed: The configurations that succeeded.
        count: Number of the fastest ones.
        earlier: Variant and configuration of finalists of earlier searches: they are timed again, so that the
            new ones are compared with them under the same conditions.
    """
    best = sorted(timed, key=lambda candidate: candidate.search_us)[:count]
    best += [
        candidate
        for candidate in timed
        if (candidate.search.key, candidate.config) in earlier and candidate not in best
    ]
    # Without its default in the same rounds, a finalist cannot be shown to be faster than the default.
    searches = {id(candidate.search) for candidate in best}
    defaults = [
        candidate
        for candidate in timed
        if candidate.is_default and id(candidate.search) in searches and candidate not in best
    ]
    return [*best, *defaults]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalSelection:
    """The best of the finalists, and its comparisons.

    Attributes:
        best: The fastest among the defaults and the configurations that beat their default beyond noise.
        default: The default of the best's variant, if it succeeded.
        versus: Comparison of the best with the `default` and the `runner_up`, if they have common rounds.
    """

    best: TimedConfig
    default: TimedConfig | None
    versus: Mapping[str, BaselineComparison]


def select_best(timed: Sequence[TimedConfig]) -> FinalSelection | None:
    """Return the best of configurations that were timed in the same way; None if there are none.

    A tuned configuration wins only if it beats the default of its variant beyond noise. The database view
    `answer_v1` applies the same rule to lookups.
    """
    defaults = _defaults(timed)
    eligible = [candidate for candidate in timed if _verdict(candidate, defaults) != "not faster"]
    best = min(eligible, key=_rank, default=None)
    if best is None:
        return None
    by_time = sorted(
        (candidate for candidate in timed if candidate is not best),
        key=lambda candidate: candidate.median()[0],
    )
    default = defaults.get(id(best.search))
    rivals = {
        "default": default if default is not best else None,
        "runner_up": by_time[0] if by_time else None,
    }
    compared = {name: comparison_with(best, rival) for name, rival in rivals.items() if rival is not None}
    return FinalSelection(
        best=best,
        default=default,
        versus={name: comparison for name, comparison in compared.items() if comparison is not None},
    )


def comparison_with(timed: TimedConfig, rival: TimedConfig) -> BaselineComparison | None:
    """Return the comparison with another configuration by their common rounds; None if there are none."""
    versus = timed.against(rival)
    return None if versus is None else with_time(versus, *rival.median())


def with_time(versus: Comparison, time_us: float, ci_us: tuple[float, float] | None) -> BaselineComparison:
    """Return a comparison with the time of the other configuration, in microseconds, and its interval."""
    return BaselineComparison(
        ratio=versus.ratio,
        low=versus.low,
        high=versus.high if math.isfinite(versus.high) else None,
        time_us=time_us,
        ci_us=ci_us,
        probability=versus.probability,
    )


def ties_of(best: TimedConfig, timed: Sequence[TimedConfig]) -> list[TimedConfig]:
    """Return the measured configurations that are as fast as the best within noise, fastest first.

    A configuration that was faster in the search and was not timed again is a tie, too.
    """
    tied = [
        candidate
        for candidate in timed
        if candidate is not best
        and not candidate.failed
        and (best.tied(candidate) or (not candidate.rounds and candidate.search_us < best.median()[0]))
    ]
    return sorted(tied, key=lambda candidate: candidate.median()[0])


def verdict(
    finalist: TimedConfig,
    timed: Sequence[TimedConfig],
    selected: FinalSelection,
    *,
    search: Figures,
    ties: Sequence[TimedConfig],
) -> Verdict:
    """Return the comparisons of a finalist to store; those of the best include runner-up and ties.

    Args:
        finalist: The finalist.
        timed: All finalists.
        selected: The best of them.
        search: Bound and variants of the search, and the comparison of the finalist with each baseline that
            was timed in the same rounds.
        ties: Configurations that are as fast as the best.
    """
    defaults = _defaults(timed)
    default = defaults.get(id(finalist.search))
    figures = search
    if default is not None and default is not finalist:
        figures = dataclasses.replace(figures, default=comparison_with(finalist, default))
    if finalist is selected.best:
        figures = dataclasses.replace(
            _with_ties(figures, ties), runner_up=selected.versus.get("runner_up"), default=figures.default
        )
    return Verdict(versus_default=_verdict(finalist, defaults), comparison=figures.stored())


def _with_ties(figures: Figures, ties: Sequence[TimedConfig]) -> Figures:
    tied_configs = tuple(
        TiedConfig(variant=tied.search.key, config=dict(tied.config), time_us=tied.median()[0])
        for tied in ties[:MOST_TIES]
    )
    return dataclasses.replace(figures, tie_count=len(ties), ties=tied_configs)


# -- predictions -------------------------------------------------------------------------------------------


def predicted_choices(timed: Sequence[TimedConfig], preferred: Mapping[str, int]) -> list[TimedConfig]:
    """Return the configuration to name for each variant, the best of all first.

    Verified configurations come before others, then the preferred one of a variant, then the shortest time.

    Args:
        timed: Configurations with predicted times.
        preferred: Row of each variant that a lookup names without records (`PredictedSpace.unmeasured`).
    """
    groups: dict[str, list[TimedConfig]] = {}
    for candidate in timed:
        groups.setdefault(candidate.search.key, []).append(candidate)
    choices = [
        min(group, key=lambda candidate: (not candidate.verified, candidate.row != row, *_rank(candidate)))
        for group, row in ((group, preferred.get(key)) for key, group in groups.items())
    ]
    return sorted(choices, key=_rank)


def predicted_ties(best: TimedConfig, timed: Sequence[TimedConfig]) -> list[TimedConfig]:
    """Return the configurations with the same predicted time as the best, in the order of preference."""
    tied = [
        candidate for candidate in timed if candidate is not best and candidate.search_us == best.search_us
    ]
    return sorted(tied, key=_rank)


def predicted_verdict(
    choice: TimedConfig, default: TimedConfig | None, search: Figures, ties: Sequence[TimedConfig]
) -> Verdict:
    """Return the figures of a predicted choice to store.

    Args:
        choice: The choice.
        default: The default of its variant, if it succeeded.
        search: Bound and variants of the search.
        ties: Configurations with the same predicted time.
    """
    figures = _with_ties(search, ties)
    if default is not None and default is not choice:
        versus = BaselineComparison(
            ratio=default.search_us / choice.search_us, low=0.0, high=None, time_us=default.search_us
        )
        figures = dataclasses.replace(figures, default=versus)
    return Verdict(versus_default="itself" if choice.is_default else None, comparison=figures.stored())


def _rank(timed: TimedConfig) -> tuple[bool, float, bool, str, int]:
    """Return the order of preference: verified, fast, a default; then any order that never changes."""
    return not timed.verified, timed.median()[0], not timed.is_default, timed.search.key, timed.row


def _defaults(timed: Sequence[TimedConfig]) -> dict[int, TimedConfig]:
    """Return the default of each search that has one among the finalists."""
    return {id(candidate.search): candidate for candidate in timed if candidate.is_default}


def _verdict(timed: TimedConfig, defaults: Mapping[int, TimedConfig]) -> VersusDefault | None:
    default = defaults.get(id(timed.search))
    if default is None:
        return None
    if default is timed:
        return "itself"
    return "faster" if timed.beats(default) else "not faster"
