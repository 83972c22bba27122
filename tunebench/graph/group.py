"""Legal groups: which nodes of a graph one kernel can compute together.

A group is a single node, or several nodes whose internal values need not be written:

- an elementwise chain, which may start with the statistics of its normalisation, or read operands of any
  layout
- a reduction with a prologue, an epilogue, or both
- a product or a convolution with a prologue, an epilogue, or both
- two products of one input, where one gates the other
- a normalisation with the sum before it
- a convolution of concatenated images, as a sum of convolutions
- nodes that were recognised as one workload when the model was traced (`Graph.patterns`)

Only the group itself reads the values that it writes, except its last value and the outputs of its kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tunebench.errors import InputError
from tunebench.expression import Apply, Name, Node, names, write
from tunebench.expression import parse as parse_expression
from tunebench.graph._chain import (
    ChainEpilogue,
    ChainExpression,
    chain_expression,
    chains,
    epilogue_of,
    matrix_dimensions,
    plain_chains,
    statistics_nodes,
)
from tunebench.graph._prologue import NodeWithPrologue, prologues, reduction_prologues
from tunebench.graph._relu_gradient import with_relu_gradient
from tunebench.graph._strided_chain import as_strided, strided_chain
from tunebench.graph.convolution_split import split_convolution
from tunebench.graph.node import Broadcast, Graph
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.common.expression_workload import substitute
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gated_gemm import GatedGemm

__all__ = ["FusedGroup", "GroupKind", "groups"]

GroupKind = Literal["alone", "chain", "epilogue", "gated", "parted", "pattern", "prologue", "torch"]
"""Why the nodes are together; `torch` if no operator of tunebench computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGroup:
    """Nodes that one kernel, or torch, computes together.

    Attributes:
        nodes: The nodes, in an order in which they can run.
        kind: Why they are together.
        workloads: Canonical texts of what they compute; empty if only torch computes it.
        roles: Value of each input and output tensor of the workloads, by the tensor's name; empty where
            kernels do not compute everything that the node writes. Where two workloads have different tensors
            of one name, the workload's number precedes it: ``1.x``.
        copied: Bytes that must be copied to another layout, before or after the kernels.
    """

    nodes: tuple[int, ...]
    kind: GroupKind
    workloads: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    copied: int = 0

    def role(self, index: int, tensor: str) -> str:
        """Return the value that is a tensor of a workload; empty if there is none."""
        return self.roles.get(f"{index}.{tensor}") or self.roles.get(tensor, "")


def groups(graph: Graph) -> tuple[FusedGroup, ...]:
    """Return all legal groups: the single nodes in their order, then groups of several nodes."""
    alone = tuple(_alone(graph, index) for index in range(len(graph.nodes)))
    several: dict[tuple[Any, ...], FusedGroup] = {}
    with_prologue = {
        index: (*prologues(graph, index), *reduction_prologues(graph, index))
        for index in range(len(graph.nodes))
    }
    for index, node in enumerate(graph.nodes):
        fused: Iterator[FusedGroup] = iter(())
        if node.expression:
            fused = _ending_in(graph, index, with_prologue)
        elif node.workloads:
            fused = _prologues(graph, index, with_prologue[index])
        for group in fused:
            # The same group may be found from several sinks or prologues.
            several.setdefault((group.nodes, group.workloads), group)
    for group in _patterns(graph):
        several.setdefault((group.nodes, group.workloads), group)
    # Single nodes stand first and in order: prices and plans index them by node.
    candidates = (*alone, *several.values())
    wider = (
        widened(graph, group)
        for widened in (_split_convolution_group, _relu_gradient_group)
        for group in candidates
        if group.roles
    )
    return tuple(
        candidate
        for candidate in (*candidates, *filter(None, wider))
        if not _reads_unwritten(graph, candidate)
    )


def _patterns(graph: Graph) -> Iterator[FusedGroup]:
    """Yield the patterns of a graph whose results alone are read by other nodes."""
    index_of = {node.name: index for index, node in enumerate(graph.nodes)}
    for pattern in graph.patterns:
        members = {index_of[name] for name in pattern.nodes}
        written = {value for index in members for value in graph.nodes[index].writes}
        inner = written - set(pattern.roles.values())
        if all(graph.is_internal(value, members) for value in inner) and _is_convex(graph, members):
            yield FusedGroup(
                nodes=tuple(sorted(members)),
                kind="pattern",
                workloads=(pattern.workload,),
                roles=pattern.roles,
            )


def _reads_unwritten(graph: Graph, group: FusedGroup) -> bool:
    """Return whether kernels would read a part of the memory of a value that they do not write."""
    return any(graph.is_view_of(value, group.nodes) for value in group.roles.values())


def _alone(graph: Graph, index: int) -> FusedGroup:
    node = graph.nodes[index]
    if node.expression:
        tree = chain_expression(graph, index, frozenset({index}))
        return _chain(graph, index, frozenset({index}), tree) or FusedGroup(nodes=(index,), kind="torch")
    if not node.workloads:
        return FusedGroup(nodes=(index,), kind="torch")
    needed = {tensor.name for text in node.workloads for tensor in parse(text).inputs()}
    is_whole = needed <= node.roles.keys() and set(node.writes) <= set(node.roles.values())
    roles = dict(node.roles) if is_whole else {}
    return FusedGroup(
        nodes=(index,), kind="alone", workloads=node.workloads, roles=roles, copied=node.copied + node.relaid
    )


def _split_convolution_group(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """Return a convolution of concatenated images, with its epilogue, as one convolution per image."""
    if len(group.workloads) != 1 or group.copied:
        return None
    split = split_convolution(graph, group.nodes, group.workloads[0], group.roles)
    if split is None:
        return None
    joining, texts, roles = split
    return FusedGroup(
        nodes=tuple(sorted((joining, *group.nodes))),
        kind="parted",
        workloads=texts,
        roles=roles,
        copied=sum(graph.values[value].nbytes for name, value in roles.items() if name.endswith(".w")),
    )


def _relu_gradient_group(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """Return a batch normalisation's gradient together with relu's gradient before it."""
    fused = with_relu_gradient(graph, group.nodes, group.workloads, group.roles)
    if fused is None or not _is_convex(graph, {fused[0], *group.nodes}):
        return None
    before, texts, roles = fused
    return FusedGroup(nodes=tuple(sorted((before, *group.nodes))), kind="chain", workloads=texts, roles=roles)


# -- elementwise nodes and their fusion with other groups -------------------------------------------------


def _ending_in(
    graph: Graph, sink: int, with_prologue: Mapping[int, Sequence[NodeWithPrologue]]
) -> Iterator[FusedGroup]:
    for members in chains(graph, sink):
        tree = chain_expression(graph, sink, members)
        chain = _chain(graph, sink, members, tree) if len(members) > 1 else None
        if chain is not None:
            yield chain
        if tree is None or statistics_nodes(graph, members):
            continue
        gated = _gated(graph, sink, members, tree)
        if gated is not None:
            yield gated
        for leaf in tree.leaves.values():
            before = graph.writer.get(leaf.value)
            if before is None or not graph.is_internal(leaf.value, members):
                continue
            alone = NodeWithPrologue(graph.nodes[before], frozenset({before}))
            for product in (alone, *with_prologue[before]):
                fused = _with_epilogue(graph, product, members, tree, leaf.value, sink)
                if fused is not None:
                    yield fused


def _chain(
    graph: Graph, sink: int, members: frozenset[int], tree: ChainExpression | None
) -> FusedGroup | None:
    """Return the group of an elementwise chain and its statistics, or None if no workload expresses it."""
    result = graph.nodes[sink].writes[0]
    workload = None if tree is None else _elementwise(graph, tree, result)
    if tree is None or workload is None:
        return _strided(graph, sink, members)
    before = [graph.nodes[index] for index in statistics_nodes(graph, members)]
    leaves = {name: leaf.value for name, leaf in tree.leaves.items()}
    roles = {name: value for node in before for name, value in node.roles.items()}
    roles |= {name: leaves[name] for name in names(tree.root)}
    return FusedGroup(
        nodes=tuple(sorted(members)),
        kind="chain",
        workloads=(*(text for node in before for text in node.workloads), str(workload)),
        roles={**roles, "out": result},
    )


def _strided(graph: Graph, sink: int, members: frozenset[int]) -> FusedGroup | None:
    """Return the group of a chain whose operands have any layout, or None if no workload expresses it."""
    if statistics_nodes(graph, members):
        return None
    (result,) = graph.nodes[sink].writes
    chain = strided_chain(graph, sink, members)
    workload = None if chain is None else as_strided(graph, chain, result)
    if chain is None or workload is None:
        return None
    return FusedGroup(
        nodes=tuple(sorted(members)),
        kind="chain",
        workloads=(str(workload),),
        roles={**chain.roles, "out": result},
    )


def _elementwise(graph: Graph, tree: ChainExpression, result: str) -> Workload | None:
    dimensions = matrix_dimensions(graph, tree, result)
    try:
        return None if dimensions is None else Elementwise.from_dimensions(dimensions)
    except InputError:
        return None


# -- epilogues -------------------------------------------------------------------------------------------


def _with_epilogue(
    graph: Graph,
    before: NodeWithPrologue,
    members: frozenset[int],
    tree: ChainExpression,
    sums: str,
    sink: int,
) -> FusedGroup | None:
    """Return a product with a chain as its epilogue, or None if its kernels have no such epilogue."""
    node = before.node
    if len(node.workloads) != 1 or node.writes != (sums,) or node.relaid:
        return None
    workload = parse(node.workloads[0])
    fuse = _WITH_EPILOGUE.get(workload.operator)
    if fuse is None or getattr(workload, "direction", "fprop") != "fprop":
        return None
    # Numbers per column of a product: channels, which are innermost except in nchw.
    broadcast: Broadcast = "channel" if getattr(workload, "layout", "") == "nchw" else "vector"
    after = epilogue_of(tree, sums, broadcast)
    fused = None if after is None else fuse(workload, after)
    if after is None or fused is None:
        return None
    (result,) = graph.nodes[sink].writes
    added = {"scale": after.scale, "bias": after.bias, "residual": after.residual or after.inner}
    roles = {**node.roles, **{name: value for name, value in added.items() if value}}
    roles[workload.outputs()[0].name] = result
    # Kernels read every tensor in the dtype of the workload: a value of another dtype cannot be fused.
    tensors = {tensor.name: tensor.dtype for tensor in (*fused.inputs(), *fused.outputs())}
    if tensors != {name: graph.values[value].dtype for name, value in roles.items()}:
        return None
    return FusedGroup(
        nodes=tuple(sorted({*before.nodes, *members})),
        kind="epilogue" if len(before.nodes) == 1 else "prologue",
        workloads=(str(fused),),
        roles=roles,
        copied=node.copied,
    )


def _gemm_with_epilogue(workload: Any, after: ChainEpilogue) -> Workload | None:
    """Return the workload ``act(ab + bias) + residual``, or None if the epilogue has another form."""
    if after.scale or workload.has_residual or (workload.has_bias and after.bias):
        return None
    if after.inner and (after.activation != "x" or after.residual):
        return None
    bias = "bias" if workload.has_bias or after.bias else ""
    residual = "residual" if after.residual or after.inner else ""
    return _changed(workload, after.activation, bias, residual)


def _conv2d_with_epilogue(workload: Any, after: ChainEpilogue) -> Workload | None:
    """Return the workload ``act(sums * scale + bias + residual)``, or None for other epilogues."""
    has_own = workload.epilogue == "bias"
    if workload.epilogue not in ("none", "bias") or (has_own and (after.scale or after.bias)):
        return None
    if after.residual:
        return None
    scale = "scale" if after.scale else ""
    bias = "bias" if has_own or after.bias else ""
    residual = "residual" if after.inner else ""
    return _changed(workload, after.activation, scale, bias, residual)


def _changed(workload: Workload, activation: str, *parts: str) -> Workload | None:
    epilogue = "+".join(filter(None, parts)) or "none"
    act = {} if activation == "x" else {"act": activation}
    try:
        return workload.changed(epilogue=epilogue, **act)
    except InputError:
        return None


def _reduction_with_epilogue(workload: Any, after: ChainEpilogue) -> Workload | None:
    """Return the reduction whose results an expression is applied to, or None for other epilogues."""
    if after.scale or after.bias or after.inner or after.residual:
        return None
    then = substitute(parse_expression(after.activation), {Name("x"): workload.end})
    try:
        return workload.changed(then=write(then))  # type: ignore[no-any-return]
    except InputError:
        return None


_WITH_EPILOGUE = {
    "gemm": _gemm_with_epilogue,
    "conv2d": _conv2d_with_epilogue,
    "reduction": _reduction_with_epilogue,
    "strided_reduction": _reduction_with_epilogue,
}


def _gated(graph: Graph, sink: int, members: frozenset[int], tree: ChainExpression) -> FusedGroup | None:
    """Return two products of one input, where one gates the other, or None for other chains."""
    gating, leaves = _gating(tree.root), tree.leaves.values()
    if gating is None or len(leaves) != 2:
        return None
    if any(leaf.place != "whole" or not graph.is_internal(leaf.value, members) for leaf in leaves):
        return None
    activation, *factors = gating
    products = [graph.writer.get(tree.leaves[name].value) for name in factors]
    nodes = {*members, *(index for index in products if index is not None)}
    gate, up = (None if index is None else graph.nodes[index] for index in products)
    if gate is None or up is None or gate.workloads != up.workloads or len(gate.workloads) != 1:
        return None
    product: Any = parse(gate.workloads[0])
    if product.operator != "gemm" or product.epilogue != "none" or product.batch != 1:
        return None
    if gate.relaid or gate.roles["a"] != up.roles.get("a") or not _is_convex(graph, nodes):
        return None
    sizes = {name: getattr(product, name) for name in ("m", "n", "k", "dtype", "trans")}
    try:
        workload = GatedGemm.from_dimensions({**sizes, "activation": activation})
    except InputError:
        return None
    (result,) = graph.nodes[sink].writes
    return FusedGroup(
        nodes=tuple(sorted(nodes)),
        kind="gated",
        workloads=(str(workload),),
        roles={"a": gate.roles["a"], "b_gate": gate.roles["b"], "b_up": up.roles["b"], "c": result},
        copied=gate.copied + up.copied,
    )


def _gating(root: Node) -> tuple[str, str, str] | None:
    """Return activation, gate and up of ``activation(gate) * up``, or None for another expression."""
    if isinstance(root, Apply) and root.operation == "mul":
        for first, second in (root.arguments, root.arguments[::-1]):
            arguments = names(first)
            if isinstance(second, Name) and len(arguments) == 1 and arguments != (second.name,):
                for activation in GatedGemm.choices("activation"):
                    if first == parse_expression(f"{activation}({arguments[0]})"):
                        return activation, arguments[0], second.name
    return None


# -- prologues -------------------------------------------------------------------------------------------


def _prologues(graph: Graph, index: int, with_prologue: Sequence[NodeWithPrologue]) -> Iterator[FusedGroup]:
    """Yield products, reductions and normalisations, each with nodes before it."""
    for both in with_prologue:
        node = both.node
        yield FusedGroup(
            nodes=tuple(sorted(both.nodes)),
            kind="prologue",
            workloads=node.workloads,
            roles=node.roles,
            copied=node.copied + node.relaid,
        )
    yield from _norms_of_sums(graph, index, parse(graph.nodes[index].workloads[0]))


def _norms_of_sums(graph: Graph, index: int, workload: Any) -> Iterator[FusedGroup]:
    """Yield normalisations with the sum before them, which their kernels write too."""
    node = graph.nodes[index]
    if workload.operator not in ("layernorm", "rmsnorm") or workload.is_backward:
        return
    total = node.roles["x"]
    before = graph.writer.get(total)
    if before is None or not graph.nodes[before].expression:
        return
    for members, tree in plain_chains(graph, before):
        parts = _sum_operands(tree, workload.cols, graph)
        if parts is None or not _is_convex(graph, {*members, index}):
            continue
        prologue = "bias+residual" if "bias" in parts else "residual"
        fused = workload.changed(prologue=prologue)
        yield FusedGroup(
            nodes=tuple(sorted({*members, index})),
            kind="prologue",
            workloads=(str(fused),),
            roles={**node.roles, **parts, "z": total},
            copied=node.copied + node.relaid,
        )


def _sum_operands(tree: ChainExpression, cols: int, graph: Graph) -> dict[str, str] | None:
    """Return the operands of a sum of two tensors and an optional vector; None for other expressions."""
    wholes = [name for name, leaf in tree.leaves.items() if leaf.place == "whole"]
    vectors = [name for name, leaf in tree.leaves.items() if leaf.place == "vector"]
    if len(wholes) != 2 or len(vectors) > 1 or len(wholes) + len(vectors) != len(tree.leaves):
        return None
    if any(graph.values[tree.leaves[name].value].elements != cols for name in vectors):
        return None
    if write(tree.root).translate(str.maketrans("", "", "()")).count("+") != len(tree.leaves) - 1:
        return None
    if set(write(tree.root)) & set("-*/,") or not _is_sum(tree.root):
        return None
    parts = {"x": tree.leaves[wholes[0]].value, "residual": tree.leaves[wholes[1]].value}
    return {**parts, **({"bias": tree.leaves[vectors[0]].value} if vectors else {})}


def _is_sum(node: Any) -> bool:
    if isinstance(node, Name):
        return True
    return getattr(node, "operation", "") == "add" and all(map(_is_sum, node.arguments))


def _is_convex(graph: Graph, nodes: set[int]) -> bool:
    """Return whether a set of nodes is convex: no path leaves it and returns."""
    reached: set[int] = set()
    # Nodes are in running order, so one pass finds those that are reached from the group. A member with such
    # a predecessor closes a path that left the group.
    for index in range(min(nodes), max(nodes) + 1):
        before = graph.predecessors[index]
        if index in nodes:
            if before & reached:
                return False
        elif before & (nodes | reached):
            reached.add(index)
    return True
