"""Tuning: find the fastest configuration of workloads on a device, and record it.

`tune` tunes one workload, `tune_all` several one after another (a size range), `tune_from_profile` those of a
recorded profile, `tune_suite` those of a suite with one budget, `tune_devices` one workload on several
devices of a cluster. For each workload, all call

    prepare -> search -> time_finalists -> finish     (`tunebench.tuning.run`, `tunebench.tuning.run_report`)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebench._deprecation import renamed, warn_renamed
from tunebench._signal import ending_like_ctrl_c
from tunebench._user_code import limit_user_code
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels import load_file
from tunebench.tuning.cluster import open_cluster, side_by_side, targets, worker_setup_of
from tunebench.tuning.plan import TRIALS, Plan
from tunebench.tuning.profile_queue import tune_profile
from tunebench.tuning.progress_bar import show_progress
from tunebench.tuning.repetition import repetition
from tunebench.tuning.run import StartExecutor, tune_one
from tunebench.tuning.run_context import TuningSetup
from tunebench.tuning.scheduler import SharedBudget
from tunebench.tuning.size_range import is_size_range, parse_size_range
from tunebench.tuning.summary import TuningSummary, WorkloadResult
from tunebench.tuning.tunable import TuningTarget, tuning_target
from tunebench.tuning.weighted_workload import WeightedWorkload, find_any, suite_workloads
from tunebench.tuning.workers import start_workers, user_code_limit_s
from tunebench.tuning.workload_report import Progress, ProgressCallback, Report
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = [
    "Plan",
    "Progress",
    "Report",
    "TuningSummary",
    "WorkloadResult",
    "default_trials",
    "is_size_range",
    "parse_size_range",
    "repeat",
    "repetition",
    "show_progress",
    "suite_workloads",
    "tune",
    "tune_all",
    "tune_devices",
    "tune_from_profile",
    "tune_suite",
]


def tune(
    workload: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: ProgressCallback | None = None,
) -> Report:
    """Find the fastest configuration of a workload on a device, verify it and record it.

    Every trial is recorded at once: the same call resumes an interrupted run. Ctrl-C, SIGTERM and SIGHUP end
    the run early and return the report so far.

    Args:
        workload: The workload, or its text.
        device: A device or its name (see `tunebench.device.find`); an absent device is tuned offline. On a
            cluster, a device of its workers, by name, architecture or key. Default: the first GPU, else the
            CPU.
        db: Path or URL of the database. Default: the user's database.
        plan: How to tune. Default: `Plan()`.
        watcher: Progress callback, called after every trial.

    Returns:
        The report of the run.

    Raises:
        InputError: if workload, plan or device is invalid, or no variant supports the workload.
        DatabaseError: if the database fails; earlier records are kept. During the run, a lost database is
            waited for, up to two minutes at a time.
        MissingDependency: if a GPU is present and its Python packages are not; or Ray is not, for a cluster.
        ClusterLost: if the cluster is unreachable, or none of its workers is usable.
    """
    plan = plan or Plan()
    names = _names(plan)
    weighted = WeightedWorkload(workload=parse(workload) if isinstance(workload, str) else workload)
    find = functools.partial(weighted.find_variants, plan=plan, names=names)
    with _setup([weighted], device, db, plan, find) as (setup, start):
        return tune_one(setup, weighted, start, watcher or _ignore)


def repeat(run: str, *, db: str | Path | None = None, watcher: ProgressCallback | None = None) -> Report:
    """Repeat a run with the same workload, device, options and seed; an interrupted one is continued.

    Outcomes that the database knows are not measured again.

    Args:
        run: Id of the run, or its first characters (`tunebench db runs` lists them).
        db: Path or URL of the database with the run. Default: the user's database.
        watcher: Progress callback, called after every trial.

    Returns:
        The report of the new run.

    Raises:
        InputError: if there is no such run, its options are unknown, a variant file of it is gone or has
            changed, or its device is absent.
        TunebenchError: as `tune`.
    """
    arguments = repetition(run, db)
    return tune(arguments.workload, device=arguments.device, db=db, plan=arguments.plan, watcher=watcher)


def tune_all(
    workloads: Iterable[Workload],
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: Callable[[Workload, Progress], None] | None = None,
) -> Iterator[Report]:
    """Tune workloads one after another; each warm-starts from the records of those before. Ctrl-C ends all.

    Args:
        workloads: The workloads, such as those of `parse_size_range`.
        device: As for `tune`.
        db: As for `tune`.
        plan: How to tune each of them.
        watcher: Progress callback, called with the workload and its progress after every trial.

    Yields:
        The report of each workload; the last one may be interrupted.

    Raises:
        InputError: if no variant supports a workload.
    """
    plan = plan or Plan()
    names = _names(plan)
    listed = (WeightedWorkload(workload=workload) for workload in workloads)
    first = list(listed if plan.cluster is not None else itertools.islice(listed, 1))

    def find(target: TuningTarget, *, compilable: bool) -> None:
        for weighted in first:
            weighted.find_variants(target, plan, names, compilable=compilable)

    def on_progress(progress: Progress) -> None:
        if watcher is not None:
            watcher(weighted.workload, progress)

    with _setup(first, device, db, plan, find) as (setup, start):
        for weighted in itertools.chain(first, listed):
            weighted.find_variants(setup.target, plan, names)
            report = tune_one(setup, weighted, start, on_progress)
            yield report
            if report.interrupted:
                return


def tune_devices(
    workload: Workload | str,
    *,
    devices: Sequence[Device | str | None] = ("all",),
    db: str | Path | None = None,
    plan: Plan,
    watcher: ProgressCallback | None = None,
) -> list[Report]:
    """Tune a workload on several devices of a Ray cluster at the same time; `plan.cluster` is required.

    Only this process writes to the database. Ctrl-C, and the loss of the cluster, end all runs early.

    Args:
        workload: The workload, or its text.
        devices: Devices of the workers, by name, architecture or key; ``"all"`` for every kind of GPU, or of
            CPU if the cluster has no GPU.
        db: As for `tune`.
        plan: How to tune on each device.
        watcher: Progress callback; `Progress.device` is the key of the device.

    Returns:
        The report of each device.

    Raises:
        InputError: as `tune`, or if a device is not in the cluster.
        ClusterLost: if the cluster is unreachable, or none of its workers is usable.
        MissingDependency: if Ray is not installed.
    """
    if plan.cluster is None:
        raise InputError("tuning on several devices needs a cluster: Plan(cluster=...) or --cluster")
    names = _names(plan)
    parsed = parse(workload) if isinstance(workload, str) else workload
    with (
        ending_like_ctrl_c(),
        limit_user_code(user_code_limit_s(plan)),
        open_cluster(plan, devices) as cluster,
    ):
        by_device = {target.device.key: target for target in targets(cluster, devices)}
        workloads = {key: WeightedWorkload(workload=parsed) for key in by_device}
        for key, weighted in workloads.items():
            weighted.find_variants(by_device[key], plan, names, compilable=False)
        setups = {key: worker_setup_of(by_device[key], plan, workloads[key].variants) for key in by_device}
        executors = cluster.executors(setups)

        def run(key: str) -> Report:
            with open_store(db) as store, executors[key] as executor:
                setup = TuningSetup(target=by_device[key], plan=plan, store=store)
                return tune_one(setup, workloads[key], lambda: executor, watcher or _ignore)

        runs = {key: functools.partial(run, key) for key in by_device}
        if len(runs) == 1:
            return [run_only() for run_only in runs.values()]
        return side_by_side(runs, executors)


def tune_from_profile(
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    retune: bool = False,
    watcher: ProgressCallback | None = None,
) -> TuningSummary:
    """Tune the workloads of a profile (`tunebench.torch.profile`), the greatest possible saving first.

    Ctrl-C ends the run and returns the summary so far; the same call resumes it.

    Args:
        device: As for `tune`.
        db: As for `tune`; the database of the profile and of the results.
        plan: How to tune each workload; `Plan.minutes` is for all of them together.
        retune: Whether to tune workloads again that are tuned with the current sources.
        watcher: Progress callback; `Progress.index` of `Progress.count` is the workload.

    Returns:
        A summary with the result of each workload.

    Raises:
        InputError: if the profile is empty, or plan or device is invalid.
        DatabaseError: if the database fails; earlier records are kept.
        MissingDependency: if a GPU is present and its Python packages are not.
    """
    plan = plan or Plan()
    _refuse_objectives(plan)
    if plan.variants or plan.variant_files:
        raise InputError(
            "a profile has workloads of many operators: variants cannot be chosen for all of them"
        )
    if plan.cluster is not None:
        raise InputError("a profile is tuned on this machine: leave the cluster out")
    with _setup([], device, db, plan, lambda target, *, compilable: None) as (setup, start):
        return tune_profile(setup, start, watcher or _ignore, retune=retune)


def tune_suite(
    suite: str | Path | Mapping[Workload | str, int],
    *,
    batch: int = 1,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: ProgressCallback | None = None,
) -> TuningSummary:
    """Tune all workloads of a suite with one budget of trials, spent where it saves the most time.

    Every workload gets a first round of trials. Each further round goes to the workload with the greatest
    expected saving, from its number of calls, the gap of its best time to its lower bound, and its progress
    so far (`tunebench.tuning.budget_scheduler`). Unsupported and failing workloads are reported; their trials
    go to the others.

    Every trial is recorded at once: the same call resumes an interrupted run. Ctrl-C ends the run early and
    returns the summary so far.

    Args:
        suite: Name of a suite (`tunebench workloads` lists them), path of a TOML file of the same form, or
            workloads with the number of calls of each.
        batch: Samples per inference, of a suite or a file.
        device: As for `tune`; on a cluster, one of its devices.
        db: As for `tune`.
        plan: How to tune; `trials` and `minutes` are for all workloads together, and `variants` restricts
            only the operators that have them. Trials default to 50 per workload, wherever they save most.
        watcher: Progress callback; `Progress.workload` is the workload of the current round.

    Returns:
        A summary with the result of each workload.

    Raises:
        InputError: if suite, plan or device is invalid, or no variant supports any workload.
        DatabaseError: as `tune`.
        MissingDependency: as `tune`.
        ClusterLost: as `tune`.
    """
    plan = plan or Plan()
    if plan.trials is None:
        plan = dataclasses.replace(plan, trials=default_trials(suite, batch, plan))
    _refuse_objectives(plan)
    names = _names(plan)
    name, workloads = suite_workloads(suite, batch)
    find = functools.partial(find_any, name, workloads, plan=plan, names=names)
    with _setup(workloads, device, db, plan, find) as (setup, start):
        setup = dataclasses.replace(setup, shared_budget=f"suite {name}")
        budget = SharedBudget(setup, name, workloads, watcher or _ignore)
        budget.run(start())
        return budget.finish()


def default_trials(
    suite: str | Path | Mapping[Workload | str, int], batch: int = 1, plan: Plan | None = None
) -> int:
    """Return the default budget of a suite: 50 trials per workload.

    Args:
        suite: As for `tune_suite`.
        batch: As for `tune_suite`.
        plan: Its `variant_files` may define operators of the suite.

    Raises:
        InputError: if the suite is invalid.
    """
    _names(plan or Plan())
    return TRIALS * len(suite_workloads(suite, batch)[1])


# -- shared by the functions above -------------------------------------------------------------------------


@contextlib.contextmanager
def _setup(
    workloads: Sequence[WeightedWorkload],
    device: Device | str | None,
    db: str | Path | None,
    plan: Plan,
    find: Callable[..., None],
) -> Iterator[tuple[TuningSetup, StartExecutor]]:
    """Find the variants of workloads and open the database; the executor is started on request."""
    limit = limit_user_code(user_code_limit_s(plan))
    with ending_like_ctrl_c(), limit, contextlib.ExitStack() as stack:
        if plan.cluster is None:
            target = _target(device, plan)
            find(target, compilable=True)
            executor: StartExecutor = functools.partial(start_workers, target, plan)
        else:
            cluster = stack.enter_context(open_cluster(plan, [device]))
            [target, *surplus] = targets(cluster, [device])
            if surplus:
                raise InputError("several workloads are tuned for one device at a time: name it by --device")
            find(target, compilable=False)
            variants = [tunable for weighted in workloads for tunable in weighted.variants]
            executors = cluster.executors({target.device.key: worker_setup_of(target, plan, variants)})
            executor = functools.partial(executors.__getitem__, target.device.key)
        store = stack.enter_context(open_store(db))
        start = functools.cache(lambda: stack.enter_context(executor()))
        yield TuningSetup(target=target, plan=plan, store=store), start


def _target(device: Device | str | None, plan: Plan) -> TuningTarget:
    """Return where to tune without a cluster, if the plan allows it."""
    target = tuning_target(device, offline=plan.offline)
    if target.runner == "offline" and plan.learned_pruner:
        raise InputError("the learned pruner needs measurements: the device must be present")
    if target.runner == "offline" and plan.stop_at_gap is not None:
        raise InputError("stop_at_gap needs measured times: the device must be present")
    return target


def _names(plan: Plan) -> tuple[str, ...]:
    """Load the variant files of a plan; return the names of the variants to try, empty for all."""
    return (*plan.variants, *(load_file(path).key for path in plan.variant_files))


def _refuse_objectives(plan: Plan) -> None:
    """Refuse other objectives than the time for workloads that share one budget.

    Raises:
        InputError: The plan has one.
    """
    if not plan.goal.is_time:
        raise InputError("several workloads share a budget by the time they save: leave objectives out")


def _ignore(progress: Progress) -> None:
    """Do nothing with the progress."""


# -- old names, for one version ----------------------------------------------------------------------------


def tune_recorded(
    *, again: bool = False, watcher: Callable[[Any, Progress], None] | None = None, **arguments: Any
) -> TuningSummary:
    """Call `tune_from_profile`; deprecated."""
    warn_renamed("tunebench.tune_recorded", "tunebench.tune_from_profile")

    def tell(progress: Progress) -> None:
        if watcher is not None:
            watcher(Turn(progress.index, progress.count, progress.workload), progress)

    return tune_from_profile(**arguments, retune=again, watcher=tell)


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """First argument of the progress callback of `tune_recorded`; deprecated."""

    place: int
    total: int
    workload: str


__getattr__ = renamed(
    __name__,
    {
        "DemandReport": "TuningSummary",
        "SuiteProgress": "Progress",
        "SuiteReport": "TuningSummary",
        "family": "parse_size_range",
        "is_family": "is_size_range",
    },
)
