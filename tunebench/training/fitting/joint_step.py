"""The joint forward and backward graph of a model as a training step: operations, and the memory they write.

A tensor of the step is memory: all views of it, and results of an operation that share it, are one tensor.
Views and items of results are no operations; whoever executes a plan makes them again where they are read.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError
from tunebench.torch.compiler.capture import is_of_torch
from tunebench.training.fitting.gradient_copy import gradient_copy_bytes
from tunebench.training.memory.step import HostLink, StepOperation, StepTensor, TrainingStep

__all__ = [
    "BOUNDARY",
    "RUNNING_STATISTICS",
    "WORKSPACE_BYTES",
    "JointStep",
    "is_random",
    "joint_step",
    "layer_of",
    "parameter_places",
    "random_state",
    "source_of",
    "unread_bytes",
]

RUNNING_STATISTICS: Mapping[Any, tuple[int, int]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: (3, 5),
    torch.ops.aten._batch_norm_with_update_functional.default: (3, 5),
}
"""Operators that return new running statistics, and the places of the old ones among their arguments."""

BOUNDARY = "loss gradient"
"""Name of the operation between forward and backward, which writes the gradients of the results."""

GRADIENT_COPIES = "copies of gradients"
"""Name of the operation at the end in which autograd copies gradients into the layout of their parameters."""

OTHER = "optimizer and other memory"
"""Name of the tensor for bytes that are on the device besides the step."""

WORKSPACE_BYTES = "tunebench workspace bytes"
"""Entry of a node's `meta`: bytes of temporary tensors of a call, which torch does not trace."""

PARAMETERS, INPUTS, RESULTS = "parameters", "inputs and buffers", "results"
"""Roles of the memory that the caller has."""


@dataclass(frozen=True, kw_only=True)
class JointStep:
    """A training step, and where its operations and tensors are in the graph.

    Attributes:
        graph: The joint graph.
        step: The step.
        nodes: Node of each operation; none for the boundary, and for copies of gradients at the end.
        base: For each tensor, the node that is its memory: a placeholder, a call, or an item of a call.
        tensor_of: Tensor of each node that has one; views have that of their base.
        layers: Module of each operation, as in ``layer1.0.conv2``; empty if it belongs to none.
        boundary: Index of the operation between forward and backward.
    """

    graph: fx.Graph
    step: TrainingStep
    nodes: tuple[fx.Node | None, ...]
    base: tuple[fx.Node | None, ...]
    tensor_of: dict[fx.Node, int]
    layers: tuple[str, ...]
    boundary: int

    @cached_property
    def operation_of(self) -> dict[fx.Node, int]:
        """Index of the operation of each node that is one."""
        return {node: index for index, node in enumerate(self.nodes) if node is not None}

    @cached_property
    def readers(self) -> dict[int, list[fx.Node]]:
        """Nodes of the operations that read each tensor, in order."""
        readers: dict[int, list[fx.Node]] = {tensor: [] for tensor in range(len(self.base))}
        for node, operation in zip(self.nodes, self.step.operations, strict=True):
            for tensor in operation.inputs if node is not None else ():
                readers[tensor].append(node)
        return readers

    def returns(self, tensor: int) -> bool:
        """Return whether a tensor stays on the device, or is a result of the step."""
        return self.step.tensors[tensor].resident or tensor in self.step.results

    @cached_property
    def returns_loss(self) -> bool:
        """Whether a result of the model that has a gradient has one element."""
        gradients = (node for node in self.graph.find_nodes(op="placeholder") if _is_tangent(node))
        return any(int(node.meta["val"].numel()) == 1 for node in gradients)

    def tensors_of(self, node: fx.Node) -> set[int]:
        """Return the tensors whose memory a node's result shares; those of all its items, if it is a list."""
        tensor = self.tensor_of.get(node)
        if tensor is not None:
            return {tensor}
        items = (user for user in node.users if user.target is operator.getitem)
        return {self.tensor_of[item] for item in items if item in self.tensor_of}


def joint_step(
    graph: fx.Graph,
    forward_results: int,
    times_us: Callable[[Sequence[fx.Node]], Sequence[float]],
    *,
    link: HostLink | None = None,
    other_bytes: int = 0,
    on_gpu: bool = False,
    parameters: Collection[int] = (),
) -> JointStep:
    """Return the training step of a joint graph.

    Memory of inputs, parameters and results of the forward pass stays on the device during the whole step,
    because the caller holds it.

    Args:
        graph: The graph that AOTAutograd traced, without mutation; each node's `meta` has its `val`.
        forward_results: Number of the graph's results that belong to the forward pass.
        times_us: Returns the time of each of the given calls in microseconds.
        link: The link to host memory; without one, nothing is swapped.
        other_bytes: Bytes on the device besides the step, such as states of the optimizer.
        on_gpu: Whether the device is a GPU. The states of its random numbers, which a plan keeps to repeat an
            operation, are on the host.
        parameters: Places of the parameters among the inputs that Dynamo's graph has.

    Raises:
        InputError: The graph changes tensors in place, has sizes that are not constant or sparse tensors, or
            calls an operation that returns nested lists of tensors.
    """
    if not on_gpu:
        random = sum(node.op == "call_function" and is_random(node) for node in graph.nodes)
        other_bytes += random * _CPU_STATE_BYTES
    return _Reader(graph, forward_results, link, other_bytes, parameters).read(times_us)


def parameter_places(inputs: Sequence[Any]) -> frozenset[int]:
    """Return the places of the parameters among the inputs of a graph that Dynamo traced."""
    return frozenset(place for place, value in enumerate(inputs) if isinstance(value, nn.Parameter))


def unread_bytes(model: nn.Module | None, module: fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Return the bytes of a model's parameters and buffers that are no memory of a graph, but on its device.

    Args:
        model: The model; none if it is not known.
        module: The graph that Dynamo traced.
        inputs: Its inputs.
    """
    read = [
        value for value in (*inputs, *module.parameters(), *module.buffers()) if isinstance(value, Tensor)
    ]
    if model is None or not read:
        return 0
    device = read[0].device
    bytes_of = _storage_bytes(
        tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device == device
    )
    return sum(bytes_of[storage] for storage in bytes_of.keys() - _storage_bytes(read).keys())


def _storage_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each memory of tensors, except sparse, sharded and uninitialised ones."""
    storages = (
        tensor.untyped_storage()
        for tensor in tensors
        if tensor.layout == torch.strided
        and not (is_traceable_wrapper_subclass(tensor) or nn.parameter.is_lazy(tensor))
    )
    return {storage._cdata: storage.nbytes() for storage in storages}


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Reader:
    """Assigns memory and operations to the nodes of a joint graph."""

    def __init__(
        self,
        graph: fx.Graph,
        forward_results: int,
        link: HostLink | None,
        other_bytes: int,
        parameters: Collection[int],
    ) -> None:
        self._graph, self._link, self._parameters = graph, link, parameters
        (output,) = graph.find_nodes(op="output")
        self._results: list[Any] = list(output.args[0])
        self._forward_results = forward_results
        self._sizes: list[int] = []
        self._names: list[str] = []
        self._base: list[fx.Node | None] = []
        self._tensor_of: dict[fx.Node, int] = {}
        self._known: dict[StorageWeakRef, int] = {}
        self._calls: list[fx.Node] = []
        self._outputs: dict[fx.Node, tuple[int, ...]] = {}
        self._tangents: list[int] = []
        self._changed: set[int] = set()
        """Inputs that the step changes after the forward pass."""
        if other_bytes:
            self._add(None, OTHER, other_bytes)

    def read(self, times_us: Callable[[Sequence[fx.Node]], Sequence[float]]) -> JointStep:
        """Return the step."""
        resident = set(range(len(self._sizes)))
        for node in self._graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                tensor_count = len(self._sizes)
                self._memory(node)
                new = range(tensor_count, len(self._sizes))
                if _is_tangent(node):
                    self._tangents.extend(new)
                else:
                    resident.update(new)
            elif node.op == "call_function":
                self._call(node)
        forward = self._results[: self._forward_results]
        returned = {self._tensor_of[node] for node in forward if node in self._tensor_of}
        resident |= returned
        self._tangents = [tensor for tensor in self._tangents if tensor not in resident]
        self._changed = self._changed_inputs()
        boundary = self._boundary(forward)
        times = times_us(self._calls)
        operations = [
            self._operation(node, time_us, resident) for node, time_us in zip(self._calls, times, strict=True)
        ]
        between = StepOperation(
            name=BOUNDARY, time_us=0.0, inputs=(), outputs=tuple(self._tangents), recomputable=False
        )
        operations.insert(boundary, between)
        nodes: list[fx.Node | None] = [*self._calls]
        nodes.insert(boundary, None)
        results = self._backward_results(resident)
        copies = self._gradient_copies(results, resident)
        operations.extend(copies)
        nodes.extend(None for _ in copies)
        step = TrainingStep(
            tensors=self._tensors(resident),
            operations=tuple(operations),
            results=results,
            link=self._link,
        )
        return JointStep(
            graph=self._graph,
            step=step,
            nodes=tuple(nodes),
            base=tuple(self._base),
            tensor_of=self._tensor_of,
            layers=tuple("" if node is None else layer_of(node) for node in nodes),
            boundary=boundary,
        )

    def _tensors(self, resident: set[int]) -> tuple[StepTensor, ...]:
        return tuple(
            StepTensor(
                name=name,
                size_bytes=size,
                resident=tensor in resident,
                role=self._role(base) if tensor in resident else "",
            )
            for tensor, (name, size, base) in enumerate(
                zip(self._names, self._sizes, self._base, strict=True)
            )
        )

    def _backward_results(self, resident: set[int]) -> tuple[int, ...]:
        gradients = (node for node in self._results[self._forward_results :] if node in self._tensor_of)
        results = dict.fromkeys(self._tensor_of[node] for node in gradients)
        return tuple(tensor for tensor in results if tensor not in resident)

    def _gradient_copies(self, results: tuple[int, ...], resident: set[int]) -> list[StepOperation]:
        """Return the operation in which autograd copies gradients; none if it copies none."""
        nbytes = gradient_copy_bytes(self._graph, self._parameters, self._tensor_of, self._sizes, resident)
        if not nbytes:
            return []
        copies = StepOperation(
            name=GRADIENT_COPIES,
            time_us=0.0,
            inputs=results,
            outputs=(),
            workspace_bytes=nbytes,
            recomputable=False,
        )
        return [copies]

    def _role(self, base: fx.Node | None) -> str:
        """Return what a tensor is that stays on the device."""
        if base is None:
            return OTHER
        if base.op not in ("placeholder", "get_attr"):
            return RESULTS
        return PARAMETERS if getattr(base.meta.get("desc"), "idx", None) in self._parameters else INPUTS

    def _operation(self, node: fx.Node, time_us: float, resident: set[int]) -> StepOperation:
        first, last = RUNNING_STATISTICS.get(node.target, (0, 0))
        ignored = {source for source in node.args[first:last] if self._tensor_of.get(source) in resident}
        reads = dict.fromkeys(
            self._tensor_of[source]
            for source in node.all_input_nodes
            if source in self._tensor_of and source not in ignored
        )
        outputs = self._outputs[node]
        return StepOperation(
            name=node.name,
            time_us=time_us,
            inputs=tuple(reads),
            outputs=tuple(tensor for tensor in outputs if tensor not in resident),
            workspace_bytes=node.meta.get(WORKSPACE_BYTES, 0),
            recomputable=not _has_effects(node) and not self._changed & set(reads),
            source=source_of(node),
        )

    def _changed_inputs(self) -> set[int]:
        (output,) = self._graph.find_nodes(op="output")
        described = (getattr(leaf, "mutated_input", None) for leaf in tree_leaves(output.meta.get("desc")))
        changed = {mutated_input for mutated_input in described if mutated_input is not None}
        inputs = self._graph.find_nodes(op="placeholder")
        return {
            self._tensor_of[node]
            for node in inputs
            if node.meta.get("desc") in changed and node in self._tensor_of
        }

    def _boundary(self, forward: Sequence[Any]) -> int:
        """Return the number of operations of the forward pass: all before the last that its results need."""
        needed = [node for node in forward if isinstance(node, fx.Node)]
        seen = set(needed)
        last = 0
        order = {node: index for index, node in enumerate(self._calls)}
        while needed:
            node = needed.pop()
            last = max(last, order.get(node, -1) + 1)
            for source in node.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    needed.append(source)
        tangents = {node for node in self._graph.nodes if _is_tangent(node)}
        if seen & tangents:
            raise InputError("a result of the forward pass depends on a gradient")
        return last

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            if node not in self._tensor_of:
                self._memory(node)
            return
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise InputError(f"the step changes tensors in place by {node.target}")
        tensor_count = len(self._sizes)
        self._memory(node)
        new = tuple(range(tensor_count, len(self._sizes)))
        if new or not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta.get("val"))):
            self._calls.append(node)
            self._outputs[node] = new

    def _memory(self, node: fx.Node) -> None:
        """Assign tensors to a node, and to items of its result."""
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            self._tensor_of[node] = self._tensor(node, value)
        elif isinstance(value, (tuple, list)):
            items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
            for index, element in enumerate(value):
                if isinstance(element, Tensor):
                    item = items.get(index)
                    tensor = self._tensor(item, element, f"{node.name}.{index}")
                    if item is not None:
                        self._tensor_of[item] = tensor
                elif any(isinstance(leaf, Tensor) for leaf in tree_leaves(element)):
                    raise InputError(f"{node.name} returns lists of tensors within a list")

    def _tensor(self, node: fx.Node | None, value: Tensor, name: str = "") -> int:
        if value.layout != torch.strided:
            raise InputError(f"the step has sparse tensors, which have no plan{_line_of(node)}")
        storage = value.untyped_storage()
        size = storage.nbytes()
        if not isinstance(size, int):
            raise InputError(f"the step has sizes that depend on values{_line_of(node)}")
        key = StorageWeakRef(storage)
        if key not in self._known:
            self._known[key] = self._add(node, name or (node.name if node else ""), size)
        return self._known[key]

    def _add(self, node: fx.Node | None, name: str, size: int) -> int:
        self._sizes.append(size)
        self._names.append(name)
        self._base.append(node)
        return len(self._sizes) - 1


def _is_tangent(node: fx.Node) -> bool:
    """Return whether a node is the gradient of a result of the forward pass."""
    return bool(node.name.startswith("tangents"))


def _line_of(node: fx.Node | None) -> str:
    """Return where the model calls an operation, as in ``: nonzero (model.py:12)``; empty if not known."""
    source = "" if node is None else source_of(node)
    return f": {node} ({source})" if source else ""


def source_of(node: fx.Node) -> str:
    """Return the line of the model that calls an operation, or the one whose gradient it computes.

    Args:
        node: A call of a graph of Dynamo or AOTAutograd.

    Returns:
        Its file and line, as in ``model.py:12``; empty if not known.
    """
    lines = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [line for line in lines if not is_of_torch(line[0])]
    return ":".join((own or lines)[-1]) if lines else ""


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator of random numbers; a tensor on the host."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


_CPU_STATE_BYTES = torch.get_rng_state().nbytes


def _has_effects(node: fx.Node) -> bool:
    """Return whether a call must not run again: communication, or results that are not tensors."""
    if "c10d" in getattr(node.target, "namespace", ""):
        return True
    leaves = tree_leaves(node.meta.get("val"))
    return not any(isinstance(leaf, Tensor) for leaf in leaves)


def layer_of(node: fx.Node) -> str:
    """Return the module of a call of the forward pass, or of the call whose gradient it computes.

    Args:
        node: A call of Dynamo's or of AOTAutograd's graph.

    Returns:
        Its name, as in ``layer1.0.conv2``; empty if it belongs to none.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    source = next(reversed([text for text, _ in stack.values()]), "")
    names = re.findall(r"\w+", source.partition("]")[2] if source.startswith("L[") else source)
    return ".".join(name for name in names if name not in ("_modules", "fn"))
