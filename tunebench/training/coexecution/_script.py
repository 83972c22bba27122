"""Runners of a sequence of operations: a TorchScript function, which needs no Python, and Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._call import Arithmetic, Constant, Number, Operation, Value

__all__ = ["Runner", "forked_runner", "operation_result", "python_runner", "script_runner"]

Runner = Callable[..., Any]
"""A function from input tensors and numbers to a tuple of tensors."""

_TENSOR = torch._C.TensorType.get()
_INT = torch._C.IntType.get()
_TENSORS = torch._C.ListType(_TENSOR)
_OPTIONALS = torch._C.ListType(torch._C.OptionalType(_TENSOR))
_MEMORY_FORMATS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3
}  # fmt: skip


def script_runner(
    operations: Sequence[Operation | Arithmetic],
    inputs: Sequence[int],
    numbers: dict[int, type],
    outputs: Sequence[int],
    listed: Sequence[int] | None = None,
    carried: Sequence[int] | None = None,
    appended: Sequence[int] | None = None,
) -> Runner:
    """Return a TorchScript function that runs operations in order, with the kernels of eager mode.

    Args:
        operations: The operations.
        inputs: Indices of the values that they read and that exist before.
        numbers: Types of the Python numbers that they read, by index, in the order of the arguments.
        outputs: Indices of the values to return.
        listed: Indices of further such values, which are the first argument, a list; None without one. A
            `torch._C.ScriptList` of them is passed on without a conversion of each.
        carried: Indices of values in a second such list, which earlier functions filled.
        appended: Indices of values that are appended to it for later functions; without any, it is cleared,
            so that its values are freed after their last use.

    Raises:
        RuntimeError: TorchScript has no such operator or argument.
    """
    writer = _GraphWriter(inputs, numbers, listed=listed, carried=carried)
    if carried is not None and appended is None:
        writer.call("aten::clear", [writer.carry], [])
    for operation in operations:
        writer.add(operation)
    for index in appended or ():
        writer.call("aten::append", [writer.carry, writer.values[index]], [_TENSORS])
    writer.finish([writer.values[index] for index in outputs])
    made: Runner = torch._C._create_function_from_graph("segment", writer.graph)
    return made


def forked_runner(
    operations: Sequence[Operation],
    futures: Sequence[Sequence[int]],
    inputs: Sequence[int],
    numbers: dict[int, type],
    outputs: Sequence[int],
) -> Runner:
    """Return a TorchScript function that starts operations in a PyTorch thread, and returns a future.

    The future is a tuple of tensors and two times in nanoseconds, when the operations began and ended. No
    thread needs the GIL as long as Python's thread holds a second reference to each input: PyTorch acquires
    the GIL when a release leaves only the reference of the Python object to a tensor.

    Args:
        operations: The operations.
        futures: Indices of the values of the futures of such functions, which are the first arguments. The
            operations run after all of them.
        inputs: Indices of the values that the operations read and that exist before; arguments.
        numbers: Types of the Python numbers that they read, by index, in the order of the arguments.
        outputs: Indices of the values to return.

    Raises:
        RuntimeError: TorchScript has no such operator or argument.
    """
    kinds = [_future(len(each)) for each in futures]
    outer = _GraphWriter(inputs, numbers, kinds)
    inner = _GraphWriter(inputs, numbers, kinds)
    for future, known in zip(inner.futures, futures, strict=True):
        results = inner.call("aten::wait", [future], [_results(len(known))])[0]
        parts = inner.call("prim::TupleUnpack", [results], [_TENSOR] * len(known) + [_INT, _INT])
        for index, value in zip(known, parts, strict=False):
            if index not in inputs:
                inner.values[index] = value
    (start,) = inner.call("prim::TimePoint", [], [_INT])
    for operation in operations:
        inner.add(operation)
    (stop,) = inner.call("prim::TimePoint", [], [_INT])
    inner.finish([*(inner.values[index] for index in outputs), start, stop])
    node = outer.graph.create("prim::fork", list(outer.graph.inputs()), 1)
    node.g_("Subgraph", inner.graph)
    outer.graph.appendNode(node)
    node.output().setType(_future(len(outputs)))
    outer.graph.registerOutput(node.output())
    made: Runner = torch._C._create_function_from_graph("launch", outer.graph)
    return made


def _results(count: int) -> Any:
    return torch._C.TupleType([_TENSOR] * count + [_INT, _INT])


def _future(count: int) -> Any:
    return torch._C.FutureType(_results(count))


class _GraphWriter:
    """Writes a graph of TorchScript."""

    def __init__(
        self,
        inputs: Sequence[int],
        numbers: dict[int, type],
        futures: Sequence[Any] = (),
        listed: Sequence[int] | None = None,
        carried: Sequence[int] | None = None,
    ) -> None:
        self.graph = torch._C.Graph()
        self.futures = [self._input(kind) for kind in futures]
        self._constants: dict[tuple[type, str, str], Any] = {}
        self.values: dict[int, Any] = {}
        for indices in (listed, carried):
            if indices is not None:
                self.carry = self._input(_TENSORS)
                parts = self.call("prim::ListUnpack", [self.carry], [_TENSOR] * len(indices))
                self.values.update(zip(indices, parts, strict=True))
        self.values.update((index, self._input(_TENSOR)) for index in inputs)
        self.numbers = {
            index: self._input(torch._C.FloatType.get() if number is float else _INT)
            for index, number in numbers.items()
        }

    def _input(self, kind: Any) -> Any:
        value = self.graph.addInput()
        value.setType(kind)
        return value

    def call(self, operator: str, arguments: list[Any], kinds: list[Any]) -> list[Any]:
        """Add a call of an operator that returns values of some types."""
        node = self.graph.create(operator, arguments, len(kinds))
        self.graph.appendNode(node)
        outputs = list(node.outputs())
        for output, kind in zip(outputs, kinds, strict=True):
            output.setType(kind)
        return outputs

    def add(self, operation: Operation | Arithmetic) -> None:
        if isinstance(operation, Arithmetic):
            arguments = [self._value(argument, "float") for argument in operation.args]
            (self.numbers[operation.output],) = self.call(
                operation.operator, arguments, [torch._C.FloatType.get()]
            )
            return
        operator = operation.operator
        given = dict(operation.kwargs)
        arguments = []
        for position, (name, kind, default) in enumerate(_parameters(operator)):
            value = operation.args[position] if position < len(operation.args) else given.get(name, default)
            arguments.append(self._value(value, kind))
        count = len(operator._schema.returns)
        node = self.graph.create(operator.name().split(".")[0], arguments, count)
        self.graph.appendNode(node)
        if node.schema() == "(no schema)":
            raise RuntimeError(f"TorchScript has no {operator.name()} with these arguments")
        if operation.is_list:
            node.output().setType(_TENSORS)
            node = self.graph.create("prim::ListUnpack", [node.output()], len(operation.outputs))
            self.graph.appendNode(node)
        for index, output in zip(operation.outputs if count else (), node.outputs(), strict=True):
            output.setType(_TENSOR)
            if index is not None:
                self.values[index] = output

    def _value(self, value: Any, kind: str) -> Any:
        if isinstance(value, Value):
            return self.values[value.index]
        if isinstance(value, Number):
            return self.numbers[value.index]
        if isinstance(value, list):
            return self._list(value, kind)
        return self._constant(value.value, kind)

    def _list(self, values: list[Any], kind: str) -> Any:
        if "Tensor" in kind:
            return self._new_list(values, _OPTIONALS if "Optional" in kind.split("List", 1)[-1] else _TENSORS)
        if not any(isinstance(each, Number) for each in values):
            return self._constant([each.value for each in values], kind)
        key = list, repr(values), ""
        if key not in self._constants:
            self._constants[key] = self._new_list(values, torch._C.ListType(_INT))
        return self._constants[key]

    def _new_list(self, values: list[Any], kind: Any) -> Any:
        node = self.graph.create("prim::ListConstruct", [self._value(each, "") for each in values], 1)
        self.graph.appendNode(node)
        node.output().setType(kind)
        return node.output()

    def _constant(self, value: Any, kind: str) -> Any:
        """Return a constant; equal ones are one node, because nodes take most of the memory of a path."""
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        held = getattr(value, "tensor", None)
        if isinstance(held, Tensor):
            return self.graph.insertConstant(held)
        if "float" in kind and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if "List[float]" in kind and isinstance(value, list):
            value = [float(each) for each in value]
        is_empty = isinstance(value, list) and not value
        key = type(value), repr(value), kind if is_empty else ""
        if key not in self._constants:
            self._constants[key] = self._new_constant(value, kind)
        return self._constants[key]

    def _new_constant(self, value: Any, kind: str) -> Any:
        if isinstance(value, list) and not value:
            node = self.graph.create("prim::ListConstruct", [], 1)
            self.graph.appendNode(node)
            element = torch._C.FloatType if "float" in kind else torch._C.IntType
            node.output().setType(torch._C.ListType(element.get()))
            return node.output()
        if isinstance(value, list) and isinstance(value[0], bool):
            return self._bools(value)
        return self.graph.insertConstant(value)

    def _bools(self, values: list[bool]) -> Any:
        node = self.graph.create(
            "prim::ListConstruct", [self.graph.insertConstant(each) for each in values], 1
        )
        self.graph.appendNode(node)
        node.output().setType(torch._C.ListType(torch._C.BoolType.get()))
        return node.output()

    def finish(self, outputs: list[Any]) -> None:
        """Return a tuple of values, or None without any."""
        if outputs:
            kind = torch._C.TupleType([each.type() for each in outputs])
            self.graph.registerOutput(self.call("prim::TupleConstruct", outputs, [kind])[0])
        else:
            self.graph.registerOutput(self.graph.insertConstant(None))


@functools.cache
def _parameters(operator: Any) -> tuple[tuple[str, str, Any], ...]:
    """Return the name, type and default of each argument of an operator."""
    return tuple(
        (argument.name, str(argument.type), _pattern(argument.default_value))
        for argument in operator._schema.arguments
    )


def _pattern(value: Any) -> Any:
    return [Constant(each) for each in value] if isinstance(value, (list, tuple)) else Constant(value)


def python_runner(
    operations: Sequence[Operation], inputs: Sequence[int], numbers: Sequence[int], outputs: Sequence[int]
) -> Runner:
    """Return a Python function that runs operations in order by torch's operators."""

    def run(*given: Any) -> tuple[Any, ...]:
        values: dict[int, Any] = dict(zip(inputs, given[: len(inputs)], strict=True))
        known = dict(zip(numbers, given[len(inputs) :], strict=True))
        for operation in operations:
            results = operation_result(operation, values, known)
            for index, result in zip(operation.outputs, results, strict=True):
                if index is not None:
                    values[index] = result
        return tuple(values[index] for index in outputs)

    return run


def operation_result(operation: Operation, values: Any, numbers: Any) -> Sequence[Any]:
    """Run an operation on values and numbers by index, and return its results."""

    def resolved(pattern: Any) -> Any:
        if isinstance(pattern, Value):
            return values[pattern.index]
        if isinstance(pattern, Number):
            return numbers[pattern.index]
        if isinstance(pattern, (list, tuple)):
            return [resolved(each) for each in pattern]
        held = getattr(pattern.value, "tensor", None)
        return held if isinstance(held, Tensor) else pattern.value

    result = operation.operator(
        *(resolved(each) for each in operation.args),
        **{key: resolved(each) for key, each in operation.kwargs},
    )
    results: Sequence[Any] = result if isinstance(result, (tuple, list)) else (result,)
    return results
