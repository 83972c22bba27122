"""Record an iteration that runs as in eager mode: its calls, and the operations below autograd."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _len_torch_dispatch_stack

from tunebench.training.coexecution._autograd import leaves_of, raises_again
from tunebench.training.coexecution._call import (
    Bound,
    Call,
    Constant,
    Number,
    Operation,
    Structure,
    Value,
    Variable,
    flat,
    holds_tensor,
    replaced,
)
from tunebench.training.coexecution._function import REPRESENTING, SHARING, Kind, kind
from tunebench.training.coexecution._modes import settings, thread_state
from tunebench.training.coexecution._operator import (
    allocates,
    allocation,
    cost_us,
    depends_on_data,
    filling,
    indices,
    is_random,
    may_raise,
    scales,
    written,
)
from tunebench.training.coexecution._tensors import (
    NotUnderstoodError,
    Tensors,
    dropping,
    has_program_reference,
)
from tunebench.training.coexecution.trace_graph import TracedOperation

__all__ = ["Recorder", "call_site"]

_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""Folders whose frames are no call sites."""

_STEP = str(Path(__file__).with_name("coexecute.py"))
"""The module whose `__call__` calls the step."""

_CONSTANTS = (
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    type(Ellipsis), np.integer, np.floating, np.bool_,
)  # fmt: skip


def call_site(frame: FrameType | None) -> tuple[str, ...]:
    """Return the call stack within the step without frames of torch, outermost first."""
    site: list[str] = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _STEP and frame.f_code.co_name == "__call__":
            break
        if not path.startswith(_HIDDEN):
            site.append(sys.intern(f"{path}:{frame.f_lineno}"))  # many records of a call hold it
        frame = frame.f_back
    return tuple(reversed(site))


class Recorder:
    """The record of an iteration.

    Attributes:
        calls: The calls, in order, as far as all were understood.
        trace: All operations, in order.
        replaying: Call stack of a call that runs again after it ran as a known one; None for a new call.
        problem: Why the iteration can only run as in eager mode, and where; None if it is understood.
        tensors: The tensors of the iteration.
        spent: Histories, by variable, through which another backward pass raises an error at once.
        made_bytes: Bytes of the results of all operations.
        reads: Number of calls that read values, by call site.

    Args:
        saves: Whether memory is saved that the iteration writes, so that its path can be checked.
    """

    def __init__(self, *, saves: bool = True) -> None:
        self.calls: list[Call] = []
        self.trace: list[TracedOperation] = []
        self.problem: tuple[str, str] | None = None
        self.tensors = Tensors(saves=saves)
        self.mode: TorchDispatchMode = _OperationMode(self)
        self._current: Call | None = None
        self._site: tuple[str, ...] = ()
        self.replaying: tuple[str, ...] | None = None
        self._numbers = 0
        self.spent: dict[int, Any] = {}
        self.made_bytes = 0
        self.reads = Counter[str]()
        self._settings = settings()

    @property
    def size(self) -> int:
        """Return a number that all indices are smaller than."""
        return max(self.tensors.size, self._numbers) + 1

    # -- calls -----------------------------------------------------------------------------------------------

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Kind | None = None
    ) -> Any:
        """Run a call and record it."""
        found = known or kind(function)
        if found is Kind.METADATA or found is Kind.IGNORED:
            return function(*args, **kwargs)
        self._site = self.replaying if self.replaying is not None else call_site(sys._getframe(1))
        if found is Kind.FETCH:
            self._count_read()
        if found is Kind.UNSEEN:
            self.refuse(f"{_name(function)} {found.value}")
            with _disable_current_modes() if _len_torch_dispatch_stack() == 1 else nullcontext():
                return function(*args, **kwargs)
        if self.problem is not None:
            return function(*args, **kwargs)
        call = self._begin(function, args, kwargs, found)
        before: dict[int, Tensor | None] = {}
        if found is Kind.BACKWARD and call is not None:
            with self._understanding():
                before = self._gradients_before(call, args, kwargs)
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
        if found is Kind.FETCH:
            self._count_read()
        call = self._begin(function, args, kwargs, found)
        if call is not None and self.problem is None:
            self._end(call, result, {}, args)

    def _count_read(self) -> None:
        self.reads[self._site[-1] if self._site else "?"] += 1

    def release(self) -> None:
        """Release the tensors and results that only the check of the path needed."""
        self.tensors.release()
        self.spent.clear()
        del self.mode  # which refers to the recorder
        for call in self.calls:
            call.result = None
            call.random_states.clear()

    def refuse(self, reason: str) -> None:
        """Note why the iteration can only run as in eager mode; the first reason counts."""
        if self.problem is None:
            self.problem = (reason, self._site[-1] if self._site else "?")

    @contextmanager
    def _understanding(self) -> Iterator[None]:
        """Refuse the iteration if a part of it is not understood."""
        try:
            yield
        except NotUnderstoodError as error:
            self.refuse(str(error))

    def watching_drops(self) -> AbstractContextManager[None]:
        """Refuse the iteration if the program drops a tensor and keeps a weak reference to it.

        A known path holds every tensor until the iteration ends, so that such a reference would live on.
        """
        return dropping(self._dropped)

    def _dropped(self, tensor: Tensor) -> None:
        if self.tensors.index_of(tensor) is not None and has_program_reference(tensor):
            self._site = call_site(sys._getframe(1)) or self._site
            self.refuse("a weak reference to a tensor that the step drops")

    def _begin(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Kind
    ) -> Call | None:
        state = thread_state()
        if settings() != self._settings:  # by a function that was taken from torch before
            self.refuse("a setting of torch changes within the step")
            return None
        call = Call(
            function=function, kind=found, args=(), kwargs=(), state=state,
            site=self._site[-1] if self._site else "?", stack=self._site,
        )  # fmt: skip
        with self._understanding():
            if found is Kind.UNKNOWN:
                raise NotUnderstoodError(f"{_name(function)} is not understood")
            if state[2]:
                raise NotUnderstoodError(state[2])
            if _len_torch_dispatch_stack() > 1:
                raise NotUnderstoodError("another dispatch mode is active")
            if found is Kind.CREATE or (found is Kind.COMPUTE and not holds_tensor((args, kwargs))):
                call.kind = Kind.CREATE
                return call
            call.args = self._pattern(call, tuple(args))
            call.kwargs = tuple((key, self._pattern(call, value)) for key, value in kwargs.items())
            if found is Kind.OPTIMIZER:
                call.kwargs = tuple((key, replaced(value, functools.partial(self._number, call)))
                                    for key, value in call.kwargs)  # fmt: skip
            return call
        return None

    def _end(self, call: Call, result: Any, before: dict[int, Tensor | None], args: tuple[Any, ...]) -> None:
        if call.kind is Kind.CREATE and not call.operations and not holds_tensor(result):
            return  # such as torch.device
        with self._understanding():
            if call.kind is Kind.FETCH:
                self._fetched(call, result)
            elif call.kind is Kind.BACKWARD:
                self._gradients_after(call, before)
            elif call.kind is not Kind.STATE:
                call.outputs = self._output(call, result)
            if call.kind is Kind.CREATE:
                if not holds_tensor(result):
                    return
                call.operations.clear()
            self._finish(call)
            self.calls.append(call)

    def _finish(self, call: Call) -> None:
        tensors = self.tensors
        for operation in call.operations:
            call.waits |= any(map(tensors.is_shared, (*operation.reads(), *operation.writes)))
            if call.kind is Kind.COMPUTE:
                dtypes = [tensors.geometry[index].dtype for index in operation.outputs if index is not None]
                reads = [tensors.geometry[index].dtype for index in operation.reads()]
                bound = self._bound(operation)
                if bound is not None:
                    call.bounds += (bound,)
                else:
                    call.waits |= may_raise(operation, dtypes)
                if depends_on_data(operation, reads):
                    call.waits = True
                    for index in operation.outputs:
                        if index is not None:
                            _, shape, *others = tensors.geometry[index]
                            call.checked[index] = (tuple(shape), *others)
            reads_number = "_local_scalar_dense" in operation.operator.name()
            if reads_number and call.kind not in (Kind.FETCH, Kind.OPTIMIZER):
                raise NotUnderstoodError(f"{_name(call.function)} reads a tensor as a number")
        self._abstract_number(call)

    def _bound(self, operation: Operation) -> Bound | None:
        """Return what Python's thread can check before an operation, so that it need not wait for errors."""
        found = indices(operation)
        if found is None:
            return None
        held, chosen, ignored = found
        tensors = self.tensors
        root = tensors.root(held)
        if root < 0 or tensors.is_saved(held) or tensors.is_shared(held):
            return None  # the indices are a result, or are written
        shape = tensors.geometry[chosen].shape
        axis = 1 if ignored is not None and len(shape) > 1 else 0
        bound = Bound(tensors.specs[root].value, shape[axis], ignored)
        with _disable_current_modes():
            return bound if bound.holds(tensors.given[root]) else None

    def _fetched(self, call: Call, result: Any) -> None:
        if holds_tensor(result):
            raise NotUnderstoodError(f"{_name(call.function)} returned a tensor")
        for leaf in flat((call.args, call.kwargs)):
            if isinstance(leaf, Variable):
                spec = self.tensors.specs[leaf.index]
                if call.function in REPRESENTING and spec.has_history:
                    raise NotUnderstoodError(f"{_name(call.function)} shows the history of a tensor")
                if call.function in SHARING:
                    self.tensors.share(spec.value)
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
        constants = [leaf.value for leaf in flat((core[0].args, tuple(v for _, v in core[0].kwargs)))
                     if isinstance(leaf, Constant)]  # fmt: skip

        def abstract(leaf: Any) -> Any:
            if not isinstance(leaf, Constant) or type(leaf.value) not in (int, float):
                return leaf
            if constants.count(leaf.value) != 1:
                return leaf
            return self._number(call, leaf)

        call.args = replaced(call.args, abstract)
        call.kwargs = tuple((key, replaced(value, abstract)) for key, value in call.kwargs)

    def _number(self, call: Call, leaf: Any) -> Any:
        """Return a number of a call as an input of it."""
        if not isinstance(leaf, Constant) or type(leaf.value) not in (int, float):
            return leaf
        call.numbers[self._numbers] = leaf.value
        self._numbers += 1
        return Number(self._numbers - 1)

    # -- gradients -------------------------------------------------------------------------------------------

    def _gradients_before(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[int, Tensor | None]:
        """Return the gradients that leaves have before a backward pass, by variable."""
        if kwargs.get("create_graph") or len(args) > 2:
            raise NotUnderstoodError("backward makes a graph of its own")
        if torch.is_anomaly_enabled() or (
            torch.distributed.is_available() and torch.distributed.is_initialized()
        ):
            raise NotUnderstoodError("anomaly detection or collectives are active")
        roots = args[0] if isinstance(args[0], (tuple, list)) else [args[0]]
        leaves = leaves_of(roots)
        if not kwargs.get("retain_graph"):
            self.spent |= {
                index: root.grad_fn
                for root in roots
                if (index := self.tensors.index_of(root)) is not None and raises_again(root.grad_fn)
            }
        before: dict[int, Tensor | None] = {}
        for leaf in leaves:
            index = self.tensors.index_of(leaf)
            if index is None:
                raise NotUnderstoodError("backward reaches a tensor that the iteration did not use")
            before[index] = leaf.grad
            if leaf.grad is not None:
                call.accumulated += ((index, self.tensors.variable(leaf.grad, call.specs, given=True)),)
        return before

    def _gradients_after(self, call: Call, before: dict[int, Tensor | None]) -> None:
        changed = []
        for index in before:
            leaf = self.tensors.object(index)
            gradient = leaf.grad if leaf is not None else None
            if gradient is None or gradient is before[index]:
                continue
            changed.append((index, self.tensors.variable(gradient, call.specs, given=False).index))
        call.gradients = tuple(changed)

    # -- patterns --------------------------------------------------------------------------------------------

    def _pattern(self, call: Call, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.tensors.variable(value, call.specs, given=True)
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
            given = call.kind is Kind.CREATE and not self.tensors.is_result(value)
            variable = self.tensors.variable(value, call.specs, given=given, made=True)
            if not self.tensors.is_unchanged(value, variable.index):
                raise NotUnderstoodError(
                    f"{_name(call.function)} changed the shape or history of a tensor in place"
                )
            return variable
        if value is None:
            return Constant(None)
        if type(value) in (tuple, list):
            return type(value)(self._output(call, each) for each in value)
        if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
            return Structure(type(value), tuple(self._output(call, each) for each in value))
        raise NotUnderstoodError(f"{_name(call.function)} returned a {type(value).__name__}")

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
        with self._understanding():
            self._run_recorded(call, operator, args, kwargs, results)
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
        patterns = tuple(self._argument(call, each, lifted) for each in args)
        named = tuple((key, self._argument(call, value, lifted)) for key, value in kwargs.items())
        changed = written(operator, args, kwargs)
        for tensor in changed:
            self.tensors.save(tensor)
        writes = tuple(self.tensors.value_of(tensor, views=call.operations) for tensor in changed)
        state = torch.default_generator.get_state() if is_random(operator) else None
        result = operator(*args, **kwargs)
        done.append(result)
        random = state is not None and not torch.equal(state, torch.default_generator.get_state())
        if state is not None and random:
            call.random_states.append(state)
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.made_bytes += sum(each.nbytes for each in results if isinstance(each, Tensor))
        outputs = tuple(
            self.tensors.value_of(each, new=True) if isinstance(each, Tensor) else None for each in results
        )
        if allocates(operator):
            call.operations.append(allocation(result, outputs))
            return
        if random and (fill := filling(operator, outputs)) is not None:
            call.operations += [allocation(result, outputs), fill]
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
        if any(leaf.index not in made for leaf in flat(patterns) if isinstance(leaf, Value)):
            raise NotUnderstoodError(f"{_name(call.function)} draws random numbers that depend on values")

    def _argument(self, call: Call, value: Any, lifted: bool) -> Any:
        if isinstance(value, Tensor):
            if lifted and not self.tensors.has_value(value):
                return Constant(_Held(value.clone()))
            return Value(self.tensors.value_of(value, views=call.operations))
        if isinstance(value, (tuple, list)):
            return [self._argument(call, each, lifted) for each in value]
        if isinstance(value, torch.Generator):
            raise NotUnderstoodError("an operation uses a random number generator of its own")
        if isinstance(value, _CONSTANTS):
            return Constant(value)
        raise NotUnderstoodError(f"an operation has an argument of type {type(value).__name__}")


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


_OWNERS = {"_VariableFunctionsClass": "torch", "TensorBase": "Tensor"}
"""Names in documentation of classes of torch's C++ code."""


def _name(function: Any) -> str:
    """Return the name of a function as documentation has it, such as ``torch.normal`` or ``Tensor.add_``."""
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", function)).replace(
        "getset_descriptor", getattr(getattr(function, "__self__", None), "__name__", "attribute")
    )
    owner, _, rest = name.partition(".")
    return f"{_OWNERS.get(owner, owner)}.{rest}" if rest else name


def _text(value: Any) -> str:
    if type(value) in (Tensor, Parameter):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Tensor):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(each) for each in value)}]"
    return type(value).__name__ if isinstance(value, torch.Generator) else repr(value)
