"""One run of `tune`: its searches, its workers, its records and its books."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import wait

import numpy as np

from tunebench import __version__
from tunebench._environment import cache_folder
from tunebench.compile import worker as compile_worker
from tunebench.db.owner import new_owner
from tunebench.db.record import Purpose, RunStart, RunSummary, TrialKey
from tunebench.db.store import Store
from tunebench.kernels import load_file, loaded_files
from tunebench.measure import worker as measure_worker
from tunebench.measure.baseline import Baseline, measure_baselines
from tunebench.outcome import Effort, Measured, Outcome, Predicted, Result, time_us
from tunebench.search.executor import Executor
from tunebench.search.executor.local import LocalExecutor, Stage, call_once
from tunebench.search.loop import Budget, Proposal, VariantSearch, run
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning.candidate import Candidate, Target
from tunebench.tuning.finalist import ROUNDS, Timed, choose
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report, Watcher
from tunebench.workload import Workload

__all__ = ["Session"]

COMPILE_TIMEOUT_S = 300.0
BASELINE_TIMEOUT_S = 180.0


class Session:
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
        self.timed: list[Timed] = []
        self.cached = 0
        self.again: set[tuple[str, Config]] = set()
        self.interrupted = False
        self.busy_s = 0.0
        self.candidates = {candidate.variant.key: candidate for candidate in found}
        self.searches = [self._search_of(candidate) for candidate in found]
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
            variant.key, candidate.prospects(), sampler=self.plan.sampler, seed=self.plan.seed
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

    def executor(self) -> Executor[Task]:
        """Start the worker processes."""
        files = loaded_files()
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

    def search(self, executor: Executor[Task]) -> None:
        """Run the loop; Ctrl-C ends it and keeps everything."""
        under_way: set[TrialKey] = set()

        def claim(proposal: Proposal) -> bool:
            key = self._key(proposal.search, proposal.config)
            again = (proposal.search.key, proposal.config) in self.again
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
            variant=self.candidates[search.key].variant,
            workload=self.problem,
            config=config,
            device=self.target.device,
            seed=self.plan.seed + self.budget.done,
            predicted_us=self.candidates[search.key].predicted_us(row),
            thorough=thorough,
        )

    def _key(self, search: VariantSearch, config: Config) -> TrialKey:
        return TrialKey(
            device=self.target.device.key,
            workload=str(self.problem),
            variant=search.key,
            revision=self.candidates[search.key].variant.revision(self.problem, config),
            config=config,
        )

    def _keep(self, search: VariantSearch, config: Config, outcome: Outcome) -> None:
        value = time_us(outcome)
        if value is not None:
            self.timed.append(Timed(search, config, value))

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

    def time_finalists(self, executor: Executor[Task]) -> None:
        """Time the best and the default again, in turn, with more samples: a lucky sample wins no more."""
        finalists = self._finalists()
        total = ROUNDS * len(finalists)
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

    def _finalists(self) -> list[Timed]:
        best = min(self.timed, key=lambda timed: timed.search_us, default=None)
        default = self._default_of(best.search) if best is not None else None
        return choose(self.timed, self.plan.finalists, default)

    def _default_of(self, search: VariantSearch) -> Timed | None:
        config = self.candidates[search.key].variant.default(self.problem, self.target.device)
        return next((t for t in self.timed if t.search is search and t.config == config), None)

    def _time_again(self, executor: Executor[Task], timed: Timed) -> None:
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
        stage = Stage(
            function=measure_baselines,
            start=_load,
            start_arguments=loaded_files(),
            timeout_s=BASELINE_TIMEOUT_S,
        )
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
            variant=best.search.key if best else None,
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


def _load(*files: str) -> None:
    """Start a worker that needs users' operators and nothing else."""
    for path in files:
        load_file(path)
