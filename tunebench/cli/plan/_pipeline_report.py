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
        one = self.predicted
        if one is None:
            return f"{getattr(self.source, 'name', 'stages')}: {parts}"
        devices = self.source.ranks * one.tensor
        return f"{one.network.name} on {devices} x {one.device.name}: {parts} of {one.microbatch}"

    @property
    def chosen(self) -> ComparedSchedule:
        """The best schedule; if none fits, the one with the least memory."""
        found = self.comparison.best
        return found or min(self.comparison.schedules, key=lambda each: (each.peak_bytes, each.step_us))

    # -- JSON ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the report as data."""
        best, one = self.comparison.best, self.predicted
        return {
            "model": one.network.name if one is not None else None,
            "device": one.device.key if one is not None else None,
            "ranks": self.source.ranks,
            "microbatches": self.microbatches,
            "microbatch_size": one.microbatch if one is not None else None,
            "memory_bytes": self.memory_bytes,
            "best": best.name if best is not None else None,
            "schedules": [_schedule_json(each) for each in self.comparison.schedules],
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
        to.print(f"{self.title}{limit}", soft_wrap=True)
        columns = ("schedule", ">step", ">90 % interval", ">bubble", ">peak memory", ">on rank", "fits")
        copies = (">exposed sends", ">evictions", ">exposed evictions")
        to.print(table(*columns, *copies, rows=self._rows()))
        for one in self.comparison.schedules:
            if one.bound_us is not None:
                gap = one.step_us / one.bound_us - 1
                to.print(
                    f"{one.name}: at most {gap:.1%} above the fastest order of passes (lower bound "
                    f"{duration(one.bound_us)})",
                    soft_wrap=True,
                )
        for each in self.comparison.skipped:
            to.print(f"{each.name} is left out: {each.reason}", soft_wrap=True)
        if self.comparison.best is None:
            to.print(
                f"no schedule fits; {self.chosen.name} needs the least memory: "
                f"{size_text(self.chosen.peak_bytes)}",
                soft_wrap=True,
            )
        else:
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

        for each in self.comparison.schedules:
            peaks = each.simulation.peak_bytes
            yield (
                each.name,
                duration(each.step_us),
                f"{duration(each.low_us)} to {duration(each.high_us)}"
                if self.predicted is not None
                else None,
                f"{each.simulation.bubble:.1%}",
                size_text(each.peak_bytes),
                str(peaks.index(each.peak_bytes)),
                None if each.memory_bytes is None else "yes" if each.fits else "no",
                duration(_sends_us(each)),
                str(each.evictions) if each.evictions else None,
                None
                if not each.evictions
                else "hidden"
                if each.hidden
                else duration(each.simulation.exposed_us),
            )

    def _estimate_rows(self) -> Iterator[tuple[str, ...]]:
        from tunebench.training.memory import size_text

        for name, estimates in self.estimates.items():
            for each in estimates:
                yield (
                    name,
                    str(each.microbatch),
                    duration(each.stage_us),
                    f"{each.stage_speedup:.3f}x",
                    f"{each.speedup:.3f}x",
                    size_text(each.peak_bytes),
                    size_text(each.balanced_bytes),
                )

    @property
    def verdict(self) -> list[str]:
        """Whether a larger micro-batch pays in 1F1B, and whether it needs balanced memory."""
        return [self._verdict(name, found) for name, found in self.estimates.items()]

    def _verdict(self, name: str, estimates: tuple[MicrobatchEstimate, ...]) -> str:
        """Return the verdict on the fastest micro-batch that fits."""
        limit = self.memory_bytes

        def fastest(kind: str) -> MicrobatchEstimate | None:
            fits = [each for each in estimates if limit is None or getattr(each, kind) <= limit]
            return min(fits, key=lambda each: each.step_us, default=None)

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


def _sends_us(each: ComparedSchedule) -> float:
    """Return how much longer the step is than with instant transfers, without waits for evictions."""
    from tunebench.training.schedules import PipelineCosts, simulate_pipeline

    instant = simulate_pipeline(each.schedule, PipelineCosts(stages=each.costs.stages))
    return max(0.0, each.simulation.step_us - each.simulation.exposed_us - instant.step_us)


def _schedule_json(each: ComparedSchedule) -> dict[str, Any]:
    """Return a schedule as data."""
    return {
        "name": each.name,
        "step_us": each.step_us,
        "low_us": each.low_us,
        "high_us": each.high_us,
        "optimizer_us": each.optimizer_us,
        "bound_us": each.bound_us,
        "bubble": each.simulation.bubble,
        "peak_bytes": each.simulation.peak_bytes,
        "fits": each.fits,
        "sends_us": _sends_us(each),
        "evictions": each.evictions,
        "evictions_exposed_us": each.simulation.exposed_us,
        "busy_us": each.simulation.busy_us,
    }
