"""The state of one tuning run: what `prepare` reads and opens, and what changes until `finish`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tunebench.db.retry import RetryPolicy
from tunebench.db.store import Store
from tunebench.executor import PoolStatus
from tunebench.objective import Goal
from tunebench.search.loop import Budget
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config
from tunebench.tuning.audit import BoundAudit
from tunebench.tuning.finalist import TimedConfig
from tunebench.tuning.finalist_rounds import FinalistRounds
from tunebench.tuning.plan import Plan
from tunebench.tuning.run_recorder import RunRecorder
from tunebench.tuning.tunable import TunableVariant, TuningTarget
from tunebench.tuning.warm import WarmStart, WarmStartSource
from tunebench.tuning.workload_report import Failure, Progress, ProgressCallback
from tunebench.workload import Workload

__all__ = ["RunContext", "RunState", "TuningSetup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSetup:
    """Shared state of all runs of one call: the device, the plan, the database, and who shares the budget."""

    target: TuningTarget
    plan: Plan
    store: Store
    shared_budget: str = ""

    @property
    def predicts(self) -> bool:
        """Whether times are predicted because the device is absent."""
        return self.target.runner == "offline"


@dataclass(slots=True, kw_only=True)
class RunState:
    """The part of a run that changes.

    Attributes:
        outcomes: Number of search trials by outcome class.
        failed_defaults: Why the default of a variant failed, by key of the variant.
        default_repeats: Number of repetitions of the default of a variant, by key of the variant.
        failures: Configurations that failed, by outcome class and error, whose numbers may differ.
        timed: Configurations that succeeded.
        repeatable: Variant and configuration of known trials that may run again without a new claim.
        cached: Number of configurations whose outcome was known before.
        finals: The finalist rounds, once they began.
        interrupted: Whether the run was stopped.
        stopped: Why it was stopped, if not by the user.
        cut_short: Whether the time limit ended the search.
        busy_s: Time in which the executor compiled or measured, in seconds.
        finals_s: Wall time of the finalist rounds, in seconds.
        pool: Workers of the cluster, if one measures.
        waiting: What the run waits for; empty while it runs.
        phase: Name, finished trials and total trials of the current phase.
        latest: Variant, configuration and outcome of the trial that finished last.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    failed_defaults: dict[str, str] = field(default_factory=dict)
    default_repeats: Counter[str] = field(default_factory=Counter)
    failures: dict[tuple[str, str], Failure] = field(default_factory=dict)
    timed: list[TimedConfig] = field(default_factory=list)
    repeatable: set[tuple[str, Config]] = field(default_factory=set)
    cached: int = 0
    finals: FinalistRounds | None = None
    interrupted: bool = False
    stopped: str | None = None
    cut_short: bool = False
    busy_s: float = 0.0
    finals_s: float = 0.0
    pool: PoolStatus | None = None
    waiting: str = ""
    phase: tuple[str, int, int]
    latest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything a run needs; made by `prepare`.

    Attributes:
        setup: Device, plan and database.
        workload: The workload.
        variants: The variants to try, by key.
        skipped: Why other variants are not tried, by key.
        defaults: The default configuration of each variant, by key.
        searches: One search per variant.
        warm: The warm starts, by key of the variant.
        bound_us: Lower bound of all configurations before compiling, in microseconds; at measured rates if
            those of the device are assumed and others are measured.
        budget: The budget of trials.
        recorder: Writes to the database.
        audit: Compares runs with their bounds.
        retry_policy: Retry policy of transient database errors.
        on_progress: Called after every trial.
        state: The part that changes.
        goal: The metrics, objectives and requirements of the plan.
    """

    setup: TuningSetup
    workload: Workload
    variants: Mapping[str, TunableVariant]
    skipped: Mapping[str, str]
    defaults: Mapping[str, Config]
    searches: list[VariantSearch]
    warm: dict[str, WarmStart]
    bound_us: float
    budget: Budget
    recorder: RunRecorder
    audit: BoundAudit
    retry_policy: RetryPolicy
    on_progress: ProgressCallback
    state: RunState
    goal: Goal

    @property
    def best_us(self) -> float:
        """Time of the incumbent, in microseconds; infinite before the first success."""
        return min((search.best_us for search in self.searches), default=float("inf"))

    def best_us_of(self, variant: str) -> float:
        """Return the best time of a variant, in microseconds; infinite before its first success."""
        return min(
            (search.best_us for search in self.searches if search.key == variant), default=float("inf")
        )

    @property
    def gap_is_meaningful(self) -> bool:
        """Whether the best time over `bound_us` says something: the rates of the device are not assumed."""
        return all(tunable.gap_bounds is not None for tunable in self.variants.values())

    @property
    def sources(self) -> tuple[WarmStartSource, ...]:
        """The records that warm-start the search."""
        return tuple(source for start in self.warm.values() for source in start.sources)

    def revision(self, variant: str, config: Config) -> str:
        """Return the current revision of a configuration.

        Raises:
            ConfigError: if the configuration is not in the current space.
        """
        self.variants[variant].table.space.ordinals(config)
        return self.recorder.revision(variant, config)

    def report_progress(self, phase: str, done: int, total: int) -> None:
        """Call the progress callback."""
        state = self.state
        state.phase = (phase, done, total)
        tried = sum(state.outcomes.values())
        rate = self.recorder.elapsed_s / tried if tried else None
        self.on_progress(
            Progress(
                phase=phase,
                done=done,
                total=total,
                outcomes=dict(state.outcomes),
                masked=sum(search.masked for search in self.searches),
                cached=state.cached,
                best_us=min((timed.median()[0] for timed in state.timed), default=None),
                bound_us=self.bound_us if self.gap_is_meaningful else 0.0,
                seconds_left=rate * (total - done) if rate is not None and phase == "search" else None,
                elsewhere=sum(source.records for source in self.sources),
                unlikely=sum(search.postponed.count for search in self.searches),
                waiting=state.waiting,
                device=self.setup.target.device.key,
                pool=state.pool,
                workload=str(self.workload),
                latest=state.latest if phase == "search" else "",
            )
        )

    def report_waiting(self, line: str) -> None:
        """Call the progress callback with the reason for which the run waits."""
        self.state.waiting = line
        self.report_progress(*self.state.phase)
