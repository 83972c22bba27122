"""Report of a memory plan: what is kept, recomputed and swapped, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.cli._output import duration, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.device import Device
    from tunebench.training.fitting.model_plan import BatchFit, ModelProfile
    from tunebench.training.memory import DeviceUse, LayerPlan, MemoryPlan

__all__ = ["MemoryReport"]

MOST_LAYERS = 24
"""Most rows of layers in text; JSON has all layers."""


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """A plan of a model's training step on a device.

    Attributes:
        profile: The step.
        device: The device.
        plan: The plan.
        use: Time and memory with the plan.
        plain: Time and memory without a plan.
        batches: Largest batch without and with a plan; none if it was not searched.
        curve: Plans for other budgets.
        written: Files that were written.
    """

    profile: ModelProfile
    device: Device
    plan: MemoryPlan
    use: DeviceUse
    plain: DeviceUse
    batches: tuple[BatchFit, BatchFit] | None
    curve: tuple[MemoryPlan, ...]
    written: list[Path] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Name of the model and the device, and the batch if it was searched."""
        batch = f", batch {self.batches[1].batch}" if self.batches is not None else ""
        return f"training step of {self.profile.name}{batch} on {self.device.name}"

    def layers(self, max_modules: int | None = None) -> list[LayerPlan]:
        """Return what the plan does with each layer, or with at most that many modules."""
        from tunebench.training.memory import layer_plans, layers_above

        names = (
            list(self.profile.layers)
            if max_modules is None
            else layers_above(self.profile.layers, max_modules)
        )
        return layer_plans(self.plan, names, forward=self.profile.forward)

    # -- JSON ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        link = self.plan.step.link
        return {
            "model": self.profile.name,
            "device": self.device.key,
            "host_link": None if link is None else link.name,
            "budget_bytes": self.plan.budget_bytes,
            "fits": self.use.fits,
            "without_plan": _use_json(self.plain),
            "with_plan": _use_json(self.use),
            **_plan_json(self.plan),
            "layers": self.layers(),
            "max_batch": None if self.batches is None else self._batches_json(),
            "curve": [
                {"budget_bytes": plan.budget_bytes, "peak_bytes": plan.simulation.peak_bytes}
                | {"step_us": plan.simulation.step_us}
                | _plan_json(plan)
                for plan in self.curve
            ],
            "written": self.written,
        }

    def _batches_json(self) -> dict[str, Any]:
        assert self.batches is not None
        return {
            name: {"batch": fit.batch, "step_us": fit.step_us, "sample_us": fit.sample_us}
            for name, fit in zip(("without_plan", "with_plan"), self.batches, strict=True)
        }

    # -- text ----------------------------------------------------------------------------------------------

    def render(self, to: Console) -> None:
        """Print the report as text."""
        from tunebench.training.memory import size_text

        to.print(
            f"{self.title}: {len(self.plan.step.operations)} operations, budget "
            f"{size_text(self.plan.budget_bytes)}",
            soft_wrap=True,
        )
        to.print(table("", ">without a plan", ">with the plan", rows=self._totals()))
        if not self.use.fits:
            to.print(
                "The tensors fit the budget, but the segments of the caching allocator exceed it: plan with "
                "--expandable-segments, and train with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or "
                "lower the budget.",
                soft_wrap=True,
            )
        if self.batches is not None:
            to.print(table("largest batch", ">samples", ">step", ">per sample", rows=self._batch_rows()))
        headings = ("layer", ">kept", ">recomputed", ">swapped", ">time", ">recomputation", ">copies")
        to.print(table(*headings, rows=self._layer_rows()))
        if self.curve:
            columns = (">budget", ">peak", ">step", ">overhead", ">optimality gap")
            to.print(table(*columns, rows=self._curve_rows()))
        for path in self.written:
            to.print(f"wrote {path}", soft_wrap=True)

    def _totals(self) -> Iterator[tuple[str, str | None, str | None]]:
        from tunebench.training.memory import size_text

        plain, planned = self.plain.simulation, self.use.simulation
        yield "peak memory, requested", size_text(plain.peak_bytes), size_text(planned.peak_bytes)
        before, after = self.plain.allocator, self.use.allocator
        if before is not None and after is not None:
            yield (
                "peak memory, allocated",
                size_text(before.allocated_bytes),
                size_text(after.allocated_bytes),
            )
            yield "peak memory, reserved", size_text(before.reserved_bytes), size_text(after.reserved_bytes)
        yield "predicted time of the step", duration(plain.step_us), duration(planned.step_us)
        again_us = planned.compute_us - plain.compute_us
        yield "  recomputation", None, duration(again_us)
        yield "  waits for copies", None, duration(planned.stall_us)
        yield "  overhead", None, f"{planned.step_us / plain.step_us - 1:.1%}"
        proof = "proven optimal" if self.plan.optimal else f"optimality gap {self.plan.gap:.1%}"
        yield "lower bound of any plan", None, f"{duration(self.plan.lower_us)}, {proof}"
        link = self.plan.step.link
        yield "link to the host", None, link.name if link is not None else "none"

    def _layer_rows(self) -> Iterator[tuple[str, ...]]:
        from tunebench.training.memory import size_text

        for layer_plan in self.layers(MOST_LAYERS):
            sizes = (layer_plan.kept_bytes, layer_plan.recomputed_bytes, layer_plan.swapped_bytes)
            times = (layer_plan.first_us, layer_plan.again_us, layer_plan.copies_us)
            if any(sizes) or any(times):
                yield (
                    layer_plan.layer or "(no layer)",
                    *(size_text(size) if size else "" for size in sizes),
                    *(duration(time) if time else "" for time in times),
                )

    def _batch_rows(self) -> Iterator[tuple[str, ...]]:
        assert self.batches is not None
        for name, fit in zip(("without a plan", "with a plan"), self.batches, strict=True):
            if fit.sample_us is None:
                yield name, "0", "-", "-"
            else:
                yield name, str(fit.batch), duration(fit.step_us), duration(fit.sample_us)

    def _curve_rows(self) -> Iterator[tuple[str, ...]]:
        from tunebench.training.memory import size_text

        for plan in self.curve:
            yield (
                size_text(plan.budget_bytes),
                size_text(plan.simulation.peak_bytes),
                duration(plan.simulation.step_us),
                f"{plan.simulation.step_us / self.plain.simulation.step_us - 1:.1%}",
                "optimal" if plan.optimal else f"{plan.gap:.1%}",
            )


def _use_json(use: DeviceUse) -> dict[str, Any]:
    """Return time and memory of a schedule as data."""
    allocator = use.allocator
    return {
        "step_us": use.simulation.step_us,
        "compute_us": use.simulation.compute_us,
        "stall_us": use.simulation.stall_us,
        "peak_bytes": use.simulation.peak_bytes,
        "allocated_bytes": None if allocator is None else allocator.allocated_bytes,
        "reserved_bytes": None if allocator is None else allocator.reserved_bytes,
    }


def _plan_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return the quality of a plan as data."""
    return {"lower_us": plan.lower_us, "gap": plan.gap, "optimal": plan.optimal}
