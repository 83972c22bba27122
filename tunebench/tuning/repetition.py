"""Repetition of a stored run: its workload, device and plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunebench import device as devices
from tunebench.db.record import StoredRun
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.kernels import load_file
from tunebench.tuning.plan import Plan
from tunebench.tuning.run_options import SHOWN_ID, repeated_plan
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["Repetition", "repetition"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Arguments of `tune` that repeat a run.

    Attributes:
        workload: Its workload.
        device: Its device; on a cluster, its key.
        plan: Its plan.
    """

    workload: Workload
    device: Device | str
    plan: Plan


def repetition(run: str, db: str | Path | None = None) -> Repetition:
    """Return the arguments of `tune` that repeat a run with the same options and the same seed.

    Args:
        run: Id of the run, or its first characters.
        db: Path or URL of the database with the run. Default: the user's database.

    Raises:
        InputError: if there is no such run, its options are unknown, a variant file of it is gone or has
            changed, or its device is absent.
        DatabaseError: if the database cannot be read.
    """
    with open_store(db, read_only=True) as store:
        stored = store.run_of(run)
    name = f"run {stored.id[:SHOWN_ID]} of {stored.workload}"
    if stored.options is None:
        raise InputError(
            f"{name} cannot be repeated: it is an import, or of an earlier version that stored no options"
        )
    plan = repeated_plan(stored.options, name)
    for path in plan.variant_files:  # which may bring the operator
        load_file(path)
    return Repetition(workload=parse(stored.workload), device=_device(stored, plan, name), plan=plan)


def _device(run: StoredRun, plan: Plan, name: str) -> Device | str:
    if plan.cluster is not None:
        return run.device
    if plan.offline:
        return Device(**run.descriptor)
    present = {device.key: device for device in (devices.local_cpu(), *devices.local_gpus())}
    if run.device not in present:
        raise InputError(
            f"{name} cannot be repeated: it was measured on {run.device}, and this machine has "
            f"{', '.join(present)}; repeat it where that device is"
        )
    return present[run.device]
