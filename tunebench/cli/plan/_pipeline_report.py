"""Report of pipeline schedules: their times, memory and transfers, and whether a larger micro-batch pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench.cli._output import duration, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.training.pipeline import (
        ComparedSchedule,
        Comparison,
        MicrobatchEstimate,
        PredictedStages,
        StageSource,
    )

__all__ = ["PipelineReport"]


@dataclass(frozen=True, kw_only=True)
class PipelineReport:
    """Schedules of a pipeline side by side.

    Attributes:
        source: Costs of the stages.
        predicted: The same if the stages are predicted, else None.
        microbatches: Micro-batches of a step.
        memory_bytes: Memory of each device; None if it is not known.
        comparison: The schedules.
        estimates: Estimates of micro-batches in 1F1B, by what is changed about attention.
        written: Files that were written.
    """

    source: StageSource
    predicted: PredictedStages | None
    microbatches: int
    memory_bytes: int | None
    comparison: Comparison
    estimates: Mapping[str, tuple[MicrobatchEstimate, ...]]
    written: list[Path] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The model, the devices and the micro-batches."""
        parts = f"{self.source.ranks} ranks, {self.microbatches} micro-batches"
        predicted = self.predicted
        if predicted is None:
            return f"{getattr(self.source, 'name', 'stages')}: {parts}"
        devices = self.source.ranks * predicted.tensor
        return (
            f"{predicted.network.name} on {devices} x {predicted.device.name}: {parts} of "
            f"{predicted.microbatch} x {predicted.seq} tokens in {predicted.dtype}"
        )

    @property
    def chosen(self) -> ComparedSchedule:
        """The best schedule; if none fits, the one with the least memory."""
        best = self.comparison.best
        return best or min(
            self.comparison.schedules, key=lambda compared: (compared.peak_bytes, compared.step_us)
        )

    # -- JSON ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        best, predicted = self.comparison.best, self.predicted
        return {
            "model": predicted.network.name if predicted is not None else None,
            "device": predicted.device.key if predicted is not None else None,
            "ranks": self.source.ranks,
            "microbatches": self.microbatches,
            "microbatch_size": predicted.microbatch if predicted is not None else None,
            "memory_bytes": self.memory_bytes,
            "best": best.name if best is not None else None,
            "schedules": [_schedule_json(compared) for compared in self.comparison.schedules],
            "skipped": self.comparison.skipped,
            "estimates": self.estimates,
            "verdict": self.verdict,
            "written": self.written,
        }

    # -- text ----------------------------------------------------------------------------------------------

    def render(self, to: Console) -> None:
        """Print the report as text."""
        from tunebench.training.memory import size_text

        limit = f", {size_text(self.memory_bytes)} per device" if self.memory_bytes is not None else ""
        if self.comparison.best is None:
            least_bytes = self.chosen.peak_bytes
            excess = size_text(least_bytes - (self.memory_bytes or 0))
            to.print(
                f"no schedule fits; {self.chosen.name} needs the least memory: {size_text(least_bytes)}, "
                f"{excess} more than there is. Use more stages or smaller micro-batches",
                soft_wrap=True,
            )
        to.print(f"{self.title}{limit}", soft_wrap=True)
        columns = ("schedule", ">step", ">90 % interval", ">bubble", ">peak memory", ">on rank", "fits")
        copies = (">exposed sends", ">evictions", ">exposed evictions")
        to.print(table(*columns, *copies, rows=self._rows()))
        for compared in self.comparison.schedules:
            if compared.bound_us is not None:
                gap = compared.step_us / compared.bound_us - 1
                to.print(
                    f"{compared.name}: at most {gap:.1%} above the fastest order of passes (lower bound "
                    f"{duration(compared.bound_us)})",
                    soft_wrap=True,
                )
        for skipped in self.comparison.skipped:
            to.print(f"{skipped.name} is left out: {skipped.reason}", soft_wrap=True)
        if self.comparison.best is not None:
            fitting = " that fits" if self.memory_bytes is not None else ""
            to.print(f"fastest schedule{fitting}: {self.comparison.best.name}", soft_wrap=True)
        if self.estimates:
            headings = (
                "attention",
                ">micro-batch",
                ">stage",
                ">per sequence",
                ">1f1b",
                ">memory",
                ">balanced",
            )
            to.print(table(*headings, rows=self._estimate_rows()))
        for line in self.verdict:
            to.print(line, soft_wrap=True)
        for path in self.written:
            to.print(f"wrote {path}", soft_wrap=True)

    def _rows(self) -> Iterator[tuple[str | None, ...]]:
        from tunebench.training.memory import size_text

        for compared in self.comparison.schedules:
            peaks = compared.simulation.peak_bytes
            yield (
                compared.name,
                duration(compared.step_us),
                f"{duration(compared.low_us)} to {duration(compared.high_us)}"
                if self.predicted is not None
                else None,
                f"{compared.simulation.bubble:.1%}",
                size_text(compared.peak_bytes),
                str(peaks.index(compared.peak_bytes)),
                None if compared.memory_bytes is None else "yes" if compared.fits else "no",
                duration(_sends_us(compared)),
                str(compared.evictions) if compared.evictions else None,
                None
                if not compared.evictions
                else "hidden"
                if compared.hidden
                else duration(compared.simulation.exposed_us),
            )

    def _estimate_rows(self) -> Iterator[tuple[str, ...]]:
        from tunebench.training.memory import size_text

        for name, estimates in self.estimates.items():
            for estimate in estimates:
                yield (
                    name,
                    str(estimate.microbatch),
                    duration(estimate.stage_us),
                    f"{estimate.stage_speedup:.3f}x",
                    f"{estimate.speedup:.3f}x",
                    size_text(estimate.peak_bytes),
                    size_text(estimate.balanced_bytes),
                )

    @property
    def verdict(self) -> list[str]:
        """Whether a larger micro-batch pays in 1F1B, and whether it needs balanced memory."""
        return [self._verdict(name, estimates) for name, estimates in self.estimates.items()]

    def _verdict(self, name: str, estimates: tuple[MicrobatchEstimate, ...]) -> str:
        """Return the verdict on the fastest micro-batch that fits."""
        limit = self.memory_bytes

        def fastest(kind: str) -> MicrobatchEstimate | None:
            fits = [estimate for estimate in estimates if limit is None or getattr(estimate, kind) <= limit]
            return min(fits, key=lambda estimate: estimate.step_us, default=None)

        plain, balanced = fastest("peak_bytes"), fastest("balanced_bytes")
        if balanced is None:
            return f"{name}: no micro-batch fits 1f1b, balanced or not"
        if plain is None:
            return f"{name}: only balanced memory fits 1f1b, with micro-batches of {balanced.microbatch}"
        gain = plain.step_us / balanced.step_us
        if balanced.microbatch == plain.microbatch:
            return (
                f"{name}: balancing 1f1b gains nothing: micro-batches of {plain.microbatch} fit without it, "
                "and no larger one that fits is faster"
            )
        return (
            f"{name}: balancing 1f1b allows micro-batches of {balanced.microbatch} in place of "
            f"{plain.microbatch}, which is {gain:.3f} times as fast"
        )


def _sends_us(compared: ComparedSchedule) -> float:
    """Return how much longer the step is than with instant transfers, without waits for evictions."""
    from tunebench.training.schedules import PipelineCosts, simulate_pipeline

    instant = simulate_pipeline(compared.schedule, PipelineCosts(stages=compared.costs.stages))
    return max(0.0, compared.simulation.step_us - compared.simulation.exposed_us - instant.step_us)


def _schedule_json(compared: ComparedSchedule) -> dict[str, Any]:
    """Return a schedule as data."""
    return {
        "name": compared.name,
        "step_us": compared.step_us,
        "low_us": compared.low_us,
        "high_us": compared.high_us,
        "optimizer_us": compared.optimizer_us,
        "bound_us": compared.bound_us,
        "bubble": compared.simulation.bubble,
        "peak_bytes": compared.simulation.peak_bytes,
        "fits": compared.fits,
        "sends_us": _sends_us(compared),
        "evictions": compared.evictions,
        "evictions_exposed_us": compared.simulation.exposed_us,
        "busy_us": compared.simulation.busy_us,
    }
