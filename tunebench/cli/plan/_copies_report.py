"""Report of data parallelism of a residual network or a module: micro-batches with their step and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.cli._memory_text import limit_text
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
        answer = self.answer
        plans = [_plan_json(priced) for priced in answer.plans[: self.top]]
        return {
            "model": answer.name,
            "batch": answer.batch,
            "stack": answer.stack,
            "device": answer.machine.device.key,
            "devices": answer.machine.devices,
            "memory_bytes": answer.machine.memory_bytes,
            "best": plans[0] if plans else None,
            "plans": plans,
            "too_large": answer.too_large,
            "missing_bytes": answer.missing_bytes,
        }

    def render(self, to: Console) -> None:
        """Print the answer as text."""
        from tunebench.training.memory import size_text

        answer = self.answer
        to.print(
            f"{answer.name} ({answer.stack}, {answer.dtype}) on {answer.machine.name}: batch "
            f"{answer.batch}, {answer.machine.devices} copies, "
            f"{limit_text(answer.machine)}",
            soft_wrap=True,
        )
        if not answer.plans:
            lacks = size_text(answer.missing_bytes)
            to.print(f"nothing fits: a micro-batch of 1 lacks {lacks} per device", soft_wrap=True)
            return
        to.print(
            f"all plans are predicted: {len(answer.plans)} fit, {answer.too_large} do not; the first one is "
            "optimal for the model of time and memory",
            soft_wrap=True,
        )
        costs = (">cost",) if answer.plans[0].cost is not None else ()
        rows = (
            (
                priced.microbatch,
                priced.microbatches,
                priced.sharding,
                duration(priced.step_us),
                significant(priced.samples_per_s),
                size_text(priced.memory_bytes),
                f"{priced.communication_us / priced.step_us:.1%}",
                *((f"${significant(priced.cost)}",) if priced.cost is not None else ()),
            )
            for priced in answer.plans[: self.top]
        )
        to.print(table(*_COLUMNS, *costs, rows=rows))
        kinds = ", ".join(
            f"{name} {size_text(size)}" for name, size in answer.plans[0].memory.items() if size
        )
        to.print(f"memory of a device: {kinds}", soft_wrap=True)


def _plan_json(priced: PricedCopies) -> dict[str, Any]:
    """Return a plan with its predictions as data."""
    return {
        "microbatch": priced.microbatch,
        "microbatches": priced.microbatches,
        "sharding": priced.sharding,
        "step_us": priced.step_us,
        "low_us": priced.low_us,
        "high_us": priced.high_us,
        "samples_per_s": priced.samples_per_s,
        "communication_us": priced.communication_us,
        "memory": {"total": priced.memory_bytes, **priced.memory},
        "cost": priced.cost,
    }
