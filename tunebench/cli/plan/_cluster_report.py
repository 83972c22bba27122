"""Report of plans for a cluster: the best ones, the proof, what binds, and how sure the choice is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench._figure import significant
from tunebench.cli._memory_text import limit_text, memory_json, memory_text
from tunebench.cli._output import duration, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.training.cluster import ClusterAnswer, ClusterPlan, PricedPlan, StepTime
    from tunebench.training.steps.calibration import Calibration

__all__ = [
    "ClusterReport",
    "calibrated_interval_us",
    "context_text",
    "experts_text",
    "recompute_text",
    "stored_text",
]

_COLUMNS = (
    ">tensor",
    ">context",
    ">pipeline",
    ">data",
    ">chunks",
    "schedule",
    ">micro-batch",
    "recompute",
    "seq. parallel",
    "flash",
    "sharding",
    ">step",
    ">MFU",
    ">memory",
    ">bubble",
    ">exposed comm.",
)


@dataclass(frozen=True, kw_only=True)
class ClusterReport:
    """The answer of the planner as text and as data.

    Attributes:
        answer: The answer.
        written: Files that were written.
    """

    answer: ClusterAnswer
    written: list[Path] = field(default_factory=list)

    # -- JSON ----------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return the answer as data."""
        answer = self.answer
        return {
            "model": answer.job.network.name,
            "batch": answer.job.batch,
            "seq": answer.job.seq,
            "stack": answer.job.stack,
            "tuning": answer.job.tuning,
            "software_factors": answer.job.software_factors,
            "device": answer.machine.device.key,
            "devices": answer.machine.devices,
            "memory_bytes": answer.machine.memory_bytes,
            "memory_margin": answer.machine.memory_margin,
            "limit_bytes": answer.machine.limit_bytes,
            "objective": answer.result.objective,
            "best": _plan_json(answer.best) if answer.best else None,
            "plans": [_plan_json(priced) for priced in answer.result.best],
            "front": [_plan_json(priced) for priced in answer.result.front],
            "cost_front": [_plan_json(priced) for priced in answer.cost_front],
            "proof": answer.result.proof,
            "shares": answer.shares,
            "gains": [
                {
                    "twice_the": gain.resource,
                    "speedup": gain.speedup,
                    "plan": _plan_json(gain.plan) if gain.plan else None,
                }
                for gain in answer.gains
            ],
            "next_plans": [_plan_json(priced) for priced in answer.next_plans],
            "sensitivity": answer.sensitivity,
            "least_memory": _plan_json(answer.result.least_memory),
            "missing_bytes": answer.missing_bytes,
            "missing_host_bytes": answer.missing_host_bytes,
            "missing_nvme_bytes": answer.missing_nvme_bytes,
            "written": self.written,
        }

    # -- text ----------------------------------------------------------------------------------------------

    def render(self, to: Console) -> None:
        """Print the answer as text."""
        from tunebench.training.memory import size_text

        answer = self.answer
        to.print(
            f"{answer.job.network.name} on {answer.machine.name}: batch {answer.job.batch} of "
            f"{answer.job.seq} tokens, {limit_text(answer.machine)}",
            soft_wrap=True,
        )
        for line in self._proof():
            to.print(line, soft_wrap=True)
        if answer.best is None:
            self._render_missing(to)
            return
        to.print(table(*self._columns(), rows=self._rows(answer.result.best)))
        to.print(f"best: {answer.best.plan}", soft_wrap=True)
        to.print(
            f"its step: {', '.join(f'{name} {share:.1%}' for name, share in self._shares())}", soft_wrap=True
        )
        to.print(self._software(answer.best), soft_wrap=True)
        kinds = ", ".join(
            f"{name} {size_text(size)}" for name, size in answer.best.memory.kinds.items() if size
        )
        to.print(f"memory of rank {answer.best.memory.rank}: {kinds}", soft_wrap=True)
        to.print(memory_text(answer.best.memory, answer.best.verdict), soft_wrap=True)
        stored = {"host memory": answer.best.memory.host, "NVMe": answer.best.memory.nvme}
        for name, size in stored.items():
            if size:
                whole = size_text(size * answer.machine.links.devices_per_node)
                to.print(f"{name}: {size_text(size)} for each device, {whole} for each node", soft_wrap=True)
        for line in (*self._gains(), *self._sensitivity()):
            to.print(line, soft_wrap=True)
        to.print(
            table(
                ">step",
                ">memory",
                "plan",
                rows=self._front(),
                title="Pareto front of step time and memory",
            )
        )
        if answer.cost_front:
            title = "Pareto front of step time and cost"
            to.print(table(">nodes", ">step", ">cost", "plan", rows=self._cost_front(), title=title))
        for path in self.written:
            to.print(f"wrote {path}", soft_wrap=True)

    def _proof(self) -> Iterator[str]:
        proof = self.answer.result.proof
        yield (
            f"{proof.plans} plans: {proof.too_large} do not fit, {proof.bounded_by_passes} closed by the "
            f"bound of passes, {proof.bounded_by_step} by that of the step, {proof.simulated} simulated"
        )
        if proof.optimal:
            yield "the best plan is optimal for the model of time and memory"

    def _render_missing(self, to: Console) -> None:
        from tunebench.training.memory import size_text

        least, answer = self.answer.result.least_memory, self.answer
        lacks = f", {size_text(answer.missing_bytes)} more than there is" if answer.missing_bytes else ""
        to.print(
            f"nothing fits: the least memory is {size_text(least.memory.needed)} per device{lacks}, with "
            f"{least.plan}",
            soft_wrap=True,
        )
        for missing, resource in (
            (answer.missing_host_bytes, "host memory"),
            (answer.missing_nvme_bytes, "NVMe"),
        ):
            if missing:
                to.print(f"each node lacks {size_text(missing)} of {resource}", soft_wrap=True)
        kinds = ", ".join(f"{name} {size_text(size)}" for name, size in least.memory.kinds.items() if size)
        to.print(f"memory of rank {least.memory.rank}: {kinds}", soft_wrap=True)
        to.print("; ".join(self._remedies()), soft_wrap=True)

    def _remedies(self) -> Iterator[str]:
        """Yield what to change if nothing fits."""
        job, machine = self.answer.job, self.answer.machine
        if not job.full_sharding and machine.links.devices > 1:
            yield "allow plans that divide parameters among copies (--full-sharding)"
        if not machine.host_bytes:
            yield "give the host memory of a node, such as 'host 512GB 200', to keep states there"
        yield "use more devices, devices with more memory, shorter sequences, or fewer values of --fix"

    @property
    def _has_experts(self) -> bool:
        return self.answer.job.network.expert_parameters() > 0

    @property
    def _has_ends(self) -> bool:
        """Whether a listed plan counts the embedding or the head as layers."""
        return any(priced.plan.head_layers for priced in self.answer.result.best)

    def _columns(self) -> tuple[str, ...]:
        """Return the columns of the table of plans: every parameter that two of its rows may differ in."""
        chunks = _COLUMNS.index(">chunks")
        return (
            *((">nodes",) if self.answer.result.objective == "cost" else ()),
            *_COLUMNS[:chunks],
            *((">expert",) if self._has_experts else ()),
            _COLUMNS[chunks],
            *(("ends as layers",) if self._has_ends else ()),
            *_COLUMNS[chunks + 1 :],
            *((">cost",) if self.answer.best and self.answer.best.cost is not None else ()),
        )

    def _rows(self, plans: Iterable[PricedPlan]) -> Iterator[tuple[object, ...]]:
        from tunebench.training.memory import size_text

        for priced in plans:
            plan, step = priced.plan, priced.step
            yield (
                *((plan.nodes,) if self.answer.result.objective == "cost" else ()),
                plan.tensor,
                context_text(plan),
                plan.pipeline,
                plan.data,
                *((experts_text(plan),) if self._has_experts else ()),
                plan.chunks,
                *((f"{plan.embedding_layers} + {plan.head_layers}",) if self._has_ends else ()),
                plan.schedule if plan.pipeline > 1 else "-",
                plan.microbatch,
                recompute_text(plan),
                "yes" if plan.sequence_parallel else "no",
                "yes" if plan.flash else "no",
                plan.sharding + stored_text(plan),
                duration(step.time_us),
                f"{priced.mfu:.1%}",
                size_text(priced.memory.needed),
                f"{step.bubble_us / step.time_us:.1%}",
                f"{step.communication_us / step.time_us:.1%}",
                *((f"${significant(priced.cost)}",) if priced.cost is not None else ()),
            )

    def _software(self, best: PricedPlan) -> str:
        """Return what the software adds to all steps, or what measured steps changed, for the best plan."""
        from tunebench.cli._software_text import calibration_text, software_text

        job = self.answer.job
        if job.calibration is None:
            return f"software, in all times: {software_text(job.stack, job.tuning)}"
        low_us, high_us = calibrated_interval_us(best.step, job.calibration)
        return (
            f"calibrated: {calibration_text(job.calibration)}; 90 % interval of the best step "
            f"{duration(low_us)} to {duration(high_us)}"
        )

    def _shares(self) -> Iterator[tuple[str, float]]:
        return ((name, share) for name, share in self.answer.shares.items() if share >= 0.0005)

    def _gains(self) -> Iterator[str]:
        from tunebench.training.memory import size_text

        best = self.answer.best
        assert best is not None
        for gain in self.answer.gains:
            if gain.plan is None or gain.speedup is None:
                yield f"twice the {gain.resource}: nothing fits"
                continue
            changed = gain.plan.plan.differences(best.plan)
            suffix = f" with {changed}" if changed else " with the same plan"
            yield f"twice the {gain.resource}: {gain.speedup:.3f} times the sequences per second{suffix}"
        for faster in self.answer.next_plans:
            share = 1 - faster.step.time_us / best.step.time_us
            changed = faster.plan.differences(best.plan)
            memory = size_text(faster.memory.needed)
            yield f"with {memory} per device: {share:.1%} shorter step with {changed}"
        if self.answer.gains:
            yield f"binding: {self.binding}"

    @property
    def binding(self) -> str:
        """The largest part of the step, and the resource whose doubling gains most."""
        gains = [gain for gain in self.answer.gains if (gain.speedup or 0.0) > 1.01]
        part = next(iter(self.answer.shares))
        if not gains:
            return f"{part}; twice the memory, links or batch gains at most 1 %"
        largest = max(gains, key=lambda gain: gain.speedup or 0.0)
        return f"{part}, then the {largest.resource}"

    def _sensitivity(self) -> Iterator[str]:
        best = self.answer.best
        assert best is not None
        for sensitivity in self.answer.sensitivity:
            changed = sensitivity.plan.differences(best.plan)
            if changed:
                choice = f"the choice changes to {changed}; this plan then loses {sensitivity.regret:.2%}"
                yield f"{sensitivity.slower} 10 % slower: {choice}"
            else:
                yield f"{sensitivity.slower} 10 % slower: the same choice"

    def _front(self) -> Iterator[tuple[object, ...]]:
        from tunebench.training.memory import size_text

        for priced in self.answer.result.front_outline:
            time, memory = duration(priced.step.time_us), size_text(priced.memory.needed)
            yield time, memory, self._change(priced.plan)

    def _cost_front(self) -> Iterator[tuple[object, ...]]:
        for priced in self.answer.cost_front:
            assert priced.cost is not None
            cost = f"${significant(priced.cost)}"
            yield priced.plan.nodes, duration(priced.step.time_us), cost, self._change(priced.plan)

    def _change(self, plan: ClusterPlan) -> str:
        """Return the values of a plan that differ from those of the best one: short enough for a row."""
        return plan.differences(self.answer.result.best[0].plan) or "the best plan"


def calibrated_interval_us(step: StepTime, calibration: Calibration) -> tuple[float, float]:
    """Return the 90 % interval of a step whose time is that of a calibration, in microseconds."""
    # The modelled share of communication follows from the calibrated one by the factors on both parts.
    kernels, communication = calibration.factors
    exposed_us = step.communication_us / communication
    busy_us = (step.compute_us + step.optimizer_us) / kernels
    low, expected, high = calibration.ratios(exposed_us / (exposed_us + busy_us))
    return step.time_us * low / expected, step.time_us * high / expected


def recompute_text(plan: ClusterPlan) -> str:
    """Return the activation recomputation, with the number of layers of each stage if it is not all."""
    return f"{plan.recompute}, {plan.recompute_layers} layers" if plan.recompute_layers else plan.recompute


def context_text(plan: ClusterPlan) -> str:
    """Return the context-parallel size, and whether keys and values are gathered."""
    return f"{plan.context}{', gathered' if plan.context_gather else ''}"


def experts_text(plan: ClusterPlan) -> str:
    """Return the degree of expert parallelism, and how many devices share an expert if several do."""
    shared = f" x {plan.expert_tensor}" if plan.expert_tensor > 1 else ""
    return f"{plan.expert}{shared}"


def stored_text(plan: ClusterPlan) -> str:
    """Return what a plan keeps in host memory and NVMe, as text that follows other text; nothing if none."""
    locations = {"states": plan.states, "parameters": plan.parameters, "activations": plan.activations}
    return "".join(f", {kind} on {location}" for kind, location in locations.items() if location != "device")


def _plan_json(priced: PricedPlan) -> dict[str, Any]:
    """Return a plan with its predictions as data."""
    return {
        **priced.plan.values,
        "step": priced.step,
        "memory": memory_json(priced.memory, priced.verdict),
        "host_bytes": priced.memory.host,
        "nvme_bytes": priced.memory.nvme,
        "fits": priced.fits,
        "mfu": priced.mfu,
        "samples_per_s": priced.samples_per_s,
        "device_hours": priced.device_hours,
        "cost": priced.cost,
    }
