"""Legal groups: which nodes of a graph one kernel can do together.

A group is one node by itself, or several whose inner values need not be written: an elementwise chain, which
may begin with the statistics that it normalises by; a product or a convolution with the chain that gives its
left operand, with the chain after it as its epilogue, or with both; two products of one input of which one
gates the other; a normalisation with the sum before it; a convolution of joined images, as a sum of
convolutions.
Every value that a group writes besides its last is read by none but the group, or is an output of its kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tunebench.errors import InputError
from tunebench.expression import Apply, Name, names, write
from tunebench.graph._chain import (
    ChainEpilogue,
    ChainExpression,
    chain_expression,
    chains,
    epilogue_of,
    statistics_nodes,
)
from tunebench.graph._prologue import NodeWithPrologue, prologues
from tunebench.graph._relu_gradient import with_relu_gradient
from tunebench.graph._split_convolution import split_convolution
from tunebench.graph.node import Broadcast, Graph
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.elementwise import Elementwise
from tunebench.workloads.operators.gated_gemm import GatedGemm

__all__ = ["FusedGroup", "GroupKind", "groups"]

GroupKind = Literal["alone", "chain", "epilogue", "gated", "parted", "prologue", "torch"]
"""Why its nodes are together; `torch` if no operator of ours does what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedGroup:
    """Nodes that one kernel does together, or that torch does.

    Attributes:
        nodes: In the order in which they can run.
        kind: Why they are together.
        workloads: What they compute, as canonical texts; empty if only torch does it.
        roles: Which value each tensor of the workloads is, inputs and outputs; empty where kernels do not do
            all that the node does. Where workloads have tensors of one name that are not one value, the
            number of the workload comes before it: ``1.x``.
        copied: Bytes that must be laid out anew before.
    """

    nodes: tuple[int, ...]
    kind: GroupKind
    workloads: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    copied: int = 0

    def role(self, index: int, tensor: str) -> str:
        """Return which value a tensor of a workload is; empty if it is none."""
        return self.roles.get(f"{index}.{tensor}") or self.roles.get(tensor, "")


def groups(graph: Graph) -> tuple[FusedGroup, ...]:
    """Return every legal group: each node by itself first, in their order, then those of several."""
    alone = tuple(_alone(graph, index) for index in range(len(graph.nodes)))
    several: dict[tuple[Any, ...], FusedGroup] = {}
    ahead = {index: tuple(prologues(graph, index)) for index in range(len(graph.nodes))}
    for index, node in enumerate(graph.nodes):
        found: Iterator[FusedGroup] = iter(())
        if node.expression:
            found = _ending_in(graph, index, ahead)
        elif node.workloads and not node.expression:
            found = _prologues(graph, index, ahead[index])
        for group in found:
            several.setdefault((group.nodes, group.workloads), group)
    known = (*alone, *several.values())
    wider = (widened(graph, group) for widened in (_parted, _masked) for group in known if group.roles)
    return (*known, *filter(None, wider))


def _alone(graph: Graph, index: int) -> FusedGroup:
    node = graph.nodes[index]
    if node.expression:
        tree = chain_expression(graph, index, frozenset({index}))
        chain = None if tree is None else _chain(graph, index, frozenset({index}), tree)
        return chain or FusedGroup(nodes=(index,), kind="torch")
    if not node.workloads:
        return FusedGroup(nodes=(index,), kind="torch")
    needed = {tensor.name for text in node.workloads for tensor in parse(text).inputs()}
    is_whole = needed <= node.roles.keys() and set(node.writes) <= set(node.roles.values())
    roles = dict(node.roles) if is_whole else {}
    return FusedGroup(nodes=(index,), kind="alone", workloads=node.workloads, roles=roles, copied=node.copied)


def _parted(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """Return a convolution of joined images, with its epilogue, as convolutions of the parts."""
    if len(group.workloads) != 1 or group.copied:
        return None
    found = split_convolution(graph, group.nodes, group.workloads[0], group.roles)
    if found is None:
        return None
    joining, texts, roles = found
    return FusedGroup(
        nodes=tuple(sorted((joining, *group.nodes))), kind="parted", workloads=texts, roles=roles
    )


def _masked(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """Return gradients by statistics of a batch with the gradient of the relu that follows them."""
    found = with_relu_gradient(graph, group.nodes, group.workloads, group.roles)
    if found is None or not _is_convex(graph, {found[0], *group.nodes}):
        return None
    before, texts, roles = found
    return FusedGroup(nodes=tuple(sorted((before, *group.nodes))), kind="chain", workloads=texts, roles=roles)


# -- elementwise nodes, and what is before them ------------------------------------------------------------


def _ending_in(
    graph: Graph, sink: int, ahead: Mapping[int, Sequence[NodeWithPrologue]]
) -> Iterator[FusedGroup]:
    for members in chains(graph, sink):
        tree = chain_expression(graph, sink, members)
        if tree is None:
            continue
        if len(members) > 1:
            chain = _chain(graph, sink, members, tree)
            if chain is not None:
                yield chain
        if statistics_nodes(graph, members):
            continue
        gated = _gated(graph, sink, members, tree)
        if gated is not None:
            yield gated
        for leaf in tree.leaves.values():
            before = graph.writer.get(leaf.value)
            if before is None or not graph.is_inner(leaf.value, members):
                continue
            alone = NodeWithPrologue(graph.nodes[before], frozenset({before}))
            for product in (alone, *ahead[before]):
                fused = _with_epilogue(graph, product, members, tree, leaf.value, sink)
                if fused is not None:
                    yield fused


def _chain(graph: Graph, sink: int, members: frozenset[int], tree: ChainExpression) -> FusedGroup | None:
    """Return an elementwise workload of a tree, and what must run before; None if none computes it."""
    result = graph.nodes[sink].writes[0]
    given = _elementwise(graph, tree, result)
    if given is None:
        return None
    before = [graph.nodes[index] for index in statistics_nodes(graph, members)]
    leaves = {name: leaf.value for name, leaf in tree.leaves.items()}
    roles = {name: value for node in before for name, value in node.roles.items()}
    roles |= {name: leaves[name] for name in names(tree.root)}
    return FusedGroup(
        nodes=tuple(sorted(members)),
        kind="chain",
        workloads=(*(text for node in before for text in node.workloads), str(given)),
        roles={**roles, "out": result},
    )


def _elementwise(graph: Graph, tree: ChainExpression, result: str) -> Workload | None:
    given = _dimensions(graph, tree, result)
    try:
        return None if given is None else Elementwise.from_dimensions(given)
    except InputError:
        return None


def _dimensions(graph: Graph, tree: ChainExpression, result: str) -> dict[str, Any] | None:
    """Return what a workload says of a tree: its expression, and how its operands lie in a matrix."""
    value = graph.values[result]
    placed: dict[Broadcast, list[str]] = {place: [] for place in get_args(Broadcast)}
    for name in names(tree.root):
        placed[tree.leaves[name].place].append(name)
    columns = placed["row"]
    if value.shape[:1] == (1,):  # channels of one image are rows
        columns, placed["channel"] = [*columns, *placed["channel"]], []
    if placed["channel"] or placed["scalar"] or not placed["whole"]:
        return None
    elements = {name: graph.values[tree.leaves[name].value].elements for name in tree.leaves}
    lines = {elements[name] for name in placed["vector"]}
    lines |= {value.elements // elements[name] for name in columns}
    if len(lines) > 1:
        return None
    cols = lines.pop() if lines else value.inner
    try:
        expression = write(tree.root)
    except InputError:  # too long
        return None
    types = {graph.values[tree.leaves[name].value].dtype for name in placed["vector"]}
    if len(types) > 1:
        return None
    return {
        "rows": value.elements // cols,
        "cols": cols,
        "dtype": value.dtype,
        "expression": expression,
        "vectors": "+".join(placed["vector"]),
        "columns": "+".join(columns),
        **({"vector_dtype": types.pop()} if types else {}),
    }


# -- products with what follows them -----------------------------------------------------------------------


def _with_epilogue(
    graph: Graph,
    before: NodeWithPrologue,
    members: frozenset[int],
    tree: ChainExpression,
    sums: str,
    sink: int,
) -> FusedGroup | None:
    """Return a product with a chain after it, or None if its kernels have no such epilogue."""
    node = before.node
    if len(node.workloads) != 1 or node.writes != (sums,):
        return None
    workload = parse(node.workloads[0])
    fuse = _FUSED.get(workload.operator)
    if fuse is None or getattr(workload, "direction", "fprop") != "fprop":
        return None
    place: Broadcast = "channel" if getattr(workload, "layout", "") == "nchw" else "vector"
    after = epilogue_of(tree, sums, place)
    fused = None if after is None else fuse(workload, after)
    if after is None or fused is None:
        return None
    (result,) = graph.nodes[sink].writes
    added = {"scale": after.scale, "bias": after.bias, "residual": after.residual or after.inner}
    roles = {**node.roles, **{name: value for name, value in added.items() if value}}
    roles[workload.outputs()[0].name] = result
    if {tensor.name for tensor in (*fused.inputs(), *fused.outputs())} != roles.keys():
        return None
    return FusedGroup(
        nodes=tuple(sorted({*before.nodes, *members})),
        kind="epilogue" if len(before.nodes) == 1 else "prologue",
        workloads=(str(fused),),
        roles=roles,
        copied=node.copied,
    )


def _fused_gemm(workload: Any, after: ChainEpilogue) -> Workload | None:
    """Return ``act(ab + bias) + residual``, the residual being what is added last."""
    if after.scale or workload.has_residual or (workload.has_bias and after.bias):
        return None
    if after.inner and (after.activation != "x" or after.residual):
        return None
    bias = "bias" if workload.has_bias or after.bias else ""
    residual = "residual" if after.residual or after.inner else ""
    return _changed(workload, after.activation, bias, residual)


def _fused_conv2d(workload: Any, after: ChainEpilogue) -> Workload | None:
    """Return ``act(sums * scale + bias + residual)``."""
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


_FUSED = {"gemm": _fused_gemm, "conv2d": _fused_conv2d}


def _gated(graph: Graph, sink: int, members: frozenset[int], tree: ChainExpression) -> FusedGroup | None:
    """Return two products of one input with what gates one by the other, or None if it is none."""
    if len(tree.leaves) != 2 or any(leaf.place != "whole" for leaf in tree.leaves.values()):
        return None
    products = {}
    for name, leaf in tree.leaves.items():
        before = graph.writer.get(leaf.value)
        if before is None or not graph.is_inner(leaf.value, members):
            return None
        products[name] = before
    gate, up = _gate_and_up(tree)
    nodes = [graph.nodes[products[name]] for name in (gate, up) if name]
    if len(nodes) < 2 or any(len(node.workloads) != 1 for node in nodes):
        return None
    product: Any = parse(nodes[0].workloads[0])
    alike = nodes[0].workloads == nodes[1].workloads and nodes[0].roles["a"] == nodes[1].roles.get("a")
    if not alike or product.operator != "gemm" or product.epilogue != "none" or product.batch != 1:
        return None
    return _gated_group(graph, sink, members, products[gate], products[up], tree)


def _gate_and_up(tree: ChainExpression) -> tuple[str, str]:
    """Return the names of ``act(gate) * up``; empty if it is something else."""
    root = tree.root
    if isinstance(root, Apply) and root.operation == "mul":
        for first, second in (root.arguments, root.arguments[::-1]):
            if isinstance(second, Name) and isinstance(first, Apply) and first.operation in _GATES:
                (inner,) = first.arguments
                if isinstance(inner, Name) and inner != second:
                    return inner.name, second.name
    return "", ""


_GATES = frozenset(GatedGemm.choices("activation"))


def _gated_group(
    graph: Graph, sink: int, members: frozenset[int], gate: int, up: int, tree: ChainExpression
) -> FusedGroup | None:
    product: Any = parse(graph.nodes[gate].workloads[0])
    root: Any = tree.root
    activation = next(a.operation for a in root.arguments if getattr(a, "operation", "") in _GATES)
    sizes = {name: getattr(product, name) for name in ("m", "n", "k", "dtype", "trans")}
    try:
        workload = GatedGemm.from_dimensions({**sizes, "activation": activation})
    except InputError:
        return None
    first, second = graph.nodes[gate], graph.nodes[up]
    (result,) = graph.nodes[sink].writes
    nodes = {gate, up, *members}
    return (
        FusedGroup(
            nodes=tuple(sorted(nodes)),
            kind="gated",
            workloads=(str(workload),),
            roles={
                "a": first.roles["a"],
                "b_gate": first.roles["b"],
                "b_up": second.roles["b"],
                "c": result,
            },
            copied=first.copied + second.copied,
        )
        if _is_convex(graph, nodes)
        else None
    )


# -- what is before ------------------------------------------------------------------------------------


def _prologues(graph: Graph, index: int, ahead: Sequence[NodeWithPrologue]) -> Iterator[FusedGroup]:
    """Yield products, reductions and normalisations with what is before them."""
    for both in ahead:
        node = both.node
        yield FusedGroup(
            nodes=tuple(sorted(both.nodes)),
            kind="prologue",
            workloads=node.workloads,
            roles=node.roles,
            copied=node.copied,
        )
    workload: Any = parse(graph.nodes[index].workloads[0])
    if workload.operator == "reduction":
        yield from _reductions_of_chains(graph, index, workload)
    else:
        yield from _normalised_sums(graph, index, workload)


def _reductions_of_chains(graph: Graph, index: int, workload: Any) -> Iterator[FusedGroup]:
    """Yield reductions of elementwise chains whose values nobody else reads."""
    node = graph.nodes[index]
    read = node.roles["x0"]
    before = graph.writer.get(read)
    if before is None or not graph.nodes[before].expression or not graph.is_inner(read, (index,)):
        return
    for members in chains(graph, before):
        tree = None if statistics_nodes(graph, members) else chain_expression(graph, before, members)
        given = None if tree is None else _dimensions(graph, tree, read)
        if tree is None or given is None or given.get("vector_dtype", workload.dtype) != workload.dtype:
            continue
        lies_in_lines = given["vectors"] or given["columns"]
        if lies_in_lines and (given["rows"], given["cols"]) != (workload.rows, workload.cols):
            continue
        try:
            fused = workload.changed(**{key: given[key] for key in ("expression", "vectors", "columns")})
        except InputError:
            continue
        leaves = {name: tree.leaves[name].value for name in names(tree.root)}
        yield FusedGroup(
            nodes=tuple(sorted({*members, index})),
            kind="prologue",
            workloads=(str(fused),),
            roles={**leaves, "out": node.roles["out"]},
        )


def _normalised_sums(graph: Graph, index: int, workload: Any) -> Iterator[FusedGroup]:
    """Yield normalisations with the sum before them, which their kernels write as well."""
    node = graph.nodes[index]
    if workload.operator not in ("layernorm", "rmsnorm") or workload.is_backward:
        return
    total = node.roles["x"]
    before = graph.writer.get(total)
    if before is None or not graph.nodes[before].expression:
        return
    for members in chains(graph, before):
        tree = None if statistics_nodes(graph, members) else chain_expression(graph, before, members)
        parts = None if tree is None else _summed(tree, graph.values[total].elements, workload.cols, graph)
        if parts is None or not _is_convex(graph, {*members, index}):
            continue
        prologue = "bias+residual" if "bias" in parts else "residual"
        fused = workload.changed(prologue=prologue)
        yield FusedGroup(
            nodes=tuple(sorted({*members, index})),
            kind="prologue",
            workloads=(str(fused),),
            roles={**node.roles, **parts, "z": total},
        )


def _summed(tree: ChainExpression, elements: int, cols: int, graph: Graph) -> dict[str, str] | None:
    """Return the parts of a sum of two tensors and, maybe, a vector; None if it is something else."""
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
    """Tell whether no path leaves a set of nodes and comes back."""
    reached: set[int] = set()
    for index in range(min(nodes), max(nodes) + 1):
        before = graph.predecessors[index]
        if index in nodes:
            if before & reached:
                return False
        elif before & (nodes | reached):
            reached.add(index)
    return True
