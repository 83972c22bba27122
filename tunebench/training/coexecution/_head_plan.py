"""Plans of heads of steps: the function of a record, its inputs and results, and when it is valid."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import Optimizer
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from tunebench.training.coexecution._autograd import HOOKED_NODES
from tunebench.training.coexecution._call import Operation, Value, flat
from tunebench.training.coexecution._head_compiled import Compiled, HeadOperations
from tunebench.training.coexecution._head_reads import (
    DECIDE,
    Computed,
    Piece,
    Stage,
    evaluate,
    is_read,
    run_stages,
)
from tunebench.training.coexecution._head_record import OperationRecorder, tensor_key
from tunebench.training.coexecution._head_sizes import HeadSizes
from tunebench.training.coexecution._head_tracing import BACKWARD, CLEAR, CLIP, UPDATE
from tunebench.training.coexecution._head_update import (
    HeadUpdate,
    UpdateEntry,
    UpdateWriter,
    optimizer_words,
    parameters_of,
)
from tunebench.training.coexecution._modes import current_settings, eager_reason
from tunebench.training.coexecution._optimizer_step import joined, same_objects
from tunebench.training.coexecution._script import Runner, script_runner
from tunebench.training.coexecution._tensors import NotUnderstoodError
from tunebench.training.coexecution._words import CachedValue, Word, hook_words

__all__ = ["NUMBER_DECIDES", "NumberInterpreter", "Plan", "Planner", "check_nodes", "has_history"]

NUMBER_DECIDES = "a number that changes decides more than a factor or a summand"
"""Why a head is traced for each value of a number."""

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default

_WRITTEN_BYTES = 1 << 22
"""Memory that a graph writes up to which it is copied in each step, so that an error can be taken back."""

_RESULTS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = {
    BACKWARD, CLEAR, UPDATE, DECIDE, torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}  # fmt: skip
"""Functions without results that are nodes of heads."""

_SCALING = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.le, operator.gt,
    operator.ge, operator.iadd, operator.isub, operator.imul, operator.itruediv, torch.add, torch.sub,
    torch.mul, torch.div, torch.scalar_tensor, "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_",
}  # fmt: skip
"""Functions and methods that give a number to an operation as it is."""


class NumberInterpreter(torch.fx.Interpreter):  # type: ignore[misc]  # torch does not type it
    """Runs a graph of Dynamo and notes the numbers of Python that it reads and gives to operations.

    Attributes:
        nodes: Nodes of numbers that operations get.
        values: These numbers.
        reads: Nodes that read a value of a tensor, the number of operations before, and the value's index.
    """

    def __init__(self, module: torch.fx.GraphModule, recorder: OperationRecorder, sizes: HeadSizes) -> None:
        super().__init__(module)
        self.recorder = recorder
        self._sizes = sizes
        self.nodes: list[torch.fx.Node] = []
        self.values: list[float] = []
        self.reads: dict[torch.fx.Node, tuple[int, int]] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node."""
        if is_read(n) and not (n.args[0].op == "placeholder" and all(map(is_read, n.args[0].users))):
            index = self.recorder.index(self.env[n.args[0]])
            if index is not None:
                self.reads[n] = len(self.recorder.operations), index
        result = super().run_node(n)
        uses = [user for user in n.users if isinstance(user.meta.get("example_value"), Tensor)]
        is_size = self._sizes.includes(n.meta.get("example_value")) and isinstance(result, int)
        if uses and isinstance(result, (int, float)) and n.op != "output" and not is_size:
            if not all(_scales(result, user) for user in uses):
                raise NotUnderstoodError(NUMBER_DECIDES)
            if repr(result) in self.recorder.numbers:
                raise NotUnderstoodError("two numbers that change are equal in the record")
            self.recorder.numbers[repr(result)] = len(self.nodes)
            self.nodes.append(n)
            self.values.append(result)
        return result


def _scales(number: float, user: torch.fx.Node) -> bool:
    """Return whether a node gives a number to an operation as it is.

    An integer acts on tensors of floating-point numbers as the same float does.
    """
    if type(number) is int:
        tensors = [leaf.meta.get("example_value") for leaf in user.all_input_nodes]
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        is_float = bool(tensors) and all(tensor.is_floating_point() for tensor in tensors)
        return is_float and abs(number) < 1 << 53 and user.target in _SCALING
    return type(number) is float and user.target in _SCALING


@dataclass(frozen=True, slots=True)
class Output:
    """A result of a graph: argument `index`, tensor `index` of the function, or a node's number.

    A shared tensor is returned more than once, such as a loss and the detached loss: each is an object.
    """

    kind: str
    index: Any
    has_history: bool = False
    is_shared: bool = False

    def value(self, args: Sequence[Any], results: Sequence[Any], numbers: dict[Any, Any]) -> Any:
        """Return it, from the arguments of the graph, the results of the function and numbers by node."""
        if self.kind == "result":
            result = results[self.index].detach() if self.is_shared else results[self.index]
            return _without_graph(result) if self.has_history else result
        if self.kind == "argument":
            return args[self.index]
        return numbers[self.index] if self.kind == "number" else self.index


_FREED = (
    "Trying to backward through the graph a second time: the step ran as one function, and its first "
    "backward pass freed what this one needs"
)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a result whose graph of autograd a backward pass freed already: another one raises an error."""
    freed: Tensor = torch._C._functions.DelayedError(_FREED, 1)(tensor.requires_grad_())
    return freed


@dataclass(slots=True, kw_only=True)
class Plan:
    """A recorded head.

    Attributes:
        runner: The function.
        inputs: Positions of its inputs among the arguments of the graph, without owned parameters.
        constants: Tensors that the graph holds, which are inputs after those.
        sources: Arguments from which numbers of Python are computed, and their positions.
        arithmetic: Nodes that compute numbers of Python, in order.
        numbers: Those of them that are inputs.
        values: The numbers in the record.
        outputs: What the graph returns.
        leaves: Positions of arguments that are leaves of autograd.
        extra: Parameters of optimizers that are no arguments.
        owned: Parameters of optimizers by position among the arguments.
        gradients: Positions among leaves and extra parameters, and of their gradients among the results;
            None without one.
        fresh: Positions of those that have no gradient before the head.
        written: Positions of arguments that it writes.
        takes_back: Whether it can fail.
        random: Whether it draws random numbers.
        saves_workspace: Whether it has layers of oneDNN that save what their gradients need only while
            gradients are enabled; it then runs below autograd.
        groups: Optimizers whose gradients it clears and that do not step, and their parameters.
        updates: Steps of optimizers.
        listed: The owned parameters that it reads, then states, which are its first input.
        listed_positions: Positions of these parameters.
        states: The states.
        operations: What a compiler compiles; None after it did.
        stages: What runs before its function, with values that Python reads.
        tail: Its operations after the stages, or None.
        carried: Number of values of the stages for which its function is made.
        compiled: The compiled head, if there is one.
        settings: The settings of torch in the record.
        hooked_nodes: Number of hooks of nodes of autograd until then.
        checks: Number of replays on copies that were equal.
        free: Whether one of them had numbers other than the record.
    """

    runner: Runner
    inputs: list[int]
    constants: list[Tensor]
    sources: list[tuple[torch.fx.Node, int]]
    arithmetic: list[torch.fx.Node]
    numbers: list[torch.fx.Node]
    values: list[Any]
    outputs: list[Output]
    leaves: list[int]
    extra: list[Tensor]
    owned: dict[int, Tensor]
    gradients: list[tuple[int, int | None]]
    fresh: list[int]
    written: list[int]
    takes_back: bool
    random: bool
    saves_workspace: bool
    groups: list[tuple[Optimizer, list[Tensor]]]
    updates: list[HeadUpdate]
    listed: Any
    listed_positions: list[int]
    states: list[Tensor]
    operations: HeadOperations | None
    stages: list[Stage] = field(default_factory=list)
    tail: HeadOperations | None = None
    carried: int = -1
    compiled: Compiled | None = None
    settings: list[Any] = field(default_factory=current_settings)
    hooked_nodes: int = field(default_factory=lambda: HOOKED_NODES[0])
    checks: int = 0
    free: bool = False

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return leaves and extra parameters."""
        return [args[position] for position in self.leaves] + self.extra

    def environment(self, args: Sequence[Any]) -> dict[Any, Any]:
        """Return the numbers of Python by node that depend on arguments alone."""
        if not self.sources:
            return {}
        values: dict[Any, Any] = {node: args[position] for node, position in self.sources}
        for node in self.arithmetic:
            values[node] = values[node.args[0]].item() if is_read(node) else evaluate(node, values)
        return values

    def misfit(
        self, args: Sequence[Any], parameters: Sequence[Tensor], hooks: CachedValue | None = None
    ) -> str | None:
        """Return what else than the arguments decides what the head does, or None.

        Args:
            args: Arguments of the graph.
            parameters: Leaves and extra parameters.
            hooks: Where it is cached that there are no hooks and that optimizers have the same parameters.
        """
        if not all(parameters[position].grad is None for position in self.fresh):
            return "gradients are there before it"
        if not all(map(_IS_LEAF, parameters)):
            return "a tensor has a history from before the iteration"
        if self.hooked_nodes != HOOKED_NODES[0]:
            return "hooks run in its backward pass"
        cached = None if hooks is None else hooks.value()
        if cached is None or cached[0] is not self or not same_objects(cached[1], parameters):
            reason = self._owner_reason(args, parameters)
            if reason is not None:
                return reason
            if hooks is not None:
                hooks.learn((self, parameters), lambda: self._words(parameters))
        return _mode_reason() or (
            None if current_settings() == self.settings else "settings of torch changed"
        )

    def _owner_reason(self, args: Sequence[Any], parameters: Sequence[Tensor]) -> str | None:
        """Return why hooks run, or optimizers have other parameters; None otherwise."""
        if _have_hooks(parameters):
            return "hooks run in its backward pass"
        if not all(
            same_objects(parameters_of(optimizer), group) for optimizer, group in self.groups
        ) or not all(map(operator.is_, map(args.__getitem__, self.owned), self.owned.values())):
            return "an optimizer has other parameters"
        return None if all(map(HeadUpdate.is_plain, self.updates)) else "a step of an optimizer has hooks"

    def _words(self, parameters: Sequence[Tensor]) -> list[Word]:
        """Return the words on which hooks and parameters of optimizers depend."""
        words = [*chain.from_iterable(map(hook_words, parameters))]
        words += chain.from_iterable(optimizer_words(optimizer) for optimizer, _ in self.groups)
        return [*words, *chain.from_iterable(map(HeadUpdate.hook_words, self.updates))]

    def cached_numbers(self, cached: CachedValue) -> list[float] | None:
        """Return the numbers of the updates, if possible as they are cached; None as `update_numbers`."""
        plan, numbers = cached.value() or (None, None)
        if plan is not self:
            numbers = self.update_numbers()
            if numbers is not None:
                cached.learn(
                    (self, numbers), lambda: chain.from_iterable(map(HeadUpdate.words, self.updates))
                )
        return numbers

    def update_numbers(self) -> list[float] | None:
        """Return the numbers of the updates; None if an optimizer would do anything else."""
        return joined(map(HeadUpdate.numbers, self.updates))

    def has_same_numbers(self, values: dict[Any, Any]) -> bool:
        """Return whether numbers that operations get are known before it runs, and those of the record."""
        return all(
            node in values and values[node] == recorded
            for node, recorded in zip(self.numbers, self.values, strict=True)
        )

    def tensors(self, args: Sequence[Any]) -> list[Tensor]:
        """Return all tensors that the function gets."""
        listed, passed = (
            [args[at] for at in positions] for positions in (self.listed_positions, self.inputs)
        )
        return [*listed, *self.states, *passed, *self.constants]

    def run(
        self,
        args: Sequence[Any],
        values: dict[Any, Any],
        updates: Sequence[float],
        listed: Any = None,
        runner: Runner | None = None,
        computed: Computed | None = None,
    ) -> Sequence[Any]:
        """Run the function, on other parameters and states if they are given; `misfit` excludes autocast.

        Args:
            args: Arguments of the graph.
            values: Numbers of Python by node; those that it reads are added.
            updates: Numbers of the updates.
            listed: Other parameters and states, or None.
            runner: Another function with the same arguments and results, or None.
            computed: What the head of another way computed in this iteration, or None.

        Raises:
            DecidedOtherwiseError: A value that Python reads decides otherwise; nothing changed but `written`.
        """
        inputs = [*(args[position] for position in self.inputs), *self.constants]
        optimizes, enabled = torch._C._get_graph_executor_optimize(), torch.is_grad_enabled()
        torch._C._set_graph_executor_optimize(False)
        torch._C._set_grad_enabled(self.saves_workspace)
        below = torch._C._AutoDispatchBelowAutograd() if self.saves_workspace else nullcontext()
        try:
            with below:
                if self.stages:
                    carry = [self._run_stages(args, inputs, values, listed, computed)]
                    runner = self._tail_runner()
                else:
                    carry = []
                numbers = [values[node] for node in self.numbers]
                results = (runner or self.runner)(
                    self.listed if listed is None else listed, *carry, *inputs, *numbers, *updates
                )
        finally:
            torch._C._set_graph_executor_optimize(optimizes)
            torch._C._set_grad_enabled(enabled)
        return results or ()

    def _run_stages(
        self,
        args: Sequence[Any],
        inputs: Sequence[Tensor],
        values: dict[Any, Any],
        listed: Any,
        computed: Computed | None,
    ) -> Any:
        """Run what is before the function, and return the list of the values that it needs."""
        count = len(self.listed_positions)
        owned = listed[:count] if listed is not None else [args[at] for at in self.listed_positions]
        tensors = [*owned, *inputs]
        if computed is None or not computed.fits(self.stages, tensors):
            computed = Computed()
        elif computed.state is not None:
            torch.set_rng_state(computed.state)
        run_stages(self.stages, tensors, values, self.numbers, computed)
        return computed.carry

    def _tail_runner(self) -> Runner:
        """Return the function, which is made again if the stages return more values for other ways."""
        count = sum(len(stage.piece.outputs) for stage in self.stages)
        if self.carried != count:
            assert self.tail is not None
            self.carried = count
            carried = [index for stage in self.stages for index in stage.piece.outputs]
            self.runner = runner_of(self.tail, carried)
        return self.runner


def runner_of(head: HeadOperations, carried: Sequence[int] | None = None) -> Runner:
    """Return the function of operations; with stages, of those after them."""
    types: dict[int, type] = {
        index: float if index >= 0 else int for index in head.numbers
    }  # sizes have negative indices
    return script_runner(head.operations, head.inputs, types, head.outputs, head.listed, carried)


_IS_LEAF = operator.attrgetter("is_leaf")
_HOOKS = operator.attrgetter("_backward_hooks"), operator.attrgetter("_post_accumulate_grad_hooks")


def _have_hooks(tensors: Sequence[Tensor]) -> bool:
    return any(map(_HOOKS[0], tensors)) or any(map(_HOOKS[1], tensors))


def _mode_reason() -> str | None:
    """Return why the step runs in eager mode in this state of the thread, or None."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "other processes take part"
    if _has_any_global_hook():
        return "modules have global hooks"
    if torch._C._is_any_autocast_enabled():
        return "the whole step runs in autocast"
    if _len_torch_dispatch_stack() or _len_torch_function_stack():
        return "another mode of torch is active"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "saved-tensor hooks are active"
    if torch.autograd._profiler_enabled():
        return "a profiler is active"
    return eager_reason()


def check_nodes(nodes: Sequence[torch.fx.Node]) -> None:
    """Refuse graphs without a backward pass, with sizes that change, or that change more than tensors.

    Raises:
        NotUnderstoodError: The graph cannot be a head.
    """
    if not any(node.target is BACKWARD for node in nodes):
        raise NotUnderstoodError("the step has no backward pass before its first break")
    for node in nodes:
        if not node.op.startswith("call_") or node.target in _PLAIN:
            continue
        leaves = [leaf for leaf in flat(node.meta.get("example_value")) if leaf is not None]
        if not leaves or not all(isinstance(leaf, _RESULTS) for leaf in leaves):
            raise NotUnderstoodError(f"the head calls {getattr(node.target, '__name__', node.target)}")


def has_history(nodes: Sequence[torch.fx.Node], args: Sequence[Any]) -> bool:
    """Return whether a graph uses an argument with a history from before it, and does not only detach it."""
    placeholders = (node for node in nodes if node.op == "placeholder")
    return any(
        isinstance(arg, Tensor)
        and arg.requires_grad
        and not arg.is_leaf
        and any((user.op, user.target) != ("call_method", "detach") for user in node.users)
        for node, arg in zip(placeholders, args, strict=True)
    )


class Planner:
    """Makes the plan of a graph from its record."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        args: Sequence[Any],
        results: Sequence[Any],
        recorder: OperationRecorder,
        numbers: NumberInterpreter,
        optimizers: Sequence[Optimizer],
        sizes: HeadSizes,
        pieces: Piece,
    ) -> None:
        self._nodes = list(module.graph.nodes)
        self._pieces = pieces
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._constants = [*module.parameters(), *module.buffers()]
        self._args = args
        self._results = results
        self._recorder = recorder
        self._numbers = numbers
        self._optimizers = optimizers
        self._sizes = sizes
        self._entries = recorder.operations
        self._returned: list[int] = []
        self._positions = {id(arg): index for index, arg in enumerate(args) if isinstance(arg, Tensor)}

    def plan(self, parameters: Sequence[Tensor], before: Sequence[Tensor | None]) -> Plan:
        """Return the plan.

        Args:
            parameters: Leaves of autograd among the arguments, then parameters of optimizers.
            before: Their gradients before the head.

        Raises:
            NotUnderstoodError: The head cannot run as one function.
            RuntimeError: TorchScript has no such operator.
        """
        recorder = self._recorder
        if recorder.problem is not None:
            raise NotUnderstoodError(recorder.problem)
        if self._sizes:
            self._entries = self._sizes.general(self._sizes.key(self._args), recorder)
        calls = self._calls()
        owned = {id(parameter) for optimizer in calls for parameter in parameters_of(optimizer)}
        pairs = [
            (parameter, gradient)
            for parameter, gradient in zip(parameters, before, strict=True)
            if id(parameter) in self._positions or id(parameter) in owned
        ]
        leaves = [parameter for parameter, _ in pairs]
        passed_leaves = {self._positions[id(leaf)]: leaf for leaf in leaves if id(leaf) in self._positions}
        operations, writer = self._operations()
        states = [state for state, _ in writer.states.values()]
        self._check(leaves, states)
        inputs, constants = self._inputs()
        outputs = self._outputs(leaves)
        arithmetic = self._arithmetic(outputs)
        gradients, fresh = self._gradients(pairs, *self._clears())
        outputs = self._marked(outputs)
        may_end = recorder.raises or any(node.target is DECIDE for node in arithmetic)
        listed = [position for position in inputs if id(self._args[position]) in owned]
        passed = [position for position in inputs if id(self._args[position]) not in owned]
        listed_indices = [inputs[position] for position in listed]
        passed_indices = [*(inputs[position] for position in passed), *constants]
        stages, tail, late = self._stages(operations, arithmetic, [*listed_indices, *passed_indices])
        head = self._head(
            tail,
            [*listed_indices, *(index for _, index in writer.states.values())],
            passed_indices,
            [*range(len(self._numbers.nodes)), *writer.numbers, *self._sizes.numbers],
            {result for _, result in gradients if result is not None},
        )
        return Plan(
            runner=runner_of(head, [index for stage in stages for index in stage.piece.outputs] or None),
            operations=head,
            stages=stages, tail=head if stages else None,
            listed=_script_list([*map(self._args.__getitem__, listed), *states]),
            listed_positions=listed,
            inputs=passed, constants=list(constants.values()),
            sources=self._sources(outputs, arithmetic),
            arithmetic=[node for node in arithmetic if node not in late],
            numbers=self._numbers.nodes, values=self._numbers.values, outputs=outputs,
            leaves=list(passed_leaves),
            extra=[leaf for leaf in leaves if id(leaf) not in self._positions],
            owned={position: leaf for position, leaf in passed_leaves.items() if id(leaf) in owned},
            gradients=gradients, fresh=fresh, written=self._written(inputs) if may_end else [],
            takes_back=may_end,
            random=any(isinstance(entry, Operation) and entry.is_random for entry in recorder.operations),
            saves_workspace=any(entry.operator is _RECURRENT for entry in operations),
            groups=[
                (optimizer, parameters_of(optimizer))
                for optimizer in calls
                if UPDATE not in calls[optimizer]
            ],
            updates=writer.updates, states=states,
        )  # fmt: skip

    def _stages(
        self, operations: Sequence[Any], arithmetic: Sequence[torch.fx.Node], inputs: Sequence[int]
    ) -> tuple[list[Stage], Sequence[Any], set[torch.fx.Node]]:
        """Return what runs before the function, the operations of the function, and nodes of the former.

        Args:
            operations: All operations.
            arithmetic: Nodes that compute numbers of Python, in order.
            inputs: Indices of the values from before the head.
        """
        reads = {node: self._numbers.reads[node] for node in arithmetic if node in self._numbers.reads}
        bounds = sorted({position for position, _ in reads.values()})
        stage_of = {node: bounds.index(position) for node, (position, _) in reads.items()}
        for node in arithmetic:
            input_stages = [stage_of[leaf] for leaf in node.all_input_nodes if leaf in stage_of]
            if node not in reads and input_stages:
                stage_of[node] = max(input_stages)
        returned = set(self._returned)
        positions = {index: position for position, index in enumerate(inputs)}
        piece, start, stages = self._pieces, 0, []
        for number, end in enumerate(bounds):
            stage_nodes = [node for node in arithmetic if stage_of.get(node) == number]
            read_after = [node for node in stage_nodes if node in reads]
            needed = returned.union(*map(_reads_of, operations[end:]))
            needed |= {index for position, index in reads.values() if position > end}
            piece = piece.follower(operations[start:end], [reads[node][1] for node in read_after], needed)
            stages.append(
                Stage(
                    piece=piece,
                    positions=[positions[index] for index in piece.inputs],
                    reads=read_after,
                    nodes=[node for node in stage_nodes if node not in reads],
                )
            )
            start = end
        return stages, operations[start:], set(stage_of)

    def _head(
        self,
        operations: Sequence[Any],
        listed: list[int],
        inputs: list[int],
        numbers: list[int],
        gradients: set[int],
    ) -> HeadOperations:
        """Return the operations; their first input is a list of parameters and states."""
        entries = self._entries
        updates = (position for position, entry in enumerate(entries) if isinstance(entry, UpdateEntry))
        return HeadOperations(
            operations=operations, first_update=next(updates, len(operations)), listed=listed, inputs=inputs,
            numbers=numbers, outputs=list(self._returned), gradients=gradients,
            types=[dtype for _, _, dtype in self._recorder.metadata],
        )  # fmt: skip

    def _calls(self) -> dict[Optimizer, list[Any]]:
        """Return the functions by which the head clears gradients of optimizers or lets them step."""
        calls: dict[Optimizer, list[Any]] = {}
        for node in self._nodes:
            if node.target in (CLEAR, UPDATE):
                calls.setdefault(self._optimizers[node.args[0]], []).append(node.target)
        return calls

    def _clears(self) -> tuple[set[int], set[int]]:
        """Return parameters whose gradients are cleared first, and those cleared or updated by later."""
        clears: tuple[set[int], set[int]] = set(), set()
        is_later = False
        for node in self._nodes:
            is_later = is_later or node.target in (BACKWARD, UPDATE, CLIP)
            if node.target in (CLEAR, UPDATE):
                clears[is_later].update(map(id, parameters_of(self._optimizers[node.args[0]])))
        return clears

    def _operations(self) -> tuple[list[Any], UpdateWriter]:
        """Return the operations, with those of updates."""
        recorder = self._recorder
        if recorder.has_updates() and recorder.raises_late:
            raise NotUnderstoodError("an operation after an update can raise an error")
        writer = UpdateWriter(len(recorder.metadata), len(self._numbers.nodes))
        order = [self._optimizers[node.args[0]] for node in self._nodes if node.target is UPDATE]
        entries = [entry for entry in self._entries if isinstance(entry, UpdateEntry)]
        if len(entries) != sum(len(optimizer.param_groups) for optimizer in order):
            raise NotUnderstoodError("a step of an optimizer does more than an update")
        operations: list[Any] = []
        pending: list[UpdateEntry] = []
        for entry in self._entries:
            if not isinstance(entry, UpdateEntry):
                operations.append(entry)
                continue
            pending.append(entry)
            if len(pending) == len(order[0].param_groups):
                operations += writer.operations(order.pop(0), pending)
                pending = []
        return operations, writer

    def _check(self, parameters: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        reason = _mode_reason()
        if reason is not None:
            raise NotUnderstoodError(reason)
        if _have_hooks(parameters):
            raise NotUnderstoodError("hooks run in the backward pass")
        tensors = [arg for arg in self._args if isinstance(arg, Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in (*tensors, *states)}
        if len(storages) < len(tensors) + len(states):
            raise NotUnderstoodError("two arguments share memory")

    def _inputs(self) -> tuple[dict[int, int], dict[int, Tensor]]:
        """Return indices of values by position among the arguments, and constants by index."""
        if any(constant.requires_grad for constant in self._constants):
            raise NotUnderstoodError("the head reads a parameter that is no argument")
        positions = {
            tensor_key(arg): position for position, arg in enumerate(self._args) if isinstance(arg, Tensor)
        }
        constants_by_key = {tensor_key(constant): constant for constant in self._constants}
        keys = {index: tensor_key(tensor) for index, tensor in self._recorder.inputs.items()}
        inputs = {positions[key]: index for index, key in keys.items() if key in positions}
        constants = {index: constants_by_key[key] for index, key in keys.items() if key in constants_by_key}
        if len(inputs) + len(constants) < len(keys):
            raise NotUnderstoodError("the head reads a tensor from elsewhere, or gradients from before it")
        return inputs, constants

    def _written(self, inputs: dict[int, int]) -> list[int]:
        """Return the positions of arguments that the head writes and copies first, as it can end early."""
        storages = {
            tensor_key(self._recorder.inputs[index])[0]: position for position, index in inputs.items()
        }
        written = sorted(storages[key] for key in self._recorder.written_storages() if key in storages)
        if sum(self._args[position].untyped_storage().nbytes() for position in written) > _WRITTEN_BYTES:
            raise NotUnderstoodError("the head writes too much memory to take an error back")
        return written

    def _gradients(
        self, pairs: Sequence[tuple[Tensor, Tensor | None]], first: set[int], later: set[int]
    ) -> tuple[list[tuple[int, int | None]], list[int]]:
        """Return the gradients that the head sets, and which of them must be none before."""
        gradients: list[tuple[int, int | None]] = []
        fresh = []
        for position, (parameter, before) in enumerate(pairs):
            gradient = parameter.grad
            if id(parameter) not in first:
                if gradient is before and id(parameter) not in later:
                    continue
                if before is not None:
                    raise NotUnderstoodError("gradients are there before the head")
                fresh.append(position)
            if gradient is None:
                gradients.append((position, None))
                continue
            if gradient is before or type(gradient) is not Tensor or gradient.requires_grad:
                raise NotUnderstoodError("a gradient has a graph of its own, or is kept")
            gradients.append((position, self._return(gradient)))
        return gradients, fresh

    def _return(self, tensor: Tensor) -> int:
        index = self._recorder.index(tensor)
        if index is None or index in self._recorder.inputs:
            raise NotUnderstoodError("the head returns a tensor that no operation made")
        self._returned.append(index)
        return len(self._returned) - 1

    def _outputs(self, parameters: Sequence[Tensor]) -> list[Output]:
        (nodes,) = self._nodes[-1].args
        return [
            self._output(result, node, parameters) for result, node in zip(self._results, nodes, strict=True)
        ]

    def _marked(self, outputs: Sequence[Output]) -> list[Output]:
        """Return the outputs, with a mark of tensors that are returned more than once."""
        counts = Counter(self._returned)
        return [
            replace(output, is_shared=output.kind == "result" and counts[self._returned[output.index]] > 1)
            for output in outputs
        ]

    def _output(self, result: Any, node: Any, parameters: Sequence[Tensor]) -> Output:
        if isinstance(result, (int, float)) and isinstance(node, torch.fx.Node):
            return Output("number", node)
        if not isinstance(result, Tensor):
            if result is not None:
                raise NotUnderstoodError(f"the head returns a {type(result).__name__}")
            return Output("constant", None)
        if id(result) in self._positions:
            return Output("argument", self._positions[id(result)])
        if result.requires_grad and not _is_freed(result, parameters):
            raise NotUnderstoodError("a result keeps its graph of autograd after the backward pass")
        storages = {
            arg.untyped_storage()._cdata
            for arg in self._args
            if isinstance(arg, Tensor) and arg.requires_grad
        }
        if result.untyped_storage()._cdata in storages:
            raise NotUnderstoodError("the head returns a view of a parameter")
        return Output("result", self._return(result), result.requires_grad)

    def _sources(
        self, outputs: Sequence[Output], arithmetic: Sequence[torch.fx.Node]
    ) -> list[tuple[torch.fx.Node, int]]:
        """Return the arguments from which numbers of Python are computed, and their positions."""
        used = {output.index for output in outputs if output.kind == "number"} | set(self._numbers.nodes)
        for node in arithmetic:
            if node not in self._numbers.reads:
                used.update(leaf for leaf in node.args if isinstance(leaf, torch.fx.Node))
        return [(node, position) for position, node in enumerate(self._placeholders) if node in used]

    def _arithmetic(self, outputs: Sequence[Output]) -> list[torch.fx.Node]:
        """Return the nodes that compute numbers of Python, in order."""
        needed = {output.index for output in outputs if output.kind == "number"} | set(self._numbers.nodes)
        for node in reversed(self._nodes):
            if (node in needed or node.target is DECIDE) and node.op != "placeholder":
                if node in self._numbers.reads:
                    needed.add(node)
                    continue
                if (node.op != "call_function" and not is_read(node)) or node.kwargs:
                    raise NotUnderstoodError("Python computes a number in a way that is not understood")
                needed.add(node)
                needed.update(leaf for leaf in node.args if isinstance(leaf, torch.fx.Node))
        return [node for node in self._nodes if node in needed and node.op != "placeholder"]


def _reads_of(operation: Any) -> Iterator[int]:
    if isinstance(operation, Operation):
        return operation.reads()
    return (argument.index for argument in operation.args if isinstance(argument, Value))


def _script_list(tensors: list[Any]) -> Any:
    """Return a list whose elements TorchScript takes as they are; it holds the tensors, not their memory."""
    return torch._C.ScriptList(tensors) if tensors else tensors


def _is_freed(tensor: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Return whether a backward pass from a tensor raises an error, because another one freed its graph."""
    try:
        torch.autograd.grad(
            [tensor],
            [parameter for parameter in parameters if parameter.requires_grad],
            [torch.zeros_like(tensor)],
            allow_unused=True,
            retain_graph=True,
        )
    except RuntimeError as error:
        return "second time" in str(error)
    return False
