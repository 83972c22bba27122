"""`tune`: the one function that wires the stages together.

workload → variants and their spaces → bound → search → compile → verify → time → record → finalists → report
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tunebench import __version__
from tunebench import candidate as candidates
from tunebench._environment import cache_folder
from tunebench.candidate import Candidate, Target
from tunebench.compile import worker as compile_worker
from tunebench.db.owner import new_owner
from tunebench.db.record import Purpose, RunStart, RunSummary, TrialKey
from tunebench.db.store import Store, open_store
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.kernels import load_file, loaded_files
from tunebench.measure import worker as measure_worker
from tunebench.measure.baseline import Baseline, measure_baselines
from tunebench.measure.timing import Protocol, median_interval
from tunebench.outcome import Effort, Measured, Outcome, Predicted, Result, time_us
from tunebench.search.executor import Executor
from tunebench.search.executor.local import LocalExecutor, Stage, call_once
from tunebench.search.loop import SAMPLERS, Budget, Proposal, VariantSearch, run
from tunebench.space import Config
from tunebench.task import Task
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["Plan", "Progress", "Report", "tune"]

COMPILE_TIMEOUT_S = 300.0
BASELINE_TIMEOUT_S = 180.0
FINALIST_ROUNDS = 2
"""Finalists are timed in turn so many times, so that a drift of the machine meets all alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to tune.

    Attributes:
        trials: Distinct configurations that may be launched or fail; known and masked ones are free.
        sampler: A name of `tunebench.search.loop.SAMPLERS`.
        seed: Seed of all that is random: the search, the inputs.
        variants: Names or keys of the variants to try; all that can, if empty.
        variant_files: Users' files with a variant each; these alone are tried, unless `variants` names more.
        protocol: How samples are taken.
        offline: Whether to compile, emulate and predict only, even if the device is here.
        workers: Processes that compile; 0 is one for each core.
        timeout_s: Longest that verifying and timing one configuration may take.
        finalists: How many of the best are timed again at the end, beside the default.
        baselines: Whether to time libraries at the end.
    """

    trials: int = 50
    sampler: str = "bound"
    seed: int = 0
    variants: tuple[str, ...] = ()
    variant_files: tuple[str, ...] = ()
    protocol: Protocol = field(default_factory=Protocol)
    offline: bool = False
    workers: int = 0
    timeout_s: float = 60.0
    finalists: int = 3
    baselines: bool = True

    def __post_init__(self) -> None:
        if self.trials < 1 or self.timeout_s <= 0 or self.workers < 0 or self.finalists < 1:
            raise InputError("trials and finalists must be 1 or more, timeout positive, workers 0 or more")
        if self.sampler not in SAMPLERS:
            raise UnknownName("sampler", self.sampler, SAMPLERS)


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


def tune(
    workload: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: Watcher | None = None,
) -> Report:
    """Find the fastest configuration for a problem on a device, prove it right, remember it.

    What is recorded stays recorded: the same call takes up an interrupted run where it stopped. Ctrl-C ends
    the run early and returns the report of what was found.

    Args:
        workload: The problem, or its text.
        device: A device or its name (see `tunebench.device.find`); one that is not here is tuned offline.
        db: A path or URL; None is the user's database.
        plan: How to tune.
        watcher: Is told of the progress.

    Raises:
        InputError: if the problem, the plan or the device cannot be used, or no variant can do the problem.
        DatabaseError: if the database cannot be used; what was recorded before is kept.
        MissingDependency: if a GPU is here and what drives it is not installed.
    """
    plan = plan or Plan()
    extra = tuple(load_file(path).key for path in plan.variant_files)
    problem = parse(workload) if isinstance(workload, str) else workload
    target = candidates.target(device, offline=plan.offline)
    names = (*plan.variants, *extra) if plan.variants or extra else ()
    found, skipped = candidates.find(problem, target.device, names, cache=plan.protocol.cache)
    with open_store(db) as store:
        session = _Session(problem, target, plan, store, found, watcher or (lambda progress: None))
        with session.executor(loaded_files()) as executor:
            session.search(executor)
            if not session.interrupted and target.runner != "offline":
                session.time_finalists(executor)
        baselines = session.time_baselines()
        return session.report(baselines, skipped)


@dataclass(slots=True)
class _Timed:
    """A configuration that succeeded in the search, with the results of the finalist rounds."""

    search: VariantSearch
    config: Config
    search_us: float
    again: list[Result] = field(default_factory=list)

    @property
    def row(self) -> int:
        row = self.search.table.row(self.config)
        assert row is not None, self.config
        return row

    @property
    def bound_us(self) -> float:
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


class _Session:
    """One run of `tune`: its searches, its records and its books."""

    def __init__(
        self,
        problem: Workload,
        target: Target,
        plan: Plan,
        store: Store,
        found: list[Candidate],
        watcher: Watcher,
    ) -> None:
        self.problem, self.target, self.plan, self.store, self.watcher = problem, target, plan, store, watcher
        self.started = time.perf_counter()
        self.owner = new_owner()
        self.outcomes: Counter[str] = Counter()
        self.efforts: list[Effort] = []
        self.timed: list[_Timed] = []
        self.cached = 0
        self.again: set[tuple[str, Config]] = set()
        self.interrupted = False
        self.busy_s = 0.0
        self.searches = [self._search_of(candidate) for candidate in found]
        self.candidates = {candidate.variant.key: candidate for candidate in found}
        self.bound_us = min(float(candidate.bounds.us.min()) for candidate in found)
        done = store.interrupted_trials(target.device.key, str(problem), sampler=plan.sampler, seed=plan.seed)
        self.budget = Budget(trials=plan.trials, done=min(done, plan.trials))
        self.run_id = store.begin_run(
            RunStart(
                device=target.device,
                workload=str(problem),
                sampler=plan.sampler,
                seed=plan.seed,
                host=self.owner,
                versions={"tunebench": __version__, "python": platform.python_version()},
            )
        )

    # -- before the search ------------------------------------------------------------------------

    def _search_of(self, candidate: Candidate) -> VariantSearch:
        variant = candidate.variant
        search = VariantSearch(
            variant, candidate.table, candidate.bounds.us, sampler=self.plan.sampler, seed=self.plan.seed
        )

        @functools.cache
        def revision(config: Config) -> str:
            search.table.space.ordinals(config)  # refuses what an older version of the space allowed
            return variant.revision(self.problem, config)

        place = (self.target.device.key, str(self.problem), variant.key)
        self.store.recheck(*place, revision)
        for known in self.store.known(*place, cache=self.plan.protocol.cache):
            if search.table.row(known.config) is None or revision(known.config) != known.revision:
                continue
            if not self._stands(known.outcome):
                self.again.add((variant.key, known.config))
                continue
            search.remember(known.config, known.outcome)
            self.cached += 1
            self._keep(search, known.config, known.outcome)
        search.first(variant.default(self.problem, self.target.device))
        return search

    def _stands(self, outcome: Outcome) -> bool:
        """Tell whether a known outcome answers what this run asks; one of another cache state does not."""
        if isinstance(outcome, Predicted):
            return self.target.runner == "offline"
        return not isinstance(outcome, Measured) or outcome.cache == self.plan.protocol.cache

    def executor(self, files: tuple[str, ...]) -> Executor:
        """Start the worker processes."""
        setup = measure_worker.Setup(
            runner=self.target.runner,
            device=self.target.device,
            protocol=self.plan.protocol,
            variant_files=files,
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        offline = self.target.runner == "offline"
        return LocalExecutor(
            compiling=Stage(
                function=compile_worker.compile_task,
                start=compile_worker.start,
                start_arguments=(cache_folder() / "binaries", files),
                workers=self.plan.workers or cores,
                timeout_s=COMPILE_TIMEOUT_S,
            ),
            measuring=Stage(
                function=measure_worker.measure,
                start=measure_worker.start,
                start_arguments=(setup,),
                workers=cores if offline else 1,
                timeout_s=self.plan.timeout_s,
            ),
            overlap=self.target.runner != "cpu",
        )

    # -- the search -------------------------------------------------------------------------------

    def search(self, executor: Executor) -> None:
        """Run the loop; Ctrl-C ends it and keeps everything."""
        under_way: set[TrialKey] = set()

        def claim(proposal: Proposal) -> bool:
            key = self._key(proposal.search, proposal.config)
            again = (proposal.search.variant.key, proposal.config) in self.again
            if again or self.store.claim(key, self.owner):
                under_way.add(key)
                return True
            return False

        def on_result(proposal: Proposal, result: Result) -> None:
            key = self._key(proposal.search, proposal.config)
            self._record(key, result, "search", proposal.bound_us)
            under_way.discard(key)
            self.outcomes[result.outcome.kind] += 1
            self._keep(proposal.search, proposal.config, result.outcome)
            self._tell_watcher("search", self.budget.done, self.budget.trials)

        self._tell_watcher("search", self.budget.done, self.budget.trials)
        try:
            run(
                self.searches,
                executor,
                self.budget,
                make_task=lambda proposal: self._task(proposal.search, proposal.config, proposal.row),
                claim=claim,
                on_result=on_result,
            )
        except KeyboardInterrupt:
            self.interrupted = True
            executor.close()
        finally:
            for key in under_way:
                self.store.release(key, self.owner)
            self.busy_s = executor.busy_s

    def _task(self, search: VariantSearch, config: Config, row: int, *, thorough: bool = False) -> Task:
        return Task(
            variant=search.variant,
            workload=self.problem,
            config=config,
            device=self.target.device,
            seed=self.plan.seed + self.budget.done,
            predicted_us=self.candidates[search.variant.key].predicted_us(row),
            thorough=thorough,
        )

    def _key(self, search: VariantSearch, config: Config) -> TrialKey:
        return TrialKey(
            device=self.target.device.key,
            workload=str(self.problem),
            variant=search.variant.key,
            revision=search.variant.revision(self.problem, config),
            config=config,
        )

    def _keep(self, search: VariantSearch, config: Config, outcome: Outcome) -> None:
        value = time_us(outcome)
        if value is not None:
            self.timed.append(_Timed(search, config, value))

    def _record(self, key: TrialKey, result: Result, purpose: Purpose, bound_us: float) -> None:
        self.efforts.append(result.effort)
        self.store.record(
            key, result, purpose=purpose, bound_us=bound_us, run_id=self.run_id, seed=self.plan.seed
        )

    def _tell_watcher(self, phase: str, done: int, total: int) -> None:
        tried = sum(self.outcomes.values())
        rate = (time.perf_counter() - self.started) / tried if tried else None
        best = min((timed.median()[0] for timed in self.timed), default=None)
        self.watcher(
            Progress(
                phase=phase,
                done=done,
                total=total,
                outcomes=dict(self.outcomes),
                masked=sum(search.masked for search in self.searches),
                cached=self.cached,
                best_us=best,
                bound_us=self.bound_us,
                seconds_left=rate * (total - done) if rate is not None and phase == "search" else None,
            )
        )

    # -- after the search -------------------------------------------------------------------------

    def time_finalists(self, executor: Executor) -> None:
        """Time the best and the default again, in turn, with more samples: a lucky sample wins no more."""
        finalists = self._finalists()
        total = FINALIST_ROUNDS * len(finalists)
        try:
            for turn in range(total):
                self._tell_watcher("finalists", turn, total)
                self._time_again(executor, finalists[turn % len(finalists)])
        except KeyboardInterrupt:
            self.interrupted = True
            executor.close()
        for timed in finalists:
            if timed.again:
                result = timed.pooled()
                self._record(self._key(timed.search, timed.config), result, "finalist", timed.bound_us)
        self.busy_s = executor.busy_s

    def _finalists(self) -> list[_Timed]:
        best = sorted(self.timed, key=lambda timed: timed.search_us)[: self.plan.finalists]
        if best:
            default = self._default_of(best[0].search)
            if default is not None and default not in best:
                best.append(default)
        return best

    def _default_of(self, search: VariantSearch) -> _Timed | None:
        config = search.variant.default(self.problem, self.target.device)
        return next((t for t in self.timed if t.search is search and t.config == config), None)

    def _time_again(self, executor: Executor, timed: _Timed) -> None:
        future = executor.submit(self._task(timed.search, timed.config, timed.row, thorough=True))
        wait([future])
        result = future.result()
        if isinstance(result.outcome, Measured):
            timed.again.append(result)

    def time_baselines(self) -> tuple[Baseline, ...]:
        """Time the libraries; none if they crash, hang, or the run was interrupted."""
        if self.interrupted or self.target.runner == "offline" or not self.plan.baselines:
            return ()
        self._tell_watcher("baselines", 0, 1)
        stage = Stage(function=measure_baselines, start=_ready, timeout_s=BASELINE_TIMEOUT_S)
        arguments = (self.problem, self.target.device, self.plan.protocol, self.plan.seed)
        try:
            answer = call_once(stage, *arguments)
        except KeyboardInterrupt:
            return ()
        return tuple(answer) if isinstance(answer, list) else ()

    def report(self, baselines: tuple[Baseline, ...], skipped: Mapping[str, str]) -> Report:
        """Close the books."""
        finalists = [timed for timed in self.timed if timed.again] or self.timed
        best = min(finalists, key=lambda timed: timed.median()[0], default=None)
        median_us, ci_us = best.median() if best else (None, None)
        default = self._default_of(best.search) if best else None
        seconds = self._seconds()
        masked = sum(search.masked for search in self.searches)
        if not self.interrupted:
            effort = Effort(**{name: seconds[name] for name in ("compile_s", "verify_s", "measure_s")})
            self.store.finish_run(
                self.run_id,
                RunSummary(
                    masked=masked,
                    cached=self.cached,
                    wall_s=seconds["wall_s"],
                    effort=effort,
                    overhead_s=seconds["overhead_s"],
                ),
            )
        how = "predicted" if self.target.runner == "offline" else "measured"
        return Report(
            workload=str(self.problem),
            device=self.target.device.key,
            how=how if best else None,
            variant=best.search.variant.key if best else None,
            config=best.config if best else None,
            median_us=median_us,
            ci_us=ci_us,
            default_us=default.median()[0] if default else None,
            baselines=baselines,
            bound_us=self.bound_us,
            gap=median_us / self.bound_us if median_us is not None and self.bound_us > 0 else None,
            assumed=self.target.device.assumed,
            trials=dict(self.outcomes),
            masked=masked,
            cached=self.cached,
            seconds=seconds,
            database=str(self.store.location),
            interrupted=self.interrupted,
            skipped=skipped,
        )

    def _seconds(self) -> dict[str, float]:
        wall_s = time.perf_counter() - self.started
        parts = {
            name: float(np.sum([getattr(effort, name) for effort in self.efforts]))
            for name in ("compile_s", "verify_s", "measure_s")
        }
        return {"wall_s": wall_s, **parts, "overhead_s": max(0.0, wall_s - self.busy_s)}


def _ready() -> None:
    """Start a worker that needs no preparation."""
