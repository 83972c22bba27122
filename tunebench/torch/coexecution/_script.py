"""Runners of a sequence of operations: a TorchScript function, which needs no Python, and Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tunebench.torch.coexecution._call import Constant, Number, Operation, Value

__all__ = ["Runner", "operation_result", "python_runner", "script_runner"]

Runner = Callable[..., Any]
"""A function from input tensors and numbers to a tuple of tensors."""

_TENSOR = torch._C.TensorType.get()
_TENSORS = torch._C.ListType(_TENSOR)
_OPTIONALS = torch._C.ListType(torch._C.OptionalType(_TENSOR))
_MEMORY_FORMATS = {
    torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3
}  # fmt: skip


def script_runner(
    operations: Sequence[Operation], inputs: Sequence[int], numbers: dict[int, type], outputs: Sequence[int]
) -> Runner:
    """Return a TorchScript function that runs operations in order, with the kernels of eager mode.

    Args:
        operations: The operations.
        inputs: Indices of the values that they read and that exist before.
        numbers: Types of the Python numbers that they read, by index, in the order of the arguments.
        outputs: Indices of the values to return.

    Raises:
        RuntimeError: TorchScript has no such operator or argument.
    """
    writer = _GraphWriter()
    for index in inputs:
        writer.values[index] = writer.argument(_TENSOR)
    for index, number in numbers.items():
        kind = torch._C.FloatType if number is float else torch._C.IntType
        writer.numbers[index] = writer.argument(kind.get())
    for operation in operations:
        writer.add(operation)
    writer.finish(outputs)
    made: Runner = torch._C._create_function_from_graph("segment", writer.graph)
    return made


class _GraphWriter:
    """Writes a graph of TorchScript."""

    def __init__(self) -> None:
        self.graph = torch._C.Graph()
        self.values: dict[int, Any] = {}
        self.numbers: dict[int, Any] = {}
        self._constants: dict[Any, Any] = {}

    def argument(self, kind: Any) -> Any:
        value = self.graph.addInput()
        value.setType(kind)
        return value

    def add(self, operation: Operation) -> None:
        operator = operation.operator
        given = dict(operation.kwargs)
        arguments = []
        for position, argument in enumerate(operator._schema.arguments):
            if position < len(operation.args):
                value = operation.args[position]
            elif argument.name in given:
                value = given[argument.name]
            else:
                value = _default(argument)
            arguments.append(self._value(value, argument.type))
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

    def _value(self, value: Any, kind: Any) -> Any:
        if isinstance(value, Value):
            return self.values[value.index]
        if isinstance(value, Number):
            return self.numbers[value.index]
        if isinstance(value, list):
            return self._list(value, kind)
        return self._constant(value.value, kind)

    def _list(self, values: list[Any], kind: Any) -> Any:
        text = str(kind)
        if "Tensor" not in text:
            return self._constant([each.value for each in values], kind)
        tensors = _OPTIONALS if "Optional" in text.split("List", 1)[-1] else _TENSORS
        node = self.graph.create("prim::ListConstruct", [self._value(each, None) for each in values], 1)
        self.graph.appendNode(node)
        node.output().setType(tensors)
        return node.output()

    def _constant(self, value: Any, kind: Any) -> Any:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        held = getattr(value, "tensor", None)
        if isinstance(held, Tensor):
            return self.graph.insertConstant(held)
        if isinstance(value, list) and not value:
            node = self.graph.create("prim::ListConstruct", [], 1)
            self.graph.appendNode(node)
            element = torch._C.FloatType if "float" in str(kind) else torch._C.IntType
            node.output().setType(torch._C.ListType(element.get()))
            return node.output()
        text = str(kind)
        if "float" in text and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if "List[float]" in text and isinstance(value, list):
            value = [float(each) for each in value]
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

    def finish(self, outputs: Sequence[int]) -> None:
        if outputs:
            node = self.graph.create("prim::TupleConstruct", [self.values[index] for index in outputs], 1)
            self.graph.appendNode(node)
            node.output().setType(torch._C.TupleType([_TENSOR] * len(outputs)))
            self.graph.registerOutput(node.output())
        else:
            self.graph.registerOutput(self.graph.insertConstant(None))


def _default(argument: Any) -> Any:
    value = argument.default_value
    if isinstance(value, (list, tuple)):
        return [Constant(each) for each in value]
    return Constant(value)


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
