"""One tuning run of one workload on one device: `prepare`, `search`, `time_finalists`, `finish`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import numpy as np

from tunebench._figure import significant
from tunebench.db.record import NewMeasurement, Record, TrialKey, Verdict
from tunebench.db.retry import RetryPolicy
from tunebench.errors import DatabaseError, InputError, UnknownName
from tunebench.executor import ExecutorClosed, FunctionCaller, WorkerExecutor
from tunebench.measure.gpu_settings import SETTINGS
from tunebench.measure.observer import NVML, NvmlObserver, metric_names
from tunebench.objective import workload_quantities
from tunebench.outcome import (
    FAILURES,
    Aborted,
    Measured,
    Outcome,
    Predicted,
    Pruned,
    Resources,
    Result,
    failure_of,
    first_error,
    time_us,
)
from tunebench.search.loop import Budget, run_search
from tunebench.search.optimality_proof import is_impossible
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning.audit import BoundAudit
from tunebench.tuning.baseline_rounds import BaselineRounds, stage_for
from tunebench.tuning.finalist import (
    ROUNDS,
    TimedConfig,
    pick_finalists,
)
from tunebench.tuning.finalist_rounds import FATAL, FinalistRounds
from tunebench.tuning.known_outcome import answers, made_under_load
from tunebench.tuning.plan import Plan
from tunebench.tuning.run_context import RunContext, RunState, TuningSetup
from tunebench.tuning.run_options import run_options
from tunebench.tuning.run_recorder import RunRecorder
from tunebench.tuning.run_report import finish, search_figures
from tunebench.tuning.tunable import TunableVariant
from tunebench.tuning.warm import WarmStart, warm_starts
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.tuning.workload_report import Failure, ProgressCallback, Report

__all__ = [
    "StartExecutor",
    "deadline",
    "prepare",
    "search",
    "takes_hints",
    "time_finalists",
    "tune_one",
]

REPEATS = 2
"""Repetitions of a default that timed out while other programs used the processors."""

MOST_EARLIER = 4
"""Most finalists of earlier searches that are timed again, if `Plan.finalists` is not more."""

StartExecutor = Callable[[], WorkerExecutor[Task]]
"""Starts the executor at the first call, and returns it."""


def tune_one(
    setup: TuningSetup,
    weighted: WeightedWorkload,
    start: StartExecutor,
    on_progress: ProgressCallback,
    until: float | None = None,
) -> Report:
    """Tune one workload with the full budget of the plan; it warm-starts from those tuned before.

    Args:
        setup: Device, plan and database.
        weighted: The workload, whose variants are found.
        start: Starts the executor; called once the workload is prepared.
        on_progress: Called after every trial.
        until: Reading of `time.monotonic` at which the search ends; None applies `Plan.minutes`.
    """
    context = prepare(setup, weighted, on_progress, until or deadline(setup.plan))
    executor = start()
    search(context, executor)
    if not context.state.interrupted and not setup.predicts:
        time_finalists(context, executor)
    return finish(context)


# -- before the search -------------------------------------------------------------------------------------


def prepare(
    setup: TuningSetup,
    weighted: WeightedWorkload,
    on_progress: ProgressCallback,
    until: float | None = None,
) -> RunContext:
    """Read the earlier results of a workload from the database, and open a run.

    Args:
        setup: Device, plan and database.
        weighted: The workload, whose variants are found.
        on_progress: Called after every trial.
        until: Reading of `time.monotonic` at which the search stops; None has no limit.
    """
    workload, tunable = weighted.workload, weighted.variants
    plan, device = setup.plan, setup.target.device
    by_key = {searched.variant.key: searched for searched in tunable}
    policy = RetryPolicy(notify=lambda line: context.report_waiting(line))
    setup.store.retry_policy = policy
    # `notify` above closes over the context: the store does not wait before it is made.
    context = RunContext(
        setup=setup,
        workload=workload,
        variants=by_key,
        skipped=weighted.skipped,
        defaults={key: searched.variant.default(workload, device) for key, searched in by_key.items()},
        searches=[],
        warm={},
        bound_us=min(float((searched.gap_bounds or searched.bounds).us.min()) for searched in tunable),
        budget=Budget(trials=plan.trial_budget, audit=plan.audit, until=until),
        recorder=RunRecorder(
            setup.store,
            workload,
            device,
            {key: searched.variant for key, searched in by_key.items()},
            plan,
            run_options(plan, variants=by_key, predicts=setup.predicts, shared_budget=setup.shared_budget),
        ),
        audit=BoundAudit(workload, plan.protocol.cache),
        retry_policy=policy,
        on_progress=on_progress,
        state=RunState(phase=("search", 0, plan.trial_budget)),
        goal=plan.goal,
    )
    _check_goal(context)
    for key in by_key:  # mark the records of earlier sources as stale
        setup.store.recheck(*context.recorder.scope(key), functools.partial(context.revision, key))
    context.warm.update(_warm_starts(context))
    context.searches.extend([_search_of(context, searched) for searched in tunable])
    # Trials of an interrupted run of the same options count, so that repeated calls do not exceed the budget.
    context.budget.done = min(context.recorder.begin(), plan.trial_budget)
    return context


def _check_goal(context: RunContext) -> None:
    """Check that metrics, objectives and requirements use quantities that exist.

    Raises:
        UnknownName: One does not.
    """
    names = {*workload_quantities(context.workload), *(field.name for field in dataclasses.fields(Resources))}
    for tunable in context.variants.values():
        names |= {parameter.name for parameter in tunable.table.space.parameters}
    if context.setup.target.runner == "cpu" and (set_names := sorted(names & set(SETTINGS))):
        raise InputError(f"{', '.join(set_names)} are settings of GPUs: rename them")
    names |= _observed_names(context.setup)
    try:
        context.goal.check(sorted(names))
    except UnknownName as error:
        if error.name in NvmlObserver.metrics:
            raise InputError(f"{error.name} is observed on a GPU with --observe {NVML}") from None
        raise


def _observed_names(setup: TuningSetup) -> set[str]:
    """Return the names of the values that the observers of the plan provide.

    Raises:
        InputError: An observer cannot be loaded, or does not observe the device.
    """
    observers, runner = setup.plan.observers, setup.target.runner
    if observers and setup.predicts:
        raise InputError("observers need measurements: the device must be present")
    if NVML in observers and runner != "cuda":
        raise InputError(f"{NVML} observes NVIDIA GPUs, and {setup.target.device.name} is none")
    return metric_names(observers)


def takes_hints(context: RunContext) -> bool:
    """Return whether a run begins with what is fast elsewhere; predictions and random samples do not."""
    plan = context.setup.plan
    sampled = plan.sampler == "random" and not plan.learned_pruner
    return plan.warm and not context.setup.predicts and not sampled and context.goal.is_time


def _warm_starts(context: RunContext) -> dict[str, WarmStart]:
    """Return the warm start of each variant."""
    if not takes_hints(context):
        return {}
    plan = context.setup.plan
    return warm_starts(
        context.setup.store,
        context.workload,
        context.setup.target.device,
        {key: tunable.table for key, tunable in context.variants.items()},
        cache=plan.protocol.cache,
        learns=plan.sampler == "surrogate" or plan.learned_pruner,
    )


def _search_of(context: RunContext, tunable: TunableVariant) -> VariantSearch:
    """Return the search of one variant, with the outcomes in the database."""
    key, plan, store = tunable.variant.key, context.setup.plan, context.setup.store
    warm = context.warm.get(key, WarmStart())
    search = VariantSearch(
        key,
        dataclasses.replace(tunable.prospects(), elsewhere_us=warm.elsewhere_us),
        sampler=plan.sampler,
        seed=plan.seed,
        learned_pruner=plan.learned_pruner,
        goal=context.goal,
    )
    scope = context.recorder.scope(key)
    for fastest in store.fastest_samples(*scope):
        row = search.table.row(fastest.config)
        if row is not None and context.revision(key, fastest.config) == fastest.revision:
            context.audit.check_stored(tunable, search, row, fastest)
    for stored in store.trial_outcomes(*scope, cache=plan.protocol.cache):
        row = search.table.row(stored.config)
        if row is None or context.revision(key, stored.config) != stored.revision:
            continue
        if isinstance(stored.outcome, Pruned):  # pruned by an earlier incumbent: decide again
            search.tighten(row, context.audit.stored_bound_us(tunable, stored.config, stored.resources))
        bound_us = max(stored.bound_us or 0.0, float(search.bounds_us[row]))
        is_repeated = isinstance(stored.outcome, Pruned) or is_impossible(stored.outcome, bound_us)
        known = Result(outcome=stored.outcome, resources=stored.resources)
        outcome = context.recorder.completed(key, stored.config, known).outcome
        if is_repeated or not answers(context.setup, outcome) or not _answers_goal(context, outcome):
            context.state.repeatable.add((key, stored.config))
            continue
        search.remember(stored.config, outcome)
        context.state.cached += 1
        _keep(context, search, stored.config, outcome)
    search.first(context.defaults[key])
    if context.setup.predicts:
        search.first(tunable.table.config(tunable.unmeasured()))
    if plan.sampler != "random":
        for config in warm.first:
            search.first(config)
    return search


def _answers_goal(context: RunContext, outcome: Outcome) -> bool:
    """Return whether a known outcome has what the objectives need; an aborted one has no time for others."""
    if isinstance(outcome, Aborted):
        return context.goal.is_time
    is_success = isinstance(outcome, Measured | Predicted)
    return not is_success or not context.goal.lacks(outcome)


# -- the search --------------------------------------------------------------------------------------------


def search(context: RunContext, executor: WorkerExecutor[Task]) -> None:
    """Search until the budget is spent; Ctrl-C and a lost cluster end it and keep all results."""
    state, store, owner = context.state, context.setup.store, context.recorder.owner
    claimed: set[TrialKey] = set()

    def make_task(proposal: Proposal) -> Task:
        """Return a task that is pruned after compiling if its bound exceeds the incumbent."""
        # Predictions prune nothing, an audit must run, and untrusted bounds decide nothing.
        is_bounded = proposal.search.trusted and context.goal.is_time
        prune = not context.setup.predicts and is_bounded and not proposal.audit
        return _task(context, proposal, prune=prune)

    def claim(proposal: Proposal) -> bool:
        key = context.recorder.key(proposal.search.key, proposal.config)
        claimed.add(key)  # before the claim: Ctrl-C may come right after it
        if (proposal.search.key, proposal.config) in state.repeatable or store.claim(key, owner):
            return True
        claimed.discard(key)
        return False

    def on_result(proposal: Proposal, result: Result) -> Outcome:
        """Record a trial and compare it with its bound, which the binary may have raised."""
        search, key = proposal.search, context.recorder.key(proposal.search.key, proposal.config)
        result = context.recorder.completed(search.key, proposal.config, result, searched=True)
        if isinstance(result.outcome, Pruned):
            state.repeatable.add((search.key, proposal.config))
        else:
            search.tighten(proposal.row, result.bound_us)
        is_default = proposal.config == context.defaults[search.key]
        repeats = (
            is_default and made_under_load(result.outcome) and state.default_repeats[search.key] < REPEATS
        )
        # Recorded before anything learns it: after a crash, the database knows at least what the search knew.
        context.recorder.record(
            NewMeasurement(
                key=key,
                result=result,
                purpose="audit" if proposal.audit else "search",
                bound_us=proposal.bound_us,
                verdict=Verdict(
                    versus_default="itself" if is_default else None,
                    comparison=search_figures(context).stored(),
                ),
            )
        )
        claimed.discard(key)
        if not proposal.audit:
            state.outcomes[result.outcome.kind] += 1
        if repeats:  # the other programs may have ended: the best is compared with the default
            state.default_repeats[search.key] += 1
            state.repeatable.add((search.key, proposal.config))
            search.again(proposal.row)
        else:
            _keep(context, search, proposal.config, result.outcome)
        context.audit.check(search, proposal.config, result.outcome, proposal.bound_us)
        state.pool = executor.pool
        state.latest = f"{search.key} {proposal.config}: {_summary(result.outcome)}"
        context.report_progress("search", context.budget.done, context.budget.trials)
        return result.outcome

    context.report_progress("search", context.budget.done, context.budget.trials)
    try:
        with _interruptible(context, executor):
            run_search(
                context.searches,
                executor,
                context.budget,
                make_task=make_task,
                claim=claim,
                on_result=on_result,
                stop_at_gap=context.setup.plan.stop_at_gap,
            )
    finally:
        with contextlib.suppress(DatabaseError):  # without a database, the claims end with this process
            for key in claimed:
                store.release(key, owner)
        state.cut_short = context.budget.is_overdue and context.budget.done < context.budget.trials


@contextlib.contextmanager
def _interruptible(context: RunContext, executor: WorkerExecutor[Task]) -> Iterator[None]:
    """Count the busy time; Ctrl-C and faults of machines end the run early and keep its results."""
    state, before_s = context.state, executor.busy_s
    try:
        yield
    except (KeyboardInterrupt, ExecutorClosed, CancelledError, *FATAL) as end:
        state.interrupted = True
        state.stopped = str(end) if isinstance(end, FATAL) else None
        context.setup.store.hurry()
        executor.close()
    finally:
        state.busy_s += executor.busy_s - before_s
        state.pool = executor.pool


def _task(
    context: RunContext, candidate: Proposal | TimedConfig, *, prune: bool = False, thorough: bool = False
) -> Task:
    tunable = context.variants[candidate.search.key]
    return Task(
        variant=tunable.variant,
        workload=context.workload,
        config=candidate.config,
        device=context.setup.target.device,
        seed=context.setup.plan.seed + context.budget.done,
        predicted_us=tunable.predicted_us(candidate.row),
        interval_us=tunable.interval_us(candidate.row),
        prune=prune,
        thorough=thorough,
    )


def _summary(outcome: Outcome) -> str:
    """Return an outcome in a few words."""
    us, kind = time_us(outcome), outcome.kind.replace("_", " ")
    if us is not None:
        return f"{kind} {significant(us)} us"
    reason = getattr(outcome, "reason", None)
    return f"{kind}: {first_error(reason)}" if reason else kind


def _keep(context: RunContext, search: VariantSearch, config: Config, outcome: Outcome) -> None:
    """Add a configuration to those from which finalists are picked, or to the failures."""
    row = search.table.row(config)
    if row is None or is_impossible(outcome, float(search.bounds_us[row])):
        return
    us = time_us(outcome)
    is_default = config == context.defaults[search.key]
    if us is None and is_default and isinstance(outcome, Aborted):
        us = float("inf")  # slow, but the best is compared with it
    if isinstance(outcome, FAILURES):
        if is_default:
            context.state.failed_defaults[search.key] = str(failure_of(outcome))
        kind = (outcome.kind, re.sub(r"[\d.]+(?:e-?\d+)?", "#", first_error(outcome.reason)))
        failure = context.state.failures.get(kind) or Failure(
            kind=outcome.kind, reason=outcome.reason, count=0, variant=search.key, config=config
        )
        context.state.failures[kind] = dataclasses.replace(failure, count=failure.count + 1)
    if us is not None and context.goal.allows(outcome):
        timed = TimedConfig(
            search,
            config,
            us,
            ci_us=getattr(outcome, "ci_us", None),
            interval_us=getattr(outcome, "interval_us", None),
            is_default=is_default,
            verified=not isinstance(outcome, Predicted) or outcome.verification.how != "not verified",
        )
        context.state.timed.append(timed)


# -- after the search --------------------------------------------------------------------------------------


def time_finalists(
    context: RunContext, executor: WorkerExecutor[Task], caller: FunctionCaller | None = None
) -> None:
    """Time finalists, their defaults and the baselines in rounds; Ctrl-C ends this without a verdict.

    With other objectives than the time there are none: their values are those of the search.

    Args:
        context: The run.
        executor: Compiles and measures.
        caller: Calls the stage of the baselines. Default: one in processes of its own.
    """
    state, plan, device = context.state, context.setup.plan, context.setup.target.device
    if not context.goal.is_time:
        return
    began_s = time.monotonic()
    with _interruptible(context, executor), contextlib.ExitStack() as stack:
        caller = caller or stack.enter_context(executor.caller(stage_for(device)))
        state.finals = FinalistRounds(
            context.recorder,
            context.audit,
            BaselineRounds(context.workload, device, plan.protocol, caller, rounds=ROUNDS),
            timed=state.timed,
            search=search_figures(context),
            make_task=lambda timed: _task(context, timed, thorough=True),
            on_progress=context.report_progress,
        )
        finalists = pick_finalists(state.timed, plan.finalists, set(_earlier_finalists(context)))
        state.finals.run(executor, finalists, with_baselines=plan.baselines)
    state.finals_s = time.monotonic() - began_s


def _earlier_finalists(context: RunContext) -> Iterator[tuple[str, Config]]:
    """Yield the fastest finalists of earlier searches, to time again.

    Their times are of another state of the machine: without a new one, the best of an idle day would stay
    first however fast the new finalists are.
    """
    setup = context.setup
    newest: dict[tuple[str, Config], Record] = {}
    for record in setup.store.history(str(context.workload), setup.target.device.key):
        outcome, key = record.result.outcome, (record.key.variant, record.key.config)
        if record.stale or not isinstance(outcome, Measured) or outcome.cache != setup.plan.protocol.cache:
            continue
        if record.purpose == "finalist" and record.verdict.versus_default != "not faster":
            newest[key] = record
        elif key in newest:
            del newest[key]
    ranked = sorted(newest, key=lambda key: time_us(newest[key].result.outcome) or np.inf)
    yield from ranked[: max(MOST_EARLIER, setup.plan.finalists)]


def deadline(plan: Plan) -> float | None:
    """Return the reading of `time.monotonic` at the time limit of a plan; None without a limit."""
    return None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
