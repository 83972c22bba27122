"""Report of plans on nodes of different products: the best ones, the proof, and each product alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.cli._output import duration, table
from tunebench.cli.plan._cluster_report import context_text, experts_text, recompute_text, stored_text

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
        answer = self.answer
        return {
            "model": answer.job.network.name,
            "batch": answer.job.batch,
            "seq": answer.job.seq,
            "groups": [
                {"device": group.device.key, "devices": group.devices, "memory_bytes": group.memory_bytes}
                for group in answer.machine.groups
            ],
            "best": self._plan_json(answer.best[0]) if answer.best else None,
            "plans": [self._plan_json(priced) for priced in answer.best],
            "proof": answer.proof,
            "equal_layers": self._plan_json(answer.equal_layers) if answer.equal_layers else None,
            "alone": [
                priced and {**priced.plan.values, "step_us": priced.step.time_us} for priced in answer.alone
            ],
            "missing_bytes": answer.missing_bytes,
        }

    def render(self, to: Console) -> None:
        """Print the answer as text."""
        from tunebench.training.memory import size_text

        answer = self.answer
        to.print(
            f"{answer.job.network.name} on {answer.machine.name}: batch {answer.job.batch} of "
            f"{answer.job.seq} tokens",
            soft_wrap=True,
        )
        proof = answer.proof
        to.print(
            f"{proof.plans} plans: {proof.bounded} closed by the bound of layers; {proof.divisions} "
            f"divisions of the layers of the others: {proof.too_large} do not fit, "
            f"{proof.bounded_by_layers} closed by their slowest stage, {proof.bounded_by_step} by the "
            f"bound of the step, {proof.simulated} simulated",
            soft_wrap=True,
        )
        if not answer.best:
            to.print(f"nothing fits: a device lacks {size_text(answer.missing_bytes)}", soft_wrap=True)
            return
        to.print("the best plan is optimal for the model of time and memory")
        priced = (">cost",) if answer.best[0].cost is not None else ()
        columns = (*_COLUMNS[:3], ">expert", *_COLUMNS[3:]) if self._has_experts else _COLUMNS
        to.print(table(*columns, *priced, rows=self._rows()))
        for line in self._comparisons():
            to.print(line, soft_wrap=True)

    @property
    def _has_experts(self) -> bool:
        return self.answer.job.network.expert_parameters() > 0

    def _rows(self) -> Iterator[tuple[object, ...]]:
        from tunebench.training.memory import size_text

        for priced in self.answer.best:
            plan = priced.mixed.plan
            yield (
                plan.tensor,
                context_text(plan),
                plan.data,
                *((experts_text(plan),) if self._has_experts else ()),
                plan.microbatch,
                recompute_text(plan),
                "yes" if plan.sequence_parallel else "no",
                "yes" if plan.flash else "no",
                plan.sharding + stored_text(plan),
                self._stages(priced),
                duration(priced.step_us),
                f"{priced.mfu:.1%}",
                " and ".join(map(size_text, priced.memory_bytes)),
                *((f"${significant(priced.cost)}",) if priced.cost is not None else ()),
            )

    def _stages(self, priced: PricedMixedPlan) -> str:
        """Return the product and the layers of the stages of each group."""
        layers, parts = list(priced.mixed.stage_layers), []
        for group, count in zip(priced.mixed.order, priced.mixed.stages, strict=True):
            group_layers, layers = layers[:count], layers[count:]
            text = (
                f"{count} x {group_layers[0]}"
                if group_layers[0] == group_layers[-1]
                else f"{count} x {group_layers[-1]} to {group_layers[0]}"
            )
            parts.append(f"{self.answer.machine.groups[group].device.name}: {text}")
        return ", then ".join(parts)

    def _comparisons(self) -> Iterator[str]:
        answer, best_us = self.answer, self.answer.best[0].step_us
        if answer.equal_layers is not None:
            slower_us = answer.equal_layers.step_us
            yield (
                f"equal layers on all stages: {duration(slower_us)}, {slower_us / best_us:.2f} times as "
                f"long, with {answer.equal_layers.mixed.plan}"
            )
        for group, alone in zip(answer.machine.groups, answer.alone, strict=bool(answer.alone)):
            if alone is None:
                yield f"{group.name} alone: nothing fits"
            else:
                alone_us = alone.step.time_us
                times = f"{duration(alone_us)}, {alone_us / best_us:.2f} times as long"
                yield f"{group.name} alone: {times}, with {alone.plan}"

    def _plan_json(self, priced: PricedMixedPlan) -> dict[str, Any]:
        """Return a plan with its predictions as data."""
        groups = self.answer.machine.groups
        return {
            **priced.mixed.plan.values,
            "stage_layers": priced.mixed.stage_layers,
            "stage_products": [groups[group].device.name for group in priced.mixed.stage_groups],
            "step_us": priced.step_us,
            "memory_bytes": priced.memory_bytes,
            "mfu": priced.mfu,
            "samples_per_s": priced.samples_per_s,
            "cost": priced.cost,
        }
