"""Layers between which a model can be divided into pipeline stages.

Children of `torch.nn.Sequential` are layers. Any other module is traced by `torch.export`, and the operations
of its graph are divided into layers between which only tensors are alive. A tensor that several layers later
need passes through all stages between them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only, tree_unflatten

from tunebench.errors import InputError, describe_error
from tunebench.training.pipeline_runtime.parameters import is_on_meta

__all__ = ["ModelLayers", "SequentialLayers", "TracedLayers", "layers_of"]


class ModelLayers(Protocol):
    """The layers of a model in their order. A stage is a range of them.

    Attributes:
        starts: What makes the layers of two ranks equal, if it is set to the same on both.
        operations: What the model calls, in order; two ranks with equal models have the same.
    """

    starts: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of layers."""

    def join(self, inputs: Sequence[Tensor]) -> None:
        """Join what would be too many layers, as measured with the inputs of the model."""

    def module(self, first: int, last: int) -> nn.Module:
        """Return the layers from `first` up to but not including `last`, with the names of their parameters.

        The module takes the tensors that the layers before return, and returns one tensor or a tuple.
        """

    def output(self, value: Any) -> Any:
        """Return what the model returns, given what its last layer returns."""


def layers_of(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> ModelLayers:
    """Return the layers of a model.

    Args:
        model: The model.
        inputs: Positional arguments for one micro-batch.
        keywords: Keyword arguments for one micro-batch.

    Raises:
        InputError: if the model can neither be divided nor traced.
    """
    if _is_plain_sequential(model) and len(model) > 1:
        return SequentialLayers(model)
    return TracedLayers(model, inputs, keywords)


def _is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module calls its children one after the other, and nothing else."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module) is nn.Sequential and not any(getattr(module, name) for name in hooks)


# --------------------------------------------------------------------------------------------- children


class SequentialLayers:
    """The children of `torch.nn.Sequential`, and those of a `Sequential` among them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Sequential) -> None:
        self._layers = list(_children(model, ""))
        self.starts = tuple(range(len(self._layers)))
        self.operations = tuple(type(layer).__name__ for _, layer in self._layers)

    @property
    def count(self) -> int:
        """Number of children."""
        return len(self._layers)

    def join(self, inputs: Sequence[Tensor]) -> None:
        """Join nothing."""

    def module(self, first: int, last: int) -> nn.Module:
        """Return a range of layers as a module."""
        return _Chain(self._layers[first:last])

    def output(self, value: Any) -> Any:
        """Return the value."""
        return value


def _children(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """Return the layers of a `Sequential` with their names."""
    layers: list[tuple[str, nn.Module]] = []
    for name, child in module._modules.items():
        path = f"{prefix}{name}"
        layers += _children(child, f"{path}.") if _is_plain_sequential(child) else [(path, child)]
    return layers


class _Chain(nn.Module):  # type: ignore[misc]
    """Layers one after the other, whose parameters have the names of the whole model.

    Args:
        layers: The layers with their names, such as ``3.0``.
    """

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._chain = tuple(layer for _, layer in layers)
        for path, layer in layers:
            parent: nn.Module = self
            *containers, name = path.split(".")
            for container in containers:
                if container not in parent._modules:
                    parent.add_module(container, nn.Module())
                parent = parent._modules[container]
            parent.add_module(name, layer)

    def forward(self, *values: Any) -> Any:
        """Return the output of the last layer."""
        value = values[0] if len(values) == 1 else values
        for layer in self._chain:
            value = layer(value)
        return value


# ----------------------------------------------------------------------------------------------- traced

MOST_LAYERS = 96
"""Most layers of a traced model; neighbouring operations join in them."""


class TracedLayers:
    """The operations that `torch.export` records of a model, in groups of about equal time.

    Shapes are those of the inputs, and modes of modules, such as that of dropout, are those of the trace.

    Args:
        model: The model.
        inputs: Positional arguments for one micro-batch.
        keywords: Keyword arguments for one micro-batch.

    Attributes:
        starts: Position of the first operation of each group.
        operations: Names of the operations.

    Raises:
        InputError: if the model cannot be traced, or has backward hooks.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        self._traced = _traced(model, inputs, keywords)
        nodes = list(self._traced.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._nodes = [node for node in nodes if node.op.startswith("call") and node.target != "_guards_fn"]
        self.operations = tuple(str(node.target) for node in self._nodes)
        (self._results,) = (node.args[0] for node in nodes if node.op == "output")
        self._spec = self._traced._out_spec
        self._alive = self._alive_values()
        undivided = self._between_changes()
        between = range(1, len(self._nodes))
        self.starts = (0, *(start for start in between if start not in undivided and self._divides(start)))

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.starts)

    def join(self, inputs: Sequence[Tensor]) -> None:
        """Join operations to at most 96 groups of about equal time, between which few bytes are alive."""
        if self.count <= MOST_LAYERS:
            return
        ends = _Timed(self._traced, self._nodes).end_seconds(inputs)
        windows: dict[int, list[int]] = {}
        for position in self.starts[1:]:
            windows.setdefault(int(ends[position - 1] / ends[-1] * (MOST_LAYERS - 1)), []).append(position)
        self.starts = (0, *(min(window, key=self._alive_bytes) for _, window in sorted(windows.items())))

    def module(self, first: int, last: int) -> nn.Module:
        """Return a range of groups as a module."""
        begin = self.starts[first]
        end = self.starts[last] if last < self.count else len(self._nodes)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for value in self._inputs if first == 0 else self._alive[begin]:
            copies[value] = graph.placeholder(value.name)

        def copied(value: fx.Node) -> fx.Node:
            if value not in copies and value.op == "get_attr":
                copies[value] = graph.node_copy(value)
            return copies[value]

        for node in self._nodes[begin:end]:
            for value in node.all_input_nodes:
                copied(value)
            copies[node] = graph.node_copy(node, copied)
        ends_model = end == len(self._nodes)
        results = tuple(
            copied(value) for value in (self._tensor_results() if ends_model else self._alive[end])
        )
        graph.output(results[0] if len(results) == 1 else results)
        return fx.GraphModule(self._traced, graph)

    def output(self, value: Any) -> Any:
        """Return what the model returns, such as a mapping, of the tensors of the last stage."""
        tensors = iter(value if isinstance(value, tuple) else (value,))
        leaves = [next(tensors) if isinstance(leaf, fx.Node) else leaf for leaf in self._results]
        return tree_unflatten(leaves, self._spec)

    def _tensor_results(self) -> list[fx.Node]:
        return [leaf for leaf in self._results if isinstance(leaf, fx.Node)]

    def _alive_values(self) -> list[list[fx.Node]]:
        """Return the values that operations before each position make and those from it on need."""
        positions = dict.fromkeys(self._inputs, -1)
        positions |= {node: position for position, node in enumerate(self._nodes)}
        last_uses = dict.fromkeys(positions, -1)
        for position, node in enumerate(self._nodes):
            last_uses |= {value: position for value in node.all_input_nodes if value in positions}
        last_uses |= {value: len(self._nodes) for value in self._tensor_results() if value in positions}
        alive: list[list[fx.Node]] = [[] for _ in range(len(self._nodes) + 1)]
        for value, made in positions.items():
            for position in range(made + 1, last_uses[value] + 1):
                alive[position].append(value)
        return alive

    def _divides(self, position: int) -> bool:
        """Return whether only tensors are alive between two operations."""
        values = self._alive[position]
        return bool(values) and all(isinstance(value.meta.get("val"), Tensor) for value in values)

    def _between_changes(self) -> set[int]:
        """Return the positions between an operation and a later one that changes its result in place."""
        positions = {node: position for position, node in enumerate(self._nodes)}
        return {
            position
            for end, node in enumerate(self._nodes)
            for changed in _changed(node)
            for source in _sources(changed)
            for position in range(positions.get(source, 0) + 1, end + 1)
        }

    def _alive_bytes(self, position: int) -> int:
        values = [value.meta["val"] for value in self._alive[position]]
        return sum(value.numel() * value.element_size() for value in values)


def _traced(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> fx.GraphModule:
    """Return the graph of a model, which shares its parameters.

    A model on `meta` is traced with inputs on `meta`; its graph makes tensors where the inputs are.
    """
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise InputError(
                f"module {name or type(model).__name__} has backward hooks, which a trace does not contain: "
                "remove them, or call pipelined with your own stages"
            )
    try:
        arguments = (tuple(inputs), dict(keywords))
        if is_on_meta(model):
            arguments = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), arguments)
        exported = torch.export.export(model, *arguments, strict=False)
    except Exception as error:
        raise InputError(
            f"torch.export cannot trace {type(model).__name__}: {describe_error(error)}; give a "
            "torch.nn.Sequential, or call pipelined with your own stages"
        ) from error
    traced = exported.module()
    if is_on_meta(model):
        leaves = tree_leaves((inputs, keywords))
        _place(traced.graph, next(leaf.device for leaf in leaves if isinstance(leaf, Tensor)))
    return traced


def _place(graph: fx.Graph, device: torch.device) -> None:
    """Let operations of a graph make tensors on a device instead of `meta`."""

    def placed(value: Any) -> Any:
        return device if value == torch.device("meta") else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, placed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, placed)


def _changed(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [
        value
        for value, argument in zip(node.args, schema.arguments, strict=False)
        if isinstance(value, fx.Node) and argument.alias_info is not None and argument.alias_info.is_write
    ]


def _sources(value: fx.Node) -> list[fx.Node]:
    """Return a value and those of which it is a view, without parameters and buffers."""
    sources: list[fx.Node] = []
    while value.op != "get_attr":
        sources.append(value)
        schema = getattr(value.target, "_schema", None)
        is_view = schema is not None and any(argument.alias_info is not None for argument in schema.arguments)
        if not is_view or not isinstance(value.args[0], fx.Node):
            break
        value = value.args[0]
    return sources


class _Timed(fx.Interpreter):  # type: ignore[misc]
    """Runs a graph, and notes when each operation ends.

    Args:
        traced: The graph.
        nodes: The operations.
    """

    def __init__(self, traced: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        super().__init__(traced)
        self._nodes = set(nodes)
        self._ends: list[float] = []

    def end_seconds(self, flat_inputs: Sequence[Tensor]) -> list[float]:
        """Return the time from the start to the end of each operation, in seconds."""
        for _ in range(2):  # the first run includes the choice of library kernels
            self._ends.clear()
            began = time.perf_counter()
            with torch.no_grad():
                self.run(*flat_inputs, enable_io_processing=False)
        return [end - began for end in self._ends]

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation; checks of inputs are none."""
        if n.target == "_guards_fn":
            return None
        result = super().run_node(n)
        if n in self._nodes:
            if isinstance(result, Tensor) and result.is_cuda:
                torch.cuda.synchronize(result.device)
            self._ends.append(time.perf_counter())
        return result
