"""Updates of parameters by optimizers of torch, each as one TorchScript function, not a loop in Python.

An update is recorded on copies, with Python numbers that record arithmetic, so that a learning rate and a
bias correction are inputs. It is used only if it gives the bits of torch's function for these and for other
numbers, and if it is faster. Torch's function runs whenever a call does not match a record.
"""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from tunebench.training.coexecution._call import (
    Arithmetic,
    Constant,
    Number,
    Operation,
    Value,
    flat,
    replaced,
)
from tunebench.training.coexecution._memory import copies_reason
from tunebench.training.coexecution._operator import allocates, is_random
from tunebench.training.coexecution._run import same
from tunebench.training.coexecution._script import Runner, script_runner
from tunebench.training.coexecution._tensors import NotUnderstoodError

__all__ = ["Record", "Times", "Updates", "UsedRecord", "recorded"]

_CALLS = 400
"""Number of updates by a function before one is recorded.

Source: a record takes 75 to 121 times as long as torch's function (Adam on 6 and 30 tensors, SGD on 10).
"""

_RECORDS = 8
"""Number of times that the updates by a function are recorded: one for each set of options and states."""

_MEAN_ELEMENTS = 1 << 16
"""Mean number of elements of a tensor above which kernels take nearly all of the time of an update."""

_COPIES = 2
"""Number of copies of all tensors of an update that a record needs."""

_WARMUPS = 4
"""Number of runs of a record that are not timed, because TorchScript prepares a function in the first."""

_TIMED = 15
"""Number of times that an update is timed by its record and by torch's function each."""

_OPTIONS = (float, int, bool, type(None))
_LAYOUTS = {torch.strided}
_TYPES = frozenset((Tensor, Parameter))

Update = Callable[..., None]
"""A function of torch that updates parameters, of lists of tensors and of options."""


class Updates:
    """The updates of a step that were recorded.

    Attributes:
        runs: Number of updates that ran as one function.
        reasons: Why updates run as torch's function, by its name.
        used: Where updates are noted that run by records that were chosen, with their arguments; None if
            nowhere.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.reasons: dict[str, str] = {}
        self.used: list[UsedRecord] | None = None
        self._records: dict[Update, list[Record]] = {}
        self._calls = Counter[Update]()
        self._tries = Counter[Update]()

    def run(self, function: Update, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Update parameters as a function of torch does."""
        records = self._records.get(function)
        if (records is None and not self._is_due(function)) or not _is_plain(args):
            function(*args, **kwargs)
            return
        start_ns = time.perf_counter_ns()
        counts = tuple(map(len, args))
        tensors = list(chain.from_iterable(args))
        for record in records or ():
            if record.matches(counts, kwargs, tensors):
                self._run(record, function, args, kwargs, tensors, start_ns)
                return
        if self._tries[function] < _RECORDS and tensors and not any(tensor is None for tensor in tensors):
            self._tries[function] += 1
            self._learn(function, args, kwargs)
        function(*args, **kwargs)

    def _is_due(self, function: Update) -> bool:
        """Count a call of a function without records; return whether it may be recorded."""
        self._calls[function] += 1
        return self._calls[function] > _CALLS and self._tries[function] < _RECORDS

    @property
    def are_recorded(self) -> bool:
        """Return whether there is any record."""
        return bool(self._records)

    @property
    def are_over(self) -> bool:
        """Return whether all functions that were called so far run as torch's, for good."""
        return not self._records and all(self._tries[function] >= _RECORDS for function in self._calls)

    def _run(
        self,
        record: Record,
        function: Update,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        start_ns: int,
    ) -> None:
        """Update by a record, or by the function while both are timed."""
        runs_record = record.times.runs_record()
        if runs_record:
            self.runs += 1
            record.run(tensors, kwargs)
        else:
            start_ns = time.perf_counter_ns()
            function(*args, **kwargs)
        if record.times.decided:
            if self.used is not None:
                self.used.append((record, args, kwargs))
        else:
            record.times.add(time.perf_counter_ns() - start_ns, by_record=runs_record)
            if record.times.decided and not record.times.runs_record():
                self._records[function].remove(record)
                self._tries[function] = _RECORDS
                self._give_up(function, "torch's function is faster")

    def _give_up(self, function: Update, reason: str) -> None:
        """Note why an update is not used."""
        self.reasons[function.__name__] = reason
        if not self._records.get(function):
            self._records.pop(function, None)
            self._tries[function] = _RECORDS

    def _learn(self, function: Update, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            tensors = list(chain.from_iterable(args))
            _check(tensors, kwargs)
            _check_size(tensors)
            record = recorded(function, args, kwargs)
        except Exception as error:  # torch's function runs next, and raises what is to be raised
            self._give_up(function, f"{error}".strip().split("\n")[0][:200])
        else:
            self._records.setdefault(function, []).append(record)


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Return whether arguments are lists, and neither autograd nor a mode sees the operations on them."""
    return (
        all(type(tensors) is list for tensors in args)
        and not torch.is_grad_enabled()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
    )


@dataclass(slots=True)
class Times:
    """Times of an update by its record and by torch's function, which take turns until one of them is chosen.

    Attributes:
        decided: Whether one is chosen.
    """

    decided: bool = False
    _warmups: int = 0
    _by_record: list[int] = field(default_factory=list)
    _by_function: list[int] = field(default_factory=list)
    _is_faster: bool = False

    def runs_record(self) -> bool:
        """Return whether the record runs next."""
        return self._is_faster if self.decided else len(self._by_record) <= len(self._by_function)

    def add(self, nanoseconds: int, *, by_record: bool) -> None:
        """Note the time of a run."""
        if by_record and self._warmups < _WARMUPS:
            self._warmups += 1
            return
        (self._by_record if by_record else self._by_function).append(nanoseconds)
        if len(self._by_function) == len(self._by_record) == _TIMED:
            self.decided = True
            self._is_faster = sorted(self._by_record)[_TIMED // 4] < sorted(self._by_function)[_TIMED // 4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An update that was recorded, and the calls for which it is valid.

    Attributes:
        counts: Lengths of the lists of tensors.
        parameters: Types of the parameters, and whether they are on the processor.
        options: Names of the options.
        constants: Those of them that must be equal, with their values.
        numbers: Those of them that are inputs.
        guards: Comparisons of inputs, with the other number and the result that they must have.
        entries: Its operations; values and numbers count from the inputs.
        total_numbers: Number of inputs and of numbers that it computes.
        runner: The TorchScript function, of tensors and numbers.
        times: Its times and those of torch's function.
    """

    counts: tuple[int, ...]
    parameters: list[tuple[torch.dtype, bool]]
    options: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    numbers: tuple[str, ...]
    guards: tuple[tuple[str, Callable[[Any, Any], bool], Any, bool], ...]
    entries: Sequence[Operation | Arithmetic]
    total_numbers: int
    runner: Runner
    times: Times = field(default_factory=Times)

    def matches(self, counts: tuple[int, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> bool:
        """Return whether torch's function would run the recorded operations."""
        if counts != self.counts or not self.has_options(kwargs):
            return False
        parameters = tensors[: counts[0]]
        return (
            _TYPES.issuperset(map(type, tensors))
            and [(tensor.dtype, tensor.is_cpu) for tensor in parameters] == self.parameters
            and {tensor.layout for tensor in tensors[counts[0] : 2 * counts[0]]} == _LAYOUTS
        )

    def has_options(self, kwargs: dict[str, Any]) -> bool:
        """Return whether torch's function would run the recorded operations with some options."""
        if tuple(kwargs) != self.options:
            return False
        for name, constant in self.constants:
            value = kwargs[name]
            if value is not constant and (type(value) is not type(constant) or value != constant):
                return False
        return all(type(kwargs[name]) is float for name in self.numbers) and all(
            compare(kwargs[name], value) == result for name, compare, value, result in self.guards
        )

    def run(self, tensors: Sequence[Tensor], kwargs: dict[str, Any]) -> None:
        """Update parameters."""
        self.runner(*tensors, *[kwargs[name] for name in self.numbers])


UsedRecord = tuple[Record, tuple[Any, ...], dict[str, Any]]
"""A record by which an update ran, and the arguments of torch's function: lists of tensors, and options."""


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_cpu


def recorded(function: Update, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record:
    """Record an update on copies and compare it with torch's function.

    Args:
        function: The function of torch that updates parameters.
        args: Its lists of tensors.
        kwargs: Its options.

    Raises:
        NotUnderstoodError: The update cannot be recorded, or is not worth it.
    """
    tensors = list(chain.from_iterable(args))
    _check(tensors, kwargs)
    numbers = tuple(name for name, value in kwargs.items() if type(value) is float)
    recording = _Recording(len(numbers))
    named = {name: _Traced(kwargs[name], recording, index) for index, name in enumerate(numbers)}
    copies = _copies(args)
    recording.add_inputs(chain.from_iterable(copies))
    with torch._C._EnableTorchFunction(), _Functions(recording), _Operators(recording):
        function(*copies, **{**kwargs, **named})
    record = Record(
        counts=tuple(map(len, args)),
        parameters=[(tensor.dtype, tensor.is_cpu) for tensor in args[0]],
        options=tuple(kwargs),
        constants=tuple(item for item in kwargs.items() if item[0] not in numbers),
        numbers=numbers,
        guards=tuple((numbers[index], *guard) for index, *guard in recording.guards),
        entries=recording.entries,
        total_numbers=recording.numbers,
        runner=script_runner(
            recording.entries, range(len(tensors)), dict.fromkeys(range(len(numbers)), float), ()
        ),
    )
    if not record.matches(record.counts, kwargs, tensors):
        raise NotUnderstoodError("an option of the optimizer is not equal to itself")
    del copies, recording
    for options in (kwargs, {**kwargs, **{name: _other(kwargs[name]) for name in numbers}}):
        if record.matches(record.counts, options, tensors):
            _compare(function, record, args, options)
    return record


def _check(tensors: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if not _TYPES.issuperset(map(type, tensors)) or not all(map(_is_dense, tensors)):
        raise NotUnderstoodError("a tensor of the update is no plain tensor of the processor")
    for name, value in kwargs.items():
        if type(value) not in _OPTIONS:
            raise NotUnderstoodError(f"option {name} of the optimizer is a {type(value).__name__}")
    if kwargs.get("fused") or kwargs.get("foreach"):
        raise NotUnderstoodError("the optimizer updates lists of tensors already (fused or foreach)")
    if any(tensor.is_complex() for tensor in tensors):
        raise NotUnderstoodError("a parameter is complex")


def _check_size(tensors: Sequence[Tensor]) -> None:
    if sum(map(torch.numel, tensors)) > _MEAN_ELEMENTS * len(tensors):
        raise NotUnderstoodError("kernels take nearly all of the time of large parameters")
    reason = copies_reason(_COPIES * sum(tensor.nbytes for tensor in tensors))
    if reason is not None:
        raise NotUnderstoodError(reason)


def _other(number: float) -> float:
    """Return another number that an option of an optimizer can have."""
    return number * (1 - 2**-7)


def _copies(args: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return copies of tensors with their strides, which autograd does not know."""
    return [
        [torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach()) for tensor in tensors]
        for tensors in args
    ]


def _compare(function: Update, record: Record, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Compare two updates, each with numbers of its own, by torch's function and by the record."""
    expected, actual = _copies(args), _copies(args)
    for _ in range(2):
        function(*expected, **kwargs)
        record.run(list(chain.from_iterable(actual)), kwargs)
    if not all(map(same, chain.from_iterable(expected), chain.from_iterable(actual))):
        raise NotUnderstoodError("the recorded update gives other results")


@dataclass(slots=True)
class _Recording:
    """Operations of an update.

    Attributes:
        numbers: Number of numbers so far.
        entries: Operations on tensors and on numbers, in order.
        guards: Comparisons of inputs: index, comparison, other number, result.
        call: Numbers among the arguments of torch's function that runs.
    """

    numbers: int
    entries: list[Operation | Arithmetic] = field(default_factory=list)
    guards: list[tuple[int, Callable[[Any, Any], bool], Any, bool]] = field(default_factory=list)
    call: list[_Traced] = field(default_factory=list)
    _inputs: int = field(init=False)
    _indices: dict[int, int] = field(default_factory=dict)
    _tensors: list[Tensor] = field(default_factory=list)
    _made: dict[Arithmetic, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note the number of inputs."""
        self._inputs = self.numbers

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors that exist before."""
        for tensor in tensors:
            self.index(tensor, new=True)

    def index(self, tensor: Tensor, *, new: bool = False) -> int:
        """Return the index of a tensor."""
        if id(tensor) not in self._indices:
            if not new:
                raise NotUnderstoodError("the update reads a tensor that is no argument")
            self._indices[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
        return self._indices[id(tensor)]

    def arithmetic(self, name: str, args: tuple[Any, ...], value: Any) -> _Traced:
        """Add an operation on numbers; equal ones on numbers are one."""
        if type(value) is not float:
            raise NotUnderstoodError(f"{name} of numbers gives a {type(value).__name__}")
        arguments = tuple(
            Number(argument.index) if isinstance(argument, _Traced)
            else argument if isinstance(argument, Value)
            else Constant(float(argument))
            for argument in args
        )  # fmt: skip
        entry = Arithmetic(name, arguments, -1)
        if entry not in self._made or any(isinstance(argument, Value) for argument in arguments):
            self._made[entry] = self.numbers
            self.entries.append(Arithmetic(name, arguments, self.numbers))
            self.numbers += 1
        return _Traced(value, self, self._made[entry])

    def compared(self, number: _Traced, compare: Any, value: Any, result: bool) -> bool:
        """Note a comparison of an input with another number."""
        if number.index >= self._inputs or isinstance(value, _Traced):
            raise NotUnderstoodError("the update decides by a number that it computes")
        self.guards.append((number.index, compare, value, result))
        return result


def _plain(number: Any) -> Any:
    """Return a number that records nothing."""
    return float.__float__(number) if isinstance(number, _Traced) else number


def _binary(name: str, function: Callable[[Any, Any], Any], *, swapped: bool = False) -> Any:
    def computed(self: _Traced, other: Any) -> Any:
        if type(other) not in (_Traced, int, float):
            return NotImplemented
        operands = (other, self) if swapped else (self, other)
        return self.recording.arithmetic(name, operands, function(*map(_plain, operands)))

    return computed


def _comparison(function: Callable[[Any, Any], bool]) -> Any:
    def compared(self: _Traced, other: Any) -> bool:
        return self.recording.compared(self, function, other, function(_plain(self), other))

    return compared


class _Traced(float):
    """A number whose arithmetic is recorded."""

    __slots__ = ("index", "recording")
    index: int
    recording: _Recording

    def __new__(cls, value: float, recording: _Recording, index: int) -> _Traced:
        """Return a number with an index among those of a recording."""
        traced = super().__new__(cls, value)
        traced.recording, traced.index = recording, index
        return traced

    __hash__ = float.__hash__
    __add__, __radd__ = _binary("aten::add", operator.add), _binary("aten::add", operator.add, swapped=True)
    __sub__, __rsub__ = _binary("aten::sub", operator.sub), _binary("aten::sub", operator.sub, swapped=True)
    __mul__, __rmul__ = _binary("aten::mul", operator.mul), _binary("aten::mul", operator.mul, swapped=True)
    __truediv__ = _binary("aten::div", operator.truediv)
    __rtruediv__ = _binary("aten::div", operator.truediv, swapped=True)
    __pow__, __rpow__ = _binary("aten::pow", operator.pow), _binary("aten::pow", operator.pow, swapped=True)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self) -> _Traced:
        """Return the negated number."""
        return self.recording.arithmetic("aten::neg", (self,), -_plain(self))

    def __bool__(self) -> bool:
        """Return whether the number is not zero."""
        return bool(self != 0.0)


class _Functions(TorchFunctionMode):  # type: ignore[misc]  # torch does not type it
    """Note the traced numbers among the arguments of torch's functions, and read steps as traced numbers."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function."""
        recording = self._recording
        recording.call = [leaf for leaf in flat((args, kwargs or {})) if isinstance(leaf, _Traced)]
        if func is Tensor.item:
            value = func(*args)
            return recording.arithmetic("aten::Float", (Value(recording.index(args[0])),), value)
        args, kwargs = replaced(args, _plain), replaced(kwargs or {}, _plain)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):  # type: ignore[misc]  # torch does not type it
    """Record operations."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        if func.namespace != "aten" or is_random(func) or allocates(func):
            raise NotUnderstoodError(f"the update runs {func.name()}")
        call = self._recording.call
        numbers: list[int] = []
        arguments = replaced(args, lambda leaf: self._argument(leaf, numbers))
        named = tuple(
            (name, replaced(leaf, lambda leaf: self._argument(leaf, numbers)))
            for name, leaf in kwargs.items()
        )
        if len(numbers) != len(call):
            raise NotUnderstoodError(f"{func.name()} gets a number that is computed from an option")
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            raise NotUnderstoodError(f"{func.name()} returns no tensor")
        output = self._recording.index(result, new=True)
        self._recording.entries.append(
            Operation(operator=func, args=arguments, kwargs=named, outputs=(output,), is_list=False)
        )
        return result

    def _argument(self, leaf: Any, numbers: list[int]) -> Any:
        """Return an argument, and add the index of its traced number to a list if it has one."""
        if isinstance(leaf, Tensor):
            return Value(self._recording.index(leaf))
        if type(leaf) is not float:
            return Constant(leaf)
        indices = {
            number.index for number in self._recording.call if Constant(_plain(number)) == Constant(leaf)
        }
        if not indices:
            return Constant(leaf)
        if len(indices) > 1:
            raise NotUnderstoodError("two numbers of an operation are equal")
        numbers.extend(indices)
        return Number(*indices)
