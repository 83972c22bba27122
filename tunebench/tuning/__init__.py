"""`tune`: the one function that wires the stages together; `tune_suite` does it for many problems at once.

workload → variants and their spaces → bound → search → compile → verify → time → record → finalists → report
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.executor import Executor
from tunebench.kernels import load_file
from tunebench.task import Task
from tunebench.tuning import candidate, demand
from tunebench.tuning.candidate import Candidate, Target
from tunebench.tuning.cluster import equip, open_cluster, side_by_side, targets
from tunebench.tuning.demand import DemandReport, Turn
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report, Watcher
from tunebench.tuning.session import Session
from tunebench.tuning.size_range import family, is_family, tune_all
from tunebench.tuning.suite import Suite, look, suite_of
from tunebench.tuning.suite_session import SuiteSession
from tunebench.tuning.workers import start_workers
from tunebench.tuning.workload_result import SuiteProgress, SuiteReport, SuiteWatcher, WorkloadResult
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = [
    "DemandReport",
    "Plan",
    "Progress",
    "Report",
    "SuiteProgress",
    "SuiteReport",
    "Turn",
    "WorkloadResult",
    "default_trials",
    "family",
    "is_family",
    "tune",
    "tune_all",
    "tune_devices",
    "tune_recorded",
    "tune_suite",
]

TRIALS_EACH = 50
"""Trials for each problem of a suite, on average, where no budget is given."""


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
            On a cluster: what its workers find there, by name, architecture or key.
        db: A path or URL; None is the user's database.
        plan: How to tune.
        watcher: Is told of the progress.

    Raises:
        InputError: if the problem, the plan or the device cannot be used, or no variant can do the problem.
        DatabaseError: if the database cannot be used; what was recorded before is kept. One that goes away
            while the run goes on is waited for, up to two minutes at a time.
        MissingDependency: if a GPU is here and what drives it is not installed; or Ray, for a cluster.
        ClusterLost: if the cluster cannot be reached, or none of its workers can be made use of.
    """
    plan = plan or Plan()
    if plan.cluster is not None:
        (report,) = tune_devices(workload, devices=[device], db=db, plan=plan, watcher=watcher)
        return report
    problem, names = _problem(workload, plan)
    target = _target(device, plan)
    found = candidate.find(problem, target.device, names, cache=plan.protocol.cache)
    start = functools.partial(start_workers, target, plan)
    return _run(problem, target, plan, db, found, watcher, start)


def _target(device: Device | str | None, plan: Plan) -> Target:
    """Return where to tune without a cluster, if the plan can be had there."""
    target = candidate.target(device, offline=plan.offline)
    if plan.calibrated and target.runner == "offline":
        raise InputError("the calibrated pruner learns from measurements; a device that is not here has none")
    if plan.stop_at_gap is not None and target.runner == "offline":
        raise InputError("a prediction proves nothing of time: stop_at_gap needs a device that is here")
    return target


def tune_devices(
    workload: Workload | str,
    *,
    devices: Sequence[Device | str | None] = ("all",),
    db: str | Path | None = None,
    plan: Plan,
    watcher: Watcher | None = None,
) -> list[Report]:
    """Tune a problem on a Ray cluster for several of its devices, side by side; `plan.cluster` is required.

    The driver alone writes to the database. Ctrl-C, and the loss of the cluster, end all runs early.

    Args:
        workload: The problem, or its text.
        devices: Devices, their names, architectures or keys, as the cluster's workers find them; ``"all"``
            takes every kind of GPU there is, or of processor where there is no GPU.
        db: A path or URL; None is the user's database.
        plan: How to tune for each.
        watcher: Is told of the progress, `Progress.device` of which.

    Returns:
        A report for each device.

    Raises:
        InputError: as `tune` does, or if a device is not in the cluster.
        ClusterLost: if the cluster cannot be reached, or none of its workers can be made use of.
        MissingDependency: if Ray is not installed.
    """
    if plan.cluster is None:
        raise InputError("tuning for several devices at once needs a cluster: Plan(cluster=...), --cluster")
    problem, names = _problem(workload, plan)
    with open_cluster(plan, devices) as cluster:
        wanted = {target.device.key: target for target in targets(cluster, devices)}
        found = {
            key: candidate.find(problem, one.device, names, cache=plan.protocol.cache, compilable=False)
            for key, one in wanted.items()
        }
        executors = cluster.executors({key: equip(wanted[key], plan, found[key][0]) for key in wanted})

        def run(key: str) -> Report:
            return _run(problem, wanted[key], plan, db, found[key], watcher, lambda: executors[key])

        runs = {key: functools.partial(run, key) for key in wanted}
        if len(runs) == 1:
            return [one() for one in runs.values()]
        return side_by_side(runs, executors)


def _problem(workload: Workload | str, plan: Plan) -> tuple[Workload, tuple[str, ...]]:
    """Return the problem and the names of the variants to try; users' files may define both."""
    names = _names(plan)
    return parse(workload) if isinstance(workload, str) else workload, names


def _names(plan: Plan) -> tuple[str, ...]:
    return (*plan.variants, *(load_file(path).key for path in plan.variant_files))


def _run(
    problem: Workload,
    target: Target,
    plan: Plan,
    db: str | Path | None,
    candidates: tuple[list[Candidate], dict[str, str]],
    watcher: Watcher | None,
    start: Callable[[], Executor[Task]],
) -> Report:
    """Search, time the finalists and report, on whatever `start` starts."""
    found, skipped = candidates
    with open_store(db) as store:
        session = Session(problem, target, plan, store, found, watcher or (lambda progress: None))
        with start() as executor:
            session.search(executor)
            if not session.interrupted and target.runner != "offline":
                session.time_finalists(executor)
        return session.report(skipped)


def tune_recorded(
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    again: bool = False,
    watcher: Callable[[Turn, Progress], None] | None = None,
) -> DemandReport:
    """Tune what programs were seen to run on a device (`tunebench.torch.profile`), the most worth it first.

    Ctrl-C ends it and returns the report of what was found; what was recorded stays recorded, and the same
    call goes on from there.

    Args:
        device: As for `tune`.
        db: As for `tune`: where the programs were recorded, and where results go.
        plan: How to tune each problem; `Plan.minutes` is for all of them together.
        again: Whether to tune problems, too, that are tuned already with today's sources.
        watcher: Is told which problem is being tuned, and of its progress.

    Raises:
        InputError: if nothing was recorded, or the plan or the device cannot be used.
        DatabaseError: if the database cannot be used; what was recorded before is kept.
        MissingDependency: if a GPU is here and what drives it is not installed.
    """
    return demand.run(
        lambda problem, plan, told: tune(problem, device=device, db=db, plan=plan, watcher=told),
        device=device,
        db=db,
        plan=plan or Plan(),
        again=again,
        watcher=watcher or (lambda turn, progress: None),
    )


def tune_suite(
    suite: str | Path | Mapping[Workload | str, int],
    *,
    batch: int = 1,
    device: Device | str | None = None,
    db: str | Path | None = None,
    plan: Plan | None = None,
    watcher: SuiteWatcher | None = None,
) -> SuiteReport:
    """Tune all problems of a model with one budget, which goes where it saves the model the most time.

    Every problem gets a first round of trials; from then on each round goes to the problem from which the
    greatest saving is expected: by how often the model runs it, how far its best time is from its bound, and
    how that has fallen so far (`tunebench.tuning.budget_scheduler`). What no variant can do, and what fails, is
    told, and its trials go to the others.

    What is recorded stays recorded: the same call takes up an interrupted run where it stopped. Ctrl-C ends
    the run early and returns the report of what was found.

    Args:
        suite: Name of a suite (`tunebench workloads` lists them); the path of a TOML file in the same form;
            or problems with how often the model runs each.
        batch: Samples that the network of a suite or a file runs at once.
        device: As for `tune`; on a cluster, one of its devices.
        db: As for `tune`.
        plan: How to tune; its `trials` and `minutes` are for all problems together, and its `variants` are
            the only ones tried for the operators that have them. None gives 50 trials a problem on average.
        watcher: Is told of the progress.

    Raises:
        InputError: if the suite, the plan or the device cannot be used, or no variant can do any problem.
        DatabaseError, MissingDependency, ClusterLost: as `tune` does.
    """
    plan = plan or Plan(trials=default_trials(suite, batch))
    names = _names(plan)
    problems = suite_of(suite, batch)
    with _suite_workers(problems, device, plan, names) as (target, start), open_store(db) as store:
        session = SuiteSession(problems, target, plan, store, watcher or (lambda progress: None))
        with start() as executor:
            session.run(executor)
        return session.report()


def default_trials(
    suite: str | Path | Mapping[Workload | str, int], batch: int = 1, plan: Plan | None = None
) -> int:
    """Return the trials that a suite gets where nobody tells: 50 for each of its problems.

    Args:
        suite: As for `tune_suite`.
        batch: Likewise.
        plan: Its `variant_files` may define operators of the suite.

    Raises:
        InputError: if the suite cannot be used.
    """
    _names(plan or Plan())
    return TRIALS_EACH * len(suite_of(suite, batch).members)


@contextlib.contextmanager
def _suite_workers(
    suite: Suite, device: Device | str | None, plan: Plan, names: Sequence[str]
) -> Iterator[tuple[Target, Callable[[], Executor[Task]]]]:
    """Look into a suite; yield where to tune it, and what starts the workers: of a cluster, or ours."""
    if plan.cluster is None:
        target = _target(device, plan)
        look(suite, target, plan, names)
        yield target, functools.partial(start_workers, target, plan)
        return
    with open_cluster(plan, [device]) as cluster:
        [target, *others] = targets(cluster, [device])
        if others:
            raise InputError("a suite is tuned for one device at a time: name it by --device")
        found = look(suite, target, plan, names, compilable=False)
        executors = cluster.executors({target.device.key: equip(target, plan, found)})
        yield target, lambda: executors[target.device.key]
