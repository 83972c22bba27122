"""Report of plans on nodes of different products: the best ones, the proof, and each product alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.cli._output import duration, table
from tunebench.cli.plan._cluster_report import experts_text, stored_text

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.training.cluster import MixedAnswer, PricedMixedPlan

__all__ = ["MixedReport"]

_COLUMNS = (
    ">tensor",
    ">context",
    ">data",
    ">micro-batch",
    "recompute",
    "seq. parallel",
    "flash",
    "sharding",
    "layers of stages",
    ">step",
    ">MFU",
    ">memory",
)


@dataclass(frozen=True, kw_only=True)
class MixedReport:
    """The answer of the planner as text and as data.

    Attributes:
        answer: The answer.
    """

    answer: MixedAnswer

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data."""
        of = self.answer
        return {
            "model": of.job.network.name,
            "batch": of.job.batch,
            "seq": of.job.seq,
            "groups": [
                {"device": group.device.key, "devices": group.devices, "memory_bytes": group.memory_bytes}
                for group in of.machine.groups
            ],
            "best": self._plan_json(of.best[0]) if of.best else None,
            "plans": [self._plan_json(each) for each in of.best],
            "proof": of.proof,
            "equal_layers": self._plan_json(of.equal_layers) if of.equal_layers else None,
            "alone": [each and {**asdict(each.plan), "step_us": each.step.time_us} for each in of.alone],
            "missing_bytes": of.missing_bytes,
        }

    def render(self, to: Console) -> None:
        """Print the answer as text."""
        from tunebench.training.memory import size_text

        of = self.answer
        to.print(
            f"{of.job.network.name} on {of.machine.name}: batch {of.job.batch} of {of.job.seq} tokens",
            soft_wrap=True,
        )
        proof = of.proof
        to.print(
            f"{proof.plans} plans: {proof.bounded} closed by the bound of layers; {proof.divisions} "
            f"divisions of the layers of the others: {proof.too_large} do not fit, "
            f"{proof.bounded_by_layers} closed by their slowest stage, {proof.bounded_by_step} by the "
            f"bound of the step, {proof.simulated} simulated",
            soft_wrap=True,
        )
        if not of.best:
            to.print(f"nothing fits: a device lacks {size_text(of.missing_bytes)}", soft_wrap=True)
            return
        to.print("the best plan is optimal for the model of time and memory")
        priced = (">cost",) if of.best[0].cost is not None else ()
        columns = (*_COLUMNS[:3], ">expert", *_COLUMNS[3:]) if self._has_experts else _COLUMNS
        to.print(table(*columns, *priced, rows=self._rows()))
        for line in self._comparisons():
            to.print(line, soft_wrap=True)

    @property
    def _has_experts(self) -> bool:
        return self.answer.job.network.expert_parameters() > 0

    def _rows(self) -> Iterator[tuple[object, ...]]:
        from tunebench.training.memory import size_text

        for each in self.answer.best:
            plan = each.mixed.plan
            yield (
                plan.tensor,
                plan.context,
                plan.data,
                *((experts_text(plan),) if self._has_experts else ()),
                plan.microbatch,
                plan.recompute,
                "yes" if plan.sequence_parallel else "no",
                "yes" if plan.flash else "no",
                plan.sharding + stored_text(plan),
                self._stages(each),
                duration(each.step_us),
                f"{each.mfu:.1%}",
                " and ".join(map(size_text, each.memory_bytes)),
                *((f"${significant(each.cost)}",) if each.cost is not None else ()),
            )

    def _stages(self, each: PricedMixedPlan) -> str:
        """Return the product and the layers of the stages of each group."""
        layers, parts = list(each.mixed.stage_layers), []
        for group, count in zip(each.mixed.order, each.mixed.stages, strict=True):
            of, layers = layers[:count], layers[count:]
            text = f"{count} x {of[0]}" if of[0] == of[-1] else f"{count} x {of[-1]} to {of[0]}"
            parts.append(f"{self.answer.machine.groups[group].device.name}: {text}")
        return ", then ".join(parts)

    def _comparisons(self) -> Iterator[str]:
        of, best_us = self.answer, self.answer.best[0].step_us
        if of.equal_layers is not None:
            slower_us = of.equal_layers.step_us
            yield (
                f"equal layers on all stages: {duration(slower_us)}, {slower_us / best_us:.2f} times as "
                f"long, with {of.equal_layers.mixed.plan}"
            )
        for group, alone in zip(of.machine.groups, of.alone, strict=bool(of.alone)):
            if alone is None:
                yield f"{group.name} alone: nothing fits"
            else:
                alone_us = alone.step.time_us
                times = f"{duration(alone_us)}, {alone_us / best_us:.2f} times as long"
                yield f"{group.name} alone: {times}, with {alone.plan}"

    def _plan_json(self, found: PricedMixedPlan) -> dict[str, Any]:
        """Return a plan with its predictions as data."""
        groups = self.answer.machine.groups
        return {
            **asdict(found.mixed.plan),
            "stage_layers": found.mixed.stage_layers,
            "stage_products": [groups[group].device.name for group in found.mixed.stage_groups],
            "step_us": found.step_us,
            "memory_bytes": found.memory_bytes,
            "mfu": found.mfu,
            "samples_per_s": found.samples_per_s,
            "cost": found.cost,
        }
