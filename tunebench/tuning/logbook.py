"""What a run writes down: every trial under its key, the effort that it took, and how the run ended."""

from __future__ import annotations

import dataclasses
import functools
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunebench import __version__
from tunebench.db.owner import new_owner
from tunebench.db.record import NewMeasurement, Purpose, RunStart, RunSummary, TrialKey, Verdict
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.outcome import Effort, Result
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config
from tunebench.variant import Variant
from tunebench.workload import Workload

__all__ = ["Logbook"]


class Logbook:
    """The records of one run of `tune`.

    Args:
        store: Where they go.
        problem: What is tuned.
        device: Where.
        variants: What is tried, by key.
        sampler: Name of the sampler.
        seed: Seed of all that is random.
    """

    def __init__(
        self,
        store: Store,
        problem: Workload,
        device: Device,
        variants: Mapping[str, Variant[Any]],
        *,
        sampler: str,
        seed: int,
    ) -> None:
        self.store, self._problem, self._device, self._variants = store, problem, device, variants
        self._sampler, self._seed = sampler, seed
        self._started = time.perf_counter()
        self._left: float | None = None
        self._efforts: list[Effort] = []
        self._run_id: str | None = None
        self.revision = functools.cache(self._revision)
        """Returns today's revision of a configuration, by its variant's key; it takes a millisecond once."""
        self.owner = new_owner()
        """Who claims trials for this run."""

    @property
    def elapsed_s(self) -> float:
        """Wall time since the run began, without that in which others had their turn."""
        return (self._left or time.perf_counter()) - self._started

    def leave(self) -> None:
        """Let others have a turn: the time until `come_back` is none of this run's."""
        self._left = self._left or time.perf_counter()

    def come_back(self) -> None:
        """Go on with the run."""
        if self._left is not None:
            self._started += time.perf_counter() - self._left
            self._left = None

    def begin(self) -> int:
        """Open the run; returns how many trials of the same run were done before it was interrupted."""
        place = (self._device.key, str(self._problem))
        done = self.store.interrupted_trials(*place, sampler=self._sampler, seed=self._seed)
        self._run_id = self.store.begin_run(
            RunStart(
                device=self._device,
                workload=str(self._problem),
                sampler=self._sampler,
                seed=self._seed,
                host=self.owner,
                versions={"tunebench": __version__, "python": platform.python_version()},
            )
        )
        return done

    def place(self, variant: str) -> tuple[str, str, str]:
        """Return device, workload and variant, as records are found by."""
        return (self._device.key, str(self._problem), variant)

    def key(self, search: VariantSearch, config: Config) -> TrialKey:
        """Return the identity of a trial: what must be equal for its result to stand."""
        device, workload, variant = self.place(search.key)
        return TrialKey(
            device=device,
            workload=workload,
            variant=variant,
            revision=self.revision(variant, config),
            config=config,
        )

    def _revision(self, variant: str, config: Config) -> str:
        return self._variants[variant].revision(self._problem, config)

    def record(
        self, key: TrialKey, result: Result, purpose: Purpose, bound_us: float, verdict: Verdict | None = None
    ) -> None:
        """Store one result; it is on the disk when this returns."""
        self._efforts.append(result.effort)
        self.store.record(
            key,
            result,
            purpose=purpose,
            bound_us=bound_us,
            run_id=self._run_id,
            seed=self._seed,
            verdict=verdict,
        )

    def record_finalists(self, finalists: Sequence[NewMeasurement]) -> None:
        """Store what finalists took, all at once: some of them alone would be served as the best."""
        self._efforts += [each.result.effort for each in finalists]
        additions = [dataclasses.replace(each, seed=self._seed) for each in finalists]
        self.store.record_together(additions, run_id=self._run_id)

    def seconds(self, busy_s: float) -> dict[str, float]:
        """Return the wall time and its parts, given the time in which anything was compiled or measured."""
        wall_s = self.elapsed_s
        parts = {
            name: float(np.sum([getattr(effort, name) for effort in self._efforts]))
            for name in ("compile_s", "verify_s", "measure_s")
        }
        return {"wall_s": wall_s, **parts, "overhead_s": max(0.0, wall_s - busy_s)}

    def finish(self, masked: int, cached: int, seconds: Mapping[str, float]) -> None:
        """Close the run: it was not interrupted."""
        assert self._run_id is not None
        effort = Effort(**{name: seconds[name] for name in ("compile_s", "verify_s", "measure_s")})
        self.store.finish_run(
            self._run_id,
            RunSummary(
                masked=masked,
                cached=cached,
                wall_s=seconds["wall_s"],
                effort=effort,
                overhead_s=seconds["overhead_s"],
            ),
        )
