"""What a run tells: its progress while it goes on, its report at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench.measure.baseline import Baseline
from tunebench.space import Config

__all__ = ["Progress", "Report", "Watcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands; given to the watcher after every trial.

    Attributes:
        phase: ``"search"``, ``"finalists"`` or ``"baselines"``.
        done: Trials of this phase that are done.
        total: Trials of this phase.
        outcomes: How many trials of the search ended in each class.
        masked: Configurations that no run could make the best.
        cached: Configurations whose outcome was known already.
        best_us: Best time so far, if any.
        bound_us: No configuration can be faster.
        seconds_left: Expected rest of the phase, if there is a basis for it.
    """

    phase: str
    done: int
    total: int
    outcomes: Mapping[str, int]
    masked: int
    cached: int
    best_us: float | None
    bound_us: float
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run found.

    Attributes:
        workload: Canonical text of the problem.
        device: Key of the device.
        how: ``"measured"`` or ``"predicted"``; None if no configuration succeeded.
        variant: Key of the best variant.
        config: Its best configuration.
        median_us: Time of that, measured or predicted.
        ci_us: 95 % confidence interval of a measured median.
        default_us: Time of the same variant's default configuration, if it succeeded.
        baselines: What libraries take, fastest first.
        bound_us: No configuration of any variant can be faster.
        gap: `median_us / bound_us`; 1 would be proved optimal.
        assumed: Whether the bound rests on an assumed clock.
        trials: How many trials ended in each outcome class.
        masked: Configurations that no run could make the best.
        cached: Configurations whose outcome was known already.
        seconds: Wall time, and its parts: compile, verify, measure (summed over workers) and overhead.
        database: Where the records are.
        interrupted: Whether the run was stopped before its budget was spent.
        skipped: Variants that were not tried, each with the reason.
    """

    workload: str
    device: str
    how: str | None
    variant: str | None
    config: Config | None
    median_us: float | None
    ci_us: tuple[float, float] | None
    default_us: float | None
    baselines: tuple[Baseline, ...]
    bound_us: float
    gap: float | None
    assumed: bool
    trials: Mapping[str, int]
    masked: int
    cached: int
    seconds: Mapping[str, float]
    database: str
    interrupted: bool
    skipped: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with the fastest baseline under `baseline` and `baseline_us`."""
        data = dataclasses.asdict(self)
        data["config"] = dict(self.config) if self.config is not None else None
        fastest = self.baselines[0] if self.baselines else None
        data["baseline"] = fastest.name if fastest else None
        data["baseline_us"] = fastest.median_us if fastest else None
        return data


Watcher = Callable[[Progress], None]
"""Is told where a run stands after every trial."""
