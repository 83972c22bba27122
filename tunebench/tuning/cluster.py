"""Tuning on a Ray cluster: which of its devices are meant, and one run for each of them, side by side."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from tunebench import device as devices
from tunebench.device import Device
from tunebench.errors import ClusterLost, InputError
from tunebench.executor._accelerator import labels
from tunebench.executor._message import Kind
from tunebench.executor.ray import Cluster, Equipment, Look, RayExecutor, check_address, equipment
from tunebench.kernels import loaded_files
from tunebench.tuning.candidate import Candidate, Target
from tunebench.tuning.plan import Plan
from tunebench.tuning.workers import start_on_worker

__all__ = ["Wanted", "equip", "open_cluster", "side_by_side", "targets"]

T = TypeVar("T")

Wanted = Device | str | None
"""A device, its name, its architecture or its key; ``"cpu"`` or ``"cuda"`` for any of the kind."""

OF_KIND = {"cpu": "cpu", "cuda": "gpu"}
PROCESSORS = ("x86_64", "aarch64", "arm64")
"""Begin the architectures of processors, and so their keys."""
EVERY = "all"


def open_cluster(plan: Plan, wanted: Sequence[Wanted]) -> Cluster:
    """Connect to the cluster of a plan, and see what its workers have.

    Args:
        plan: How to tune.
        wanted: The devices that are meant; ``"all"`` among them for every one of the cluster.

    Raises:
        InputError: if its address is none, or the plan asks for what a cluster does not do.
        MissingDependency: if Ray is not installed.
        ClusterLost: if it cannot be reached, or has no worker that can be made use of.
    """
    assert plan.cluster is not None
    check_address(plan.cluster)
    if plan.offline or "offline" in wanted:
        raise InputError("a cluster measures on the devices it has: --cluster excludes --device offline")
    kinds = {_kind(one) for one in wanted}
    named = [one for one in wanted if one is not None and one not in (*OF_KIND, EVERY)]
    asked = frozenset[str]()
    if len(named) == len(wanted):  # otherwise every node may have what is meant
        asked = asked.union(*(labels(one.key if isinstance(one, Device) else one) for one in named))
    cluster = Cluster(Look(address=plan.cluster, kind=kinds.pop() if len(kinds) == 1 else None, labels=asked))
    if not cluster.devices:
        reasons = "; ".join(cluster.refused) or "it has no node with a GPU or a CPU to offer"
        cluster.close()
        raise ClusterLost(f"no worker of the cluster at {plan.cluster} can be made use of: {reasons}")
    return cluster


def _kind(wanted: Wanted) -> Kind | None:
    if isinstance(wanted, Device):
        return wanted.kind
    if wanted is None or wanted == EVERY:
        return None
    if wanted == "cuda" or wanted.startswith("sm_") or wanted in devices.described():
        return "gpu"
    return "cpu" if wanted == "cpu" or wanted.startswith(PROCESSORS) else None


def targets(cluster: Cluster, wanted: Sequence[Wanted]) -> list[Target]:
    """Return the devices of a cluster that are meant, each once.

    Raises:
        InputError: if one is not there, or is ambiguous; it says what there is.
    """
    found = cluster.devices if EVERY in wanted else [_the_one(cluster, one) for one in wanted]
    unique = {device.key: device for device in found}
    return [
        Target(device=device, runner="cpu" if device.kind == "cpu" else "cuda") for device in unique.values()
    ]


def _the_one(cluster: Cluster, wanted: Wanted) -> Device:
    fitting = [device for device in cluster.devices if _fits(device, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(sorted(device.key for device in fitting or cluster.devices))
    name = wanted.key if isinstance(wanted, Device) else wanted
    if fitting:
        raise InputError(
            f"the cluster has several such devices: {there}; name one by --device, or --arch all"
        )
    others = "".join(f"; {reason}" for reason in cluster.refused)
    raise InputError(f"the cluster at {cluster.address} has no {name}; it has {there}{others}")


def _fits(device: Device, wanted: Wanted) -> bool:
    if isinstance(wanted, Device):
        return device.key == wanted.key
    if wanted is None:
        return True
    return wanted in (device.name, device.architecture, device.key) or (OF_KIND.get(wanted) == device.kind)


def equip(target: Target, plan: Plan, found: Sequence[Candidate]) -> Equipment:
    """Return what the workers of a device need."""
    languages = tuple(sorted({candidate.variant.language for candidate in found}))
    files = {path: Path(path).read_text(encoding="utf-8") for path in loaded_files()}
    return equipment(functools.partial(start_on_worker, target, plan, languages), files)


def side_by_side(runs: Mapping[str, Callable[[], T]], executors: Mapping[str, RayExecutor]) -> list[T]:
    """Make runs in threads; Ctrl-C stops their executors, and with them the runs.

    An error of one lets the others end first.

    Args:
        runs: By the key of their device.
        executors: What each uses.
    """
    with ThreadPoolExecutor(max_workers=len(runs)) as pool:
        futures = [pool.submit(run) for run in runs.values()]
        while True:
            try:
                wait(futures)
                return [future.result() for future in futures]
            except KeyboardInterrupt:
                for executor in executors.values():
                    executor.close()
