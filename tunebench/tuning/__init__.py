"""`tune`: the one function that wires the stages together.

workload → variants and their spaces → bound → search → compile → verify → time → record → finalists → report
"""

from __future__ import annotations

from pathlib import Path

from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels import load_file
from tunebench.tuning import candidate
from tunebench.tuning.plan import Plan
from tunebench.tuning.report import Progress, Report, Watcher
from tunebench.tuning.session import Session
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["Plan", "Progress", "Report", "tune"]


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
    target = candidate.target(device, offline=plan.offline)
    if plan.calibrated and target.runner == "offline":
        raise InputError("the calibrated pruner learns from measurements; a device that is not here has none")
    names = (*plan.variants, *extra) if plan.variants or extra else ()
    if plan.stop_at_gap is not None and target.runner == "offline":
        raise InputError("a prediction proves nothing of time: stop_at_gap needs a device that is here")
    found, skipped = candidate.find(problem, target.device, names, cache=plan.protocol.cache)
    with open_store(db) as store:
        session = Session(problem, target, plan, store, found, watcher or (lambda progress: None))
        with session.executor() as executor:
            session.search(executor)
            if not session.interrupted and target.runner != "offline":
                session.time_finalists(executor)
        return session.report(skipped)
