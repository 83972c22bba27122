"""What a memory plan does with the saved tensors of each layer, in bytes and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunebench.training.memory.planner import MemoryPlan
from tunebench.training.memory.schedule import Compute, CopyIn, CopyOut

__all__ = ["LayerPlan", "layer_plans", "layers_above"]


@dataclass(slots=True, kw_only=True)
class LayerPlan:
    """The operations of a layer in forward and backward pass, and the tensors that it saves for later.

    Attributes:
        layer: Name of the layer.
        kept_bytes: Bytes of saved tensors that stay on the device.
        recomputed_bytes: Bytes of saved tensors that are written again.
        swapped_bytes: Bytes of saved tensors that are copied to the host and back.
        first_us: Time of the first runs of its operations, in microseconds.
        again_us: Time of their repeated runs, in microseconds.
        copies_us: Time of the copies of its tensors, hidden or not, in microseconds.
    """

    layer: str
    kept_bytes: int = 0
    recomputed_bytes: int = 0
    swapped_bytes: int = 0
    first_us: float = 0.0
    again_us: float = 0.0
    copies_us: float = 0.0

    @property
    def saved_bytes(self) -> int:
        """Bytes of all saved tensors."""
        return self.kept_bytes + self.recomputed_bytes + self.swapped_bytes


def layer_plans(plan: MemoryPlan, layers: Sequence[str], *, forward: int | None = None) -> list[LayerPlan]:
    """Return what a plan does with each layer, in the order in which layers first run.

    A tensor that is recomputed and swapped counts as swapped.

    Args:
        plan: The plan.
        layers: Layer of each operation of the step.
        forward: Number of operations of the forward pass: only tensors that one of them writes and a later
            operation reads count as saved. None counts all tensors that are read later than by the next
            operation, except the results of the step.
    """
    step = plan.step
    plans_by_layer = {layer: LayerPlan(layer=layer) for layer in layers}
    producers = step.producers()
    last = {tensor: index for index, operation in enumerate(step.operations) for tensor in operation.inputs}
    for tensor in plan.tensors:
        writer, reader = producers[tensor.tensor], last.get(tensor.tensor, 0)
        if tensor.tensor in step.results or (forward is not None and not writer < forward <= reader):
            continue
        layer, size_bytes = plans_by_layer[layers[writer]], step.tensors[tensor.tensor].size_bytes
        if tensor.copied_in_before:
            layer.swapped_bytes += size_bytes
        elif tensor.recomputed_before:
            layer.recomputed_bytes += size_bytes
        else:
            layer.kept_bytes += size_bytes
    started = 0
    for action in plan.schedule:
        if isinstance(action, Compute):
            layer, time_us = (
                plans_by_layer[layers[action.operation]],
                step.operations[action.operation].time_us,
            )
            # First runs are in order: a run of another operation is a repetition.
            if action.operation == started:
                started += 1
                layer.first_us += time_us
            else:
                layer.again_us += time_us
        elif isinstance(action, CopyOut | CopyIn) and step.link is not None:
            size_bytes = step.tensors[action.tensor].size_bytes
            out = isinstance(action, CopyOut)
            copy_us = step.link.to_host_us(size_bytes) if out else step.link.to_device_us(size_bytes)
            plans_by_layer[layers[producers[action.tensor]]].copies_us += copy_us
    return list(plans_by_layer.values())


def layers_above(layers: Sequence[str], most: int) -> list[str]:
    """Return each layer, or a module that contains it, so that few different names remain.

    Args:
        layers: Names with dots, such as ``layer1.0.conv2``.
        most: Most different names; all names are cut to the same number of parts, at least one.
    """
    depth = max((layer.count(".") + 1 for layer in layers), default=1)
    while depth > 1 and len({_cut(layer, depth) for layer in layers}) > most:
        depth -= 1
    return [_cut(layer, depth) for layer in layers]


def _cut(layer: str, depth: int) -> str:
    return ".".join(layer.split(".")[:depth])
