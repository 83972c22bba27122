"""Memory plans of a model's training step on a device, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.graph import InputSpec, make_model
from tunebench.optimizer import find_optimizer
from tunebench.training.fitting.profile import profile_step
from tunebench.training.memory import (
    CUTS,
    DeviceUse,
    HostLink,
    MemoryPlan,
    PlanEffort,
    TrainingStep,
    device_use,
    largest_batch,
    least_bytes,
    plan_memory,
    plan_on_device,
    step_at,
    unplanned,
)

__all__ = ["BatchFit", "BatchSearch", "ModelProfile", "ModelProfiler"]

QUICK = PlanEffort(exact_operations=0, rounds=0, relaxed_size=0)
"""Effort of the plans that only show whether a batch fits."""

QUICK_CUTS = (0.04, 0.16)
"""Fractions of the budget that these plans leave to fragmentation."""

RESOLUTION = 0.002
"""Fraction that the largest batch without a plan may be too small: batches below 500 are exact."""

PLANNED_RESOLUTION = 0.02
"""Fraction that the largest batch with a plan may be too small: batches below 50 are exact."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The training step of a model at one batch.

    Attributes:
        name: The model's class.
        step: Operations and tensors.
        layers: Module of each operation.
        forward: Number of operations of the forward pass.
    """

    name: str
    step: TrainingStep
    layers: tuple[str, ...]
    forward: int


class ModelProfiler:
    """Profiles a model's training step at any batch; the model is made once.

    Attributes:
        device: The device.
        name: The model's class.
        batch: First extent of the inputs; none if they differ.
        parameters: Name and bytes of each trained parameter.
        elements: Number of elements in them.
        dtype: Type of most of them.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        inputs: Sequence[InputSpec],
        device: Device,
        *,
        link: HostLink | None = None,
        dtype: str | None = None,
        optimizer: str = "adamw",
    ) -> None:
        """Make the model.

        Args:
            factory: Returns the model, whose results are the losses.
            inputs: The model's inputs.
            device: The device; it need not be in this machine.
            link: Its link to host memory; without one, plans swap nothing.
            dtype: Type of the parameters; by default that of the first f16 or bf16 input.
            optimizer: Name in `tunebench.optimizer`, whose states are on the device during the step.

        Raises:
            InputError: The model cannot be made, or there is no such optimizer.
        """
        self.device = device
        self._inputs, self._link = inputs, link
        self._model = make_model(factory, inputs, dtype)
        self.name = type(self._model).__name__
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        parameter_bytes = sum(parameter.numel() * parameter.itemsize for parameter in trained)
        self.parameters = tuple(
            (name, parameter.numel() * parameter.itemsize)
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        )
        self.elements = sum(parameter.numel() for parameter in trained)
        item_bytes = parameter_bytes / max(1, self.elements)
        is_half = any(parameter.dtype == torch.float16 for parameter in trained)
        self.dtype = "f32" if item_bytes > 3 else "f16" if is_half else "bf16"
        self._state_bytes = sum(
            find_optimizer(optimizer).tensor_state_bytes(parameter.shape, parameter.itemsize)
            for parameter in trained
        )
        extents = {spec.shape[0] for spec in inputs}
        self.batch = extents.pop() if len(extents) == 1 else None
        self._known: dict[int | None, ModelProfile] = {}

    def profile(self, batch: int | None = None) -> ModelProfile:
        """Return the step, traced without computing it.

        Args:
            batch: First extent of every input; that of the given inputs by default.

        Raises:
            InputError: The model cannot be traced, or returns no loss.
        """
        if batch not in self._known:
            specs = self._inputs
            if batch is not None:
                specs = [replace(spec, shape=(batch, *spec.shape[1:])) for spec in specs]
            joint = profile_step(
                self._model,
                [spec.tensor("meta") for spec in specs],
                device=self.device,
                link=self._link,
                other_bytes=self._state_bytes,
            )
            if not joint.returns_loss:
                raise InputError(
                    f"{self.name} returns no loss: expected a result of one element with a gradient. Return "
                    "the loss from the model, because its memory is planned too"
                )
            self._known[batch] = ModelProfile(
                name=self.name, step=joint.step, layers=joint.layers, forward=joint.boundary
            )
        return self._known[batch]


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """The largest batch that fits a budget.

    Attributes:
        batch: Samples in a step; 0 if not even one fits.
        step_us: Time of the step in microseconds.
        use: Its time and memory; none if nothing fits.
        plan: Its plan; none without one.
    """

    batch: int
    step_us: float = 0.0
    use: DeviceUse | None = None
    plan: MemoryPlan | None = None

    @property
    def sample_us(self) -> float | None:
        """Time per sample in microseconds; none if nothing fits."""
        return self.step_us / self.batch if self.batch else None


class BatchSearch:
    """Finds the largest batch of a model that fits a budget, with a profile of few batches."""

    def __init__(
        self,
        profiler: ModelProfiler,
        budget_bytes: int,
        watcher: Callable[[str], None] = lambda message: None,
        *,
        expandable_segments: bool = False,
    ) -> None:
        """Profile the batch of the inputs, and twice that batch.

        Args:
            profiler: Profiles the model.
            budget_bytes: Bytes that the step may take.
            watcher: Receives a description of each profile and attempt.
            expandable_segments: Whether segments of the caching allocator are expandable.

        Raises:
            InputError: The inputs have different first extents, or the model cannot be traced.
        """
        if profiler.batch is None:
            raise InputError("the largest batch needs the same first extent in all inputs: the batch")
        self._profiler, self._budget_bytes, self._watcher = profiler, budget_bytes, watcher
        self._expandable = expandable_segments
        self._batch = profiler.batch
        self._first, self._second = self._traced(self._batch), self._traced(2 * self._batch)

    def without_plan(self) -> BatchFit:
        """Return the largest batch that fits without a plan.

        Raises:
            InputError: Batches of any size fit.
        """
        batch = self._largest(self._plain_fits, self._batch, RESOLUTION)
        if batch == 0:
            return BatchFit(batch=0)
        use = self._plain_use(self._traced(batch))
        return BatchFit(batch=batch, step_us=use.simulation.step_us, use=use)

    def with_plan(self, *, effort: PlanEffort | None = None) -> BatchFit:
        """Return the largest batch for which a plan that fits is found.

        Args:
            effort: How long to search for the plan of the largest batch.

        Raises:
            InputError: Batches of any size fit.
        """
        bounded = largest_batch(lambda batch: self._may_fit(self._estimated(batch)), self._batch)
        # By requested bytes first: plans whose segments do not fit take long to refute.
        requested = largest_batch(self._is_planned, max(1, bounded), resolution=PLANNED_RESOLUTION)
        batch = self._largest(self._plan_fits, max(1, requested), PLANNED_RESOLUTION)
        if batch == 0:
            return BatchFit(batch=0)
        self._watcher(f"planning a batch of {batch}")
        step = self._traced(batch)
        plan, use = self._planned(step, effort)
        if not use.fits:
            plan, use = self._planned(step, QUICK)
        return BatchFit(batch=batch, step_us=plan.simulation.step_us, use=use, plan=plan)

    def _largest(self, fits: Callable[[TrainingStep], bool], start: int, resolution: float) -> int:
        """Search with sizes that grow linearly, and check the result by a profile."""

        def estimated_fits(batch: int) -> bool:
            self._watcher(f"searching, batch {batch}")
            return fits(self._estimated(batch))

        guess = largest_batch(estimated_fits, start, resolution=resolution)
        if guess and fits(self._traced(guess)):
            return guess
        return largest_batch(
            lambda batch: fits(self._traced(batch)), max(1, guess - 1), resolution=5 * resolution
        )

    def _estimated(self, batch: int) -> TrainingStep:
        step = step_at(self._first, self._second, batch / self._batch - 1)
        return step if step is not None else self._traced(batch)

    def _traced(self, batch: int) -> TrainingStep:
        self._watcher(f"tracing, batch {batch}")
        return self._profiler.profile(batch).step

    def _plain_fits(self, step: TrainingStep) -> bool:
        return self._plain_use(step).fits

    def _plain_use(self, step: TrainingStep) -> DeviceUse:
        return device_use(
            step,
            unplanned(step),
            self._profiler.device,
            self._budget_bytes,
            expandable_segments=self._expandable,
        )

    def _may_fit(self, step: TrainingStep) -> bool:
        return least_bytes(step) <= self._budget_bytes

    def _is_planned(self, batch: int) -> bool:
        """Return whether a plan of a batch fits by requested bytes."""
        self._watcher(f"searching, batch {batch}")
        try:
            plan_memory(self._estimated(batch), self._budget_bytes, effort=QUICK)
        except InputError:
            return False
        return True

    def _plan_fits(self, step: TrainingStep) -> bool:
        """Return whether a plan of a step fits with the segments of the allocator."""
        try:
            return self._planned(step, QUICK, QUICK_CUTS)[1].fits
        except InputError:
            return False

    def _planned(
        self, step: TrainingStep, effort: PlanEffort | None, cuts: Sequence[float] = CUTS
    ) -> tuple[MemoryPlan, DeviceUse]:
        return plan_on_device(
            step,
            self._budget_bytes,
            self._profiler.device,
            effort=effort,
            cuts=cuts,
            expandable_segments=self._expandable,
        )
