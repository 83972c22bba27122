"""The tuning plan: everything a caller may choose about how to tune."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tunebench._deprecation import renamed_fields
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.measure.timing import Protocol
from tunebench.objective import Goal, MetricSource
from tunebench.search.registry import ONE_OBJECTIVE, samplers

__all__ = ["TRIALS", "Plan"]

TRIALS = 50
"""Default number of trials of a workload; of a suite, on average per workload."""

_RANGES = {
    "trials": (1, 1_000_000_000),
    "finalists": (1, 1_000_000_000),
    "workers": (0, 4096),
    "seed": (0, 2**32 - 1),
}
"""Least and largest value of the whole numbers, which databases and random generators accept."""

_LONGEST_S = 1e7
"""Longest time limit of a configuration, in seconds."""


@renamed_fields({"calibrated": "learned_pruner"})
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to tune.

    Attributes:
        trials: Distinct configurations to launch, failures included; known and pruned ones are free. None:
            50, and for a suite 50 per workload.
        sampler: Name of the sampler, one of `tunebench.search.registry.samplers`. Default: `surrogate`; with
            several objectives `tpe`.
        seed: Seed of the search and of the random inputs.
        variants: Names or keys of the variants to try; empty tries all that support the workload.
        variant_files: Python files with one variant each. Only these variants, and those named in `variants`,
            are tried.
        protocol: How samples are taken.
        offline: Whether to compile, emulate and predict only, even if the device is present.
        workers: Number of compile processes; 0 is one per core.
        timeout_s: Time limit of verifying and timing one configuration, in seconds. Drawing inputs and
            computing references do not count.
        stop_at_gap: Optimality gap at which the search stops (`tunebench.search.optimality_proof`); None
            never stops early.
        audit: Fraction of bound-pruned configurations to run anyway, as a check of the bound; relative to the
            trials.
        finalists: Number of fastest configurations to time again at the end, next to the defaults of their
            variants.
        baselines: Whether libraries are searched like variants, and timed as baselines at the end.
        warm: Whether to warm-start from records of other devices and of related workloads. The `random`
            sampler ignores them, except for the learned pruner.
        learned_pruner: Whether to postpone configurations that are unlikely to win while others are open.
        cluster: Address of the Ray cluster to measure on: ``"ray://host:10001"``; ``"host:6379"`` or
            ``"auto"`` from one of its nodes; ``"local"`` to start one here. None uses this machine without
            Ray.
        retry_failed: Whether to try every configuration of the workload that failed again.
        minutes: Time limit of the search, in minutes; finalists are timed after it. None has no limit.
        metrics: Metrics to compute of each measurement and to store, by name: an expression of quantities
            (``"flops/time_us/1e3"``), or a function whose arguments are named as quantities.
        objectives: What to optimise, such as ``"energy_j"`` or ``"GFLOP/s:max"``; several have a Pareto
            front. Empty minimises the time, which alone is pruned by lower bounds, and whose finalists are
            timed again.
        require: What the best must satisfy, such as ``"error<=1e-3"``.
        observers: What observes the measurements of the search: ``"nvml"`` for power, energy and clocks of a
            GPU, or Python files that define `OBSERVER` (`tunebench.measure.observer.Observer`).

    Raises:
        InputError: if a value is out of range.
        UnknownName: if there is no such sampler.
    """

    trials: int | None = None
    sampler: str = ""
    seed: int = 0
    variants: tuple[str, ...] = ()
    variant_files: tuple[str, ...] = ()
    protocol: Protocol = field(default_factory=Protocol)
    offline: bool = False
    workers: int = 0
    timeout_s: float = 60.0
    stop_at_gap: float | None = None
    audit: float = 0.02
    finalists: int = 3
    baselines: bool = True
    warm: bool = True
    learned_pruner: bool = False
    cluster: str | None = None
    retry_failed: bool = False
    minutes: float | None = None
    metrics: Mapping[str, MetricSource] = field(default_factory=dict)
    objectives: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    observers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InputError(f"{name} must be from {least} to {most}; got {quoted(value)}")
        if not 0 < self.timeout_s <= _LONGEST_S:
            raise InputError(
                f"timeout_s must be above 0 and at most {_LONGEST_S:.0e} seconds; got {self.timeout_s}"
            )
        if self.stop_at_gap is not None and not 1 <= self.stop_at_gap < math.inf:
            raise InputError(
                f"stop_at_gap is best time / lowest open bound, 1 or more and finite; got {self.stop_at_gap}"
            )
        if not 0 <= self.audit <= 1:
            raise InputError(f"audit is a fraction of the trials, from 0 to 1; got {self.audit}")
        if self.minutes is not None and not 0 <= self.minutes < math.inf:
            raise InputError(f"minutes must be a finite number, 0 or more; got {self.minutes}")
        self._check_goal()

    @property
    def trial_budget(self) -> int:
        """The number of trials; the default of one workload where none is set."""
        return TRIALS if self.trials is None else self.trials

    def _check_goal(self) -> None:
        """Check the sampler and what only times have; choose the default sampler."""
        goal = self.goal
        several = len(goal.objectives) > 1
        if not self.sampler:
            object.__setattr__(self, "sampler", "tpe" if several else "surrogate")
        if self.sampler not in samplers():
            raise UnknownName("sampler", self.sampler, samplers())
        if several and self.sampler in ONE_OBJECTIVE:
            raise InputError(
                f"sampler {self.sampler} optimises one objective, got {len(goal.objectives)}; for several, "
                "tpe, nsga2 and random do"
            )
        for name in ("stop_at_gap", "learned_pruner"):
            if getattr(self, name) and not goal.is_time:
                raise InputError(f"{name} is about times: it needs the time as the only objective")

    @property
    def goal(self) -> Goal:
        """The objectives and requirements, parsed."""
        return Goal.parse(metrics=self.metrics, objectives=self.objectives, require=self.require)
