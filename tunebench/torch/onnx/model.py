"""Reading of ONNX files as modules of torch.

Nodes are recorded in an FX graph in the order of the file. What depends on sizes and constants only, such as
shapes, is computed meanwhile. Weights are not read: parameters are on the device `meta`.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tunebench.errors import InputError, MissingDependency
from tunebench.torch.compiler.capture import without_log
from tunebench.torch.onnx._functions import (
    BROADCASTING,
    FUNCTIONS,
    TYPES,
    OnnxFunction,
    UnsupportedError,
)

if TYPE_CHECKING:
    from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

__all__ = ["OnnxModel", "load_onnx"]

OLDEST_OPSET = 13
"""Models of older opsets are converted to this one."""

MOST_KNOWN = 2**20
"""Most elements of a tensor that is computed while the file is read."""

DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class OnnxModel:
    """A model of an ONNX file.

    Attributes:
        module: The model, whose parameters have no data.
        inputs: Its inputs, on the device `meta`.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]


def load_onnx(path: str | Path, sizes: Mapping[str, int] | None = None) -> OnnxModel:
    """Return the model of an ONNX file; its weights are not read.

    A node for which torch has no function becomes a call of one opaque operator, if onnx infers the shapes of
    its results.

    Args:
        path: The file; external data need not be beside it unless they decide shapes.
        sizes: Extent of each dynamic axis, by its name in the file; `INPUT.AXIS` if it has none.

    Raises:
        MissingDependency: if onnx is not installed.
        InputError: if the file cannot be read, a dynamic axis has no size, or a node cannot be mapped.
    """
    model = _read(Path(path))
    _set_sizes(model, dict(sizes or {}), path)
    with without_log():
        return _GraphReader(model, Path(path)).run()


def _read(path: Path) -> ModelProto:
    try:
        import onnx
        import onnx.inliner
        import onnx.version_converter
    except ModuleNotFoundError as error:
        raise MissingDependency("onnx", "onnx") from error
    if not path.is_file():
        raise InputError(f"{path} is not a file")
    try:
        model = onnx.inliner.inline_local_functions(onnx.load(str(path), load_external_data=False))
        opset = next((entry.version for entry in model.opset_import if entry.domain in DOMAINS), OLDEST_OPSET)
        if opset < OLDEST_OPSET:
            model = onnx.version_converter.convert_version(model, OLDEST_OPSET)
    except Exception as error:  # parsers of foreign files; the message keeps the reason
        raise InputError(f"{path} cannot be read as an ONNX model: {_first_line(error)}") from error
    if not model.graph.node:
        raise InputError(f"{path} is not an ONNX model with nodes")
    return model


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _inputs(graph: GraphProto) -> list[Any]:
    """Return the inputs of a graph that are no weights."""
    weights = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def _set_sizes(model: ModelProto, sizes: dict[str, int], path: str | Path) -> None:
    """Replace dynamic axes of inputs by their sizes."""
    names: dict[str, None] = {}
    for value in _inputs(model.graph):
        for axis, extent in enumerate(value.type.tensor_type.shape.dim):
            if extent.WhichOneof("value") != "dim_value":
                name = extent.dim_param or f"{value.name}.{axis}"
                names[name] = None
                extent.dim_value = sizes.get(name, 0)
    if missing := [name for name in names if name not in sizes]:
        options = " ".join(f"--size {name}=N" for name in missing)
        raise InputError(f"{path} has dynamic axes: add {options}")
    if unknown := [name for name in sizes if name not in names]:
        raise InputError(
            f"{path} has no dynamic axis {unknown[0]!r}; its dynamic axes: {', '.join(names) or 'none'}"
        )


@dataclass(slots=True)
class _Value:
    """A value of the file while it is read.

    Attributes:
        shown: Fake tensor of its shape and type; a parameter's.
        node: Node of the FX graph, once it has one.
        data: Its elements, if they are known.
        weight: The tensor in the file of a parameter.
        is_transposed: Whether a matrix is stored by columns, as `torch.nn.Linear` stores its weight.
    """

    shown: Tensor
    node: fx.Node | None = None
    data: Tensor | None = None
    weight: TensorProto | None = None
    is_transposed: bool = False

    def is_number(self, operator: str) -> bool:
        """Return whether an operator reads the value as one known number."""
        broadcasts = operator in BROADCASTING and self.shown.dim() == 1
        return self.data is not None and self.shown.numel() == 1 and (broadcasts or not self.shown.dim())


@dataclass
class _GraphReader:
    """Records the nodes of a file in an FX graph; a reader reads one file."""

    model: ModelProto
    path: Path
    root: nn.Module = field(default_factory=nn.Module)
    graph: fx.Graph = field(default_factory=fx.Graph)
    inferred: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.read = set(_read_names(self.model.graph))
        self.sigmoids: dict[str, str] = {}

    def run(self) -> OnnxModel:
        values: dict[str, _Value] = {}
        inputs = []
        for value in _inputs(self.model.graph):
            kind = value.type.tensor_type
            shape = [extent.dim_value for extent in kind.shape.dim]
            inputs.append(torch.empty(shape, dtype=self._type(kind.elem_type, value.name), device="meta"))
            shown = self._fake(inputs[-1])
            values[value.name] = _Value(shown, node=self.graph.placeholder(_identifier(value.name)))
        self._read_graph(self.model.graph, values)
        results = [values[result.name] for result in self.model.graph.output]
        self.graph.output(tuple(self._node(result) for result in results))
        return OnnxModel(fx.GraphModule(self.root, self.graph), tuple(inputs))

    def _type(self, number: int, name: str) -> torch.dtype:
        if number not in TYPES:
            raise InputError(f"{self.path}: {name} has type {number} of ONNX, which torch lacks")
        return TYPES[number]

    def _fake(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype)

    # -- constants -----------------------------------------------------------------------------------------

    def _weight(self, tensor: TensorProto) -> _Value:
        """Return a tensor of the file: known if it holds integers or one number, else a parameter."""
        dtype = self._type(tensor.data_type, tensor.name)
        shown = self._fake(torch.empty(list(tensor.dims), dtype=dtype, device="meta"))
        if shown.numel() <= MOST_KNOWN and (not dtype.is_floating_point or shown.numel() == 1):
            return _Value(shown, data=self._elements(tensor))
        return _Value(shown, weight=tensor)

    def _elements(self, tensor: TensorProto) -> Tensor:
        """Return the elements of a tensor of the file."""
        import onnx.numpy_helper

        try:
            array = onnx.numpy_helper.to_array(tensor, str(self.path.resolve().parent))
        except Exception as error:  # external data that are missing or of another size
            raise InputError(f"{self.path}: cannot read {tensor.name}: {_first_line(error)}") from error
        dtype = self._type(tensor.data_type, tensor.name)
        if array.dtype.kind not in "biuf":  # types that NumPy lacks
            array = array.astype("float32")
        return torch.from_numpy(array.copy()).to(dtype)

    def _data(self, value: _Value) -> Tensor | None:
        return value.data if value.weight is None else self._elements(value.weight)

    def _node(self, value: _Value) -> fx.Node:
        """Return the FX node of a value; a constant or parameter receives one when it is first read."""
        if value.node is None:
            name = f"constant_{len(list(self.root.buffers()))}"
            if value.weight is not None:
                name = f"{_identifier(value.weight.name)}_{len(list(self.root.parameters()))}"
                shape = tuple(value.shown.shape)
                stored = shape[::-1] if value.is_transposed else shape
                empty = torch.empty(stored, dtype=value.shown.dtype, device="meta")
                empty = empty.t() if value.is_transposed else empty
                self.root.register_parameter(name, nn.Parameter(empty, requires_grad=False))
            else:
                self.root.register_buffer(name, value.data)
            value.node = self.graph.get_attr(name)
        return value.node

    # -- nodes ---------------------------------------------------------------------------------------------

    def _read_graph(self, graph: GraphProto, values: dict[str, _Value]) -> None:
        for tensor in graph.initializer:
            values[tensor.name] = self._weight(tensor)
        for node in graph.node:
            try:
                results = self._results(node, values)
            except (UnsupportedError, RuntimeError) as error:  # torch refuses its arguments
                results = self._opaque(node, values, _first_line(error))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise InputError(f"{self.path}: {_named(node)} is invalid: {_first_line(error)}") from error
            for name, result in zip(node.output, results, strict=False):
                values[name] = result

    def _results(self, node: NodeProto, values: dict[str, _Value]) -> Sequence[_Value]:
        """Return the results of a node.

        Raises:
            UnsupportedError: if torch has no function for it.
        """
        attributes = dict(self._attributes(node))
        if node.domain not in DOMAINS:
            raise UnsupportedError(f"domain {node.domain}")
        if node.op_type == "Constant":
            (value,) = attributes.values()
            return [_Value(self._fake(value), data=value)]
        inputs = [values[name] if name else None for name in node.input]
        if node.op_type == "If":
            return self._branch(node, inputs[0], values)
        if node.op_type in ("Shape", "Size") and inputs[0] is not None:
            extents = list(inputs[0].shown.shape)[attributes.get("start", 0) : attributes.get("end")]
            data = torch.tensor(
                extents if node.op_type == "Shape" else inputs[0].shown.numel(), dtype=torch.int64
            )
            return [_Value(self._fake(data), data=data)]
        function, inputs = self._function(node, inputs, values)
        if _multiplies_by_matrix(node, attributes) and inputs[1] is not None:
            # The memory layout of a constant is the runtime's choice.
            inputs[1].is_transposed |= inputs[1].shown.dim() == 2
        if node.op_type == "Split" and len(inputs) < 2:
            attributes["num_outputs"] = len(node.output)
        return self._called(node, function, inputs, attributes)

    def _function(
        self, node: NodeProto, inputs: list[_Value | None], values: Mapping[str, _Value]
    ) -> tuple[OnnxFunction, list[_Value | None]]:
        """Return the function of a node and its inputs.

        The product of a value and its sigmoid is one function; ONNX has had its operator since opset 24.
        """
        if node.op_type == "Sigmoid":
            self.sigmoids[node.output[0]] = node.input[0]
        for value, gate in itertools.permutations(node.input) if node.op_type == "Mul" else ():
            if self.sigmoids.get(gate) == value:
                return FUNCTIONS["Swish"], [values[value]]
        if node.op_type not in FUNCTIONS:
            raise UnsupportedError("no function of torch")
        return FUNCTIONS[node.op_type], inputs

    def _called(
        self,
        node: NodeProto,
        function: OnnxFunction,
        inputs: Sequence[_Value | None],
        attributes: dict[str, Any],
    ) -> Sequence[_Value]:
        """Call a function: with data if all inputs are known and the result is small, else recorded."""
        try:
            inspect.signature(function.call).bind(*inputs, **attributes)
        except TypeError as error:
            raise UnsupportedError(str(error)) from None
        except ValueError:  # a built-in function without a signature
            pass
        tensors = _tensors(function, inputs)
        shown, recorded, with_data = self._arguments(node, function, inputs)
        with self.mode:
            result = function.call(*shown, **attributes)
        results = result if isinstance(result, tuple) else (result,)
        if any(name in self.read for name in node.output[len(results) :]):
            raise UnsupportedError(f"{len(node.output)} results")
        small = all(part.numel() <= MOST_KNOWN for part in results)
        if small and all(value.data is not None for value in tensors):
            made = function.call(*with_data, **attributes)
            return [
                _Value(self._fake(part), data=part) for part in (made if isinstance(made, tuple) else (made,))
            ]
        arguments = tuple(self._node(value) if isinstance(value, _Value) else value for value in recorded)
        call = self.graph.call_function(function.call, arguments, attributes)
        return self._parts(call, result)

    def _arguments(
        self, node: NodeProto, function: OnnxFunction, inputs: Sequence[_Value | None]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the arguments of a call: fake ones, those to record, and those with data."""
        tensors = _tensors(function, inputs)
        types = {value.shown.dtype for value in tensors if not value.is_number(node.op_type)}
        calls: list[tuple[Any, Any, Any]] = []
        for position, value in enumerate(inputs):
            if value is None or position in function.numeric:
                number = None if value is None else self._numbers(value)
                calls.append((number, number, number))
                continue
            keeps_type = value.shown.dtype in types or node.op_type == "Gather"
            if value.data is not None and value.is_number(node.op_type) and keeps_type:
                number = _number(value.data)
                calls.append((number, number, value.data))
            else:
                calls.append((value.shown, value, value.data))
        shown, recorded, with_data = zip(*calls, strict=True) if calls else ((), (), ())
        return list(shown), list(recorded), list(with_data)

    def _parts(self, call: fx.Node, result: Any) -> list[_Value]:
        if isinstance(result, Tensor):
            return [_Value(result, node=call)]
        return [
            _Value(part, node=self.graph.call_function(_item, (call, position)))
            for position, part in enumerate(result)
        ]

    def _numbers(self, value: _Value) -> Any:
        """Return a known value as a number or a list.

        Raises:
            UnsupportedError: if its elements depend on the inputs of the model.
        """
        data = self._data(value)
        if data is None:
            raise UnsupportedError("sizes that depend on data")
        return data.tolist()

    def _attributes(self, node: NodeProto) -> Iterator[tuple[str, Any]]:
        for attribute in node.attribute:
            yield attribute.name, self._attribute(attribute)

    def _attribute(self, attribute: AttributeProto) -> Any:
        """Return an attribute as Python or torch has it; a graph stays as it is."""
        import onnx

        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if isinstance(value, float):
            return _shortest(value)
        if isinstance(value, onnx.TensorProto):
            return self._elements(value)
        if attribute.name.startswith("value_"):  # of a Constant
            floats = attribute.name.startswith("value_float")
            return torch.tensor(value, dtype=torch.float32 if floats else torch.int64)
        return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    def _branch(
        self, node: NodeProto, condition: _Value | None, values: dict[str, _Value]
    ) -> Sequence[_Value]:
        """Return the results of the branch that a known condition chooses."""
        if condition is None or condition.data is None:
            raise UnsupportedError("a condition that depends on data")
        taken = "then_branch" if bool(condition.data) else "else_branch"
        (branch,) = [attribute.g for attribute in node.attribute if attribute.name == taken]
        scope = dict(values)
        self._read_graph(branch, scope)
        return [scope[result.name] for result in branch.output]

    # -- nodes without a function --------------------------------------------------------------------------

    def _opaque(self, node: NodeProto, values: dict[str, _Value], reason: str) -> list[_Value]:
        """Record a node without a function as a call of an operator that only has shapes.

        Raises:
            InputError: if onnx does not infer the shapes of its results.
        """
        inferred = [self._inferred(name) for name in node.output if name]
        results = [result for result in inferred if result is not None]
        if not results or len(results) < len(inferred):
            raise InputError(
                f"{self.path}: {_named(node)} has no function of torch ({reason}), and onnx does not infer "
                "the shapes of its results"
            )
        inputs = [self._node(values[name]) for name in node.input if name]
        texts = [
            f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))}" for dtype, shape in results
        ]
        call = self.graph.call_function(
            torch.ops.tunebench.onnx_node.default,
            (inputs, f"{node.op_type} {node.name}".strip(), reason, ",".join(texts)),
        )
        fakes = iter([self._fake(torch.empty(shape, dtype=dtype, device="meta")) for dtype, shape in results])
        parts = iter(self._parts(call, list(fakes)))
        return [next(parts) if name else _Value(torch.empty(0)) for name in node.output]

    def _inferred(self, name: str) -> tuple[torch.dtype, list[int]] | None:
        """Return the type and shape that onnx infers for a value of the file; None if it does not."""
        if self.inferred is None:
            import onnx.shape_inference

            del self.model.graph.value_info[:]  # shapes of dynamic axes
            for output in self.model.graph.output:
                output.type.tensor_type.ClearField("shape")
            inferred = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph
            self.inferred = {
                value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)
            }
        kind = self.inferred.get(name)
        if kind is None or not kind.HasField("shape") or kind.elem_type not in TYPES:
            return None
        if any(extent.WhichOneof("value") != "dim_value" for extent in kind.shape.dim):
            return None
        return TYPES[kind.elem_type], [extent.dim_value for extent in kind.shape.dim]


def _read_names(graph: GraphProto) -> Iterator[str]:
    """Yield the names of the values that a graph returns, or that a node reads."""
    yield from (result.name for result in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from _read_names(attribute.g)


def _named(node: NodeProto) -> str:
    return f"node {node.name or node.output[0]} ({node.op_type})"


def _number(data: Tensor) -> Any:
    number = data.item()
    return _shortest(number) if data.dtype == torch.float32 else number


def _shortest(number: float) -> float:
    """Return the shortest decimal that f32 rounds to a number: the number that was written into the file."""
    return float(str(numpy.float32(number)))


def _multiplies_by_matrix(node: NodeProto, attributes: Mapping[str, Any]) -> bool:
    return node.op_type == "MatMul" or (node.op_type == "Gemm" and not attributes.get("transB", 0))


def _identifier(name: str) -> str:
    """Return a name as one of Python."""
    plain = re.sub(r"\W+", "_", name).strip("_")
    return plain if plain.isidentifier() else f"value_{plain}"


def _tensors(function: OnnxFunction, inputs: Sequence[_Value | None]) -> list[_Value]:
    """Return the inputs that a function takes as tensors."""
    numeric = function.numeric
    return [value for position, value in enumerate(inputs) if value is not None and position not in numeric]


def _item(parts: Any, position: int) -> Any:
    return parts[position]


@torch.library.custom_op(  # type: ignore[untyped-decorator]
    "tunebench::onnx_node", mutates_args=()
)
def _onnx_node(inputs: list[Tensor], node: str, reason: str, results: str) -> list[Tensor]:
    raise InputError(f"torch has no function for the ONNX node {node}: {reason}")


@_onnx_node.register_fake  # type: ignore[untyped-decorator]
def _(inputs: list[Tensor], node: str, reason: str, results: str) -> list[Tensor]:
    parts = [text.split(" ") for text in results.split(",")]
    return [
        torch.empty([int(extent) for extent in shape.split("x") if extent], dtype=getattr(torch, dtype))
        for dtype, shape in parts
    ]
