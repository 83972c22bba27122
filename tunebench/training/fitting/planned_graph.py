"""Forward and backward graphs that execute a schedule of a joint graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tunebench.training.fitting.host_store import HostStore, view_of
from tunebench.training.fitting.joint_step import RUNNING_STATISTICS, JointStep, is_random, random_state
from tunebench.training.memory.schedule import Action, Compute, CopyIn, CopyOut, Free

__all__ = ["planned_graphs"]


def planned_graphs(
    joint: JointStep,
    schedule: Sequence[Action],
    forward_results: int,
    store: HostStore | None,
    mode: FakeTensorMode,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a schedule, with the calling convention of AOTAutograd.

    The graphs run the operations of the schedule in its order. The forward graph saves what is on the device
    or on the host at its end and is read later. Each tensor is released after its last use.

    Args:
        joint: The joint step.
        schedule: Actions that `tunebench.training.memory.simulate` accepts.
        forward_results: Number of the graph's results that belong to the forward pass.
        store: Copies tensors to the host and back; needed if the schedule copies any.
        mode: The mode of the tensors in `meta`.
    """
    (output,) = joint.graph.find_nodes(op="output")
    results, descriptions = list(output.args[0]), output.meta.get("desc")
    boundary = schedule.index(Compute(joint.boundary))
    runs = Counter(action.operation for action in schedule if isinstance(action, Compute))
    repeated = frozenset(index for index, count in runs.items() if count > 1)
    forward = _Emitter(joint, store, mode, 0, repeated)
    forward.place_inputs(tangents=False)
    for action in schedule[:boundary]:
        forward.emit(action)
    forward.wait_for_copies()
    forward_values = [forward.value(node) for node in results[:forward_results]]
    saved = forward.saved(schedule[boundary + 1 :])
    forward.return_results(
        [*forward_values, *saved.values()], descriptions and descriptions[:forward_results]
    )

    backward = _Emitter(joint, store, mode, joint.boundary + 1, repeated)
    for key, node in saved.items():
        backward.place_saved(key, node)
    backward.place_inputs(tangents=True)
    for action in schedule[boundary + 1 :]:
        backward.emit(action)
    gradients = [backward.value(node) for node in results[forward_results:]]
    backward.return_results(gradients, descriptions and descriptions[forward_results:])
    return forward.module(), backward.module()


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the forward graph saves for the backward graph.

    Attributes:
        kind: A tensor on the device, its bytes on the host, or the random state before an operation.
        index: The tensor or the operation.
    """

    kind: Literal["device", "host", "random"]
    index: int


class _Emitter:
    """Emits the nodes of one of both graphs, action by action.

    Args:
        joint: The joint step.
        store: Copies tensors to the host and back.
        mode: The mode of the tensors in `meta`.
        started: Number of operations that ran before this graph.
        repeated: Operations that the schedule runs more than once.
    """

    def __init__(
        self,
        joint: JointStep,
        store: HostStore | None,
        mode: FakeTensorMode,
        started: int,
        repeated: frozenset[int],
    ) -> None:
        self._joint, self._store, self._mode = joint, store, mode
        self._started, self._repeated = started, repeated
        self._graph = fx.Graph()
        self._known: dict[fx.Node, fx.Node] = {}
        """The new node of each node of the joint graph whose memory is on the device."""
        self._nodes_of: dict[int, set[fx.Node]] = {}
        """Nodes of the joint graph that are known, by tensor; lists of views as well."""
        self._host: dict[int, fx.Node] = {}
        """Bytes on the host of each tensor that was copied out."""
        self._leaving: set[int] = set()
        """Tensors whose copy to the host was not waited for."""
        self._arriving: dict[int, fx.Node] = {}
        """Bytes on the device that are not complete, by tensor."""
        self._random: dict[int, fx.Node] = {}
        """State of the random numbers before each repeated operation."""

    # -- inputs and results --------------------------------------------------------------------------------

    def place_inputs(self, *, tangents: bool) -> None:
        """Emit the inputs of the graph: gradients of the results, or all others."""
        for node in self._joint.graph.find_nodes(op="placeholder"):
            if node.name.startswith("tangents") == tangents:
                self._learn(node, self._placeholder(node))

    def place_saved(self, key: _Saved, node: fx.Node) -> None:
        """Emit an input of the backward graph that a node of the forward graph saves."""
        new = self._placeholder(node)
        if key.kind == "device":
            self._learn(self._base(key.index), new)
        elif key.kind == "host":
            self._host[key.index] = new
        else:
            self._random[key.index] = new

    def saved(self, rest: Sequence[Action]) -> dict[_Saved, fx.Node]:
        """Return the tensors on the device and on the host that later actions read, with their nodes."""
        step = self._joint.step
        device, host, random = dict[int, None](), dict[int, None](), dict[int, None]()
        written = set(step.operations[self._joint.boundary].outputs)
        for action in rest:
            if isinstance(action, Compute):
                operation = step.operations[action.operation]
                device |= dict.fromkeys(tensor for tensor in operation.inputs if tensor not in written)
                written.update(operation.outputs)
                random[action.operation] = None
            elif isinstance(action, CopyIn):
                host[action.tensor] = None
                written.add(action.tensor)
            elif isinstance(action, CopyOut) and action.tensor not in written:
                device[action.tensor] = None
        device |= dict.fromkeys(tensor for tensor in step.results if tensor not in written)
        saved_nodes = {_Saved("device", tensor): self.value(self._base(tensor)) for tensor in device}
        saved_nodes |= {_Saved("host", tensor): self._host[tensor] for tensor in host if tensor in self._host}
        return saved_nodes | {
            _Saved("random", operation_index): self._random[operation_index]
            for operation_index in random
            if operation_index in self._random
        }

    def return_results(self, results: Sequence[Any], descriptions: Any) -> None:
        """Emit the results of the graph."""
        new = self._graph.output(tuple(results))
        new.meta["val"] = tuple(
            result.meta.get("val") if isinstance(result, fx.Node) else result for result in results
        )
        if descriptions is not None:
            new.meta["desc"] = [*descriptions, *[None] * (len(results) - len(descriptions))]

    def module(self) -> fx.GraphModule:
        """Return the graph as a module."""
        owner = self._joint.graph.owning_module
        assert owner is not None
        return fx.GraphModule(owner, self._graph)

    def _placeholder(self, node: fx.Node) -> fx.Node:
        new = self._graph.placeholder(node.name)
        new.meta = dict(node.meta)
        return new

    def _learn(self, node: fx.Node, new: fx.Node) -> None:
        self._known[node] = new
        for tensor in self._joint.tensors_of(node):
            self._nodes_of.setdefault(tensor, set()).add(node)

    def _base(self, tensor: int) -> fx.Node:
        base = self._joint.base[tensor]
        assert base is not None
        return base

    # -- actions -------------------------------------------------------------------------------------------

    def emit(self, action: Action) -> None:
        """Emit an action."""
        if isinstance(action, Compute):
            self._compute(action.operation)
        elif isinstance(action, Free):
            self._free(action.tensor)
        elif isinstance(action, CopyOut):
            self._copy_out(action.tensor)
        else:
            self._copy_in(action.tensor)

    def _compute(self, index: int) -> None:
        node = self._joint.nodes[index]
        if node is None:  # autograd copies gradients after the graph
            return
        first = index == self._started
        self._started += first
        if is_random(node) and index in self._repeated and first:
            self._random[index] = self._call(random_state, (_device(node),), self._fake_state(node))
        new = self._copy(node, node.args) if first else self._repeat(index, node)
        for output in self._joint.step.operations[index].outputs:
            self._forget(output)
        if isinstance(node.meta.get("val"), Tensor):
            self._learn(node, new)
        else:
            self._items(node, new, self._joint.step.operations[index].outputs, first=first)

    def _repeat(self, index: int, node: fx.Node) -> fx.Node:
        """Emit a call again: with the same random numbers, and without new running statistics."""
        if node.target in RUNNING_STATISTICS:
            first, last = RUNNING_STATISTICS[node.target]
            args = [*node.args]
            args[first:last] = [self._zeros(argument) for argument in args[first:last]]
            return self._copy(node, tuple(args))
        if not is_random(node):
            return self._copy(node, node.args)
        call_args = (self._random[index], _device(node), node.target, *node.args)
        new = self._graph.call_function(
            _with_random_state,
            torch.fx.node.map_arg(call_args, self.value),
            torch.fx.node.map_arg(node.kwargs, self.value),
        )
        new.meta = dict(node.meta)
        return new

    def _zeros(self, node: Any) -> Any:
        """Emit zeros in place of a running statistic, which does not affect the results in training."""
        if not isinstance(node, fx.Node):
            return node
        traced = node.meta["val"]
        new = self._graph.call_function(
            torch.zeros, (tuple(traced.shape),), {"dtype": traced.dtype, "device": traced.device}
        )
        new.meta["val"] = traced
        return new

    def _items(self, node: fx.Node, new: fx.Node, outputs: Sequence[int], *, first: bool) -> None:
        """Emit the items of a call's results at once, so that unused ones are released."""
        for user in node.users:
            if user.target is operator.getitem and (first or self._joint.tensor_of.get(user) in outputs):
                item = self._graph.call_function(operator.getitem, (new, user.args[1]))
                item.meta = dict(user.meta)
                self._learn(user, item)

    def wait_for_copies(self) -> None:
        """Wait for the copies to the host that have not ended."""
        for tensor in sorted(self._leaving):
            self._wait(self._host[tensor])
        self._leaving.clear()

    def _free(self, tensor: int) -> None:
        if tensor in self._leaving:
            self._wait(self._host[tensor])
            self._leaving.discard(tensor)
        self._forget(tensor)

    def _forget(self, tensor: int) -> None:
        for node in self._nodes_of.pop(tensor, ()):
            self._known.pop(node, None)  # a list can have views of several tensors
        self._arriving.pop(tensor, None)

    def _copy_out(self, tensor: int) -> None:
        assert self._store is not None
        with self._mode:
            fake = torch.empty(self._joint.step.tensors[tensor].size_bytes, dtype=torch.uint8)
        self._host[tensor] = self._call(self._store.copy_out, (self.value(self._base(tensor)),), fake)
        self._leaving.add(tensor)

    def _copy_in(self, tensor: int) -> None:
        assert self._store is not None
        traced = self._base(tensor).meta["val"]
        call_args = (self._host[tensor], traced.device)
        with self._mode:
            fake = torch.empty(self._host[tensor].meta["val"].shape, dtype=torch.uint8, device=traced.device)
        memory = self._call(self._store.copy_in, call_args, fake)
        self._arriving[tensor] = memory

    def _wait(self, memory: fx.Node) -> None:
        assert self._store is not None
        self._call(self._store.wait, (memory,), None)

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], traced: Any) -> fx.Node:
        new = self._graph.call_function(target, args)
        new.meta["val"] = traced
        return new

    # -- values --------------------------------------------------------------------------------------------

    def value(self, node: Any) -> Any:
        """Return the new node of a node; views are made again from the memory that is on the device.

        Nodes of the new graph, and what is no node, are returned as they are.
        """
        if not isinstance(node, fx.Node) or node.graph is self._graph:
            return node
        if node in self._known:
            return self._known[node]
        if node.op == "get_attr":
            new = self._graph.get_attr(str(node.target))
            new.meta = dict(node.meta)
        else:
            new = self._again(node)
        self._learn(node, new)
        return new

    def _again(self, node: fx.Node) -> fx.Node:
        owner = node.args[0] if node.target is operator.getitem else node
        if owner in self._joint.operation_of or node.op == "placeholder":
            traced = node.meta["val"]
            where = (traced.dtype, tuple(traced.shape), traced.stride(), traced.storage_offset())
            return self._call(view_of, (self._memory(self._joint.tensor_of[node]), *where), traced)
        return self._copy(node, node.args)

    def _copy(self, node: fx.Node, args: Any) -> fx.Node:
        """Emit a call of the joint graph, with other arguments."""
        new = self._graph.call_function(
            node.target,
            torch.fx.node.map_arg(args, self.value),
            torch.fx.node.map_arg(node.kwargs, self.value),
        )
        new.meta = dict(node.meta)
        return new

    def _memory(self, tensor: int) -> fx.Node:
        """Return a new node that has the memory of a tensor."""
        if tensor in self._arriving:
            memory = self._arriving[tensor]
            self._wait(memory)
            return memory
        for node in self._nodes_of.get(tensor, ()):
            if node in self._known and node in self._joint.tensor_of:
                return self._known[node]
        raise AssertionError(f"{self._joint.step.tensors[tensor].name} is not on the device")

    def _fake_state(self, node: fx.Node) -> Tensor:
        size = random_state(_device(node)).numel()
        with self._mode:
            return torch.empty(size, dtype=torch.uint8)


def _device(node: fx.Node) -> torch.device:
    """Return the device of the first tensor that a call returns."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    device: torch.device = next(leaf.device for leaf in leaves if isinstance(leaf, Tensor))
    return device


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, device)


def _with_random_state(
    state: Tensor, device: torch.device, target: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call an operation, which may have a keyword ``device``, with the random numbers of its first run."""
    now = random_state(device)
    _set_random_state(device, state)
    try:
        return target(*args, **kwargs)
    finally:
        _set_random_state(device, now)
