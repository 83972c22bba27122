"""Replay of a recorded tuning space: the search of `tune`, with recorded times in place of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench import device as devices
from tunebench._device import product_name
from tunebench.bound import Bounds, bound
from tunebench.cache_file import RecordedSpace
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.forecast import predict_us
from tunebench.kernels import variant
from tunebench.kernels.recorded_kernel import find_recorded_kernel
from tunebench.objective import TIME_ONLY, Goal, resource_quantities
from tunebench.outcome import Measured, Outcome, Resources, Result, Verification
from tunebench.search.loop import Budget, optimality_proof, run_search
from tunebench.search.optimality_proof import OptimalityProof, violates
from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.space import Config, Table
from tunebench.variant import Costs
from tunebench.workload import Traffic
from tunebench.workloads import parse

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CHECKPOINTS", "PostponedCheck", "ReplayResult", "ReplayTrace", "ReplayedTrial", "Space", "replay"]

CHECKPOINTS = (25, 50, 100, 200)
"""Trials after which the efficiency is reported."""

GENERIC = "sm_70"
"""Architecture whose representative predicts devices that are not described."""

_RECORDED = Verification(how="not verified", detail="recorded by another tuner")


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A recorded tuning space with the description of its kernel and device.

    Attributes:
        recording: The recorded configurations and times.
        device: Its device, if described.
        costs: Work of its configurations, if the kernel is described.
        bounds: Lower bounds, if kernel and device are described.
        missing: Why there are no bounds; empty with bounds.
        traffic: Compulsory memory traffic, if the kernel is described.
    """

    recording: RecordedSpace
    device: Device | None
    costs: Costs | None
    bounds: Bounds | None
    missing: str = ""
    traffic: Traffic | None = None

    @classmethod
    def of(cls, recording: RecordedSpace, device: Device | None = None) -> Space:
        """Add the descriptions of kernel and device to a recorded tuning space.

        Args:
            recording: The recorded configurations and times.
            device: Its device. Default: the described device of the recorded name, or this machine's.
        """
        device = device or devices.described().get(product_name(recording.device))
        if recording.workload:
            return cls._of_variant(recording, device or _local(recording.device))
        table = recording.table
        values = {parameter.name: parameter.values for parameter in table.space.parameters}
        kernel = find_recorded_kernel(recording.kernel, values, recording.problem)
        if isinstance(kernel, str):
            return cls(recording=recording, device=device, costs=None, bounds=None, missing=kernel)
        # Threads and shared memory, which the surrogate uses, are the same on any device.
        costs = kernel.costs(table.columns, device or devices.representative(GENERIC))
        if device is None or device.compute_capability < kernel.minimum_cc:
            missing = f"{recording.device or 'its device'} is not described"
            if device is not None:
                missing = f"the cost model of {kernel.kernel} does not cover {device.architecture}"
            return cls(
                recording=recording,
                device=device,
                costs=costs,
                bounds=None,
                missing=missing,
                traffic=kernel.traffic,
            )
        bounds = bound(costs, kernel.traffic, device, cache="warm", rows=len(table))
        return cls(recording=recording, device=device, costs=costs, bounds=bounds, traffic=kernel.traffic)

    @classmethod
    def _of_variant(cls, recording: RecordedSpace, device: Device | None) -> Space:
        """Return the exported space of a variant, with the cost model of the variant."""
        unknown = cls(recording=recording, device=device, costs=None, bounds=None)
        if device is None:
            missing = f"{recording.device or 'its device'} is not described"
            return dataclasses.replace(unknown, missing=missing)
        try:
            workload, kernel = parse(recording.workload), variant(recording.kernel)
            ordinals = [kernel.space.ordinals(recording.table.config(i)) for i in range(len(recording.table))]
            table = Table(kernel.space, np.array(ordinals, dtype=np.int16))
            costs = kernel.costs(workload, table, device)
        except InputError as error:
            return dataclasses.replace(unknown, missing=str(error))
        traffic = workload.traffic()
        bounds = bound(costs, traffic, device, cache="warm", rows=len(table))
        return cls(recording=recording, device=device, costs=costs, bounds=bounds, traffic=traffic)

    @property
    def multiply_adds_us(self) -> NDArray[np.float64] | None:
        """Time of the multiply-adds alone, spread evenly over all SMs, in microseconds: the simplest bound.

        None if kernel or device is not described.
        """
        if self.bounds is None or self.costs is None or self.device is None:
            return None
        rate = self.device.sm_count * self.device.fma_per_clock * self.device.max_clock_mhz
        work = np.asarray(self.costs.blocks, dtype=np.float64) * self.costs.fma
        return np.broadcast_to(work / rate, len(self.bounds))

    def predicted_us(self) -> NDArray[np.float64] | None:
        """Return the predicted times of the configurations, in microseconds.

        On a device that is not described they are those of `GENERIC`, since kernels rank alike on most GPUs.
        None if the kernel is not described, or the device is a processor.
        """
        if self.costs is None or self.traffic is None:
            return None
        device, bounds = self.device, self.bounds
        if device is None or bounds is None:
            device = devices.representative(GENERIC)
            bounds = bound(self.costs, self.traffic, device, cache="warm", rows=len(self.recording.table))
        if device.kind != "gpu":
            return None
        return predict_us(bounds, self.costs, device, self.traffic, cache="warm")

    def prospects(self, elsewhere: Sequence[RecordedSpace] = ()) -> Prospects:
        """Return the configurations as the samplers take them, without their times.

        Args:
            elsewhere: Recorded tuning spaces of the same kernel on other devices.

        Raises:
            InputError: if one of them has other parameters.
        """
        table = self.recording.table
        nothing: NDArray[np.float64] = np.zeros(len(table))
        return Prospects(
            table=table,
            predicted_us=self.predicted_us(),
            bounds_us=self.bounds.us if self.bounds is not None else nothing,
            figures=self.costs.figures(len(table)) if self.costs is not None else {},
            elsewhere_us=tuple(_times_of(self.recording, space) for space in elsewhere),
        )


def _times_of(recording: RecordedSpace, space: RecordedSpace) -> NDArray[np.float64]:
    """Return the times of configurations in another recording: infinite for a failure, NaN if unknown."""
    rows = space.table.rows_of(recording.table)
    times_us = np.where(np.isnan(space.times_us), np.inf, space.times_us)
    # The row of a missing configuration is -1: it reads the last time, which is then discarded.
    return np.where(rows >= 0, times_us[rows], np.nan)


def _local(name: str) -> Device | None:
    """Return the device of this machine that has a name; None if there is none."""
    local_devices = (devices.local_cpu(), *devices.local_gpus())
    return next((device for device in local_devices if device.name == product_name(name)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PostponedCheck:
    """The postponed configurations of a search, compared with their recorded times.

    Attributes:
        count: Number of postponed configurations.
        winners: Expected number of them that are faster than the best found.
        missed: Number of them that are faster.
        faster: Number of configurations of the whole space that are faster.
    """

    count: int
    winners: float
    missed: int
    faster: int

    @classmethod
    def of(cls, search: VariantSearch, times_us: NDArray[np.float64]) -> PostponedCheck:
        """Return the configurations that a search would postpone next, compared with all recorded times.

        Args:
            search: The search.
            times_us: Recorded times, in microseconds.
        """
        unlikely = search.unlikely(search.best_us)
        faster = times_us < search.best_us
        return cls(
            count=unlikely.count,
            winners=unlikely.winners,
            missed=int((faster & unlikely.rows).sum()),
            faster=int(faster.sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTrace:
    """The course of a search of a recorded tuning space.

    Attributes:
        seed: Seed of the sampler.
        best_us: Best time after each trial, in microseconds; infinite before the first success.
        exhausted: Whether it ended before its budget: no configuration was open, or `stop_at_gap` was
            reached.
    """

    seed: int
    best_us: tuple[float, ...]
    exhausted: bool

    def efficiency(self, optimum_us: float, counts: Iterable[int] = CHECKPOINTS) -> dict[int, float]:
        """Return optimum / best after each number of trials; an exhausted search keeps its best.

        Numbers that the search did not reach are left out.

        Args:
            optimum_us: The least recorded time, in microseconds.
            counts: Numbers of trials.
        """
        asked = len(self.best_us)
        return {
            count: optimum_us / self.best_us[min(count, asked) - 1]
            for count in counts
            if asked and (count <= asked or self.exhausted)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedTrial:
    """One trial of a replayed search: its configuration, outcome, and lower bound in microseconds."""

    config: Config
    outcome: Outcome
    bound_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult(ReplayTrace):
    """The result of `replay`.

    Attributes:
        trials: The trials, in order.
        masked: Configurations pruned by their lower bound.
        optimality_proof: The optimality proof of the best.
        postponed: The configurations that the learned pruner would postpone next.
        front: The best trial by the goal, or those of its Pareto front.
        goal: Metrics, objectives and requirements.
    """

    trials: tuple[ReplayedTrial, ...]
    masked: int
    optimality_proof: OptimalityProof
    postponed: PostponedCheck
    front: tuple[ReplayedTrial, ...] = ()
    goal: Goal = TIME_ONLY


class ReplayExecutor:
    """Returns recorded outcomes at once, in place of measuring (an `Executor` of proposals)."""

    capacity = 1
    abort_above_us: float | None = None

    def __init__(self, recording: RecordedSpace) -> None:
        self._recording = recording

    def submit(self, task: Proposal) -> Future[Result]:
        """Return the recorded outcome of a proposal."""
        future: Future[Result] = Future()
        future.set_result(Result(outcome=self._outcome(task.row)))
        return future

    def _outcome(self, row: int) -> Outcome:
        if row in self._recording.failures:
            return self._recording.failures[row]
        us, fastest_us = float(self._recording.times_us[row]), float(self._recording.fastest_us[row])
        return Measured(
            median_us=us,
            ci_us=(us, us),
            samples_us=(fastest_us, us),
            cache="warm",
            verification=_RECORDED,
            metrics=self._metrics(row),
        )

    def _metrics(self, row: int) -> dict[str, float]:
        """Return the recorded metrics of a configuration that has them."""
        metrics = {name: float(column[row]) for name, column in self._recording.metrics.items()}
        return {name: value for name, value in metrics.items() if np.isfinite(value)}


def replay(
    space: Space,
    *,
    trials: int,
    seed: int,
    sampler: str,
    elsewhere: Sequence[RecordedSpace] = (),
    stop_at_gap: float | None = None,
    learned_pruner: bool = False,
    goal: Goal = TIME_ONLY,
) -> ReplayResult:
    """Search a recorded tuning space as `tune` searches a device.

    The sampler learns only the times of the configurations that it proposed.

    Args:
        space: The recorded tuning space.
        trials: Distinct configurations to try, failures included.
        seed: Seed of the sampler.
        sampler: Name of the sampler.
        elsewhere: Recorded tuning spaces of the same kernel on other devices, for a warm start.
        stop_at_gap: Optimality gap at which the search stops.
        learned_pruner: Whether to postpone configurations that are unlikely to win.
        goal: Metrics, objectives and requirements: expressions of the recorded times, parameters and metrics.

    Returns:
        The course of the search, and its optimality proof.

    Raises:
        UnknownName: if there is no such sampler.
        InputError: if a space of `elsewhere` has other parameters.
    """
    prospects = space.prospects(elsewhere)
    search = VariantSearch(
        space.recording.kernel,
        prospects,
        sampler=sampler,
        seed=seed,
        learned_pruner=learned_pruner,
        goal=goal,
    )
    goal.check(
        [*space.recording.metrics, *(parameter.name for parameter in prospects.table.space.parameters)]
    )
    best_us: list[float] = []
    tried: list[ReplayedTrial] = []

    def on_result(proposal: Proposal, result: Result) -> Outcome:
        outcome = goal.completed(result.outcome, resource_quantities(proposal.config, Resources()))
        time = getattr(outcome, "median_us", np.inf) if goal.allows(outcome) else np.inf
        best_us.append(min(time, best_us[-1] if best_us else np.inf))
        tried.append(ReplayedTrial(config=proposal.config, outcome=outcome, bound_us=proposal.bound_us))
        if violates(result.outcome, proposal.bound_us):
            # The bounds of the variant are wrong: without them nothing is pruned, as in a run of `tune`.
            proposal.search.distrust()
        return outcome

    run_search(
        [search],
        ReplayExecutor(space.recording),
        Budget(trials=trials),
        make_task=lambda proposal: proposal,
        claim=lambda proposal: True,
        on_result=on_result,
        stop_at_gap=stop_at_gap,
    )
    return ReplayResult(
        seed=seed,
        best_us=tuple(best_us),
        trials=tuple(tried),
        masked=search.masked,
        exhausted=len(best_us) < trials,
        optimality_proof=optimality_proof([search], search.best_us),
        postponed=PostponedCheck.of(search, space.recording.times_us),
        front=tuple(tried[index] for index in goal.front([trial.outcome for trial in tried])),
        goal=goal,
    )
