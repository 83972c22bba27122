"""Translation of FX graphs to `tunebench.graph.Graph`: workloads of nodes, and values that share memory."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from tunebench.errors import InputError
from tunebench.expression import canonical, names
from tunebench.expression import parse as parse_expression
from tunebench.graph.convolution_split import channels_of, sum_of, zeros_of
from tunebench.graph.node import Graph, Node, NodeOperand, Pattern
from tunebench.torch._aten_workload import bound_arguments, is_known, workloads_of
from tunebench.torch._layout import (
    channel_broadcast,
    is_dense,
    kernel_strides,
    reduced_axis,
    reduced_strides,
    reduction_map,
)
from tunebench.torch._tensor import DTYPES
from tunebench.torch.compiler._aten_argument import is_used, is_view, number_of, results_of, traced
from tunebench.torch.compiler._aten_expression import expression_of, is_boolean, is_pointwise
from tunebench.torch.compiler._aten_index import (
    in_memory_order,
    moved_elements,
    moves_elements,
)
from tunebench.torch.compiler._batch_norm import batch_norm_fields, batch_norm_gradient_fields
from tunebench.torch.compiler._derived_tensor import (
    DerivedTensor,
    batch_norm_scale,
    batch_norm_shift,
    filter_slice,
    zero_bias,
)
from tunebench.torch.compiler._flex_attention import FlexCall, flex_call_of
from tunebench.torch.compiler._graph_values import STORED, GraphValues
from tunebench.torch.compiler._scaled_product import ScaledProduct, call_of, scaled_products
from tunebench.torch.compiler._scatter import SCATTERS, ScatterCall, scatter_of
from tunebench.torch.compiler._whole_number import is_exact_in_int8
from tunebench.workloads import parse
from tunebench.workloads import workload as make_workload
from tunebench.workloads.common.strided_workload import StridedOperand

__all__ = ["Translation", "sums_of_channels", "translate"]


@dataclass(frozen=True)
class Translation:
    """The graph of an FX graph.

    Attributes:
        graph: The graph.
        sources: FX node that holds the memory of each value.
        calls: FX node of each node of the graph.
        derived: Values that are computed from parameters instead of by nodes or kernels.
        copied: Strides of each value that is a copy for kernels, in the shape of its source.
        relaid: Strides with which kernels write each value whose strides in torch differ.
    """

    graph: Graph
    sources: Mapping[str, fx.Node]
    calls: Mapping[str, fx.Node]
    derived: Mapping[str, DerivedTensor]
    copied: Mapping[str, tuple[int, ...]]
    relaid: Mapping[str, tuple[int, ...]]


def translate(
    graph: fx.Graph,
    name: str,
    phase: Literal["inference", "forward", "backward"],
    constants: Container[int] = (),
    varying: Container[str] = (),
) -> Translation:
    """Return the graph of a traced step.

    Args:
        graph: FX graph of ATen operators without mutation; each node's `meta` has its `val`.
        name: Name of the model.
        phase: Phase of the step.
        constants: Places of the placeholders that are the same in every step.
        varying: Names of nodes that read or write sizes that change between calls; torch runs them.
    """
    return _Translator(name, phase, constants, varying).run(graph)


class _Translator:
    def __init__(self, name: str, phase: Any, constants: Container[int], varying: Container[str]) -> None:
        self._name, self._phase, self._constants, self._varying = name, phase, constants, varying
        self._held = GraphValues()
        self._concatenations: dict[str, tuple[str, ...]] = {}
        self._nodes: list[Node] = []
        self._calls: dict[str, fx.Node] = {}

    def run(self, graph: fx.Graph) -> Translation:
        """Translate a graph; a translator runs once."""
        outputs: set[str] = set()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        constants = {node for index, node in enumerate(inputs) if index in self._constants}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                if isinstance(traced(node), Tensor):
                    constant = node in constants or node.op == "get_attr"
                    self._held.add(node, node.name, traced(node), constant=constant)
            elif node.op == "output":
                outputs = {
                    self._held.memory_of(self._held.value_of[returned])
                    for returned in node.all_input_nodes
                    if returned in self._held.value_of
                }
            elif node.target is operator.getitem:
                self._held.add_item(node)
            else:
                self._call(node)
        self._leave_numbers(outputs)
        translated = Graph(
            name=self._name,
            phase=self._phase,
            nodes=tuple(self._nodes),
            values=self._held.values,
            outputs=frozenset(outputs),
            patterns=tuple(self._patterns(graph)),
        )
        return Translation(
            translated,
            self._held.sources,
            self._calls,
            self._held.derived,
            self._held.copied,
            self._held.relaid,
        )

    def _patterns(self, graph: fx.Graph) -> Iterator[Pattern]:
        """Yield the products of quantised matrices that the graph writes as several operations."""
        for product in scaled_products(graph):
            text, roles = product.text(), self._product_roles(product)
            names_of_calls = tuple(call.name for call in product.calls)
            if (
                text
                and roles
                and traced(product.result).is_contiguous()
                and set(names_of_calls) <= set(self._calls)
            ):
                yield Pattern(nodes=names_of_calls, workload=text, roles=roles)

    def _product_roles(self, product: ScaledProduct) -> dict[str, str] | None:
        """Return the value of each tensor of a product, or None if one has no value."""
        nodes = [
            *product.tensors.values(),
            *(part for parts, _ in product.numbers.values() for part in parts),
        ]
        if any(node not in self._held.value_of for node in (*nodes, product.result)):
            return None
        roles = {name: self._held.value_of[node] for name, node in product.tensors.items()}
        for name, (parts, compute) in product.numbers.items():
            derived = f"{product.result.name}~{name}"
            with traced(parts[0]).fake_mode:
                tensor = compute(*(traced(part) for part in parts))
            roles[name] = self._held.derive(derived, tensor, parts, compute)
        return {**roles, "c": self._held.value_of[product.result]}

    # -- nodes ---------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        if node.name in self._varying:  # a view, too: its readers would address memory by its sizes
            if writes := self._written(node):
                self._calls[node.name] = node
                reads, reason = self._reads(node, {}), "sizes that change between calls"
                self._nodes.append(
                    Node(name=node.name, target=_target(node), reads=reads, writes=writes, reason=reason)
                )
            return
        if is_view(node):
            (base,) = [read for read in node.all_input_nodes if read in self._held.value_of][:1] or [None]
            if isinstance(traced(node), Tensor):
                self._held.add_view(node, None if base is None else self._held.value_of[base])
            return
        if _target(node) == "aten.empty":  # memory without a kernel
            self._held.add(node, node.name, traced(node))
            return
        fields = self._fields(node) or {"reason": "no expression of tunebench"}
        reads = self._reads(node, fields)
        self._calls[node.name] = node
        writes = self._written(node)
        if "roles" in fields and "expression" not in fields:
            results = results_of(node, fields["workloads"], fields["roles"])
            fields["roles"] |= {name: value for name, (value, _) in results.items()}
        self._nodes.append(Node(name=node.name, target=_target(node), reads=reads, writes=writes, **fields))

    def _reads(self, node: fx.Node, fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the values that own the memory that a call reads; numbers that kernels know are not read."""
        read_by_kernel = {operand.value for operand in fields.get("operands", {}).values()}
        read_by_kernel |= set(map(self._held.memory_of, fields.get("roles", {}).values()))
        knows_numbers = "expression" in fields or "roles" in fields
        read_nodes = [read for read in node.all_input_nodes if read in self._held.value_of]
        memory = [(read, self._held.memory_of(self._held.value_of[read])) for read in read_nodes]
        is_number = [
            knows_numbers and owner not in read_by_kernel and number_of(read) is not None
            for read, owner in memory
        ]
        owners = (owner for (_, owner), number in zip(memory, is_number, strict=True) if not number)
        return tuple(dict.fromkeys(owners))

    def _leave_numbers(self, outputs: Container[str]) -> None:
        """Remove nodes that write one number which all readers have in expressions; torch runs others."""
        read = {value for node in self._nodes for value in node.reads}
        nodes = []
        for node in self._nodes:
            is_number = bool(node.expression) and not node.operands and not node.workloads
            if is_number and not any(value in read or value in outputs for value in node.writes):
                del self._calls[node.name]
            elif is_number:
                reason = "fills a tensor with one number"
                nodes.append(dataclasses.replace(node, expression="", reason=reason))
            else:
                nodes.append(node)
        self._nodes = nodes

    def _written(self, node: fx.Node) -> tuple[str, ...]:
        result = traced(node)
        if isinstance(result, Tensor):
            return (self._held.add(node, node.name, result),)
        parts = result if isinstance(result, (list, tuple)) else ()
        names = {
            f"{node.name}.{index}": part
            for index, part in enumerate(parts)
            if isinstance(part, Tensor) and is_used(node, index)
        }
        return tuple(
            name if name in self._held.values else self._held.add(None, name, part)
            for name, part in names.items()
        )

    def _fields(self, node: fx.Node) -> dict[str, Any] | None:
        """Return the fields of `Node` that describe what a call computes."""
        if node.target is torch.ops.higher_order.flex_attention:
            return self._flex_fields(node)
        if reason := self._refusal(node):
            return {"reason": reason}
        func, name = node.target, node.target._schema.name
        arguments = bound_arguments(func, node.args, node.kwargs)
        if name == "aten::_native_batch_norm_legit_no_training":
            return self._batch_norm_fields(arguments)
        if name in _SCALED_CALLS:
            return self._scaled_fields(node, arguments)
        if name in SCATTERS:
            scatter = scatter_of(node, name, arguments)
            return {"reason": scatter} if isinstance(scatter, str) else self._called_fields(scatter)
        if name in _BY_BATCH:
            add_value = functools.partial(self._held.add, None)
            return _BY_BATCH[name](node, arguments, self._held.as_f32, add_value)
        if name == "aten::cat":
            joined = {"joins": self._concatenated(node, arguments)}
            return (self._moved_fields(name, node, arguments) or {}) | joined
        if moves_elements(name):
            return self._moved_fields(name, node, arguments)
        if is_known(func):
            return self._workload_fields(node, arguments)
        if name in _REDUCTIONS:
            return self._reduction_fields(_REDUCTIONS[name], node, arguments)
        if not is_pointwise(name):
            return {"reason": "no operator of tunebench"}
        return self._elementwise_fields(name, node, arguments)

    def _refusal(self, node: fx.Node) -> str:
        """Return why no operator can compute a call, whatever its arguments; empty if one may."""
        if node.op != "call_function" or not hasattr(node.target, "_schema"):
            return "not an ATen operator"
        if node.target._schema.name == "tunebench::onnx_node":
            return f"ONNX node {node.args[1]}: {node.args[2]}"
        tensors = (read for read in node.all_input_nodes if isinstance(traced(read), Tensor))
        if any(read not in self._held.value_of for read in tensors):
            return "views of an unknown value"
        return "an empty tensor" if _writes_nothing(node) else ""

    def _reduction_fields(self, reduce: str, node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a reduction: of rows or columns in memory, or else over any axes."""
        x, result = traced(arguments["self"]), traced(node)
        if x.dtype not in STORED or not x.numel() or not _is_written(result):
            return NOT_WRITTEN
        axis = reduced_axis(x, arguments.get("dim")) if is_dense(x) and x.dtype in DTYPES else None
        if axis is None or result.dtype != x.dtype:
            return self._strided_reduction_fields(reduce, node, arguments)
        result_count = result.numel()
        rows, cols = (
            (result_count, x.numel() // result_count)
            if axis == "cols"
            else (x.numel() // result_count, result_count)
        )
        sizes = {"rows": rows, "cols": cols, "dtype": DTYPES[x.dtype]}
        try:
            reduction = make_workload("reduction", **sizes, expression="x0", reduce=reduce, axis=axis)
        except InputError as error:
            return {"reason": str(error)}
        roles = {"x0": self._held.value_of[arguments["self"]]}
        written = reduced_strides(x, arguments.get("dim"), result)
        relaid = self._held.add_relaid(node.name, result, written)
        return {"workloads": (str(reduction),), "roles": roles, "relaid": relaid}

    def _strided_reduction_fields(
        self, reduce: str, node: fx.Node, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the fields of a reduction over any axes of a tensor in any layout."""
        x, result = arguments["self"], traced(node)
        index, axes = reduction_map(traced(x), arguments.get("dim"), result)
        operand = self._held.strided_operand(x, index)
        if isinstance(operand, str) or operand.index is None:
            return {"reason": operand}
        try:
            reduction = make_workload(
                "strided_reduction",
                shape="x".join(map(str, index.shape)),
                dtype=STORED[result.dtype],
                expression="x0",
                operands=StridedOperand(STORED[traced(x).dtype], operand.index).text("x0"),
                reduce=reduce,
                axes=axes,
            )
        except InputError as error:
            return {"reason": str(error)}
        return {"workloads": (str(reduction),), "roles": {"x0": operand.value}}

    def _workload_fields(self, node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
        tensors = {
            key: traced(value) if isinstance(value, fx.Node) else value for key, value in arguments.items()
        }
        translated = workloads_of(node.target, (), tensors)
        if isinstance(translated, str) or not translated:
            return {"reason": translated or ""}
        texts = tuple(_with_statistics(text, node) for text in translated)
        if node.target._schema.name == "aten::convolution_backward" and arguments["output_mask"][2]:
            texts += sums_of_channels(traced(arguments["grad_output"]))
        workloads = [parse(text) for text in texts]
        roles = {
            name: value for parsed in workloads for name, value in self._held.roles(parsed, arguments).items()
        }
        copied = sum(
            self._held.values[value].nbytes for value in roles.values() if value in self._held.copied
        )
        relaid = sum(
            self._held.add_relaid(value, tensor, kernel_strides(workload, name, tensor))
            for workload in workloads
            for name, (value, tensor) in results_of(node, (str(workload),), roles).items()
        )
        if arguments.get("transposed") and isinstance(arguments.get("bias"), fx.Node):
            if relaid:
                return {"reason": "a result in another memory layout"}
            return self._with_bias(node, texts, roles, arguments["bias"], copied)
        if roles.get("x") in self._concatenations and not copied + relaid:
            self._split(node, workloads[0], roles)
        return {"workloads": texts, "roles": roles, "copied": copied, "relaid": relaid}

    def _flex_fields(self, node: fx.Node) -> dict[str, Any]:
        """Return the fields of a call of flex_attention."""
        call = flex_call_of(node)
        return {"reason": call} if isinstance(call, str) else self._called_fields(call)

    def _called_fields(self, call: FlexCall | ScatterCall) -> dict[str, Any]:
        """Return the fields of a call whose arguments are the tensors of one workload."""
        roles = self._held.roles(parse(call.text), dict(call.arguments))
        copied = sum(
            self._held.values[value].nbytes for value in roles.values() if value in self._held.copied
        )
        return {"workloads": (call.text,), "roles": roles, "copied": copied}

    def _scaled_fields(self, node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a call that is one product of quantised matrices."""
        product = call_of(node, arguments)
        if isinstance(product, str):
            return {"reason": product}
        self._held.add(node, node.name, traced(node))
        return {"workloads": (product.text(),), "roles": self._product_roles(product) or {}}

    def _concatenated(self, node: fx.Node, arguments: dict[str, Any]) -> tuple[str, ...]:
        """Return the images that are concatenated along channels, if channels are innermost; else nothing."""
        parts, result = arguments["tensors"], traced(node)
        tensors = [traced(part) for part in parts]
        last = all(
            tensor.dim() == 4 and channel_broadcast(tensor) == "vector" for tensor in (*tensors, result)
        )
        if (
            not last
            or arguments["dim"] not in (1, -3)
            or any(tensor.dtype != result.dtype for tensor in tensors)
        ):
            return ()
        self._concatenations[node.name] = tuple(self._held.value_of[part] for part in parts)
        return self._concatenations[node.name]

    def _split(self, node: fx.Node, workload: Any, roles: dict[str, str]) -> None:
        """Add the values that convolutions of parts of concatenated images read and write.

        See `tunebench.graph.convolution_split`.
        """
        if workload.operator != "conv2d" or workload.direction != "fprop" or workload.groups > 1:
            return
        filters, first = self._held.sources[roles["w"]], 0
        for part, value in enumerate(self._concatenations[roles["x"]]):
            end = first + self._held.values[value].shape[1]
            name = channels_of(roles["w"], first, end)
            part_of = functools.partial(filter_slice, first=first, end=end)
            self._held.derive(name, traced(filters)[:, first:end], [filters], part_of)
            self._held.add(None, sum_of(node.name, part), traced(node))
            first = end
        self._held.derive(zeros_of(node.name), traced(filters)[:, 0, 0, 0], [filters], zero_bias)

    def _with_bias(
        self, node: fx.Node, texts: tuple[str, ...], roles: dict[str, str], bias: fx.Node, copied: int
    ) -> dict[str, Any]:
        """Return the fields of a transposed convolution with a bias, which a second kernel adds."""
        result = traced(node)
        if channel_broadcast(result) != "vector":
            return {"workloads": texts, "copied": copied}
        sums = self._held.add(None, f"{node.name}~sums", result)
        dimensions = {"rows": result.numel() // result.shape[1], "cols": result.shape[1]}
        adding = make_workload(
            "elementwise", **dimensions, dtype=parse(texts[0]).dtype, expression="t0+t1", vectors="t1"
        )
        return {
            "workloads": (*texts, str(adding)),
            "roles": {**roles, "dx": sums, "t0": sums, "t1": self._held.value_of[bias]},
            "copied": copied,
        }

    def _elementwise_fields(
        self, name: str, node: fx.Node, arguments: dict[str, Any]
    ) -> dict[str, Any] | None:
        result = traced(node)
        if not _is_written(result):
            return NOT_WRITTEN
        if result.dtype == torch.int8 and not is_exact_in_int8(name, arguments):
            return {"reason": "arithmetic in int8, or a conversion to it that changes numbers"}
        operands: dict[str, NodeOperand] = {}
        texts: dict[str, Any] = {}
        for key, value in arguments.items():
            number = number_of(value)
            if number is not None and not math.isfinite(number):
                return {"reason": f"{key} of {number}"}
            if number is not None and key in _NUMBERS:
                texts[key] = repr(number)
            elif number is not None:
                texts[key] = number
            elif isinstance(value, fx.Node):
                operand = self._held.operand(value, result)
                if isinstance(operand, str):
                    return {"reason": operand}
                names_of = {earlier: name for name, earlier in operands.items()}
                texts[key] = names_of.get(operand, f"x{len(operands)}")
                operands[texts[key]] = operand
            else:
                texts[key] = value
        expression = expression_of(name, texts)
        if expression and result.dtype == torch.bool and not is_boolean(name):
            expression = f"ne({expression},0)"
        return _expression_fields(expression, operands)

    def _moved_fields(self, name: str, node: fx.Node, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a call that moves elements: a sum of operands that are 0 elsewhere."""
        result = traced(node)
        if not _is_written(result):
            return NOT_WRITTEN
        parts = moved_elements(name, arguments, result)
        if not parts or any(traced(part).dtype not in STORED for part, _ in parts):
            return {"reason": "elements that no index map describes, or of another type"}
        operands = {
            f"x{number}": self._held.strided_operand(
                part, in_memory_order(index, result), node.all_input_nodes
            )
            for number, (part, index) in enumerate(parts)
        }
        return _expression_fields("+".join(operands), operands)

    def _batch_norm_fields(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Return the fields of a batch normalisation by running statistics: a scale and shift per channel."""
        x = traced(arguments["input"])
        statistics = [arguments[key] for key in ("weight", "bias", "running_mean", "running_var")]
        is_constant = all(
            isinstance(statistic, fx.Node) and self._held.is_constant(statistic) for statistic in statistics
        )
        if not is_constant or x.dtype not in DTYPES or not is_dense(x):
            return {"reason": "statistics that change from step to step"}
        weight, images = arguments["weight"], self._held.value_of[arguments["input"]]
        operands = {"x0": NodeOperand(images, "whole")}
        for key, part, compute in (("x1", "scale", batch_norm_scale), ("x2", "shift", batch_norm_shift)):
            name = f"{images}~{weight.name}.{part}"
            folded = functools.partial(compute, eps=arguments["eps"], dtype=x.dtype)
            self._held.derive(name, traced(weight).to(x.dtype), statistics, folded)
            operands[key] = NodeOperand(name, channel_broadcast(x))
        return {"expression": "x0*x1+x2", "operands": operands}


# -- reading FX --------------------------------------------------------------------------------------------

_BY_BATCH = {
    "aten::_native_batch_norm_legit_functional": batch_norm_fields,
    "aten::native_batch_norm_backward": batch_norm_gradient_fields,
}

_SCALED_CALLS = frozenset({"aten::_scaled_mm", "aten::_weight_int8pack_mm"})

_REDUCTIONS = {"aten::amax": "max", "aten::amin": "min", "aten::mean": "mean", "aten::sum": "sum"}

_NUMBERS = frozenset({"fill_value", "max", "min", "other", "s", "self", "value"})
"""Arguments of elementwise operators that may be numbers instead of tensors."""


NOT_WRITTEN = {"reason": "tensors of another type, without elements, or whose elements are not contiguous"}


def _is_written(result: Any) -> bool:
    """Return whether kernels can write a result."""
    return isinstance(result, Tensor) and result.dtype in STORED and is_dense(result)


def _writes_nothing(node: fx.Node) -> bool:
    """Return whether a result that is used has no elements; statistics that no call reads may be empty."""
    result = traced(node)
    parts = result if isinstance(result, (list, tuple)) else (result,)
    used = (part for index, part in enumerate(parts) if part is result or is_used(node, index))
    return any(
        isinstance(part, Tensor) and any(type(extent) is int and extent == 0 for extent in part.shape)
        for part in used
    )


def _expression_fields(text: str | None, operands: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of an elementwise node, or why there are none."""
    reasons = [operand for operand in operands.values() if isinstance(operand, str)]
    if reasons or not text:
        return {"reason": reasons[0]} if reasons else None
    try:
        used = names(parse_expression(text))
    except InputError as error:
        return {"reason": str(error)}
    return {"expression": canonical(text), "operands": {name: operands[name] for name in used}}


def _target(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.replace("::", ".") if schema is not None else str(node.target)


def _with_statistics(text: str, node: fx.Node) -> str:
    """Return a normalisation that writes its statistics if the gradients read them."""
    norm = parse(text)
    if norm.operator not in ("layernorm", "rmsnorm") or getattr(norm, "direction", "") != "forward":
        return text
    reads_statistics = any(user.target is operator.getitem and user.args[1] > 0 for user in node.users)
    return str(norm.changed(stats=reads_statistics))


def sums_of_channels(images: Tensor) -> tuple[str, ...]:
    """Return the workload of a convolution's bias gradient, if channels are innermost; else nothing."""
    if channel_broadcast(images) != "vector" or images.dtype not in DTYPES:
        return ()
    sizes = {"rows": images.numel() // images.shape[1], "cols": images.shape[1]}
    reduction = {"expression": "x0", "reduce": "sum", "axis": "rows"}
    try:
        return (str(make_workload("reduction", **sizes, dtype=DTYPES[images.dtype], **reduction)),)
    except InputError:  # sums that overflow a 16-bit type
        return ()
