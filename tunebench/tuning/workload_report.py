"""Progress of a tuning run, and the report of one workload on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench._console import as_text
from tunebench._deprecation import renamed_fields
from tunebench._figure import duration, significant
from tunebench._notebook import folded_text
from tunebench.db.figures import BaselineComparison
from tunebench.executor import PoolStatus
from tunebench.measure.baseline import Baseline
from tunebench.outcome import CacheState, first_error
from tunebench.search.optimality_proof import OptimalityProof
from tunebench.space import Config
from tunebench.tuning.report_text import html_report, render_reports
from tunebench.tuning.run_options import UnresumedRun
from tunebench.tuning.warm import WarmStartSource

__all__ = [
    "BoundViolation",
    "Failure",
    "FrontPoint",
    "Progress",
    "ProgressCallback",
    "Report",
    "Served",
    "Tie",
]


@renamed_fields({"fleet": "pool"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a tuning run after a trial; passed to the progress callback.

    Attributes:
        phase: ``"search"``, ``"finalists"`` or ``"baselines"``.
        done: Finished trials of the phase.
        total: Trials of the phase.
        outcomes: Number of search trials by outcome class.
        masked: Configurations pruned by their lower bound without a trial.
        cached: Configurations whose outcome was known before.
        best_us: Time of the incumbent, in microseconds; None before the first success.
        bound_us: Lower bound of all configurations, in microseconds; 0 if it rests on assumed rates.
        seconds_left: Expected rest of the phase; None if unknown.
        elsewhere: Records of other devices or workloads that warm-start the search.
        unlikely: Open configurations that the learned pruner postpones.
        device: Key of the device; several devices may be tuned at the same time.
        pool: Workers of the cluster, if one measures.
        waiting: What the run waits for, such as the database; empty while it runs.
        workload: Canonical text of the workload that is being tuned.
        index: Number of that workload, from 1, of workloads that are tuned one after another.
        count: Number of workloads to tune; 0 for a single one.
        trials_done: Finished trials of all workloads of a suite.
        trials_total: Budget of a suite, in trials; 0 if each workload has its own budget.
        model_us: Sum of count times best time over a suite, in microseconds.
        predicted: Workloads of a suite without a time yet; `model_us` contains their predicted time.
        latest: Variant, configuration and outcome of the newest trial; empty before the first one.
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
    elsewhere: int = 0
    unlikely: int = 0
    device: str = ""
    pool: PoolStatus | None = None
    waiting: str = ""
    workload: str = ""
    index: int = 0
    count: int = 0
    trials_done: int = 0
    trials_total: int = 0
    model_us: float = 0.0
    predicted: int = 0
    latest: str = ""


ProgressCallback = Callable[[Progress], None]
"""Is called with the progress after every trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundViolation:
    """A run that was faster than its lower bound: the bound or the time is wrong.

    Attributes:
        variant: Key of the variant, whose bounds no longer prune.
        config: The configuration.
        fastest_us: Its fastest sample, in microseconds.
        bound_us: Its lower bound, in microseconds.
        known: Whether an earlier run recorded it.
    """

    variant: str
    config: Config
    fastest_us: float
    bound_us: float
    known: bool

    def __str__(self) -> str:
        when = ", in an earlier run" if self.known else ""
        return (
            f"{self.variant} with {self.config} took {significant(self.fastest_us)} us, less than its lower "
            f"bound of {significant(self.bound_us)} us{when}; until this is resolved, the bounds of the "
            "variant are ignored"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A configuration whose time is that of the best within noise, or is predicted to be equal.

    Attributes:
        variant: Key of its variant.
        config: The configuration.
        median_us: Its median or predicted time, in microseconds.
    """

    variant: str
    config: Config
    median_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """A configuration that no other one dominates in the objectives of the run.

    Attributes:
        variant: Key of its variant.
        config: The configuration.
        time_us: Its median or predicted time, in microseconds.
        values: Value of each objective by name.
        is_default: Whether it is the default of its variant.
    """

    variant: str
    config: Config
    time_us: float
    values: Mapping[str, float]
    is_default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The answer that a lookup returns if it is not the best of this search, such as an earlier result.

    Attributes:
        variant: Key of its variant.
        config: The configuration.
        time_us: Its time, in microseconds.
        how: ``"measured"`` or ``"predicted"``.
        cache: Cache state of the measurement; None for a prediction.
    """

    variant: str
    config: Config
    time_us: float
    how: str
    cache: CacheState | None

    def __str__(self) -> str:
        caches = f", {self.cache} caches" if self.cache is not None else ""
        return f"{self.variant} {self.config}: {duration(self.time_us)} ({self.how}{caches})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Configurations that failed in the same way.

    Attributes:
        kind: Outcome class, such as ``"compile_failed"``.
        reason: Reason of the first of them.
        count: Number of configurations.
        variant: Variant of the first of them.
        config: The first of them.
    """

    kind: str
    reason: str
    count: int
    variant: str
    config: Config

    def __str__(self) -> str:
        return f"{self.count} {self.kind}: {first_error(self.reason)}"


@renamed_fields({"fleet": "pool"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of tuning one workload on one device.

    Attributes:
        workload: Canonical text of the workload.
        device: Key of the device.
        how: ``"measured"`` or ``"predicted"``; None if no configuration succeeded.
        variant: Key of the best variant.
        config: Its best configuration: the default, unless another is faster beyond noise.
        median_us: Measured or predicted time of `config`, in microseconds; as all figures of the best and its
            rivals, that of the database (see `tunebench.db.figures`).
        ci_us: 95 % confidence interval of a measured median.
        is_default: Whether `config` is the default of its variant.
        default_us: Time of the default configuration of the same variant, if it succeeded.
        default_failure: Why that default failed: the best is then compared with no default.
        baselines: Times of the baselines in the rounds of the best, fastest first; with samples if this run
            timed them.
        bound_us: Lower bound of all configurations of all variants, in microseconds; 0 after a violation.
        gap: `median_us` over the lowest open bound (see `optimality_proof`), 1 if proved optimal; None if an
            open configuration has no bound, or if the rates of the device are assumed. Of a prediction, and
            at measured rates, the time over `bound_us`.
        optimality_proof: What is proved of the best among the searched configurations; None of a prediction.
        assumed: Whether the optimality proof rests on assumed device rates.
        outside: Variants of the operator that were not searched; the optimality proof excludes them.
        versus: Comparison of the best with the `default`, the `runner_up` and the `baseline`, as far as they
            were timed in the same rounds.
        versus_baselines: Comparison of the best with each baseline, by name, in their common rounds.
        ties: Configurations that are as fast as the best within noise, or predicted to be as fast, fastest
            first; at most `tunebench.db.figures.MOST_TIES`.
        tie_count: Number of all of them.
        violations: Runs that were faster than their bounds.
        audited: Bound-pruned configurations that were run as a check.
        trials: Number of trials by outcome class.
        failures: Configurations that failed, now or before, grouped by reason, the largest group first.
        masked: Configurations pruned by their lower bound without a trial.
        cached: Configurations whose outcome was known before.
        seconds: Wall time, and its parts: compile, verify, measure (summed over workers) and overhead.
        finals_s: Part of the wall time after the search, in which finalists and baselines were timed.
        database: Location of the records.
        interrupted: Whether the run stopped before its budget was spent.
        skipped: Variants that were not tried and baselines that were not timed, each with the reason; key
            `baselines` if all of them failed.
        warm: Records of other devices and related workloads that warm-started the search.
        unlikely: Open configurations that the learned pruner postponed; nothing is proved of them.
        unlikely_winners: Expected number of them that are faster than the best.
        interval_us: 90 % prediction interval, where `median_us` is predicted.
        pool: Workers of the cluster, if one measured.
        stopped: Why the run ended early, if not by the user.
        noise: What made the times of the finals unreliable: load, drift, disagreement with the search.
        unresumed: Interrupted runs of the workload with other options, which stay as they are.
        measured_rates: Measured rates of a processor, on which `bound_us` and `gap` rest; else None.
        is_earlier: Whether an earlier run measured the best.
        served: What a lookup returns instead of the best of this search; None if it returns the best, or if
            the time is not the objective.
        metrics: Time, errors, observed values and metrics of the best, by name.
        objectives: Objectives of the run; empty if it minimised the time. `config` is then the best of the
            first one.
        require: What the best had to satisfy.
        front: The Pareto front of the objectives, the best of the first one first; one configuration for one
            objective, empty without objectives and requirements.
    """

    workload: str
    device: str
    how: str | None
    variant: str | None
    config: Config | None
    median_us: float | None
    ci_us: tuple[float, float] | None
    is_default: bool
    default_us: float | None
    baselines: tuple[Baseline, ...]
    bound_us: float
    gap: float | None
    optimality_proof: OptimalityProof | None
    assumed: bool
    outside: tuple[str, ...]
    versus: Mapping[str, BaselineComparison]
    ties: tuple[Tie, ...]
    violations: tuple[BoundViolation, ...]
    audited: int
    trials: Mapping[str, int]
    masked: int
    cached: int
    seconds: Mapping[str, float]
    database: str
    interrupted: bool
    skipped: Mapping[str, str]
    warm: tuple[WarmStartSource, ...] = ()
    unlikely: int = 0
    unlikely_winners: float = 0.0
    interval_us: tuple[float, float] | None = None
    pool: PoolStatus | None = None
    stopped: str | None = None
    failures: tuple[Failure, ...] = ()
    versus_baselines: Mapping[str, BaselineComparison] = dataclasses.field(default_factory=dict)
    default_failure: str | None = None
    noise: tuple[str, ...] = ()
    unresumed: tuple[UnresumedRun, ...] = ()
    measured_rates: str | None = None
    tie_count: int = 0
    is_earlier: bool = False
    served: Served | None = None
    finals_s: float = 0.0
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    objectives: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    front: tuple[FrontPoint, ...] = ()

    def __str__(self) -> str:
        """Return the report as `tunebench tune` prints it."""
        return as_text(lambda to: render_reports([self], to))

    def _repr_html_(self) -> str:
        """Return the report for notebooks."""
        return html_report(self) + folded_text("report", str(self))

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with the fastest baseline as `baseline` and `baseline_us`."""
        data = dataclasses.asdict(self)
        data["config"] = dict(self.config) if self.config is not None else None
        for name in ("ties", "violations", "failures", "front"):
            data[name] = [{**entry, "config": dict(entry["config"])} for entry in data[name]]
        data["optimality_proof"] = (
            self.optimality_proof.to_json() if self.optimality_proof is not None else None
        )
        if self.assumed and data["optimality_proof"] is not None:
            data["optimality_proof"]["gap"] = None
        for name in ("versus", "versus_baselines"):
            data[name] = {rival: comparison.to_json() for rival, comparison in getattr(self, name).items()}
        for baseline in data["baselines"]:
            del baseline["samples_us"]
        if self.served is not None:
            data["served"]["config"] = dict(self.served.config)
        fastest = self.baselines[0] if self.baselines else None
        data["baseline"] = fastest.name if fastest else None
        data["baseline_us"] = fastest.median_us if fastest else None
        data["fleet"] = data["pool"]  # the old name of this field, kept for one version
        return data
