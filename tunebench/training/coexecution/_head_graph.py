"""Graphs of heads of steps: recorded below autograd, checked against eager mode, replayed as one function."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch.optim import Optimizer
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
)

from tunebench.training.coexecution._autograd import HOOKED_NODES, are_held
from tunebench.training.coexecution._call import Constant, Number, Operation, Value, flat, replaced
from tunebench.training.coexecution._head_tracing import BACKWARD, CLEAR, CLIP, UPDATE, Method, optimizers
from tunebench.training.coexecution._head_update import (
    HeadUpdate,
    UpdateEntry,
    UpdateWriter,
    optimizer_tensors,
    states_of,
)
from tunebench.training.coexecution._memory import MEMORY_SHARE, resident_bytes, return_freed_memory
from tunebench.training.coexecution._modes import current_settings, eager_reason
from tunebench.training.coexecution._operator import may_raise, written
from tunebench.training.coexecution._optimizer_step import same_objects
from tunebench.training.coexecution._run import same
from tunebench.training.coexecution._script import Runner, script_runner
from tunebench.training.coexecution._tensors import NotUnderstoodError

__all__ = ["HeadGraph", "OperationRecorder", "RepeatError", "UnconfirmedError", "active_recorder"]

_CONFIRMATIONS = 2
"""Number of iterations in which eager mode must run the operations of a head before it is trusted."""

_CHECKS = 2
"""Number of replays on copies that must give eager mode's bits before a graph is used."""

_MOST_CHECKS = 8
"""Number of such replays after which other numbers of Python are no longer checked."""

_PLANS = 4
"""Number of times that a head is recorded again, because its optimizers got other states or options."""

_WRITTEN_BYTES = 1 << 22
"""Memory that a graph writes up to which it is copied in each step, so that an error can be taken back."""

_TYPES = (Tensor, Parameter)
_RESULTS = (Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = {
    BACKWARD, CLEAR, UPDATE, torch._C._set_grad_enabled, torch.amp.autocast_mode._enter_autocast,
    torch.amp.autocast_mode._exit_autocast,
}  # fmt: skip
"""Functions without results that are nodes of heads."""

_SCALING = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.lt, operator.le, operator.gt,
    operator.ge, operator.iadd, operator.isub, operator.imul, operator.itruediv, torch.add, torch.sub,
    torch.mul, torch.div, torch.scalar_tensor, "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_",
}  # fmt: skip
"""Functions and methods that give a number to an operation as it is."""


class RepeatError(BaseException):
    """A replayed head failed and was taken back: the step must be repeated in eager mode.

    No handler of the program for `Exception` sees it.
    """


class UnconfirmedError(RepeatError):
    """A head was recorded and taken back: its operations must be compared with those of eager mode.

    Attributes:
        graph: The head.
    """

    def __init__(self, graph: HeadGraph) -> None:
        super().__init__()
        self.graph = graph


class MisfitError(RepeatError):
    """Something else than the arguments decides what the head does; nothing ran."""


def _key(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
    )  # fmt: skip


class OperationRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Record operations below autograd; values are numbered in the order in which they are seen first.

    Attributes:
        operations: The operations.
        metadata: Shape, strides and type of each value.
        first: The tensors that are no results, by index.
        numbers: Indices of numbers of Python, by their text.
        raises: Whether an operation can raise an error.
        raises_late: Whether one can after an update.
        problem: Why the operations cannot be replayed, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation | UpdateEntry] = []
        self.metadata: list[tuple[Any, ...]] = []
        self.first: dict[int, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.raises = self.raises_late = False
        self._written: set[int] = set()
        self.problem: str | None = None
        self._indices: dict[tuple[Any, ...], int] = {}
        self._pauses = False
        self._storages: list[StorageWeakRef] = []  # their addresses stay theirs, their memory is freed

    def index(self, tensor: Tensor) -> int | None:
        """Return the index of a value, or None."""
        return self._indices.get(_key(tensor))

    def release(self) -> None:
        """Release tensors; what ran stays known."""
        self.first.clear()
        self._storages.clear()
        self._indices.clear()
        for entry in self.operations:
            if isinstance(entry, UpdateEntry):
                entry.gradients.clear()

    def has_updates(self) -> bool:
        """Return whether an optimizer updated parameters."""
        return any(isinstance(entry, UpdateEntry) for entry in self.operations)

    def written_storages(self) -> set[int]:
        """Return the addresses of memory that operations write."""
        return self._written

    def update(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a function that updates parameters, and note it as one entry."""
        if self.problem is None and not all(isinstance(tensors, list) for tensors in args):
            self.problem = f"{function.__name__} gets other arguments than lists of tensors"
        if self.problem is None:
            indices = [self.index(tensor) for tensor in (*args[0], *args[1])]
            tensors = list(args[0]), *map(list, args[2:])
            self.operations.append(UpdateEntry(function, tensors, kwargs, list(args[1]), indices))
        self._pauses = True
        try:
            function(*args, **kwargs)
        finally:
            self._pauses = False

    def _add(self, tensor: Tensor) -> int:
        index = len(self.metadata)
        self._indices[_key(tensor)] = index
        self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.metadata.append((tensor.shape, tensor.stride(), tensor.dtype))
        return index

    def _argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            index = self.index(leaf)
            if index is None:
                index = self._add(leaf)
                self.first[index] = leaf.detach()
            return Value(index)
        if type(leaf) is float and repr(leaf) in self.numbers:
            return Number(self.numbers[repr(leaf)])
        return Constant(leaf)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        reads = func is torch.ops.aten._local_scalar_dense.default or func.namespace == "profiler"
        if reads or self._pauses or self.problem is not None:
            return func(*args, **kwargs)
        try:
            arguments = replaced(args, self._argument)
            named = tuple((name, replaced(value, self._argument)) for name, value in kwargs.items())
        except (RuntimeError, NotImplementedError):
            arguments, named = (), ()
            self.problem = f"{func.name()} gets a tensor without memory"
        result = func(*args, **kwargs)
        if self.problem is None:
            try:
                self._note(func, args, kwargs, arguments, named, result)
            except (RuntimeError, NotImplementedError):
                self.problem = f"{func.name()} returns a tensor without memory"
        return result

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that torch.compile returned run as without this mode."""
        return True

    def _has_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether an argument of an operation is an offset into memory that existed before."""
        storage = _key(args[0])[0]
        return len(args) + len(kwargs) > 3 and any(_key(first)[0] == storage for first in self.first.values())

    def _note(self, func: Any, args: Any, kwargs: Any, arguments: Any, named: Any, result: Any) -> None:
        leaves = list(flat((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        results = list(flat(result)) if result is not None else []
        if any(tensor.is_conj() or tensor.is_neg() for tensor in tensors):
            self.problem = f"{func.name()} gets a tensor that is conjugated or negated lazily"
        elif "as_strided" in func.name() and self._has_place(func, args, kwargs):
            self.problem = f"{func.name()} gets a place in the memory of an argument"
        elif func.namespace != "aten" or not all(type(tensor) in _TYPES for tensor in tensors):
            self.problem = f"{func.name()} is no operator of torch on plain tensors"
        elif any(not isinstance(leaf, Tensor) and leaf is not None for leaf in results):
            self.problem = f"{func.name()} returns no tensors"
        elif any(isinstance(leaf, torch.Generator) for leaf in leaves):
            self.problem = f"{func.name()} draws from a generator of its own"
        elif any(not tensor.is_cpu or tensor.layout is not torch.strided for tensor in tensors):
            self.problem = f"{func.name()} gets a tensor that is no dense one of the processor"
        elif func.name().split(".")[0] in ("aten::set_", "aten::resize_"):
            self.problem = f"{func.name()} replaces memory"
        if self.problem is not None:
            return
        for tensor in written(func, args, kwargs):
            self._written.add(_key(tensor)[0])
        operation = Operation(
            operator=func, args=arguments, kwargs=named,
            outputs=tuple(None if leaf is None else self._add(leaf) for leaf in results),
            is_list=isinstance(result, list), is_random=torch.Tag.nondeterministic_seeded in func.tags,
        )  # fmt: skip
        raises = may_raise(operation, [tensor.dtype for tensor in tensors])
        self.raises = self.raises or raises
        self.raises_late = self.raises_late or (
            raises and self.has_updates() and not _returns_number(operation)
        )
        self.operations.append(operation)


def active_recorder() -> OperationRecorder | None:
    """Return the recorder of operations that is the innermost mode of this thread, or None."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, OperationRecorder) else None


def matches(head: OperationRecorder, whole: OperationRecorder, values: Sequence[float]) -> bool:
    """Return whether an iteration of eager mode began with the operations of a head.

    Operators, data flow, shapes, strides, types, constants and numbers must be equal. Dynamo's last
    operations, which return numbers of Python as tensors, are left out.

    Args:
        head: The operations of the head.
        whole: Those of the same iteration in eager mode.
        values: The numbers of Python that are inputs of the head.
    """
    count = len(head.operations)
    while count and _returns_number(head.operations[count - 1]):
        count -= 1
    made = len(head.metadata) - len(head.operations) + count
    if len(whole.operations) < count or head.metadata[:made] != whole.metadata[:made]:
        return False
    pairs = zip(head.operations[:count], whole.operations[:count], strict=True)
    return all(_is_same_operation(ours, theirs, values) for ours, theirs in pairs)


def _returns_number(entry: Operation | UpdateEntry) -> bool:
    return isinstance(entry, Operation) and entry.operator is torch.ops.aten.scalar_tensor.default


def _is_same_operation(ours: Any, theirs: Any, values: Sequence[float]) -> bool:
    if isinstance(ours, UpdateEntry) or isinstance(theirs, UpdateEntry):
        return isinstance(ours, UpdateEntry) and ours.is_same(theirs)
    return (
        ours.same_but_constants(theirs)
        and [name for name, _ in ours.kwargs] == [name for name, _ in theirs.kwargs]
        and _same_arguments(ours, theirs, values)
    )


def _same_arguments(ours: Operation, theirs: Operation, values: Sequence[float]) -> bool:
    lists = [list(flat((each.args, tuple(value for _, value in each.kwargs)))) for each in (ours, theirs)]
    return len(lists[0]) == len(lists[1]) and all(
        (Constant(values[one.index]) if isinstance(one, Number) else one) == two
        for one, two in zip(*lists, strict=True)
    )


class _Numbers(torch.fx.Interpreter):  # type: ignore[misc]  # torch does not type it
    """Runs a graph of Dynamo and notes the numbers of Python that it gives to operations."""

    def __init__(self, module: torch.fx.GraphModule, recorder: OperationRecorder) -> None:
        super().__init__(module)
        self.recorder = recorder
        self.nodes: list[torch.fx.Node] = []
        self.values: list[float] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run a node."""
        result = super().run_node(n)
        uses = [user for user in n.users if isinstance(user.meta.get("example_value"), Tensor)]
        if uses and isinstance(result, (int, float)) and n.op != "output":
            if type(result) is not float or any(user.target not in _SCALING for user in uses):
                raise NotUnderstoodError("a number that changes decides more than a factor or a summand")
            if repr(result) in self.recorder.numbers:
                raise NotUnderstoodError("two numbers that change are equal in the record")
            self.recorder.numbers[repr(result)] = len(self.nodes)
            self.nodes.append(n)
            self.values.append(result)
        return result


@dataclass(frozen=True, slots=True)
class _Output:
    """A result of a graph: argument `index`, tensor `index` of the function, or a node's number."""

    kind: str
    index: Any
    has_history: bool = False


@dataclass(slots=True, kw_only=True)
class _Plan:
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
        groups: Optimizers whose gradients it clears and that do not step, and their parameters.
        updates: Steps of optimizers.
        listed: The owned parameters that it reads, then states, which are its first input.
        listed_positions: Positions of these parameters.
        states: The states.
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
    outputs: list[_Output]
    leaves: list[int]
    extra: list[Tensor]
    owned: dict[int, Tensor]
    gradients: list[tuple[int, int | None]]
    fresh: list[int]
    written: list[int]
    takes_back: bool
    random: bool
    groups: list[tuple[Optimizer, list[Tensor]]]
    updates: list[HeadUpdate]
    listed: Any
    listed_positions: list[int]
    states: list[Tensor]
    settings: list[Any] = field(default_factory=current_settings)
    hooked_nodes: int = field(default_factory=lambda: HOOKED_NODES[0])
    checks: int = 0
    free: bool = False

    def parameters(self, args: Sequence[Any]) -> list[Tensor]:
        """Return leaves and extra parameters."""
        return [args[position] for position in self.leaves] + self.extra

    def environment(self, args: Sequence[Any]) -> dict[Any, Any]:
        """Return the numbers of Python by node."""
        if not self.sources:
            return {}
        values: dict[Any, Any] = {node: args[position] for node, position in self.sources}
        for node in self.arithmetic:
            arguments = [values[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in node.args]
            values[node] = arguments[0].item() if node.op == "call_method" else node.target(*arguments)
        return values

    def misfit(self, args: Sequence[Any], parameters: Sequence[Tensor]) -> str | None:
        """Return what else than the arguments decides what the head does, or None."""
        if not all(parameters[position].grad is None for position in self.fresh):
            return "gradients are there before it"
        if _have_hooks(parameters) or self.hooked_nodes != HOOKED_NODES[0]:
            return "hooks run in its backward pass"
        if not all(map(_IS_LEAF, parameters)):
            return "a tensor has a history from before the iteration"
        if not all(
            same_objects(_parameters(optimizer), group) for optimizer, group in self.groups
        ) or not all(map(operator.is_, map(args.__getitem__, self.owned), self.owned.values())):
            return "an optimizer has other parameters"
        if not all(map(HeadUpdate.is_plain, self.updates)):
            return "a step of an optimizer has hooks"
        return _mode_reason() or (
            None if current_settings() == self.settings else "settings of torch changed"
        )

    def update_numbers(self) -> list[float] | None:
        """Return the numbers of the updates; None if an optimizer would do anything else."""
        numbers: list[float] = []
        for update in self.updates:
            values = update.numbers()
            if values is None:
                return None
            numbers += values
        return numbers

    def run(self, args: Sequence[Any], numbers: Sequence[Any], listed: Any = None) -> Sequence[Any]:
        """Run the function, on other parameters and states if they are given; `misfit` excludes autocast."""
        inputs = [args[position] for position in self.inputs]
        optimizes, enabled = torch._C._get_graph_executor_optimize(), torch.is_grad_enabled()
        torch._C._set_graph_executor_optimize(False)
        torch._C._set_grad_enabled(False)
        try:
            results = self.runner(
                self.listed if listed is None else listed, *inputs, *self.constants, *numbers
            )
        finally:
            torch._C._set_graph_executor_optimize(optimizes)
            torch._C._set_grad_enabled(enabled)
        return results or ()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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


class HeadGraph:
    """A graph of Dynamo: what the head of a step computes.

    It is recorded and taken back until eager mode ran the same operations in the same iterations. Then it
    runs as it is until its record gave the same bits on copies, and then as one function.

    Attributes:
        runs: Number of times that it ran.
        replays: Number of times that it ran as one function.
        misfit: Why it did not run the last time that it did not, or None.
        reason: Why it does not run as one function, or None.
    """

    turns_dynamo_off = True

    def __init__(
        self, module: torch.fx.GraphModule, known: list[Optimizer], methods: Sequence[Method]
    ) -> None:
        self.runs = 0
        self.replays = 0
        self.misfit: str | None = None
        self.reason: str | None = None
        self._module = module
        self._known = known
        self._methods = _methods(module, methods, known)
        self._plan: _Plan | None = None
        self._confirmations = 0
        self._plans = 0
        self._recorded: tuple[OperationRecorder, list[float]] | None = None
        try:
            _check_nodes(list(module.graph.nodes))
        except NotUnderstoodError as error:
            self.reason = str(error)

    def __call__(self, *args: Any) -> Any:
        """Run the graph.

        Raises:
            RepeatError: The step must run in eager mode instead; nothing of it ran, or all was taken back.
        """
        torch._C._dynamo.eval_frame.set_eval_frame(None)  # Dynamo has no part in the rest of the step
        self.runs += 1
        if self.reason is not None:
            raise RepeatError(self.reason)
        if not self._has_methods():
            self._miss("a method of a class was replaced")
        plan = self._plan
        if plan is None:
            return self._run_first(args)
        parameters = plan.parameters(args)
        misfit = plan.misfit(args, parameters)
        if misfit is not None:
            self._miss(misfit)
        updates = plan.update_numbers()
        if updates is None:
            self._plan_again()
            self._miss("an optimizer would do another update")
        values = plan.environment(args)
        numbers = [values[node] for node in plan.numbers]
        if plan.checks < _CHECKS or not (plan.free or numbers == plan.values):
            return self._checked(plan, args, numbers, updates)
        return self._replayed(plan, args, parameters, values, [*numbers, *updates])

    def _has_methods(self) -> bool:
        """Return whether classes have the methods from which the graph was traced."""
        try:
            return all(read(owner) == functions for read, owner, functions in self._methods)
        except AttributeError:
            return False

    def _plan_again(self) -> None:
        """Forget the plan, because states or options of an optimizer were replaced."""
        self._plan = None
        self._confirmations = 0
        self._plans += 1
        if self._plans > _PLANS:
            self.reason = "states or options of an optimizer change again and again"

    def release(self) -> None:
        """Release what was recorded; the graph does not run any more."""
        self.reason = self.reason or self.misfit or "it is not used any more"
        self._plan = self._recorded = None
        self._module = torch.fx.GraphModule({}, torch.fx.Graph())
        self._known = []

    def confirm(self, iteration: OperationRecorder) -> None:
        """Compare what was recorded with the same iteration in eager mode."""
        assert self._recorded is not None
        head, values = self._recorded
        self._recorded = None
        self._confirmations += 1
        if head.problem is not None:
            self.reason = head.problem
        elif not matches(head, iteration, values):  # a record ends at its problem, here often after the head
            self.reason = iteration.problem or "eager mode runs other operations than its trace"

    def _miss(self, misfit: str) -> NoReturn:
        """End the call before anything ran.

        Raises:
            MisfitError: Always.
        """
        self.misfit = misfit
        raise MisfitError(misfit)

    def _run_first(self, args: Sequence[Any]) -> Any:
        """Run the graph as it is, record it, and make the plan if eager mode confirmed it."""
        self.reason = _memory_reason(args, self._known)
        if self.reason is not None:
            raise RepeatError(self.reason)
        parameters = _leaves(args, self._known)
        if are_held(parameter for parameter in parameters if parameter.requires_grad):
            self._miss("a graph of autograd from before the iteration is held, and may have hooks")
        before = _thread_modes()
        states = states_of(self._known)
        with optimizers(self._known), _taken_back(args, self._known):
            recorder = OperationRecorder()
            numbers = _Numbers(self._module, recorder)
            gradients = [parameter.grad for parameter in parameters]
            try:
                with recorder:
                    results = numbers.run(*args)
                if _thread_modes() != before:
                    raise NotUnderstoodError("the head changes modes of torch")
                if not same_objects(states, states_of(self._known)):
                    self._miss("an optimizer makes states")
            except NotUnderstoodError as error:
                self.reason = _first_line(error)
                raise RepeatError from error
            if self._confirmations < _CONFIRMATIONS:
                recorder.release()
                self._recorded = recorder, numbers.values
                raise UnconfirmedError(self)
        try:
            self._plan = _Planner(self._module, args, results, recorder, numbers).plan(
                self._known, parameters, gradients
            )
        except (NotUnderstoodError, RuntimeError) as error:
            self.reason = _first_line(error)
        return results

    def _replayed(
        self,
        plan: _Plan,
        args: Sequence[Any],
        parameters: Sequence[Tensor],
        values: dict[Any, Any],
        numbers: Any,
    ) -> Any:
        state = torch.get_rng_state() if plan.takes_back and plan.random else None
        before = [(args[position], args[position].detach().clone()) for position in plan.written]
        try:
            results = plan.run(args, numbers)
        except Exception as error:
            if not plan.takes_back:
                raise
            _restore(before, state)
            self.reason = "an operation of the head raised an error"
            raise RepeatError from error
        self.replays += 1
        for position, result in plan.gradients:
            parameters[position].grad = None if result is None else results[result]
        for update in plan.updates:
            update.finish()
        return tuple(_output(output, args, results, values) for output in plan.outputs)

    def _checked(
        self, plan: _Plan, args: Sequence[Any], numbers: list[Any], update_numbers: Sequence[float]
    ) -> Any:
        """Run the graph as it is, and compare it with the function on copies."""
        state = torch.get_rng_state()
        with optimizers(self._known), _taken_back((*args, *plan.states), self._known) as copies:
            outputs = self._module(*args)
        equal = _gives_same(plan, args, outputs, copies, [*numbers, *update_numbers], state)
        copies.clear()
        plan.checks += 1
        if plan.checks == _CHECKS:
            return_freed_memory()
        if not equal:
            self.reason = "the recorded head gives other results than eager mode"
        elif any(one != two for one, two in zip(numbers, plan.values, strict=True)):
            plan.free = all(one != two for one, two in zip(numbers, plan.values, strict=True))
        if plan.checks > _MOST_CHECKS and not plan.free:
            self.reason = "numbers of Python in the head change now and then"
        return outputs


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().split("\n")[0][:200]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _TYPES and tensor.is_cpu and tensor.layout is torch.strided


def _methods(
    module: torch.fx.GraphModule, methods: Sequence[Method], known: Sequence[Optimizer]
) -> list[tuple[Callable[[Any], Any], Any, Any]]:
    """Return how to read the methods that a graph was traced from, their classes, and what is read.

    Dynamo looks at classes only when it traces.
    """
    nodes = module.graph.nodes
    names = {node.target for node in nodes if node.op == "call_method"}
    for operation in {node.target for node in nodes if getattr(node.target, "__module__", "") == "_operator"}:
        name = operation.__name__.strip("_")
        names |= {f"__{name}__", f"__r{name}__"}
    by_owner: dict[Any, set[str]] = {nn.Module: {"__call__"}, Tensor: names}
    for owner, name, _ in methods:
        by_owner.setdefault(owner, set()).add(name)
    for optimizer in known:
        by_owner.setdefault(type(optimizer), set()).update(("step", "zero_grad"))
        for module_name in {
            owner.__module__ for owner in type(optimizer).__mro__
        }:  # with the function of updates
            by_owner.setdefault(sys.modules[module_name], set()).add(module_name.rpartition(".")[2])
    readers = [
        (operator.attrgetter(*sorted(name for name in names if hasattr(owner, name)), "__doc__"), owner)
        for owner, names in by_owner.items()
    ]
    return [(read, owner, read(owner)) for read, owner in readers]


def _thread_modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), torch.is_inference_mode_enabled()


def _are_equal(
    plan: _Plan, args: Sequence[Any], copies: Sequence[Any], outputs: Sequence[Any], results: Sequence[Tensor]
) -> bool:
    """Return whether the function gave the outputs, gradients and written inputs of eager mode."""
    pairs = [(one, two) for one, two in zip(args, copies, strict=True) if isinstance(one, Tensor)]
    pairs += [
        (outputs[position], results[output.index])
        for position, output in enumerate(plan.outputs)
        if output.kind == "result"
    ]
    parameters = plan.parameters(args)
    for position, result in plan.gradients:
        pairs.append((parameters[position].grad, None if result is None else results[result]))
    return all(one is two if one is None else same(one, two) for one, two in pairs)


def _gives_same(
    plan: _Plan,
    args: Sequence[Any],
    outputs: Sequence[Any],
    before: dict[int, Tensor],
    numbers: Sequence[Any],
    state: Tensor,
) -> bool:
    """Return whether the function does the same to copies from before, with the random state from before."""
    copies = [before[id(arg)] if isinstance(arg, Tensor) else arg for arg in args]
    states = [before[id(tensor)] for tensor in plan.states]
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        listed = [*(copies[position] for position in plan.listed_positions), *states]
        results = plan.run(copies, numbers, listed)
        return (
            torch.equal(after, torch.get_rng_state())
            and _are_equal(plan, args, copies, outputs, results)
            and all(map(same, plan.states, states))
        )
    except Exception:
        return False
    finally:
        torch.set_rng_state(after)


def _output(output: _Output, args: Sequence[Any], results: Sequence[Any], values: dict[Any, Any]) -> Any:
    if output.kind == "result":
        result = results[output.index]
        return _without_graph(result) if output.has_history else result
    if output.kind == "argument":
        return args[output.index]
    return values[output.index] if output.kind == "number" else output.index


_FREED = (
    "Trying to backward through the graph a second time: the step ran as one function, and its first "
    "backward pass freed what this one needs"
)


def _without_graph(tensor: Tensor) -> Tensor:
    """Return a result whose graph of autograd a backward pass freed already: another one raises an error."""
    freed: Tensor = torch._C._functions.DelayedError(_FREED, 1)(tensor.requires_grad_())
    return freed


def _leaves(args: Sequence[Any], known: Sequence[Optimizer]) -> list[Tensor]:
    """Return leaves of autograd among arguments, and parameters of optimizers, without duplicates."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad and arg.is_leaf]
    tensors += [parameter for optimizer in known for parameter in _parameters(optimizer)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors(args: Sequence[Any], known: Sequence[Optimizer]) -> list[Tensor]:
    """Return the tensors that a graph may write, without duplicates."""
    gradients = [parameter.grad for parameter in _leaves(args, known)]
    tensors = [arg for arg in (*args, *gradients, *optimizer_tensors(known)) if isinstance(arg, Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _memory_reason(args: Sequence[Any], known: Sequence[Optimizer]) -> str | None:
    """Return why a head cannot be checked on copies of what it writes, or None.

    Its check takes these copies and a second set of gradients.
    """
    tensors = _tensors(args, known)
    if not all(map(_is_plain, tensors)):
        return "a tensor is no plain one of the processor"
    copied = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    made = sum(leaf.nbytes for leaf in _leaves(args, known))
    if copied + made > MEMORY_SHARE * resident_bytes():
        return "parameters, gradients and states are too much to copy"
    return None


def _copy(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().clone()
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)


@contextmanager
def _taken_back(args: Sequence[Any], known: Sequence[Optimizer]) -> Iterator[dict[int, Tensor]]:
    """Take back what a graph wrote before an error, which the step in eager mode raises again.

    Yields:
        Copies of what it may write, by identity.
    """
    state = torch.get_rng_state()
    parameters = _leaves(args, known)
    gradients = [parameter.grad for parameter in parameters]
    tensors = _tensors(args, known)
    if not all(map(_is_plain, tensors)):
        raise RepeatError("a tensor is no plain one of the processor")
    copies = {id(tensor): _copy(tensor) for tensor in tensors}
    states = [{key: dict(value) for key, value in optimizer.state.items()} for optimizer in known]
    try:
        yield copies
    except (Exception, RepeatError) as error:
        _restore(list(zip(tensors, copies.values(), strict=True)), state)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer, values in zip(known, states, strict=True):
            _restore_states(optimizer.state, values)
        if isinstance(error, RepeatError):
            raise
        raise RepeatError from error


def _restore_states(state: dict[Any, Any], before: dict[Any, dict[str, Any]]) -> None:
    for key in [key for key in state if key not in before]:
        del state[key]
    for key, values in before.items():
        for name in [name for name in state[key] if name not in values]:
            del state[key][name]
        state[key].update(values)


def _restore(before: Sequence[tuple[Tensor, Tensor]], state: Tensor | None) -> None:
    with torch.no_grad():
        for tensor, copy in before:
            if not same(tensor, copy):
                tensor.copy_(copy)
    if state is not None:
        torch.set_rng_state(state)


def _check_nodes(nodes: Sequence[torch.fx.Node]) -> None:
    """Refuse graphs without a backward pass, with sizes that change, or that change more than tensors.

    Raises:
        NotUnderstoodError: The graph cannot be a head.
    """
    if not any(node.target is BACKWARD for node in nodes):
        raise NotUnderstoodError("the step has no backward pass before its first break")
    for node in nodes:
        if not node.op.startswith("call_") or node.target in _PLAIN:
            continue
        leaves = list(flat(node.meta.get("example_value")))
        if not leaves or not all(isinstance(leaf, _RESULTS) for leaf in leaves):
            raise NotUnderstoodError(f"the head calls {getattr(node.target, '__name__', node.target)}")
    values = [node.meta.get("example_value") for node in nodes if node.op == "placeholder"]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(type(size) is torch.SymInt for tensor in tensors for size in (*tensor.shape, *tensor.stride())):
        raise NotUnderstoodError("sizes of an argument are marked as dynamic")


class _Planner:
    """Makes the plan of a graph from its record."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        args: Sequence[Any],
        results: Sequence[Any],
        recorder: OperationRecorder,
        numbers: _Numbers,
    ) -> None:
        self._nodes = list(module.graph.nodes)
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._constants = [*module.parameters(), *module.buffers()]
        self._args = args
        self._results = results
        self._recorder = recorder
        self._numbers = numbers
        self._returned: list[int] = []
        self._positions = {id(arg): index for index, arg in enumerate(args) if isinstance(arg, Tensor)}

    def plan(
        self, known: Sequence[Optimizer], parameters: Sequence[Tensor], before: Sequence[Tensor | None]
    ) -> _Plan:
        """Return the plan.

        Args:
            known: Optimizers.
            parameters: Leaves of autograd among the arguments, then parameters of optimizers.
            before: Their gradients before the head.

        Raises:
            NotUnderstoodError: The head cannot run as one function.
            RuntimeError: TorchScript has no such operator.
        """
        recorder = self._recorder
        if recorder.problem is not None:
            raise NotUnderstoodError(recorder.problem)
        calls = self._calls(known)
        groups = [(optimizer, _parameters(optimizer)) for optimizer in known if optimizer in calls]
        owned = {id(parameter) for _, group in groups for parameter in group}
        pairs = [
            (parameter, gradient)
            for parameter, gradient in zip(parameters, before, strict=True)
            if id(parameter) in self._positions or id(parameter) in owned
        ]
        kept = [parameter for parameter, _ in pairs]
        operations, writer = self._operations(known)
        states = [state for state, _ in writer.states.values()]
        self._check(kept, states)
        inputs, constants, order = self._inputs()
        outputs = self._outputs(kept)
        gradients, fresh = self._gradients(pairs, *self._clears(known))
        numbers = [*range(len(self._numbers.nodes)), *writer.numbers]
        positions = dict(zip(inputs, order, strict=False))
        listed = [position for position in positions if id(self._args[position]) in owned]
        passed = [position for position in positions if id(self._args[position]) not in owned]
        return _Plan(
            runner=script_runner(
                operations,
                [*map(positions.__getitem__, passed), *order[len(inputs) :]],
                dict.fromkeys(numbers, float),
                self._returned,
                [*map(positions.__getitem__, listed), *(index for _, index in writer.states.values())],
            ),
            listed=_script_list([*map(self._args.__getitem__, listed), *states]),
            listed_positions=listed,
            inputs=passed, constants=constants, sources=self._sources(outputs),
            arithmetic=self._arithmetic(outputs),
            numbers=self._numbers.nodes, values=self._numbers.values, outputs=outputs,
            leaves=[self._positions[id(leaf)] for leaf in kept if id(leaf) in self._positions],
            extra=[leaf for leaf in kept if id(leaf) not in self._positions],
            owned={
                self._positions[id(leaf)]: leaf
                for leaf in kept
                if id(leaf) in owned and id(leaf) in self._positions
            },
            gradients=gradients, fresh=fresh, written=self._written(inputs, order),
            takes_back=recorder.raises,
            random=any(isinstance(entry, Operation) and entry.is_random for entry in operations),
            groups=[pair for pair in groups if UPDATE not in calls[pair[0]]],
            updates=writer.updates, states=states,
        )  # fmt: skip

    def _calls(self, known: Sequence[Optimizer]) -> dict[Optimizer, list[Any]]:
        """Return the functions by which the head clears gradients of optimizers or lets them step."""
        calls: dict[Optimizer, list[Any]] = {}
        for node in self._nodes:
            if node.target in (CLEAR, UPDATE):
                calls.setdefault(known[node.args[0]], []).append(node.target)
        return calls

    def _clears(self, known: Sequence[Optimizer]) -> tuple[set[int], set[int]]:
        """Return parameters whose gradients are cleared first, and those cleared or updated by later."""
        clears: tuple[set[int], set[int]] = set(), set()
        is_later = False
        for node in self._nodes:
            is_later = is_later or node.target in (BACKWARD, UPDATE, CLIP)
            if node.target in (CLEAR, UPDATE):
                clears[is_later].update(map(id, _parameters(known[node.args[0]])))
        return clears

    def _operations(self, known: Sequence[Optimizer]) -> tuple[list[Any], UpdateWriter]:
        """Return the operations, with those of updates."""
        recorder = self._recorder
        if recorder.has_updates() and recorder.raises_late:
            raise NotUnderstoodError("an operation after an update can raise an error")
        writer = UpdateWriter(len(recorder.metadata), len(self._numbers.nodes))
        order = [known[node.args[0]] for node in self._nodes if node.target is UPDATE]
        entries = [entry for entry in recorder.operations if isinstance(entry, UpdateEntry)]
        if len(entries) != sum(len(optimizer.param_groups) for optimizer in order):
            raise NotUnderstoodError("a step of an optimizer does more than an update")
        operations: list[Any] = []
        pending: list[UpdateEntry] = []
        for entry in recorder.operations:
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
        if any(tensor.requires_grad and not tensor.is_leaf for tensor in tensors):
            raise NotUnderstoodError("a tensor has a history from before the iteration")
        storages = {tensor.untyped_storage()._cdata for tensor in (*tensors, *states)}
        if len(storages) < len(tensors) + len(states):
            raise NotUnderstoodError("two arguments share memory")

    def _inputs(self) -> tuple[list[int], list[Tensor], list[int]]:
        """Return positions of arguments, constants, and the indices of their values."""
        if any(constant.requires_grad for constant in self._constants):
            raise NotUnderstoodError("the head reads a parameter that is no argument")
        arguments = {
            _key(arg): position for position, arg in enumerate(self._args) if isinstance(arg, Tensor)
        }
        held = {_key(constant): constant for constant in self._constants}
        first = self._recorder.first
        read = [(index, arguments[key]) for index in first if (key := _key(first[index])) in arguments]
        constants = [(index, held[key]) for index in first if (key := _key(first[index])) in held]
        if len(read) + len(constants) < len(first):
            raise NotUnderstoodError("the head reads a tensor from elsewhere, or gradients from before it")
        order = [index for index, _ in read] + [index for index, _ in constants]
        return [position for _, position in read], [constant for _, constant in constants], order

    def _written(self, inputs: list[int], order: list[int]) -> list[int]:
        """Return the positions of arguments that the head writes and copies first, because it can fail."""
        if not self._recorder.raises:
            return []
        storages = {
            _key(self._recorder.first[index])[0]: position
            for index, position in zip(order, inputs, strict=False)
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
        if index is None or index in self._recorder.first:
            raise NotUnderstoodError("the head returns a tensor that no operation made")
        self._returned.append(index)
        return len(self._returned) - 1

    def _outputs(self, parameters: Sequence[Tensor]) -> list[_Output]:
        (nodes,) = self._nodes[-1].args
        return [
            self._output(result, node, parameters) for result, node in zip(self._results, nodes, strict=True)
        ]

    def _output(self, result: Any, node: Any, parameters: Sequence[Tensor]) -> _Output:
        if isinstance(result, (int, float)) and isinstance(node, torch.fx.Node):
            return _Output("number", node)
        if not isinstance(result, Tensor):
            if result is not None:
                raise NotUnderstoodError(f"the head returns a {type(result).__name__}")
            return _Output("constant", None)
        if id(result) in self._positions:
            return _Output("argument", self._positions[id(result)])
        if result.requires_grad and not _is_freed(result, parameters):
            raise NotUnderstoodError("a result keeps its graph of autograd after the backward pass")
        storages = {
            arg.untyped_storage()._cdata
            for arg in self._args
            if isinstance(arg, Tensor) and arg.requires_grad
        }
        if result.untyped_storage()._cdata in storages:
            raise NotUnderstoodError("the head returns a view of a parameter")
        return _Output("result", self._return(result), result.requires_grad)

    def _sources(self, outputs: Sequence[_Output]) -> list[tuple[torch.fx.Node, int]]:
        """Return the arguments from which numbers of Python are computed, and their positions."""
        used = {output.index for output in outputs if output.kind == "number"} | set(self._numbers.nodes)
        for node in self._arithmetic(outputs):
            used.update(leaf for leaf in node.args if isinstance(leaf, torch.fx.Node))
        return [(node, position) for position, node in enumerate(self._placeholders) if node in used]

    def _arithmetic(self, outputs: Sequence[_Output]) -> list[torch.fx.Node]:
        """Return the nodes that compute numbers of Python, in order."""
        needed = {output.index for output in outputs if output.kind == "number"} | set(self._numbers.nodes)
        for node in reversed(self._nodes):
            if node in needed and node.op != "placeholder":
                reads_item = node.op == "call_method" and node.target == "item"
                if reads_item and node.args[0].op != "placeholder":
                    raise NotUnderstoodError("the head reads a value of a tensor")
                if (node.op != "call_function" and not reads_item) or node.kwargs:
                    raise NotUnderstoodError("Python computes a number in a way that is not understood")
                needed.update(leaf for leaf in node.args if isinstance(leaf, torch.fx.Node))
        return [node for node in self._nodes if node in needed and node.op != "placeholder"]


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
