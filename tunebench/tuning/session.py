"""One run of `tune`: what is known before, the search, the finals, and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

import numpy as np

from tunebench.db.record import Purpose, TrialKey, Verdict
from tunebench.db.retry import RetryPolicy
from tunebench.db.store import Store
from tunebench.errors import ClusterLost, DatabaseError
from tunebench.executor import Executor, Fleet, Stopped
from tunebench.kernels import variants
from tunebench.outcome import Aborted, Measured, Outcome, Predicted, Pruned, Result, time_us
from tunebench.search.loop import Budget, optimality_proof, run
from tunebench.search.optimality_proof import OptimalityProof
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning import library
from tunebench.tuning.audit import Audit
from tunebench.tuning.candidate import Candidate, Target
from tunebench.tuning.finalist import ROUNDS, Timed, choose, settle
from tunebench.tuning.finals import Finals
from tunebench.tuning.library import Libraries
from tunebench.tuning.logbook import Logbook
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report, Tie, Watcher
from tunebench.tuning.warm import Source, WarmStart, warm_starts
from tunebench.workload import Workload

__all__ = ["Session"]


class Session:
    """One run of `tune`."""

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
        self.candidates = {candidate.variant.key: candidate for candidate in found}
        tried = {key: candidate.variant for key, candidate in self.candidates.items()}
        self.logbook = Logbook(store, problem, target.device, tried, sampler=plan.sampler, seed=plan.seed)
        self.audit = Audit(problem, target.device, plan.protocol.cache)
        self.finals: Finals | None = None
        self.outcomes: Counter[str] = Counter()
        self.timed: list[Timed] = []
        self.defaults: dict[str, Config] = {}
        self.cached = 0
        self.again: set[tuple[str, Config]] = set()
        self.interrupted = False
        self.stopped: str | None = None
        self.cut_short = False
        self.busy_s = 0.0
        self.waiting = ""
        self.stand = ("search", 0, plan.trials)
        self.bound_us = min(float(candidate.bounds.us.min()) for candidate in found)
        self.warm: dict[str, WarmStart] = {}
        self.searches: list[VariantSearch] = []
        self.retry_policy = store.retry_policy = RetryPolicy(notify=self._tell_waiting)
        self.fleet: Fleet | None = None
        self.revisions = {key: self._recheck(candidate) for key, candidate in self.candidates.items()}
        self.warm = self._warm_starts()
        self.searches = [self._search_of(candidate) for candidate in found]
        done = min(self.logbook.begin(), plan.trials)
        until = time.monotonic() + 60 * plan.minutes if plan.minutes is not None else None
        self.budget = Budget(trials=plan.trials, done=done, audit=plan.audit, until=until)

    # -- before the search ------------------------------------------------------------------------

    def _recheck(self, candidate: Candidate) -> Callable[[Config], str]:
        """Mark what earlier sources did as stale, and return today's revision by configuration."""
        key = candidate.variant.key

        def revision(config: Config) -> str:
            candidate.table.space.ordinals(config)  # refuses what an older version of the space allowed
            return self.logbook.revision(key, config)

        self.store.recheck(*self.logbook.place(key), revision)
        return revision

    def _warm_starts(self) -> dict[str, WarmStart]:
        """Look up what is known elsewhere; predictions need no measurements to go by."""
        sampled = self.plan.sampler == "random" and not self.plan.calibrated
        if not self.plan.warm or self.target.runner == "offline" or sampled:
            return {}
        return warm_starts(
            self.store,
            self.problem,
            self.target.device,
            {key: candidate.table for key, candidate in self.candidates.items()},
            cache=self.plan.protocol.cache,
            learns=self.plan.sampler == "surrogate" or self.plan.calibrated,
        )

    def _search_of(self, candidate: Candidate) -> VariantSearch:
        variant = candidate.variant
        self.defaults[variant.key] = variant.default(self.problem, self.target.device)
        warm = self.warm.get(variant.key, WarmStart())
        search = VariantSearch(
            variant.key,
            dataclasses.replace(candidate.prospects(), elsewhere_us=warm.elsewhere_us),
            sampler=self.plan.sampler,
            seed=self.plan.seed,
            calibrated=self.plan.calibrated,
        )
        place, revision = self.logbook.place(variant.key), self.revisions[variant.key]
        for found in self.store.fastest_samples(*place):
            row = search.table.row(found.config)
            if row is not None and revision(found.config) == found.revision:
                self.audit.recall(candidate, search, row, found)
        for known in self.store.trial_outcomes(*place, cache=self.plan.protocol.cache):
            row = search.table.row(known.config)
            if row is None or revision(known.config) != known.revision:
                continue
            if isinstance(known.outcome, Pruned):  # today's bound decides, and today's best
                search.tighten(row, self.audit.refined_us(candidate, known.config, known.resources))
                self.again.add((variant.key, known.config))
                continue
            if not self._stands(known.outcome):
                self.again.add((variant.key, known.config))
                continue
            search.remember(known.config, known.outcome)
            self.cached += 1
            self._keep(search, known.config, known.outcome)
        search.first(self.defaults[variant.key])
        if self.plan.sampler != "random":
            for config in warm.first:
                search.first(config)
        return search

    def _stands(self, outcome: Outcome) -> bool:
        """Tell whether a known outcome answers what this run asks; one of another cache state does not."""
        if isinstance(outcome, Predicted):
            return self.target.runner == "offline"
        return not isinstance(outcome, Measured) or outcome.cache == self.plan.protocol.cache

    # -- the search -------------------------------------------------------------------------------

    def search(self, executor: Executor[Task]) -> None:
        """Run the loop; Ctrl-C ends it and keeps everything, and so does the loss of a cluster."""
        under_way: set[TrialKey] = set()

        def claim(proposal: Proposal) -> bool:
            key = self.logbook.key(proposal.search, proposal.config)
            again = (proposal.search.key, proposal.config) in self.again
            if again or self.store.claim(key, self.logbook.owner):
                under_way.add(key)
                return True
            return False

        def on_result(proposal: Proposal, result: Result) -> None:
            key = self.logbook.key(proposal.search, proposal.config)
            self._tighten(proposal, result)
            untuned = proposal.config == self.defaults[proposal.search.key]
            said = Verdict(versus_default="itself") if untuned else None
            purpose: Purpose = "audit" if proposal.audit else "search"
            self.logbook.record(key, result, purpose, proposal.bound_us, said)
            under_way.discard(key)
            if not proposal.audit:
                self.outcomes[result.outcome.kind] += 1
            self._keep(proposal.search, proposal.config, result.outcome)
            self.audit.check(proposal.search, proposal.config, result.outcome, proposal.bound_us)
            self.fleet = executor.fleet
            self._tell_watcher("search", self.budget.done, self.budget.trials)

        before_s = executor.busy_s
        self._tell_watcher("search", self.budget.done, self.budget.trials)
        try:
            run(
                self.searches,
                executor,
                self.budget,
                make_task=self._search_task,
                claim=claim,
                on_result=on_result,
                stop_at_gap=self.plan.stop_at_gap,
            )
        except (KeyboardInterrupt, Stopped, ClusterLost) as end:
            self._interrupt(executor, end)
        finally:
            self._release(under_way)
            self.busy_s += executor.busy_s - before_s
            self.fleet = executor.fleet
            self.cut_short = self.budget.is_overdue and self.budget.done < self.budget.trials

    def _interrupt(self, executor: Executor[Task], end: BaseException) -> None:
        """End the run early, and keep what was found."""
        self.interrupted = True
        self.stopped = str(end) if isinstance(end, ClusterLost) else None
        executor.close()

    def _release(self, keys: set[TrialKey]) -> None:
        """Give back what was claimed and not measured; where that fails, the claims end with this process."""
        with contextlib.suppress(DatabaseError):
            for key in keys:
                self.store.release(key, self.logbook.owner)

    def _tighten(self, proposal: Proposal, result: Result) -> None:
        """Take over what the binary tells of a configuration's bound."""
        if isinstance(result.outcome, Pruned):
            self.again.add((proposal.search.key, proposal.config))
        elif self.target.runner != "offline":
            candidate = self.candidates[proposal.search.key]
            refined = self.audit.refined_us(candidate, proposal.config, result.resources)
            proposal.search.tighten(proposal.row, refined)

    def _search_task(self, proposal: Proposal) -> Task:
        """Return a task of the search: once it is compiled, its bound is looked at again."""
        task = self._task(proposal.search, proposal.config, proposal.row)
        prune = self.target.runner != "offline" and proposal.search.trusted and not proposal.audit
        return dataclasses.replace(task, prune=prune)

    def _task(self, search: VariantSearch, config: Config, row: int, *, thorough: bool = False) -> Task:
        return Task(
            variant=self.candidates[search.key].variant,
            workload=self.problem,
            config=config,
            device=self.target.device,
            seed=self.plan.seed + self.budget.done,
            predicted_us=self.candidates[search.key].predicted_us(row),
            interval_us=self.candidates[search.key].interval_us(row),
            thorough=thorough,
        )

    def _keep(self, search: VariantSearch, config: Config, outcome: Outcome) -> None:
        value = time_us(outcome)
        default = config == self.defaults[search.key]
        if value is None and default and isinstance(outcome, Aborted):
            value = float("inf")  # slow, but what the best is to be compared with
        if value is not None:
            timed = Timed(
                search,
                config,
                value,
                ci_us=getattr(outcome, "ci_us", None),
                interval_us=getattr(outcome, "interval_us", None),
                is_default=default,
            )
            self.timed.append(timed)

    def _tell_waiting(self, line: str) -> None:
        self.waiting = line
        self._tell_watcher(*self.stand)

    def _tell_watcher(self, phase: str, done: int, total: int) -> None:
        self.stand = (phase, done, total)
        tried = sum(self.outcomes.values())
        rate = self.logbook.elapsed_s / tried if tried else None
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
                elsewhere=sum(source.records for source in self._sources()),
                unlikely=sum(search.passed_over.count for search in self.searches),
                waiting=self.waiting,
                device=self.target.device.key,
                fleet=self.fleet,
            )
        )

    # -- after the search -------------------------------------------------------------------------

    def time_finalists(self, executor: Executor[Task]) -> None:
        """Time the best, their defaults and the libraries again; Ctrl-C ends it without a verdict."""
        self.finals = Finals(
            self.logbook,
            self.audit,
            Libraries(
                self.problem,
                self.target.device,
                self.plan.protocol,
                executor.calls(library.stage),
                rounds=ROUNDS,
            ),
            make_task=lambda timed: self._task(timed.search, timed.config, timed.row, thorough=True),
            tell=self._tell_watcher,
        )
        seed, before_s = self.plan.seed if self.plan.baselines else None, executor.busy_s
        try:
            self.finals.rerun_finalists(executor, choose(self.timed, self.plan.finalists), seed)
        except (KeyboardInterrupt, Stopped, CancelledError, ClusterLost) as end:
            self._interrupt(executor, end)
        self.busy_s += executor.busy_s - before_s
        self.fleet = executor.fleet

    # -- the books --------------------------------------------------------------------------------

    def report(self, skipped: Mapping[str, str]) -> Report:
        """Close the books.

        Args:
            skipped: Variants that were not tried, each with the reason.
        """
        finalists = self.finals.finalists if self.finals is not None else []
        baselines = self.finals.baselines() if self.finals is not None else ()
        settled = settle(finalists or [timed for timed in self.timed if not timed.failed])
        best = settled.best if settled else None
        median_us, ci_us = best.median() if best else (None, None)
        default = settled.default if settled else None
        seconds = self.logbook.seconds(self.busy_s)
        masked = sum(search.masked for search in self.searches)
        unlikely = [search.unlikely(min(s.best_us for s in self.searches)) for search in self.searches]
        if not self.interrupted and not self.cut_short:
            self.logbook.finish(masked, self.cached, seconds)
        how = "predicted" if self.target.runner == "offline" else "measured"
        proof = self._optimality_proof(median_us)
        return Report(
            workload=str(self.problem),
            device=self.target.device.key,
            how=how if best else None,
            variant=best.search.key if best else None,
            config=best.config if best else None,
            median_us=median_us,
            ci_us=ci_us,
            interval_us=best.interval_us if best else None,
            is_default=best.is_default if best else False,
            default_us=default.median()[0] if default else None,
            baselines=baselines,
            bound_us=0.0 if self.audit.violations else self.bound_us,
            gap=proof.gap if proof is not None else self._expected_gap(median_us),
            optimality_proof=proof,
            assumed=self.target.device.assumed,
            outside=tuple(sorted({v.key for v in variants(self.problem)} - self.candidates.keys())),
            versus=self.finals.versus(settled) if self.finals is not None and settled is not None else {},
            ties=self._ties(best),
            violations=self.audit.violations,
            audited=self.budget.audited,
            trials=dict(self.outcomes),
            masked=masked,
            cached=self.cached,
            seconds=seconds,
            database=str(self.store.location),
            interrupted=self.interrupted,
            skipped={**skipped, **(self.finals.failures if self.finals is not None else {})},
            warm=self._sources(),
            unlikely=sum(one.count for one in unlikely),
            unlikely_winners=sum(one.winners for one in unlikely),
            fleet=self.fleet,
            stopped=self.stopped,
        )

    def _optimality_proof(self, best_us: float | None) -> OptimalityProof | None:
        """Return what is proved; of times that are predicted, nothing is."""
        if self.target.runner == "offline":
            return None
        return optimality_proof(self.searches, np.inf if best_us is None else best_us)

    def _expected_gap(self, predicted_us: float | None) -> float | None:
        return predicted_us / self.bound_us if predicted_us is not None and self.bound_us > 0 else None

    def _ties(self, best: Timed | None) -> tuple[Tie, ...]:
        if best is None or self.target.runner == "offline":
            return ()
        # What seemed faster on a better day of the search, and was not timed again, is a tie too.
        tied = [
            one
            for one in self.timed
            if one is not best
            and not one.failed
            and (best.tied(one) or (not one.again and one.search_us < best.median()[0]))
        ]
        tied.sort(key=lambda one: one.median()[0])
        return tuple(
            Tie(variant=one.search.key, config=one.config, median_us=one.median()[0]) for one in tied
        )

    def _sources(self) -> tuple[Source, ...]:
        return tuple(source for start in self.warm.values() for source in start.sources)
