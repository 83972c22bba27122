"""Report of data parallelism of a residual network or a module: micro-batches with their step and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.cli._output import duration, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.training.cluster import CopiesAnswer, PricedCopies

__all__ = ["CopiesReport"]

_COLUMNS = (">micro-batch", ">micro-batches", "sharding", ">step", ">samples/s", ">memory", ">exposed comm.")


@dataclass(frozen=True, kw_only=True)
class CopiesReport:
    """The answer of the planner as text and as data.

    Attributes:
        answer: The answer.
        top: Most plans to list.
    """

    answer: CopiesAnswer
    top: int

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data."""
        of = self.answer
        plans = [_plan_json(each) for each in of.plans[: self.top]]
        return {
            "model": of.name,
            "batch": of.batch,
            "stack": of.stack,
            "device": of.machine.device.key,
            "devices": of.machine.devices,
            "memory_bytes": of.machine.memory_bytes,
            "best": plans[0] if plans else None,
            "plans": plans,
            "too_large": of.too_large,
            "missing_bytes": of.missing_bytes,
        }

    def render(self, to: Console) -> None:
        """Print the answer as text."""
        from tunebench.training.memory import size_text

        of = self.answer
        to.print(
            f"{of.name} ({of.stack}, {of.dtype}) on {of.machine.name}: batch "
            f"{of.batch}, {of.machine.devices} copies, {size_text(of.machine.memory_bytes)} per device",
            soft_wrap=True,
        )
        if not of.plans:
            lacks = size_text(of.missing_bytes)
            to.print(f"nothing fits: a micro-batch of 1 lacks {lacks} per device", soft_wrap=True)
            return
        to.print(
            f"all plans are predicted: {len(of.plans)} fit, {of.too_large} do not; the first one is optimal "
            "for the model of time and memory",
            soft_wrap=True,
        )
        costs = (">cost",) if of.plans[0].cost is not None else ()
        rows = (
            (
                each.microbatch,
                each.microbatches,
                each.sharding,
                duration(each.step_us),
                significant(each.samples_per_s),
                size_text(each.memory_bytes),
                f"{each.communication_us / each.step_us:.1%}",
                *((f"${significant(each.cost)}",) if each.cost is not None else ()),
            )
            for each in of.plans[: self.top]
        )
        to.print(table(*_COLUMNS, *costs, rows=rows))
        kinds = ", ".join(f"{name} {size_text(size)}" for name, size in of.plans[0].memory.items() if size)
        to.print(f"memory of a device: {kinds}", soft_wrap=True)


def _plan_json(found: PricedCopies) -> dict[str, Any]:
    """Return a plan with its predictions as data."""
    return {
        "microbatch": found.microbatch,
        "microbatches": found.microbatches,
        "sharding": found.sharding,
        "step_us": found.step_us,
        "low_us": found.low_us,
        "high_us": found.high_us,
        "samples_per_s": found.samples_per_s,
        "communication_us": found.communication_us,
        "memory": {"total": found.memory_bytes, **found.memory},
        "cost": found.cost,
    }
