"""Record an iteration that runs as in eager mode: its calls, and the operations below autograd."""

from __future__ import annotations

import functools
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _len_torch_dispatch_stack

from tunebench.torch.coexecution._call import (
    Bound,
    Call,
    Constant,
    Number,
    Operation,
    Structure,
    TensorSpec,
    Value,
    Variable,
)
from tunebench.torch.coexecution._function import REPRESENTING, SHARING, Kind, kind
from tunebench.torch.coexecution._modes import thread_state
from tunebench.torch.coexecution._operator import (
    allocates,
    cost_us,
    depends_on_data,
    indices,
    is_random,
    may_raise,
    scales,
    written,
)
from tunebench.torch.coexecution.trace_graph import TracedOperation

__all__ = ["NotUnderstoodError", "Recorder", "call_site"]

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose frames are no call sites."""

_STEP = str(Path(__file__).with_name("coexecute.py"))
"""The module whose `__call__` calls the step."""

_CONSTANTS = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(Ellipsis), np.integer, np.floating, np.bool_,
)  # fmt: skip


class NotUnderstoodError(Exception):
    """A call that can only run as in eager mode."""


def call_site(frame: FrameType | None) -> tuple[str, ...]:
    """Return the call stack within the step without frames of torch, outermost first."""
    site: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _STEP and frame.f_code.co_name == "__call__":
            break
        if not path.startswith(_HIDDEN):
            site.append(f"{path}:{frame.f_lineno}")
        frame = frame.f_back
    return tuple(reversed(site))


class Recorder:
    """The record of an iteration.

    Attributes:
        calls: The calls, in order, as far as all were understood.
        trace: All operations, in order.
        replaying: Call stack of a call that runs again after it ran as a known one; None for a new call.
        problem: Why the iteration can only run as in eager mode, and where; None if it is understood.
        tensors: The tensor objects by variable, as far as they are alive.
        saved: Contents of given storages before the iteration wrote them.
        spent: Histories, by variable, through which another backward pass raises an error at once.
        made_bytes: Bytes of the results of all operations.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.trace: list[TracedOperation] = []
        self.problem: tuple[str, str] | None = None
        self.specs: list[TensorSpec] = []
        self.tensors: list[Any] = []
        self.given: dict[int, Tensor] = {}
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.mode: TorchDispatchMode = _OperationMode(self)
        self._variables: dict[int, int] = {}
        self._values: dict[tuple[Any, ...], int] = {}
        self._geometry: list[tuple[Any, ...]] = []
        self._bases: dict[int, int] = {}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._shared: set[int] = set()
        self._current: Call | None = None
        self._site: tuple[str, ...] = ()
        self.replaying: tuple[str, ...] | None = None
        self._numbers = 0
        self.spent: dict[int, Any] = {}
        self.made_bytes = 0

    # -- calls -----------------------------------------------------------------------------------------------

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Kind | None = None
    ) -> Any:
        """Run a call and record it."""
        found = known or kind(function)
        if found is Kind.METADATA or found is Kind.IGNORED:
            return function(*args, **kwargs)
        self._site = self.replaying if self.replaying is not None else call_site(sys._getframe(1))
        if found is Kind.UNSEEN:
            self.refuse(f"{_name(function)} {found.value}")
            with _disable_current_modes() if _len_torch_dispatch_stack() == 1 else nullcontext():
                return function(*args, **kwargs)
        if self.problem is not None:
            return function(*args, **kwargs)
        call = self._begin(function, args, kwargs, found)
        before = self._gradients_before(call, args, kwargs) if found is Kind.BACKWARD else {}
        self._current = call
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self.refuse(f"{_name(function)} raised {type(error).__name__}")
            raise
        finally:
            self._current = None
        if call is not None and self.problem is None:
            self._end(call, result, before, args)
        return result

    def adopt(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, found: Kind
    ) -> None:
        """Record a call that has run before."""
        self._site = self.replaying if self.replaying is not None else call_site(sys._getframe(1))
        call = self._begin(function, args, kwargs, found)
        if call is not None and self.problem is None:
            self._end(call, result, {}, args)

    def release(self) -> None:
        """Let go of tensors and of results that were only needed to check the path."""
        self.given.clear()
        self.saved.clear()
        self.spent.clear()
        del self.mode  # which refers to the recorder
        for call in self.calls:
            call.result = None
            call.random_states.clear()

    def refuse(self, reason: str) -> None:
        """Note why the iteration can only run as in eager mode; the first reason counts."""
        if self.problem is None:
            self.problem = (reason, self._site[-1] if self._site else "?")

    def _begin(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Kind
    ) -> Call | None:
        state = thread_state()
        call = Call(
            function=function, kind=found, args=(), kwargs=(), state=state,
            site=self._site[-1] if self._site else "?", stack=self._site,
        )  # fmt: skip
        try:
            if found is Kind.UNKNOWN:
                raise NotUnderstoodError(f"{_name(function)} is not understood")
            if state[2]:
                raise NotUnderstoodError(state[2])
            if _len_torch_dispatch_stack() > 1:
                raise NotUnderstoodError("another dispatch mode is active")
            if found is Kind.COMPUTE and not _has_tensor((args, kwargs)):
                call.kind = Kind.CREATE
                return call
            call.args = self._pattern(call, tuple(args))
            call.kwargs = tuple((key, self._pattern(call, value)) for key, value in kwargs.items())
            if found is Kind.OPTIMIZER:
                call.kwargs = tuple((key, _mapped(value, functools.partial(self._number, call)))
                                    for key, value in call.kwargs)  # fmt: skip
        except NotUnderstoodError as error:
            self.refuse(str(error))
            return None
        return call

    def _end(self, call: Call, result: Any, before: dict[int, Tensor | None], args: tuple[Any, ...]) -> None:
        try:
            if call.kind is Kind.FETCH:
                self._fetched(call, result)
            elif call.kind is Kind.STATE:
                call.result = None
            elif call.kind is Kind.BACKWARD:
                self._gradients_after(call, before)
            else:
                call.outputs = self._output(call, result)
            if call.kind is Kind.CREATE:
                if not _has_tensor(result):
                    return
                call.operations.clear()
            self._finish(call)
        except NotUnderstoodError as error:
            self.refuse(str(error))
            return
        self.calls.append(call)

    def _finish(self, call: Call) -> None:
        for operation in call.operations:
            touched = {self._geometry[index][0] for index in (*operation.reads(), *operation.writes)}
            call.waits |= bool(touched & self._shared)
            if call.kind is Kind.COMPUTE:
                dtypes = [self._geometry[index][4] for index in operation.outputs if index is not None]
                reads = [self._geometry[index][4] for index in operation.reads()]
                bound = self._bound(operation)
                if bound is not None:
                    call.bounds += (bound,)
                else:
                    call.waits |= may_raise(operation, dtypes)
                if depends_on_data(operation, reads):
                    call.waits = True
                    for index in operation.outputs:
                        if index is not None:
                            call.checked[index] = self._geometry[index][1:]
            reads_number = "_local_scalar_dense" in operation.operator.name()
            if reads_number and call.kind not in (Kind.FETCH, Kind.OPTIMIZER):
                raise NotUnderstoodError(f"{_name(call.function)} decides by a value of a tensor")
        self._abstract_number(call)

    def _bound(self, operation: Operation) -> Bound | None:
        """Return what Python's thread can check before an operation, so that it need not wait for errors."""
        found = indices(operation)
        if found is None:
            return None
        held, chosen, ignored = found
        storage = self._geometry[held][0]
        root = self._storages[storage][1]
        if root < 0 or storage in self.saved or storage in self._shared:
            return None  # the indices are a result, or are written
        shape = self._geometry[chosen][1]
        axis = 1 if ignored is not None and len(shape) > 1 else 0
        bound = Bound(self.specs[root].value, shape[axis], ignored)
        with _disable_current_modes():
            return bound if bound.holds(self.given[root]) else None

    def _fetched(self, call: Call, result: Any) -> None:
        if _has_tensor(result):
            raise NotUnderstoodError(f"{_name(call.function)} returned a tensor")
        for leaf in _leaves((call.args, call.kwargs)):
            if isinstance(leaf, Variable):
                spec = self.specs[leaf.index]
                if call.function in REPRESENTING and spec.has_history:
                    raise NotUnderstoodError(f"{_name(call.function)} shows the history of a tensor")
                if call.function in SHARING:
                    self._shared.add(self._geometry[spec.value][0])
        call.operations.clear()
        if isinstance(result, np.ndarray):
            result = result.copy()
        call.result = result if isinstance(result, (int, float, bool, str, list, np.ndarray)) else None

    def _abstract_number(self, call: Call) -> None:
        """Make the number of an elementwise operation an argument of it."""
        if call.kind is not Kind.COMPUTE:
            return
        core = [each for each in call.operations if each.operator.name() != "aten::detach"]
        if len(core) != 1 or not scales(core[0].operator):
            return
        constants = [leaf.value for leaf in _leaves((core[0].args, tuple(v for _, v in core[0].kwargs)))
                     if isinstance(leaf, Constant)]  # fmt: skip

        def abstract(leaf: Any) -> Any:
            if not isinstance(leaf, Constant) or type(leaf.value) not in (int, float):
                return leaf
            if constants.count(leaf.value) != 1:
                return leaf
            return self._number(call, leaf)

        call.args = _mapped(call.args, abstract)
        call.kwargs = tuple((key, _mapped(value, abstract)) for key, value in call.kwargs)

    def _number(self, call: Call, leaf: Any) -> Any:
        """Return a number of a call as an input of it."""
        if not isinstance(leaf, Constant) or type(leaf.value) not in (int, float):
            return leaf
        call.numbers[self._numbers] = leaf.value
        self._numbers += 1
        return Number(self._numbers - 1)

    # -- gradients -------------------------------------------------------------------------------------------

    def _gradients_before(
        self, call: Call | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Tensor | None]:
        if call is None:
            return {}
        try:
            if kwargs.get("create_graph") or len(args) > 2:
                raise NotUnderstoodError("backward makes a graph of its own")
            if torch.is_anomaly_enabled() or (
                torch.distributed.is_available() and torch.distributed.is_initialized()
            ):
                raise NotUnderstoodError("anomaly detection or collectives are active")
            roots = args[0] if isinstance(args[0], (tuple, list)) else [args[0]]
            leaves = self._leaves_of(roots)
            if not kwargs.get("retain_graph"):
                self.spent |= {
                    index: root.grad_fn
                    for root in roots
                    if (index := self._known(root)) is not None and _raises_again(root.grad_fn)
                }
        except NotUnderstoodError as error:
            self.refuse(str(error))
            return {}
        before = {}
        for leaf in leaves:
            index = self._known(leaf)
            if index is None:
                self.refuse("backward reaches a tensor that the iteration did not use")
                return {}
            before[index] = leaf.grad
            if leaf.grad is not None:
                try:
                    call.accumulated += ((index, self._gradient(leaf.grad, call)),)
                except NotUnderstoodError as error:
                    self.refuse(str(error))
                    return {}
        return before

    def _gradient(self, gradient: Tensor, call: Call) -> Variable:
        """Return what the gradient of a leaf is before a backward pass."""
        index = self._known(gradient)
        return Variable(self._new(gradient, call, given=True) if index is None else index)

    def _leaves_of(self, roots: Any) -> list[Tensor]:
        """Return the leaves of graphs of autograd, which must hold no Python."""
        leaves: list[Tensor] = []
        pending, seen = [root.grad_fn for root in roots if root.grad_fn is not None], set()
        if len(pending) < len(roots):
            raise NotUnderstoodError("backward of a leaf")
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                leaf = node.variable
                if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                    raise NotUnderstoodError("a leaf has hooks")
                leaves.append(leaf)
            elif isinstance(node, torch.autograd.function.BackwardCFunction):
                raise NotUnderstoodError(f"{type(node).__name__} is a Python function of autograd")
            pending += [following for following, _ in node.next_functions if following is not None]
        return leaves

    def _gradients_after(self, call: Call, before: dict[int, Tensor | None]) -> None:
        changed = []
        for index in before:
            leaf = self.tensors[index]()
            gradient = leaf.grad
            if gradient is None or gradient is before[index]:
                continue
            known = self._known(gradient)
            changed.append((index, self._new(gradient, call, given=False) if known is None else known))
        call.gradients = tuple(changed)

    # -- tensors ---------------------------------------------------------------------------------------------

    def _known(self, tensor: Tensor) -> int | None:
        index = self._variables.get(id(tensor))
        return index if index is not None and self.tensors[index]() is tensor else None

    @property
    def size(self) -> int:
        """Return a number that all indices are smaller than."""
        return max(len(self.specs), len(self._geometry), self._numbers) + 1

    def roots(self) -> list[int]:
        """Return for each value the first given variable with its memory, or -1."""
        return [self._storages[key[0]][1] for key in self._geometry]

    def bases(self) -> list[int]:
        """Return for each value the first value with its memory."""
        return [self._bases[key[0]] for key in self._geometry]

    def rename(self, tensor: Tensor, index: int) -> None:
        """Note that another object is a variable now."""
        self._variables[id(tensor)] = index
        self.tensors[index] = weakref.ref(tensor)

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the variable that an object is."""
        return self._known(tensor)

    def _new(self, tensor: Tensor, call: Call, *, given: bool, made: bool = False) -> int:
        _check(tensor)
        if given and not made and tensor.grad_fn is not None:
            raise NotUnderstoodError("a tensor has a history from before the iteration")
        index = len(self.specs)
        storage = tensor.untyped_storage()
        if given:
            known = self._storages.get(storage._cdata)
            alias = known[1] if known is not None else -1
            if known is not None and alias < 0:
                raise NotUnderstoodError("a new tensor shares the memory of a result")
            if known is None:
                self._storages[storage._cdata] = (StorageWeakRef(storage), index)
            if not storage.resizable():
                self._shared.add(storage._cdata)
            value = self._value_of(tensor, new=True)
            self.given[index] = tensor
        else:
            alias, value = -1, self._value_of(tensor)
        spec = TensorSpec(
            value=value, shape=tensor.shape, stride=tensor.stride(), offset=tensor.storage_offset(),
            dtype=tensor.dtype, requires_grad=tensor.requires_grad, is_leaf=tensor.is_leaf, given=given,
            alias=alias, shared=given and not storage.resizable(),
        )  # fmt: skip
        self.specs.append(spec)
        call.specs[index] = spec
        self.tensors.append(weakref.ref(tensor))
        self._variables[id(tensor)] = index
        return index

    def _key(self, tensor: Tensor) -> tuple[Any, ...]:
        storage = tensor.untyped_storage()._cdata
        return (storage, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)

    def _value_of(self, tensor: Tensor, *, new: bool = False) -> int:
        """Return the index of a tensor's value; a view of a known value becomes a value of its own."""
        key = self._key(tensor)
        index = self._values.get(key)
        if index is not None:
            return index
        base = self._bases.get(key[0])
        index = len(self._geometry)
        self._geometry.append(key)
        self._values[key] = index
        if base is None:
            if not new:
                raise NotUnderstoodError("a tensor comes from elsewhere")
            self._bases[key[0]] = index
            if key[0] not in self._storages:
                self._storages[key[0]] = (StorageWeakRef(tensor.untyped_storage()), -1)
        elif not new:
            if self._geometry[base][4] != tensor.dtype or self._current is None:
                raise NotUnderstoodError("a tensor is a view of another with another type")
            self._current.operations.append(
                Operation(
                    operator=torch.ops.aten.as_strided.default,
                    args=(
                        Value(base),
                        [*map(Constant, key[1])],
                        [*map(Constant, key[2])],
                        Constant(key[3]),
                    ),
                    kwargs=(),
                    outputs=(index,),
                    is_list=False,
                )
            )
        return index

    def _pattern(self, call: Call, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = self._known(value)
            return Variable(self._new(value, call, given=True) if index is None else index)
        if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
            return tuple(self._pattern(call, each) for each in value)
        if type(value) is list:
            return [self._pattern(call, each) for each in value]
        if type(value) is dict:
            return {key: self._pattern(call, each) for key, each in value.items()}
        if type(value) is slice:
            return ("slice", *(self._pattern(call, each) for each in (value.start, value.stop, value.step)))
        if isinstance(value, _CONSTANTS):
            return Constant(value)
        raise NotUnderstoodError(f"an argument of {_name(call.function)} is a {type(value).__name__}")

    def _output(self, call: Call, value: Any) -> Any:
        if isinstance(value, Tensor):
            index = self._known(value)
            if index is not None:
                if self.specs[index] != self._current_spec(value, index):
                    raise NotUnderstoodError(
                        f"{_name(call.function)} changed the shape or history of a tensor"
                    )
                return Variable(index)
            given = call.kind is Kind.CREATE and not self._is_result(value)
            return Variable(self._new(value, call, given=given, made=True))
        if value is None:
            return Constant(None)
        if type(value) in (tuple, list):
            return type(value)(self._output(call, each) for each in value)
        if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
            return Structure(type(value), tuple(self._output(call, each) for each in value))
        raise NotUnderstoodError(f"{_name(call.function)} returned a {type(value).__name__}")

    def _is_result(self, tensor: Tensor) -> bool:
        known = self._storages.get(tensor.untyped_storage()._cdata)
        return known is not None and known[1] < 0

    def _current_spec(self, tensor: Tensor, index: int) -> TensorSpec:
        old = self.specs[index]
        before = (old.shape, old.stride, old.offset, old.dtype, old.requires_grad, old.is_leaf)
        if before == (*self._key(tensor)[1:], tensor.requires_grad, tensor.is_leaf):
            return old
        raise NotUnderstoodError("a tensor changed its shape or history in place")

    # -- operations ------------------------------------------------------------------------------------------

    def operation(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and record it."""
        if operator.namespace == "profiler":
            return operator(*args, **kwargs)
        self.trace.append(
            TracedOperation(
                operator=str(operator.name()), attributes=_text([*args, *kwargs.items()]), site=self._site
            )
        )
        call = self._current
        if self.problem is not None or call is None or call.kind in (Kind.CREATE, Kind.FETCH):
            if self.problem is None and call is None:
                self._outside(operator)
            return operator(*args, **kwargs)
        results: list[Any] = []
        try:
            self._run_recorded(call, operator, args, kwargs, results)
        except NotUnderstoodError as error:
            self.refuse(str(error))
        return results[0] if results else operator(*args, **kwargs)

    def _outside(self, operator: Any) -> None:
        self._site = call_site(sys._getframe(3))
        self.refuse(f"{operator.name()} ran outside of torch's Python functions")

    def _run_recorded(
        self, call: Call, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], done: list[Any]
    ) -> None:
        """Run an operation and record it; the result is added to `done` as soon as it is there."""
        if operator.namespace != "aten":
            raise NotUnderstoodError(f"{operator.name()} is no operator of ATen")
        lifted = operator.name() == "aten::lift_fresh"
        patterns = tuple(self._argument(each, lifted) for each in args)
        named = tuple((key, self._argument(value, lifted)) for key, value in kwargs.items())
        changed = written(operator, args, kwargs)
        for tensor in changed:
            self._save(tensor)
        writes = tuple(self._value_of(tensor) for tensor in changed)
        state = torch.default_generator.get_state() if is_random(operator) else None
        result = operator(*args, **kwargs)
        done.append(result)
        random = state is not None and not torch.equal(state, torch.default_generator.get_state())
        if state is not None and random:
            call.random_states.append(state)
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.made_bytes += sum(each.nbytes for each in results if isinstance(each, Tensor))
        outputs = tuple(
            self._value_of(each, new=True) if isinstance(each, Tensor) else None for each in results
        )
        if allocates(operator):
            call.operations.append(_allocation(result, outputs))
            return
        if random and (filling := _FILLING.get(operator.name())) is not None:
            call.operations += [_allocation(result, outputs), _filled(filling, outputs)]
            return
        if random:
            self._check_random(call, patterns)
        call.operations.append(
            Operation(
                operator=operator,
                args=patterns,
                kwargs=named,
                outputs=outputs,
                is_list=isinstance(result, list),
                writes=writes,
                is_random=random,
                cost_us=cost_us(operator, args, kwargs, result),
            )
        )

    def _check_random(self, call: Call, patterns: tuple[Any, ...]) -> None:
        """Refuse random numbers that depend on values."""
        made = {each.outputs[0] for each in call.operations if allocates(each.operator)}
        if any(leaf.index not in made for leaf in _leaves(patterns) if isinstance(leaf, Value)):
            raise NotUnderstoodError(f"{_name(call.function)} draws random numbers that depend on values")

    def _argument(self, value: Any, lifted: bool) -> Any:
        if isinstance(value, Tensor):
            if lifted and self._values.get(self._key(value)) is None:
                return Constant(_Held(value.clone()))
            return Value(self._value_of(value))
        if isinstance(value, (tuple, list)):
            return [self._argument(each, lifted) for each in value]
        if isinstance(value, torch.Generator):
            raise NotUnderstoodError("an operation uses a random number generator of its own")
        if isinstance(value, _CONSTANTS):
            return Constant(value)
        raise NotUnderstoodError(f"an operation has an argument of type {type(value).__name__}")

    def _save(self, tensor: Tensor) -> None:
        """Save the contents of a given storage before the iteration writes it."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is not None and known[1] >= 0 and storage._cdata not in self.saved:
            self.saved[storage._cdata] = (storage, storage.clone())


_FILLING = {
    "aten::rand_like": torch.ops.aten.uniform_.default,
    "aten::randn_like": torch.ops.aten.normal_.default,
}


def _allocation(tensor: Tensor, outputs: tuple[int | None, ...]) -> Operation:
    """Return the operation that allocates memory like that of a tensor."""
    return Operation(
        operator=torch.ops.aten.empty_strided.default,
        args=([*map(Constant, tensor.shape)], [*map(Constant, tensor.stride())]),
        kwargs=(("dtype", Constant(tensor.dtype)),), outputs=outputs, is_list=False,
    )  # fmt: skip


def _filled(operator: Any, outputs: tuple[int | None, ...]) -> Operation:
    """Return the operation that fills new memory with random numbers."""
    (index,) = outputs
    assert index is not None
    return Operation(
        operator=operator, args=(Value(index),), kwargs=(), outputs=outputs, is_list=False, writes=(index,),
        is_random=True,
    )  # fmt: skip


class _Held:
    """A small constant tensor; equal to another with the same contents."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and torch.equal(self.tensor, other.tensor)

    def __repr__(self) -> str:
        return repr(self.tensor.tolist())

    def __hash__(self) -> int:
        return hash(repr(self))


class _OperationMode(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Pass operations below autograd to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        return self._recorder.operation(func, args, kwargs or {})


def _raises_again(node: Any) -> bool:
    """Return whether a second backward pass from a node of autograd raises before it changes anything."""
    while True:
        if any(name.startswith("_raw_saved_") for name in dir(node)):
            return True
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) != 1:
            return False
        (node,) = following


def _check(tensor: Tensor) -> None:
    if type(tensor) not in (Tensor, Parameter):
        raise NotUnderstoodError(f"a tensor is a {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise NotUnderstoodError(f"a tensor has layout {tensor.layout} on {tensor.device}")
    if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor._backward_hooks:
        raise NotUnderstoodError("a tensor is quantized, a lazy conjugate, or has hooks")


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function)).replace(
        "getset_descriptor", getattr(getattr(function, "__self__", None), "__name__", "attribute")
    )


def _has_tensor(tree: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in _leaves(tree))


def _leaves(tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _leaves(each)
    else:
        yield tree


def _mapped(tree: Any, change: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(_mapped(each, change) for each in tree)
    if isinstance(tree, dict):
        return {key: _mapped(each, change) for key, each in tree.items()}
    return change(tree)


def _text(value: Any) -> str:
    if type(value) in (Tensor, Parameter):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Tensor):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each) for each in value)}]"
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)
