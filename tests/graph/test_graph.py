"""Hand-made graphs: legal groups and their workloads, plans, and graph files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tunebench.graph
from tunebench.device import described, local_cpu
from tunebench.errors import InputError, MissingDependency
from tunebench.graph import (
    FusedGroup,
    Graph,
    Node,
    NodeOperand,
    Value,
    groups,
    load_factory,
    partition_plan,
    plan_partition,
    suite_of,
)
from tunebench.graph.price import Prices
from tunebench.index_map import Guard, IndexMap
from tunebench.workloads import parse

pytest.importorskip("highspy", reason="the extra `torch` is not installed")

GEMM = "gemm:m=64,n=32,k=16,dtype=f32,trans=nt"
NORM = "layernorm:rows=64,cols=32,dtype=f32"


def value(name: str, *shape: int) -> Value:
    return Value(name=name, shape=shape, dtype="f32", inner=shape[-1], is_constant=len(shape) == 1)


def pointwise(name: str, expression: str, **places: str) -> Node:
    """Return an elementwise node; ``x0="h/whole"`` is the value and broadcast of an operand."""
    operands = {key: NodeOperand(*text.split("/")) for key, text in places.items()}  # type: ignore[arg-type]
    reads = tuple(dict.fromkeys(operand.value for operand in operands.values()))
    return Node(
        name=name,
        target=f"aten.{name}",
        reads=reads,
        writes=(name,),
        expression=expression,
        operands=operands,
    )


def computing(name: str, text: str, **roles: str) -> Node:
    workload = parse(text)
    read = [roles[tensor.name] for tensor in workload.inputs()]
    written = [roles.get(tensor.name, "") for tensor in workload.outputs()]
    return Node(
        name=name,
        target=f"aten.{name}",
        reads=tuple(read),
        writes=tuple(filter(None, written)),
        workloads=(text,),
        roles=roles,
    )


def graph(*nodes: Node, outputs: tuple[str, ...], **shapes: tuple[int, ...]) -> Graph:
    names = {name for node in nodes for name in (*node.reads, *node.writes)}
    values = {name: value(name, *shapes.get(name, (64, 32))) for name in names}
    made = Graph(name="Hand", phase="inference", nodes=nodes, values=values, outputs=frozenset(outputs))
    made.check()
    return made


def several(made: Graph) -> dict[tuple[str, ...], str]:
    """Return the workload of every group of several nodes, by the nodes' names."""
    return {
        tuple(made.nodes[index].name for index in group.nodes): group.workloads[0]
        for group in groups(made)
        if len(group.nodes) > 1
    }


def product(name: str = "mm") -> Node:
    return computing(name, GEMM, a="x", b="w", c=name)


SHAPES: Mapping[str, Any] = {"x": (64, 16), "w": (32, 16), "bias": (32,), "gamma": (32,), "beta": (32,)}

EPILOGUES = {
    "bias": ("x0+x1", {"x0": "mm/whole", "x1": "bias/vector"}, "epilogue=bias"),
    "bias+gelu": ("gelu(x1+x0)", {"x0": "mm/whole", "x1": "bias/vector"}, "epilogue=bias+gelu"),
    "residual": ("x1+x0", {"x0": "mm/whole", "x1": "r/whole"}, "epilogue=residual"),
    "bias+relu+residual": (
        "x2+relu(x0+x1)",
        {"x0": "mm/whole", "x1": "bias/vector", "x2": "r/whole"},
        "epilogue=bias+relu+residual",
    ),
    "another activation": (
        "min(max(x0+x1,0),6)",
        {"x0": "mm/whole", "x1": "bias/vector"},
        "epilogue=bias,act=min(max(x,0),6)",
    ),
    "a product of two": ("x0*x1", {"x0": "mm/whole", "x1": "r/whole"}, None),
    "a difference": ("x1-x0", {"x0": "mm/whole", "x1": "r/whole"}, None),
    "relu of a residual": ("relu(x0+x1)", {"x0": "mm/whole", "x1": "r/whole"}, None),
}


@pytest.mark.parametrize("case", EPILOGUES)
def test_chain_after_product_is_its_epilogue_if_it_fits(case: str) -> None:
    expression, operand_texts, epilogue = EPILOGUES[case]
    made = graph(product(), pointwise("after", expression, **operand_texts), outputs=("after",), **SHAPES)
    fused = several(made).get(("mm", "after"))
    assert fused == (None if epilogue is None else f"{GEMM},{epilogue}")


def test_several_nodes_form_one_epilogue() -> None:
    made = graph(
        product(),
        pointwise("add", "x0+x1", x0="mm/whole", x1="bias/vector"),
        pointwise("gelu", "gelu(x0)", x0="add/whole"),
        outputs=("gelu",),
        **SHAPES,
    )
    fused = several(made)
    assert fused["mm", "add", "gelu"] == f"{GEMM},epilogue=bias+gelu"
    assert fused["add", "gelu"] == ("elementwise:rows=64,cols=32,dtype=f32,expression=gelu(x0+x1),vectors=x1")


def test_value_with_other_readers_is_not_fused() -> None:
    nodes = (
        product(),
        pointwise("relu", "relu(x0)", x0="mm/whole"),
        pointwise("e", "exp(x0)", x0="mm/whole"),
    )
    assert several(graph(*nodes, outputs=("relu", "e"), **SHAPES)) == {}
    product_and_sum = (product(), pointwise("add", "x0+x1", x0="mm/whole", x1="r/whole"))
    assert several(graph(*product_and_sum, outputs=("add",), **SHAPES))
    assert several(graph(*product_and_sum, outputs=("add", "mm"), **SHAPES)) == {}


def test_diamond_is_one_expression() -> None:
    made = graph(
        pointwise("s", "sigmoid(x0)", x0="h/whole"),
        pointwise("t", "tanh(x0)", x0="s/whole"),
        pointwise("u", "square(x0)", x0="s/whole"),
        pointwise("v", "x0*x1", x0="t/whole", x1="u/whole"),
        outputs=("v",),
    )
    fused = several(made)
    assert fused["s", "t", "u", "v"].endswith("expression=tanh(sigmoid(x0))*square(sigmoid(x0))")
    assert ("s", "t") not in fused  # u also reads s


def test_vectors_of_different_lengths_are_strided_operands() -> None:
    made = graph(
        pointwise("a", "x0+x1", x0="h/whole", x1="bias/vector"),
        pointwise("b", "x0*x1", x0="a/whole", x1="long/vector"),
        outputs=("b",),
        bias=(32,),
        long=(64,),
    )
    assert several(made) == {
        ("a", "b"): "strided_elementwise:shape=32x2x32,dtype=f32,expression=(x0+x1)*x2,"
        "operands=x0.f32.64_32_1+x1.f32.0_0_1+x2.f32.0_32_1"
    }


def shifted(name: str, source: str) -> Node:
    """Return a node that reads all columns of a tensor but the first; the last one of its result is 0."""
    index = IndexMap((64, 32), (32, 1), 1, (Guard((0, 1), 0, 31),))
    return dataclasses.replace(
        pointwise(name, "2*x0"), reads=(source,), operands={"x0": NodeOperand(source, "strided", index)}
    )


def test_chain_is_fused_into_a_padded_read_if_it_is_0_where_its_operands_are() -> None:
    for expression, fused in (("silu(x0)", "2*silu(x0)"), ("exp(x0)", None)):
        made = graph(pointwise("a", expression, x0="h/whole"), shifted("b", "a"), outputs=("b",))
        operands = "x0.f32.32_1.at1.if0_1_0_31"
        text = f"strided_elementwise:shape=64x32,dtype=f32,expression={fused},operands={operands}"
        assert several(made) == ({("a", "b"): text} if fused else {})


def test_group_does_not_read_a_part_of_a_value_that_it_does_not_write() -> None:
    made = graph(
        product(), pointwise("sum", "x0+x1", x0="mm/whole", x1="row/vector"), outputs=("sum",), **SHAPES
    )
    assert ("mm", "sum") in several(made)
    row = dataclasses.replace(value("row", 32), memory="mm")
    assert several(dataclasses.replace(made, values={**made.values, "row": row})) == {}


def test_strided_operands_are_read_back_from_files(tmp_path: Path) -> None:
    made = graph(shifted("b", "h"), outputs=("b",))
    made.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == made


def test_sum_with_other_readers_is_prologue_of_normalisation() -> None:
    made = graph(
        pointwise("z", "x0+x1", x0="h/whole", x1="r/whole"),
        computing("norm", NORM, x="z", gamma="gamma", beta="beta", y="y"),
        pointwise("next", "x0*x1", x0="y/whole", x1="z/whole"),
        outputs=("next",),
        **SHAPES,
    )
    (group,) = [g for g in groups(made) if g.kind == "prologue"]
    assert group.workloads == (f"{NORM},prologue=residual",)
    assert {group.roles[name] for name in ("x", "residual")} == {"h", "r"}
    assert (group.roles["z"], group.roles["y"]) == ("z", "y")


AHEAD: Mapping[str, tuple[str, dict[str, str], str | None]] = {
    "relu": ("relu(x0)", {"x0": "h/whole"}, "pre=relu(x)"),
    "a folded normalisation": (
        "relu(x0*x1+x2)",
        {"x0": "h/whole", "x1": "g/vector", "x2": "s/vector"},
        "pre=relu(x*scale+shift)",
    ),
    "a shift alone": ("x1-x0", {"x0": "h/whole", "x1": "s/vector"}, "pre=shift-x"),
    "the scale comes last": (
        "tanh((x0-x1)/x2)",
        {"x0": "h/whole", "x1": "s/vector", "x2": "g/vector"},
        "pre=tanh((x-shift)/scale)",
    ),
    "a number per row": ("x0*x1", {"x0": "h/whole", "x1": "rows/row"}, None),
    "a vector of another length": ("x0*x1", {"x0": "h/whole", "x1": "bias/vector"}, None),
    "a second matrix": ("x0*x1", {"x0": "h/whole", "x1": "other/whole"}, None),
    "a possible division by zero": ("1/x0", {"x0": "h/whole"}, None),
}
OPERANDS: Mapping[str, Any] = {
    **SHAPES,
    **dict.fromkeys(("h", "other", "a"), (64, 16)),
    "g": (16,),
    "s": (16,),
    "rows": (64,),
}


def taking(**roles: str) -> Node:
    return computing("mm", GEMM, **{"a": "a", "b": "w", "c": "mm", **roles})


@pytest.mark.parametrize("case", AHEAD)
def test_chain_before_product_is_its_prologue_if_it_fits(case: str) -> None:
    expression, operand_texts, pre = AHEAD[case]
    made = graph(pointwise("a", expression, **operand_texts), taking(), outputs=("mm",), **OPERANDS)
    assert several(made).get(("a", "mm")) == (None if pre is None else f"{GEMM},{pre}")
    for group in groups(made):
        if len(group.nodes) > 1:
            workload = parse(group.workloads[0])
            named = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
            assert named == group.roles.keys()
            vectors = {"pre_scale": "g", "pre_shift": "s"}
            assert all(group.roles[name] == value for name, value in vectors.items() if name in named)
            assert group.roles["a"] == "h"


def test_prologue_vectors_of_transposed_operand_are_rows() -> None:
    node = computing("mm", GEMM.replace("trans=nt", "trans=tt"), a="a", b="w", c="mm")
    shapes = {**OPERANDS, "h": (16, 64), "a": (16, 64)}
    by_row = graph(pointwise("a", "x0*x1", x0="h/whole", x1="g/row"), node, outputs=("mm",), **shapes)
    assert several(by_row)["a", "mm"].endswith("trans=tt,pre=x*scale")
    by_column = graph(
        pointwise("a", "x0*x1", x0="h/whole", x1="rows/vector"), node, outputs=("mm",), **shapes
    )
    assert several(by_column) == {}


def test_product_has_prologue_and_epilogue() -> None:
    made = graph(
        pointwise("n", "x0*x1+x2", x0="h/whole", x1="g/vector", x2="s/vector"),
        pointwise("a", "relu(x0)", x0="n/whole"),
        taking(),
        pointwise("after", "x0+x1", x0="mm/whole", x1="bias/vector"),
        outputs=("after",),
        **OPERANDS,
    )
    fused = several(made)
    assert fused["n", "a", "mm", "after"] == f"{GEMM},epilogue=bias,pre=relu(x*scale+shift)"
    assert fused["a", "mm", "after"] == f"{GEMM},epilogue=bias,pre=relu(x)"
    assert fused["mm", "after"] == f"{GEMM},epilogue=bias"
    kinds = {group.kind for group in groups(made) if len(group.nodes) > 2}
    assert kinds == {"prologue"}


def test_operand_with_other_readers_has_no_prologue() -> None:
    chain_node = pointwise("a", "relu(x0)", x0="h/whole")
    assert several(graph(chain_node, taking(), outputs=("mm",), **OPERANDS))
    assert several(graph(chain_node, taking(), outputs=("mm", "a"), **OPERANDS)) == {}
    square = computing("mm", "gemm:m=64,n=64,k=16,dtype=f32,trans=nt", a="a", b="a", c="mm")
    assert several(graph(chain_node, square, outputs=("mm",), **{**OPERANDS, "mm": (64, 64)})) == {}
    copied = dataclasses.replace(taking(), copied=4096)
    scaled = pointwise("a", "x0*x1", x0="h/whole", x1="g/vector")
    assert several(graph(scaled, copied, outputs=("mm",), **OPERANDS)) == {}
    assert several(graph(chain_node, copied, outputs=("mm",), **OPERANDS))


LAYER = "conv2d:n=2,c=8,h=4,w=4,k=4,r=3,s=3,stride=1,pad=1,dtype=f32"
IMAGES: Mapping[str, Any] = {
    **dict.fromkeys(("h", "a"), (2, 8, 4, 4)),
    **dict.fromkeys(("conv", "after"), (2, 4, 4, 4)),
    **dict.fromkeys(("p", "q"), (2, 4, 4, 4)),
    "w": (4, 8, 3, 3),
    "g": (8,),
    "s": (8,),
    "bias": (4,),
}


@pytest.mark.parametrize(("layout", "place"), [("nhwc", "vector"), ("nchw", "channel")])
def test_convolution_has_prologue_and_epilogue(layout: str, place: str) -> None:
    layer = f"{LAYER},layout={layout}"
    made = graph(
        Node(name="h", target="aten.cat", reads=("p", "q"), writes=("h",), joins=("p", "q")),
        pointwise("a", "relu(x0*x1+x2)", x0="h/whole", x1=f"g/{place}", x2=f"s/{place}"),
        computing("conv", layer, x="a", w="w", y="conv"),
        pointwise("after", "relu(x0+x1)", x0="conv/whole", x1=f"bias/{place}"),
        outputs=("after",),
        **IMAGES,
    )
    fused = several(made)
    assert fused["a", "conv"] == f"{layer},pre=relu(x*scale+shift)"
    assert fused["a", "conv", "after"] == f"{layer},epilogue=bias+relu,pre=relu(x*scale+shift)"
    wrong_broadcast = {"vector": "channel", "channel": "vector"}[place]
    scaled = pointwise("a", "x0*x1", x0="h/whole", x1=f"g/{wrong_broadcast}")
    conv = computing("conv", layer, x="a", w="w", y="conv")
    assert several(graph(scaled, conv, outputs=("conv",), **IMAGES)) == {}
    gradient = computing("conv", f"{layer},direction=dgrad", dy="a", w="w", dx="conv")
    assert (
        several(graph(pointwise("a", "relu(x0)", x0="h/whole"), gradient, outputs=("conv",), **IMAGES)) == {}
    )


SUM = "reduction:rows=64,cols=32,dtype=f32,expression=x0,reduce=sum,axis=rows"


def test_chain_before_reduction_is_fused() -> None:
    nodes = (
        pointwise("a", "square(x0)", x0="h/whole"),
        pointwise("b", "x0*x1", x0="a/whole", x1="bias/vector"),
        computing("total", SUM, x0="b", out="total"),
    )
    made = graph(*nodes, outputs=("total",), total=(32,), **SHAPES)
    fused = several(made)
    assert fused["a", "b", "total"] == SUM.replace("x0", "square(x0)*x1,vectors=x1")
    assert fused["b", "total"] == SUM.replace("x0", "x0*x1,vectors=x1")
    with_output = graph(*nodes, outputs=("total", "b"), total=(32,), **SHAPES)
    assert [names for names in several(with_output) if "total" in names] == []


def test_value_per_row_is_a_column_operand() -> None:
    made = graph(
        pointwise("a", "x0-x1", x0="h/whole", x1="mean/row"),
        pointwise("b", "x0*x1", x0="a/whole", x1="bias/vector"),
        outputs=("b",),
        mean=(64,),
        bias=(32,),
    )
    assert several(made)["a", "b"] == (
        "elementwise:rows=64,cols=32,dtype=f32,expression=(x0-x1)*x2,vectors=x2,columns=x1"
    )


def test_group_that_is_not_convex_is_not_legal() -> None:
    made = graph(
        pointwise("z", "x0+x1", x0="h/whole", x1="r/whole"),
        Node(name="t", target="aten.sum", reads=("z",), writes=("gamma",)),
        computing("norm", NORM, x="z", gamma="gamma", beta="beta", y="y"),
        outputs=("y",),
        **SHAPES,
    )
    assert several(made) == {}


# -- plans -------------------------------------------------------------------------------------------------


def chain() -> Graph:
    return graph(
        product(),
        pointwise("add", "x0+x1", x0="mm/whole", x1="bias/vector"),
        pointwise("gelu", "gelu(x0)", x0="add/whole"),
        Node(
            name="sort",
            target="aten.sort",
            reads=("gelu",),
            writes=("sorted",),
            reason="no operator of tunebench",
        ),
        outputs=("sorted",),
        **SHAPES,
    )


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80-sxm"])
def test_plan_is_cheapest_and_reports_savings(name: str) -> None:
    partition_plan = plan_partition(chain(), described()[name])
    assert [len(offer.group.nodes) for offer in partition_plan.chosen] == [3, 1]
    (fused,) = partition_plan.fused
    assert fused.group.workloads == (f"{GEMM},epilogue=bias+gelu",)
    assert partition_plan.partition.exact
    assert partition_plan.us == pytest.approx(partition_plan.partition.cost_us)
    assert partition_plan.alone_us - partition_plan.us == pytest.approx(fused.saved_us)
    assert fused.saved_us > 0
    assert fused.saved_bytes == 4 * 64 * 32 * 4  # both internal tensors are neither written nor read
    assert 0 < partition_plan.coverage < 1
    assert partition_plan.workloads == {f"{GEMM},epilogue=bias+gelu": 1}
    assert json.loads(json.dumps(partition_plan.to_json()))["groups"][0]["nodes"] == ["mm", "add", "gelu"]


def test_chain_between_products_becomes_epilogue() -> None:
    made = graph(
        computing("first", GEMM.replace("n=32", "n=16"), a="x", b="v", c="first"),
        pointwise("relu", "relu(x0)", x0="first/whole"),
        computing("mm", GEMM, a="relu", b="w", c="mm"),
        outputs=("mm",),
        **{**SHAPES, "v": (16, 16), "first": (64, 16), "relu": (64, 16)},
    )
    assert {("first", "relu"), ("relu", "mm")} <= several(made).keys()
    (fused,) = plan_partition(made, described()["h100-sxm"]).fused
    assert [made.nodes[index].name for index in fused.group.nodes] == ["first", "relu"]


def test_preferring_torch_groups_nothing() -> None:
    partition_plan = plan_partition(chain(), described()["h100-sxm"], preferred="torch")
    assert {offer.price.by for offer in partition_plan.chosen} == {"torch"}
    assert len(partition_plan.chosen) == 4


def test_plan_says_that_it_rests_on_predictions_and_how_far_they_are_off() -> None:
    planned = plan_partition(chain(), described()["h100-sxm"])
    low_us, high_us = planned.interval_us or (0, 0)
    assert low_us < planned.us < high_us
    assert planned.proof == "proven optimal under the forecast"
    assert "under the forecast" in repr(planned)


def test_predictions_on_a_processor_have_no_interval() -> None:
    planned = plan_partition(chain(), local_cpu())
    assert planned.interval_us is None
    assert planned.to_json()["interval_us"] is None
    assert {price.interval_us for price in (offer.price for offer in planned.chosen)} == {None}


def test_groups_within_the_error_of_the_forecast_are_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    within = {}
    for error in (1.0, 100.0):
        monkeypatch.setattr(partition_plan, "FORECAST_ERROR", error)
        planned = plan_partition(chain(), described()["h100-sxm"])
        within[error] = {offer.group.nodes for offer in planned.alternatives}
        assert not within[error] & {offer.group.nodes for offer in planned.chosen}
        assert not planned.alternative_workloads.keys() & planned.workloads.keys()
    assert within[1.0] < within[100.0]
    others = tomllib.loads(suite_of([planned], alternatives=True))["layer"]
    assert {layer["workload"] for layer in others.values()} == set(planned.alternative_workloads)


def test_suite_has_each_workload_once_with_its_count() -> None:
    import tomllib

    once, twice = (
        plan_partition(chain(), described()["h100-sxm"]),
        plan_partition(chain(), described()["h100-sxm"]),
    )
    layers = tomllib.loads(suite_of([once, twice]))["layer"]
    assert layers == {"gemm_1": {"workload": f"{GEMM},epilogue=bias+gelu", "count": 2, "scales": "m"}}


# -- files -------------------------------------------------------------------------------------------------


def test_graph_file_round_trip(tmp_path: Path) -> None:
    chain().save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == chain()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("nodes"),
        lambda data: data.update(format=99),
        lambda data: data["values"].pop(),
        lambda data: data["nodes"].reverse(),
        lambda data: data["nodes"][0].update(more=1),
        lambda data: data["nodes"].append("what"),
    ],
)
def test_damaged_graph_file_is_refused(damage: Any, tmp_path: Path) -> None:
    data = chain().to_json()
    data = json.loads(json.dumps(data))
    damage(data)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"graph\.json is not a graph"):
        Graph.load(file)


def test_unreadable_graph_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        Graph.load(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(InputError, match="is not valid JSON"):
        Graph.load(tmp_path / "text.json")


def test_single_node_groups_come_first_in_order() -> None:
    all_groups: tuple[FusedGroup, ...] = groups(chain())
    assert [group.nodes for group in all_groups[:4]] == [(0,), (1,), (2,), (3,)]
    assert all_groups[3] == FusedGroup(nodes=(3,), kind="torch")
    assert dataclasses.replace(all_groups[0], roles={}).workloads == (GEMM,)


def gated(up: str) -> Graph:
    first = computing("gate", GEMM, a="x", b="w", c="gate")
    second = computing("up", GEMM, a=up, b="v", c="up")
    after = pointwise("after", "x0*silu(x1)", x0="up/whole", x1="gate/whole")
    return graph(first, second, after, outputs=("after",), v=(32, 16), other=(64, 16), **SHAPES)


def test_gated_convolutions_are_not_fused() -> None:
    products = (computing(name, f"{LAYER},layout=nchw", x="a", w="w", y=name) for name in ("conv", "p"))
    after = pointwise("after", "x0*silu(x1)", x0="conv/whole", x1="p/whole")
    assert several(graph(*products, after, outputs=("after",), **IMAGES)) == {}


def test_products_of_one_input_form_gated_gemm() -> None:
    (group,) = [g for g in groups(gated("x")) if g.kind == "gated"]
    assert group.workloads == ("gated_gemm:m=64,n=32,k=16,dtype=f32,trans=nt",)
    assert group.roles == {"a": "x", "b_gate": "w", "b_up": "v", "c": "after"}
    assert not [g for g in groups(gated("other")) if g.kind == "gated"]


def test_measured_group_time_is_divided_and_beats_predictions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fused product was measured: 50 us by a tuned kernel, five times as long by torch."""
    monkeypatch.setattr(
        "tunebench.graph.price.recorded", times := FakeTimes({f"{GEMM},epilogue=bias+gelu": 50.0})
    )
    partition_plan = plan_partition(chain(), device := described()["h100-sxm"], measured_only=True)
    assert times.asked
    assert sum(price.us for price in partition_plan.torch_prices[:3]) == pytest.approx(250.0)
    assert {price.how for price in partition_plan.torch_prices[:3]} == {"measured"}
    assert [offer.price.us for offer in partition_plan.fused] == [50.0]
    assert {price.by for price in partition_plan.fused[0].alone} == {"torch"}
    believed = plan_partition(chain(), device)  # groups without measurements are still offered for tuning
    assert {price.by for offer in believed.fused for price in offer.alone} == {"torch"}
    monkeypatch.setattr(
        "tunebench.graph.price.recorded", FakeTimes({f"{GEMM},epilogue=bias+gelu": 50.0}, 0.5)
    )
    slower = plan_partition(chain(), device, measured_only=True)
    assert slower.fused == ()
    assert {offer.price.by for offer in slower.chosen} == {"torch"}


def test_plan_by_measured_kernels_alone_predicts_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebench.graph.price.recorded", FakeTimes({f"{GEMM},epilogue=bias+gelu": 50.0}))
    monkeypatch.setattr("tunebench.graph.price.Forecaster.best", None)
    partition_plan = plan_partition(chain(), described()["h100-sxm"], measured_only=True)
    assert [offer.price.us for offer in partition_plan.fused] == [50.0]


class FakeTimes:
    """Fake measured times: of tuned kernels, and torch's as a multiple of those."""

    def __init__(self, times: Mapping[str, float], ratio: float = 5.0) -> None:
        self.times, self.ratio, self.asked = times, ratio, 0

    def __call__(self, text: str, *, device: Any, reproducible: bool) -> Any:
        self.asked += 1
        if text not in self.times:
            return None
        versus = SimpleNamespace(ratio=self.ratio)
        return SimpleNamespace(
            how="measured here",
            variant="gemm/cuda_mma",
            expected_us=self.times[text],
            baselines={"torch": versus},
        )


def test_missing_torch_is_reported_before_the_model_file_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="torch"):
        load_factory(f"{file}:make")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Candidate", "PartitionCandidate"),
        ("Group", "FusedGroup"),
        ("Offer", "PricedGroup"),
        ("Operand", "NodeOperand"),
        ("Plan", "PartitionPlan"),
    ],
)
def test_deprecated_names_warn(old: str, new: str) -> None:
    with pytest.warns(FutureWarning, match=f"use tunebench.graph.{new}"):
        assert getattr(tunebench.graph, old) is getattr(tunebench.graph, new)


def test_deprecated_attributes_of_plans_warn() -> None:
    partition_plan = plan_partition(chain(), described()["h100-sxm"])
    for old, new in (("problems", "workloads"), ("library_us", "torch_us"), ("library", "torch_prices")):
        with pytest.warns(FutureWarning, match=f"PartitionPlan.{new}"):
            assert getattr(partition_plan, old) == getattr(partition_plan, new)


def test_plan_prices_each_workload_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four equal layers have the groups of one, and groups of several nodes need no price by torch."""
    asked: list[str] = []
    predicted = Prices._predict_tuned

    def count(self: Prices, text: str) -> Any:
        asked.append(text)
        return predicted(self, text)

    monkeypatch.setattr(Prices, "_predict_tuned", count)
    layers = [
        node
        for layer in range(4)
        for node in (
            computing(f"c{layer}", GEMM, a="x", b="w", c=f"c{layer}"),
            pointwise(f"r{layer}", "relu(x0)", x0=f"c{layer}/whole"),
        )
    ]
    shapes = {**SHAPES, **{f"{kind}{layer}": (64, 32) for kind in "cr" for layer in range(4)}}
    partition_plan = plan_partition(
        graph(*layers, outputs=tuple(f"r{layer}" for layer in range(4)), **shapes), described()["h100-sxm"]
    )
    assert len(partition_plan.fused) == 4
    assert len(asked) == len(set(asked)) == 3


def test_copies_of_more_elements_than_a_dimension_has_are_priced() -> None:
    prices = Prices(graph(computing("c", GEMM, a="x", b="w", c="c"), outputs=("c",)), described()["h100-sxm"])
    odd_bytes = 8 * 3_313_197_057
    assert prices.copy_us(odd_bytes) == pytest.approx(prices.copy_us(odd_bytes - 8), rel=0.02)
