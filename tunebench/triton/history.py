"""Timings of Triton configurations in the database, and claims that let one process tune at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunebench._environment import cache_folder
from tunebench._private_file import create_folder, read_private
from tunebench.db import RunStart, SpaceKey, Store, TrialKey, new_owner, open_store
from tunebench.db.owner import is_dead
from tunebench.db.record import RunSummary
from tunebench.device import Device
from tunebench.outcome import Crashed, Measured, Outcome, Result
from tunebench.space import Config

__all__ = ["KernelHistory", "attempts", "open_history", "record_crash"]

_POLL_S = 0.2
_NEAREST = 3
"""Other keys whose fastest configurations are tried first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHistory:
    """What the database knows of one kernel with one key on one device.

    Attributes:
        store: The open database.
        device: The GPU.
        workload: Text with the name of the kernel and the values of its key.
        variant: Name under which configurations are stored.
        revision: Hash of the source; other revisions are ignored.
        owner: Name of this process in claims.
        runs: Id of the run of this process, if it tunes.
    """

    store: Store
    device: Device
    workload: str
    variant: str
    revision: str
    owner: str
    runs: list[str] = field(default_factory=list)

    def outcomes(self) -> dict[str, Outcome]:
        """Return the newest outcome of each configuration by its text."""
        stored = self.store.trial_outcomes(self.device.key, self.workload, self.variant)
        return {str(trial.config): trial.outcome for trial in stored if trial.revision == self.revision}

    def record(self, config: Config, outcome: Outcome) -> None:
        """Store the outcome of a configuration."""
        run_id = self.runs[-1] if self.runs else None
        self.store.record(self._key(config), Result(outcome=outcome), run_id=run_id)

    def _begin(self) -> None:
        """Store the device and the start of a run."""
        start = RunStart(
            device=self.device, workload=self.workload, sampler="triton.autotune", seed=0, host=self.owner
        )
        self.runs.append(self.store.begin_run(start))

    @contextlib.contextmanager
    def turn(self, wait_s: float) -> Iterator[bool]:
        """Wait until no other process tunes this key; the value is whether it is this process's turn.

        The claim of a process that ended is free.

        Args:
            wait_s: Most seconds to wait.
        """
        self._begin()
        claim, deadline = self._claim(), time.monotonic() + wait_s
        while not (taken := self.store.claim(claim, self.owner)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        try:
            yield taken
        finally:
            if taken:
                self.store.release(claim, self.owner)
            self.store.finish_run(self.runs[-1], RunSummary())

    def renew(self) -> None:
        """Renew the claim of this process while it tunes."""
        self.store.claim(self._claim(), self.owner)

    def fast_elsewhere(self) -> list[str]:
        """Return the texts of configurations that were fastest for the nearest other keys, nearest first."""
        others = [
            space.workload
            for space in self.store.spaces()
            if (space.device, space.variant) == (self.device.key, self.variant)
            and space.workload != self.workload
        ]
        nearest = sorted(others, key=lambda workload: _distance(workload, self.workload))[:_NEAREST]
        return list(dict.fromkeys(name for name in map(self._fastest, nearest) if name is not None))

    def _fastest(self, workload: str) -> str | None:
        trials = self.store.trial_outcomes(self.device.key, workload, self.variant)
        times = {str(t.config): t.outcome.median_us for t in trials if isinstance(t.outcome, Measured)}
        return min(times, key=times.__getitem__, default=None)

    def _claim(self) -> TrialKey:
        return TrialKey(
            device=self.device.key,
            workload=self.workload,
            variant=f"{self.variant}-turn",
            revision=self.revision,
            config=Config({"turn": 0}),
        )

    def _key(self, config: Config) -> TrialKey:
        space = SpaceKey(device=self.device.key, workload=self.workload, variant=self.variant)
        return TrialKey(
            device=space.device,
            workload=space.workload,
            variant=space.variant,
            revision=self.revision,
            config=config,
        )


@contextlib.contextmanager
def open_history(
    db: str | Path | None, device: Device, workload: str, variant: str, revision: str
) -> Iterator[KernelHistory]:
    """Open the database for one kernel and key.

    Args:
        db: As for `tunebench.tune`.
        device: The GPU.
        workload: Text with the name of the kernel and the values of its key.
        variant: Name under which configurations are stored.
        revision: Hash of the source.

    Raises:
        TunebenchError: The database cannot be opened.
    """
    with open_store(db) as store:
        yield KernelHistory(
            store=store,
            device=device,
            workload=workload,
            variant=variant,
            revision=revision,
            owner=new_owner(),
        )


@contextlib.contextmanager
def attempts(history: KernelHistory, config: Config) -> Iterator[None]:
    """Note a configuration in a file while it runs, so that one that ends the process is known afterwards."""
    file = create_folder(cache_folder(), "triton_autotune") / _attempt_name(history)
    file.write_text(json.dumps({"owner": history.owner, "config": dict(config)}), encoding="utf-8")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def record_crash(history: KernelHistory) -> None:
    """Record the configuration during which a former process ended."""
    file = cache_folder() / "triton_autotune" / _attempt_name(history)
    try:
        attempt: Mapping[str, Any] = json.loads(read_private(file))
        owner, config = str(attempt["owner"]), Config(attempt["config"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if is_dead(owner):
        history.record(config, Crashed(reason="the process ended while it ran this configuration"))
        file.unlink(missing_ok=True)


def _attempt_name(history: KernelHistory) -> str:
    parts = f"{history.device.key} {history.workload} {history.revision}"
    return f"{hashlib.sha256(parts.encode()).hexdigest()[:16]}.json"


def _distance(a: str, b: str) -> float:
    """Return how far the numbers of two workloads are apart, as ratios; other parts count if they differ."""
    parts = [dict(re.findall(r"(\w+)=([^,]*)", text)) for text in (a, b)]
    total = 0.0
    for name in parts[0].keys() | parts[1].keys():
        left, right = (part.get(name, "") for part in parts)
        if left.isdigit() and right.isdigit():
            total += abs(math.log2((int(left) + 1) / (int(right) + 1)))
        elif left != right:
            total += 10
    return total
