"""The database records of one tuning run: each trial under its key, the effort, and how the run ended."""

from __future__ import annotations

import dataclasses
import functools
import platform
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tunebench import __version__
from tunebench.db.owner import end_owner, new_owner
from tunebench.db.record import NewMeasurement, RunStart, RunSummary, TrialKey
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.kernels import file_of
from tunebench.objective import Goal, resource_quantities, workload_quantities
from tunebench.outcome import VARIANT_FILE, Effort, Measured, Result
from tunebench.space import Config
from tunebench.task import revision_of
from tunebench.tuning.plan import Plan
from tunebench.tuning.run_options import UnresumedRun, is_same_search, unresumed
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["RunRecorder"]


class RunRecorder:
    """Writes the records of one tuning run.

    Args:
        store: The database.
        workload: The workload that is tuned.
        device: The device it is tuned on.
        variants: The variants that are tried, by key.
        plan: The tuning plan.
        options: Every option of the run (see `run_options`).

    Attributes:
        unresumed: Interrupted runs of the workload with other options, which this run does not resume.
        revision: Returns the current revision of a configuration, by the key of its variant. The first call
            per configuration takes about a millisecond.
        owner: Claims trials for this run.
    """

    def __init__(
        self,
        store: Store,
        workload: Workload,
        device: Device,
        variants: Mapping[str, Variant[Any]],
        plan: Plan,
        options: Mapping[str, Any],
    ) -> None:
        self.store, self._workload, self._device, self._variants = store, workload, device, variants
        self._plan, self._options, self._goal = plan, options, plan.goal
        self._observed: dict[tuple[str, Config], Mapping[str, float]] = {}
        self.unresumed: tuple[UnresumedRun, ...] = ()
        self._started = time.perf_counter()
        self._paused: float | None = None
        self._efforts: list[Effort] = []
        self._run_id: str | None = None
        self._continued: list[str] = []
        self.revision = functools.cache(self._revision)
        self.owner = new_owner()

    @property
    def run_id(self) -> str | None:
        """Id of the run; None before `begin`."""
        return self._run_id

    @property
    def elapsed_s(self) -> float:
        """Wall time since the run began, without its pauses."""
        return (self._paused or time.perf_counter()) - self._started

    def pause(self) -> None:
        """Stop the clock while another workload of the suite is tuned."""
        self._paused = self._paused or time.perf_counter()

    def resume(self) -> None:
        """Restart the clock."""
        if self._paused is not None:
            # Move the start by the length of the pause.
            self._started += time.perf_counter() - self._paused
            self._paused = None

    def begin(self) -> int:
        """Open the run; returns the trials that the same run finished before it was interrupted."""
        runs = self.store.interrupted_runs(self._device.key, str(self._workload), is_same_search)
        resumed = [
            run for run in runs if run.options is not None and is_same_search(self._options, run.options)
        ]
        # Their trials are a part of this run's budget, because they count in its search.
        charged = sum(run.trials for run in resumed)
        self._continued = [run.id for run in resumed]
        self.unresumed = tuple(unresumed(run, self._options) for run in runs if run not in resumed)
        self._run_id = self.store.begin_run(
            RunStart(
                device=self._device,
                workload=str(self._workload),
                sampler=self._plan.sampler,
                seed=self._plan.seed,
                host=self.owner,
                versions={"tunebench": __version__, "python": platform.python_version()},
                budget_trials=max(0, self._plan.trial_budget - charged),
                options=self._options,
            )
        )
        return charged

    def scope(self, variant: str) -> tuple[str, str, str]:
        """Return device, workload and variant, the columns by which records are found."""
        return (self._device.key, str(self._workload), variant)

    def key(self, variant: str, config: Config) -> TrialKey:
        """Return the key of a trial: its result is valid as long as all of the key is equal."""
        return TrialKey(
            device=self._device.key,
            workload=str(self._workload),
            variant=variant,
            revision=self.revision(variant, config),
            config=config,
        )

    def _revision(self, variant: str, config: Config) -> str:
        return revision_of(self._variants[variant], self._workload, config)

    def record(self, *results: NewMeasurement) -> None:
        """Store results in one transaction: a subset of finalists could rank a slower one first.

        They are durable when this returns.
        """
        self._efforts += [measurement.result.effort for measurement in results]
        measurements = [
            dataclasses.replace(measurement, result=self._finished(measurement), seed=self._plan.seed)
            for measurement in results
        ]
        self.store.record_together(measurements, run_id=self._run_id)

    def completed(self, variant: str, config: Config, result: Result, *, searched: bool = False) -> Result:
        """Return a result with the metrics of the plan.

        Observers watch the search: a finalist has the values that they observed there.

        Args:
            variant: `Variant.key`.
            config: The configuration.
            result: Its result.
            searched: Whether it comes from the search of this run, as its observers left it.
        """
        outcome, trial = result.outcome, (variant, config)
        if isinstance(outcome, Measured):
            if searched and outcome.metrics:
                self._observed[trial] = outcome.metrics
            elif trial in self._observed:
                metrics = {**self._observed[trial], **outcome.metrics}
                outcome = dataclasses.replace(outcome, metrics=metrics)
        if self._goal != Goal():
            used = resource_quantities(config, result.resources)
            outcome = self._goal.completed(outcome, workload_quantities(self._workload) | used)
        return result if outcome is result.outcome else dataclasses.replace(result, outcome=outcome)

    def _finished(self, measurement: NewMeasurement) -> Result:
        """Return a result with its metrics; a time of a user's variant names its file, for lookups."""
        key = measurement.key
        return self._with_file(key.variant, self.completed(key.variant, key.config, measurement.result))

    def _with_file(self, variant: str, result: Result) -> Result:
        outcome, file = result.outcome, file_of(self._variants[variant])
        if file is None or not isinstance(outcome, Measured):
            return result
        conditions = {**outcome.conditions, VARIANT_FILE: file}
        return dataclasses.replace(result, outcome=dataclasses.replace(outcome, conditions=conditions))

    def seconds(self, busy_s: float) -> dict[str, float]:
        """Return the wall time and its parts, in seconds.

        Args:
            busy_s: Time in which the executor compiled or measured; the rest is overhead.
        """
        wall_s = self.elapsed_s
        parts = {
            name: float(np.sum([getattr(effort, name) for effort in self._efforts]))
            for name in ("compile_s", "verify_s", "measure_s")
        }
        return {"wall_s": wall_s, **parts, "overhead_s": max(0.0, wall_s - busy_s)}

    def leave(self) -> None:
        """End the run without closing it: it was interrupted, and the same call resumes it."""
        end_owner(self.owner)

    def finish(self, masked: int, cached: int, seconds: Mapping[str, float]) -> None:
        """Close the run as finished."""
        assert self._run_id is not None
        effort = Effort(**{name: seconds[name] for name in ("compile_s", "verify_s", "measure_s")})
        self.store.finish_run(
            self._run_id,
            RunSummary(
                masked=masked,
                cached=cached,
                wall_s=seconds["wall_s"],
                effort=effort,
                overhead_s=seconds["overhead_s"],
            ),
            continued=self._continued,
        )
