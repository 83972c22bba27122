"""Tuning on a Ray cluster: selection of its devices, and one concurrent run per device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from tunebench._device import architecture_name, products_named, selects
from tunebench.device import Device
from tunebench.errors import ClusterLost, InputError
from tunebench.executor.accelerator import labels
from tunebench.executor.message import Kind, WorkerRequest, WorkerSetup
from tunebench.executor.ray import Cluster, RayExecutor, check_address, worker_setup
from tunebench.kernels import loaded_files
from tunebench.tuning.plan import Plan
from tunebench.tuning.tunable import TunableVariant, TuningTarget
from tunebench.tuning.workers import start_on_worker

__all__ = ["Wanted", "open_cluster", "side_by_side", "targets", "worker_setup_of"]

T = TypeVar("T")

Wanted = Device | str | None
"""A device, its name, architecture or key; ``"cpu"`` or ``"cuda"`` for any device of that kind."""

OF_KIND = {"cpu": "cpu", "cuda": "gpu"}
PROCESSORS = ("x86_64", "aarch64", "arm64")
"""Prefixes of the architectures of CPUs, and so of their keys."""
EVERY = "all"


def open_cluster(plan: Plan, selectors: Sequence[Wanted]) -> Cluster:
    """Connect to the cluster of a plan, and list the devices of its workers.

    Args:
        plan: The tuning plan.
        selectors: The devices to tune on; ``"all"`` for every device of the cluster.

    Raises:
        InputError: if the address is invalid, or the plan is for an absent device.
        MissingDependency: if Ray is not installed.
        ClusterLost: if the cluster is unreachable, or none of its workers is usable.
    """
    assert plan.cluster is not None
    check_address(plan.cluster)
    if plan.offline or "offline" in selectors:
        raise InputError("a cluster measures on its own devices: --cluster excludes --device offline")
    kinds = {_kind(selector) for selector in selectors}
    named = [selector for selector in selectors if selector is not None and selector not in (*OF_KIND, EVERY)]
    asked = frozenset[str]()
    if len(named) == len(selectors):  # otherwise every node may have a wanted device
        asked = asked.union(
            *(labels(selector.key if isinstance(selector, Device) else selector) for selector in named)
        )
    cluster = Cluster(
        WorkerRequest(address=plan.cluster, kind=kinds.pop() if len(kinds) == 1 else None, labels=asked)
    )
    if not cluster.devices:
        reasons = "; ".join(cluster.refused) or "it has no node with a free GPU or CPU"
        cluster.close()
        raise ClusterLost(f"the cluster at {plan.cluster} has no usable worker: {reasons}")
    return cluster


def _kind(selector: Wanted) -> Kind | None:
    if isinstance(selector, Device):
        return selector.kind
    if selector is None or selector == EVERY:
        return None
    if selector == "cuda" or architecture_name(selector).startswith("sm_") or products_named(selector):
        return "gpu"
    return "cpu" if selector == "cpu" or selector.startswith(PROCESSORS) else None


def targets(cluster: Cluster, selectors: Sequence[Wanted]) -> list[TuningTarget]:
    """Return the wanted devices of a cluster, each once.

    Raises:
        InputError: if one is missing or ambiguous; the message lists the devices of the cluster.
    """
    chosen = (
        cluster.devices if EVERY in selectors else [_the_one(cluster, selector) for selector in selectors]
    )
    unique = {device.key: device for device in chosen}
    return [
        TuningTarget(device=device, runner="cpu" if device.kind == "cpu" else "cuda")
        for device in unique.values()
    ]


def _the_one(cluster: Cluster, selector: Wanted) -> Device:
    fitting = [device for device in cluster.devices if _fits(device, selector)]
    if len(fitting) == 1:
        return fitting[0]
    available = ", ".join(sorted(device.key for device in fitting or cluster.devices))
    name = selector.key if isinstance(selector, Device) else selector
    if fitting:
        raise InputError(
            f"the cluster has several such devices: {available}; name one by --device, or use --arch all"
        )
    refusals = "".join(f"; {reason}" for reason in cluster.refused)
    raise InputError(f"the cluster at {cluster.address} has no {name}; it has {available}{refusals}")


def _fits(device: Device, selector: Wanted) -> bool:
    if isinstance(selector, Device):
        return device.key == selector.key
    if selector is None:
        return True
    return selects(selector, device.key) or OF_KIND.get(selector) == device.kind


def worker_setup_of(target: TuningTarget, plan: Plan, variants: Sequence[TunableVariant]) -> WorkerSetup:
    """Return the setup of the workers of a device."""
    languages = tuple(sorted({tunable.variant.language for tunable in variants}))
    files = {path: Path(path).read_text(encoding="utf-8") for path in loaded_files()}
    return worker_setup(functools.partial(start_on_worker, target, plan, languages), files)


def side_by_side(runs: Mapping[str, Callable[[], T]], executors: Mapping[str, RayExecutor]) -> list[T]:
    """Run in threads; Ctrl-C closes the executors, which ends the runs.

    An error of one run is raised after the others end.

    Args:
        runs: The runs, by key of their device.
        executors: The executor of each.

    Returns:
        The result of each run.
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
