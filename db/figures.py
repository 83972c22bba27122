"""The figures of a best configuration: its comparison with the default, the runner-up and baselines.

`tune`, `lookup`, `report`, the dashboard and the Python API take them from here, so that each has one value:

- The *best* is the first row of the view `answer_v1`, in the order of `answer_order`.
- Its *time* is the median of the samples of all finalist rounds; without finalists, that of the search.
- A *speedup* is the geometric mean of the ratios of both medians over the rounds in which both were timed.
- The *time of a baseline* is the median of its samples in these rounds.

All of them are in the record of the best: `Figures.stored` writes its comparison, `Figures.of` reads it. A
database may come from anyone, so a comparison of another form is left out. Only the standard library is
imported, since `lookup` reads the figures, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MOST_TIES", "BaselineComparison", "Figures", "TiedConfig", "answer_order"]

MOST_TIES = 16
"""Most configurations of a tie that a record names; it counts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineComparison:
    """Comparison of a configuration with a baseline, measured in the same rounds.

    Attributes:
        ratio: Time of the baseline over time of the configuration; above 1 the configuration is faster.
        low: Lower end of the 95 % confidence interval; 0 if unknown.
        high: Upper end; None if unknown.
        time_us: Time of the baseline, in microseconds; None for a neighbour's comparison.
        ci_us: 95 % confidence interval of that time; None if unknown.
        probability: Confidence that the configuration is faster, in [0, 1]; None if unknown.
    """

    ratio: float
    low: float
    high: float | None
    time_us: float | None = None
    ci_us: tuple[float, float] | None = None
    probability: float | None = None

    @property
    def faster(self) -> bool:
        """Whether the configuration is significantly faster than the baseline."""
        return self.low > 1

    @property
    def tied(self) -> bool:
        """Whether neither is significantly faster."""
        return self.low <= 1 and (self.high is None or self.high >= 1)

    @property
    def is_known(self) -> bool:
        """Whether there is a confidence interval: not of predictions, nor of a single round."""
        return self.high is not None

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data without unknown times."""
        plain = dataclasses.asdict(self) | {"ci_us": None if self.ci_us is None else list(self.ci_us)}
        return {name: value for name, value in plain.items() if value is not None or name == "high"}

    @classmethod
    def from_json(cls, stored: object, best_us: float | None) -> BaselineComparison | None:
        """Return a stored comparison; None if it has no ratio.

        Args:
            stored: What `to_json` or `tunebench.measure.comparison.Comparison.to_json` returned.
            best_us: Time of the configuration, from which a time is derived that an earlier version did not
                store.
        """
        fields = _mapping(stored)
        ratio, low = _number(fields.get("ratio")), _number(fields.get("low"))
        if ratio is None or ratio <= 0:
            return None
        time_us, us = _number(fields.get("time_us")), _number(best_us)
        if time_us is None and us is not None:
            time_us = ratio * us
        return cls(
            ratio=ratio,
            low=low or 0.0,
            high=_number(fields.get("high")),
            time_us=time_us,
            ci_us=_interval(fields.get("ci_us")),
            probability=_number(fields.get("probability")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedConfig:
    """A configuration that is as fast as the best: its variant, values by parameter, and time."""

    variant: str
    config: Mapping[str, Any]
    time_us: float

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as plain data."""
        return {"variant": self.variant, "config": dict(self.config), "time_us": self.time_us}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Comparisons of a best configuration, as they are stored with its record.

    Attributes:
        default: Comparison with the default of its variant; None if it is the default or there is none.
        runner_up: Comparison with the next fastest finalist; None without one.
        baselines: Comparison with each baseline by name, the fastest baseline first.
        tie_count: Configurations that are as fast: within noise if measured, with the same time if predicted;
            None if unknown.
        ties: The fastest of them, at most `MOST_TIES`.
        bound_us: Lower bound of all configurations of the search, in microseconds; None if unknown.
        searched: Keys of the variants of the search, which its optimality gap covers; empty if unknown.
    """

    default: BaselineComparison | None = None
    runner_up: BaselineComparison | None = None
    baselines: Mapping[str, BaselineComparison] = dataclasses.field(default_factory=dict)
    tie_count: int | None = None
    ties: tuple[TiedConfig, ...] = ()
    bound_us: float | None = None
    searched: tuple[str, ...] = ()

    @classmethod
    def of(cls, stored: Mapping[str, Any], best_us: float | None) -> Figures:
        """Return the figures of a record.

        Args:
            stored: Column `comparison` of the record (`tunebench.db.record.Verdict.comparison`).
            best_us: Time of the record, in microseconds.
        """
        fields = _mapping(stored)
        baselines = {  # the stored field keeps its name
            str(name): comparison
            for name, versus in _mapping(fields.get("libraries")).items()
            if (comparison := BaselineComparison.from_json(versus, best_us)) is not None
        }
        count = _number(_mapping(fields.get("ties")).get("count"))
        return cls(
            default=BaselineComparison.from_json(fields.get("default"), best_us),
            runner_up=BaselineComparison.from_json(fields.get("runner_up"), best_us),
            baselines=dict(sorted(baselines.items(), key=lambda item: _time_or_ratio(item[1]))),
            tie_count=None if count is None else int(count),
            ties=tuple(_ties(_mapping(fields.get("ties")).get("first"))),
            bound_us=_number(fields.get("bound_us")),
            searched=tuple(name for name in _list(fields.get("searched")) if isinstance(name, str)),
        )

    def stored(self) -> dict[str, Any]:
        """Return the figures as the column `comparison` of a record; `of` is the inverse."""
        rivals = {"default": self.default, "runner_up": self.runner_up}
        columns: dict[str, Any] = {
            name: versus.to_json() for name, versus in rivals.items() if versus is not None
        }
        if self.baselines:
            columns["libraries"] = {name: versus.to_json() for name, versus in self.baselines.items()}
        if self.tie_count is not None:
            columns["ties"] = {"count": self.tie_count, "first": [tied.to_json() for tied in self.ties]}
        if self.bound_us is not None:
            columns["bound_us"] = self.bound_us
        if self.searched:
            columns["searched"] = list(self.searched)
        return columns

    def speedup_over_default(self, *, is_default: bool) -> float | None:
        """Return the speedup over the default of the variant; 1 for the default, None if unknown."""
        if is_default:
            return 1.0
        return None if self.default is None else self.default.ratio

    @property
    def fastest_baseline(self) -> tuple[str, BaselineComparison] | None:
        """Name of the fastest baseline and the comparison with it; None without a baseline."""
        return next(iter(self.baselines.items()), None)


def _ties(stored: object) -> Iterator[TiedConfig]:
    for fields in map(_mapping, _list(stored)):
        variant, config, time_us = fields.get("variant"), fields.get("config"), _number(fields.get("time_us"))
        if isinstance(variant, str) and isinstance(config, Mapping) and time_us is not None:
            yield TiedConfig(variant=variant, config=config, time_us=time_us)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _interval(value: object) -> tuple[float, float] | None:
    bounds = [end for end in map(_number, _list(value)) if end is not None]
    return (bounds[0], bounds[1]) if len(bounds) == 2 else None


def _time_or_ratio(versus: BaselineComparison) -> float:
    return versus.ratio if versus.time_us is None else versus.time_us


def answer_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the sort key of a row of `answer_v1` or its columns: the first row is what `lookup` returns.

    Measured before predicted, current before stale, cold before warm caches, verified before unverified, then
    by time. Of equal times the earlier record is first: a search records its choice before others.

    Args:
        row: Values by name of the column. The SQL of `tunebench.db.schema.answers_in_order` and of a lookup
            orders in the same way.
    """
    unproved = row["verification"] == "not verified"
    order = (row["kind"], bool(row["stale"]), row["cache"] or "", unproved)
    return (*order, row["time_us"], row["measurement_id"])
