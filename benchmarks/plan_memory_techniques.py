"""Memory plans against other techniques that reduce the memory of a training step, on predicted GPU times.

    python -m benchmarks.plan_memory_techniques [--model "ResNet-50" …] [--gpu h100-sxm]

Each technique is a schedule of the same profiled step: the tensors that its forward pass saves or copies to
the host, and the operations that it repeats. Time and peak are those of the simulator, which does not know
the plan from the technique. Checkpoints repeat a segment as a whole when the backward pass first needs one of
its tensors, up to the last one that is needed. The rule of torch's partitioner is torch's own, run on the
same graph without decompositions. Hooks copy each saved tensor to the host when it is written, and back when
it is needed; the copies run beside operations, which `torch.autograd.graph.save_on_cpu` does not do.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import fx
from torch._functorch.partitioners import min_cut_rematerialization_partition

from benchmarks.plan_memory_models import CASES, EFFORT, GPUS, profiled, retimed
from tunebench.device import described
from tunebench.training.fitting.joint_step import JointStep
from tunebench.training.memory import (
    Action,
    Compute,
    CopyIn,
    CopyOut,
    MemoryPlan,
    TrainingStep,
    memory_curve,
    plan_memory,
    simulate,
    size_text,
    unplanned,
    with_frees,
)

__all__ = ["PRODUCTS", "TECHNIQUES", "offloaded", "repeated", "segments"]

PRODUCTS = frozenset(
    {
        torch.ops.aten.convolution,
        torch.ops.aten.mm,
        torch.ops.aten.addmm,
        torch.ops.aten.bmm,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
    }
)
"""Operators whose results a selective checkpoint saves."""

BLOCK = re.compile(r"\b(blocks|layers|down|up)\.(\d+)")
"""Repeated layers of the benchmark models."""

BATCHES = {"ResNet-50": 184, "BERT-large": 16, "U-Net": 32, "MobileNetV2": 256, "DenseNet-121": 128}
POINTS = 12
"""Budgets of the curve on which the least peak for a time is found."""


# -- schedules -----------------------------------------------------------------------------------------------


def repeated(joint: JointStep, groups: Sequence[Collection[int]]) -> tuple[Action, ...]:
    """Return the schedule that repeats groups of forward operations in the backward pass.

    All other tensors of the forward pass that the backward pass reads are saved. A group runs again, once,
    when one of its tensors is first needed; operations without use in the backward pass do not run again.

    Args:
        joint: The step.
        groups: Disjoint groups of operations of the forward pass.
    """
    step = joint.step
    producers = step.producers()
    group_of = {index: sorted(group) for group in groups for index in group}
    needed = _needed(joint, producers, group_of)
    written = {
        tensor
        for index, operation in enumerate(step.operations[: joint.boundary + 1])
        if index not in group_of
        for tensor in operation.outputs
    }
    actions: list[Action] = [Compute(index) for index in range(joint.boundary + 1)]

    def provide(tensors: Sequence[int]) -> None:
        for tensor in step.movable(tuple(tensors)):
            if tensor not in written:
                for index in group_of[producers[tensor]]:
                    operation = step.operations[index]
                    if index in needed and not written.issuperset(operation.outputs):
                        provide(operation.inputs)
                        actions.append(Compute(index))
                        written.update(operation.outputs)

    for index in range(joint.boundary + 1, len(step.operations)):
        provide(step.operations[index].inputs)
        actions.append(Compute(index))
        written.update(step.operations[index].outputs)
    return with_frees(step, actions)


def _needed(joint: JointStep, producers: Mapping[int, int], repeats: Collection[int]) -> set[int]:
    """Return the operations that must run again for what the backward pass reads."""
    stack = [tensor for tensor in _saved(joint) if producers[tensor] in repeats]
    needed: set[int] = set()
    while stack:
        index = producers[stack.pop()]
        if index not in needed:
            needed.add(index)
            reads = joint.step.movable(joint.step.operations[index].inputs)
            stack.extend(tensor for tensor in reads if producers[tensor] in repeats)
    return needed


def _saved(joint: JointStep) -> dict[int, None]:
    """Return the tensors of the forward pass that the backward pass reads."""
    written = {
        tensor for operation in joint.step.operations[: joint.boundary] for tensor in operation.outputs
    }
    later = joint.step.operations[joint.boundary + 1 :]
    return dict.fromkeys(tensor for operation in later for tensor in operation.inputs if tensor in written)


def offloaded(joint: JointStep) -> tuple[Action, ...]:
    """Return the schedule that copies all saved tensors to the host, and each back when it is needed."""
    saved = _saved(joint)
    back: set[int] = set()
    actions: list[Action] = []
    for index, operation in enumerate(joint.step.operations):
        if index > joint.boundary:
            for tensor in operation.inputs:
                if tensor in saved and tensor not in back:
                    actions.append(CopyIn(tensor))
                    back.add(tensor)
        actions.append(Compute(index))
        actions.extend(CopyOut(tensor) for tensor in operation.outputs if tensor in saved)
    return with_frees(joint.step, actions)


def segments(joint: JointStep, size: int) -> list[list[int]]:
    """Return the operations that checkpoints of so many adjacent blocks repeat.

    Operations whose results another segment reads are left out: the next checkpoint saves its inputs.

    Args:
        joint: The step.
        size: Blocks in a segment.
    """
    labels: list[tuple[str, int] | None] = []
    for layer in joint.layers[: joint.boundary]:
        match = BLOCK.search(layer)
        labels.append((match[1], int(match[2]) // size) if match else None)
    readers: dict[int, set[tuple[str, int] | None]] = {}
    for operation, label in zip(joint.step.operations, labels, strict=False):
        for tensor in operation.inputs:
            readers.setdefault(tensor, set()).add(label)
    groups: dict[tuple[str, int], list[int]] = {}
    for index, label in enumerate(labels):
        operation = joint.step.operations[index]
        inside = all(readers.get(tensor, set()) <= {label} for tensor in operation.outputs)
        if label is not None and inside and operation.recomputable:
            groups.setdefault(label, []).append(index)
    return list(groups.values())


def _blocks(joint: JointStep) -> int:
    matches = (BLOCK.search(layer) for layer in joint.layers[: joint.boundary])
    return len({match.groups() for match in matches if match})


def _square_root(joint: JointStep) -> tuple[Action, ...]:
    blocks = _blocks(joint)
    return repeated(joint, segments(joint, math.ceil(blocks / max(1, round(math.sqrt(blocks))))))


def _selective(joint: JointStep) -> tuple[Action, ...]:
    def product(index: int) -> bool:
        node = joint.nodes[index]
        return node is not None and getattr(node.target, "overloadpacket", None) in PRODUCTS

    groups = ([index for index in group if not product(index)] for group in segments(joint, 1))
    return repeated(joint, list(groups))


def _partitioned(fraction: float) -> Callable[[JointStep], tuple[Action, ...]]:
    def schedule(joint: JointStep) -> tuple[Action, ...]:
        """Return what torch's partitioner repeats for a fraction of the saved bytes."""
        saved = _kept_by_torch(joint, fraction)
        producers = joint.step.producers()
        dropped = {producers[tensor] for tensor in _needed_or_read(joint) if tensor not in saved}
        recomputed = [index for index in sorted(dropped) if joint.step.operations[index].recomputable]
        return repeated(joint, [[index] for index in recomputed])

    return schedule


def _needed_or_read(joint: JointStep) -> Iterator[int]:
    """Yield all tensors of the forward pass: any may be read when others are written again."""
    for operation in joint.step.operations[: joint.boundary]:
        yield from operation.outputs


def _kept_by_torch(joint: JointStep, fraction: float) -> set[int]:
    """Return the tensors that the forward graph of torch's partitioner saves."""
    owner = joint.graph.owning_module
    assert owner is not None
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(joint.graph, new))
    (output,) = joint.graph.find_nodes(op="output")
    graph.find_nodes(op="output")[0].meta = dict(output.meta)
    old = {node.name: original for original, node in new.items()}
    results = _forward_results(joint)
    module = fx.GraphModule(owner, graph)
    settings = {"activation_memory_budget": fraction, "cse": False}
    with torch._functorch.config.patch(settings):
        forward, _ = min_cut_rematerialization_partition(module, (), num_fwd_outputs=results)
    (end,) = forward.graph.find_nodes(op="output")
    saved = [node.name for node in end.args[0][results:] if isinstance(node, fx.Node)]
    return {joint.tensor_of[old[name]] for name in saved if old.get(name) in joint.tensor_of}


def _forward_results(joint: JointStep) -> int:
    """Return the number of the graph's results that belong to the forward pass."""
    (output,) = joint.graph.find_nodes(op="output")
    gradients = sum(
        node.op == "placeholder" and node.name.startswith("primals") for node in joint.graph.nodes
    )
    return len(output.args[0]) - gradients


TECHNIQUES: Mapping[str, Callable[[JointStep], tuple[Action, ...]]] = {
    "no plan": lambda joint: unplanned(joint.step),
    "checkpoints of sqrt(n) blocks": _square_root,
    "a checkpoint for each block": lambda joint: repeated(joint, segments(joint, 1)),
    "selective checkpoint": _selective,
    "torch's budget 0.8": _partitioned(0.8),
    "torch's budget 0.5": _partitioned(0.5),
    "torch's budget 0.2": _partitioned(0.2),
    "torch's budget 0": _partitioned(0.0),
    "saved tensors on the host": offloaded,
}
"""Schedules by technique."""


# -- table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Curve:
    """Plans of a step for several budgets."""

    plans: tuple[MemoryPlan, ...]

    def least_peak(self, time_us: float) -> int | None:
        """Return the least peak of the plans that are at most so slow."""
        peaks = [
            plan.simulation.peak_bytes for plan in self.plans if plan.simulation.step_us <= time_us + 1e-6
        ]
        return min(peaks, default=None)


def _rows(joint: JointStep, step: TrainingStep) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row for each technique."""
    alone = _Curve(memory_curve(step.without_link(), points=POINTS, effort=EFFORT))
    both = _Curve((*alone.plans, *memory_curve(step, points=POINTS, effort=EFFORT)))
    plain_us = simulate(step, unplanned(step)).step_us
    for name, schedule in TECHNIQUES.items():
        simulation = simulate(step, schedule(joint))
        cells = [size_text(simulation.peak_bytes), f"{simulation.step_us / plain_us:.3f}"]
        for variant, curve in ((step.without_link(), alone), (step, both)):
            time_us = _time_within(variant, simulation.peak_bytes, curve)
            cells.append("-" if time_us is None else f"{time_us / plain_us:.3f}")
            peak = curve.least_peak(simulation.step_us)
            cells.append("-" if peak is None else size_text(peak))
        yield name, *cells


def _time_within(step: TrainingStep, budget_bytes: int, curve: _Curve) -> float | None:
    """Return the time of the fastest plan within a budget, plans of smaller budgets included."""
    if budget_bytes < min(plan.simulation.peak_bytes for plan in curve.plans):
        return None
    plan = plan_memory(step, budget_bytes, effort=EFFORT)
    fitting = (
        simulation.simulation
        for simulation in curve.plans
        if simulation.simulation.peak_bytes <= budget_bytes
    )
    return min(simulation.step_us for simulation in (plan.simulation, *fitting))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model and GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(BATCHES), nargs="*", default=list(BATCHES)[:3])
    parser.add_argument("--gpu", choices=GPUS, nargs="*", default=[GPUS[0]])
    chosen = parser.parse_args(arguments)
    for name in chosen.model:
        joint = profiled(CASES[name], BATCHES[name], described()[GPUS[0]], states=False)
        for gpu in chosen.gpu:
            print(f"\n{name}, batch {BATCHES[name]}, {gpu}\n")
            print("| technique | peak | time | recompute: time | peak | both: time | peak |")
            print("|---|---|---|---|---|---|---|")
            for row in _rows(joint, retimed(joint, described()[gpu])):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
