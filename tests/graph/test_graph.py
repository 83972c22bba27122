"""Graphs made by hand: which groups are legal, what they compute, which are chosen, and their files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunebench.device import described
from tunebench.errors import InputError, MissingDependency
from tunebench.graph import FusedGroup, Graph, Node, NodeOperand, Value, groups, load_factory, plan, suite_of
from tunebench.workloads import parse

GEMM = "gemm:m=64,n=32,k=16,dtype=f32,trans=nt"
NORM = "layernorm:rows=64,cols=32,dtype=f32"


def value(name: str, *shape: int) -> Value:
    return Value(name=name, shape=shape, dtype="f32", inner=shape[-1], is_constant=len(shape) == 1)


def pointwise(name: str, expression: str, **places: str) -> Node:
    """An elementwise node: ``x0="h/whole"`` says which value an operand is, and how it lies."""
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
def test_what_follows_a_product_is_its_epilogue_or_none(case: str) -> None:
    expression, places, epilogue = EPILOGUES[case]
    made = graph(product(), pointwise("after", expression, **places), outputs=("after",), **SHAPES)
    found = several(made).get(("mm", "after"))
    assert found == (None if epilogue is None else f"{GEMM},{epilogue}")


def test_nodes_one_after_the_other_are_one_epilogue() -> None:
    made = graph(
        product(),
        pointwise("add", "x0+x1", x0="mm/whole", x1="bias/vector"),
        pointwise("gelu", "gelu(x0)", x0="add/whole"),
        outputs=("gelu",),
        **SHAPES,
    )
    found = several(made)
    assert found["mm", "add", "gelu"] == f"{GEMM},epilogue=bias+gelu"
    assert found["add", "gelu"] == ("elementwise:rows=64,cols=32,dtype=f32,expression=gelu(x0+x1),vectors=x1")


def test_what_is_read_elsewhere_is_not_fused_away() -> None:
    nodes = (
        product(),
        pointwise("relu", "relu(x0)", x0="mm/whole"),
        pointwise("e", "exp(x0)", x0="mm/whole"),
    )
    assert several(graph(*nodes, outputs=("relu", "e"), **SHAPES)) == {}
    kept = (product(), pointwise("add", "x0+x1", x0="mm/whole", x1="r/whole"))
    assert several(graph(*kept, outputs=("add",), **SHAPES))
    assert several(graph(*kept, outputs=("add", "mm"), **SHAPES)) == {}


def test_a_diamond_is_one_expression() -> None:
    made = graph(
        pointwise("s", "sigmoid(x0)", x0="h/whole"),
        pointwise("t", "tanh(x0)", x0="s/whole"),
        pointwise("u", "square(x0)", x0="s/whole"),
        pointwise("v", "x0*x1", x0="t/whole", x1="u/whole"),
        outputs=("v",),
    )
    found = several(made)
    assert found["s", "t", "u", "v"].endswith("expression=tanh(sigmoid(x0))*square(sigmoid(x0))")
    assert ("s", "t") not in found  # s is read by u as well


def test_vectors_of_different_lengths_walk_different_lines() -> None:
    made = graph(
        pointwise("a", "x0+x1", x0="h/whole", x1="bias/vector"),
        pointwise("b", "x0*x1", x0="a/whole", x1="long/vector"),
        outputs=("b",),
        bias=(32,),
        long=(64,),
    )
    assert several(made) == {}


def test_a_sum_before_a_normalisation_is_its_prologue_though_others_read_it() -> None:
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
    "a number for each row": ("x0*x1", {"x0": "h/whole", "x1": "rows/row"}, None),
    "numbers of another length": ("x0*x1", {"x0": "h/whole", "x1": "bias/vector"}, None),
    "a second matrix": ("x0*x1", {"x0": "h/whole", "x1": "other/whole"}, None),
    "what may divide by zero": ("1/x0", {"x0": "h/whole"}, None),
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
def test_what_gives_the_left_operand_is_a_function_ahead_or_none(case: str) -> None:
    expression, places, pre = AHEAD[case]
    made = graph(pointwise("a", expression, **places), taking(), outputs=("mm",), **OPERANDS)
    assert several(made).get(("a", "mm")) == (None if pre is None else f"{GEMM},{pre}")
    for group in groups(made):
        if len(group.nodes) > 1:
            workload = parse(group.workloads[0])
            named = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
            assert named == group.roles.keys()
            vectors = {"pre_scale": "g", "pre_shift": "s"}
            assert all(group.roles[name] == value for name, value in vectors.items() if name in named)
            assert group.roles["a"] == "h"


def test_a_transposed_operand_has_numbers_by_rows() -> None:
    node = computing("mm", GEMM.replace("trans=nt", "trans=tt"), a="a", b="w", c="mm")
    shapes = {**OPERANDS, "h": (16, 64), "a": (16, 64)}
    by_row = graph(pointwise("a", "x0*x1", x0="h/whole", x1="g/row"), node, outputs=("mm",), **shapes)
    assert several(by_row)["a", "mm"].endswith("trans=tt,pre=x*scale")
    by_column = graph(
        pointwise("a", "x0*x1", x0="h/whole", x1="rows/vector"), node, outputs=("mm",), **shapes
    )
    assert several(by_column) == {}


def test_a_product_may_have_both_a_function_ahead_and_an_epilogue() -> None:
    made = graph(
        pointwise("n", "x0*x1+x2", x0="h/whole", x1="g/vector", x2="s/vector"),
        pointwise("a", "relu(x0)", x0="n/whole"),
        taking(),
        pointwise("after", "x0+x1", x0="mm/whole", x1="bias/vector"),
        outputs=("after",),
        **OPERANDS,
    )
    found = several(made)
    assert found["n", "a", "mm", "after"] == f"{GEMM},epilogue=bias,pre=relu(x*scale+shift)"
    assert found["a", "mm", "after"] == f"{GEMM},epilogue=bias,pre=relu(x)"
    assert found["mm", "after"] == f"{GEMM},epilogue=bias"
    kinds = {group.kind for group in groups(made) if len(group.nodes) > 2}
    assert kinds == {"prologue"}


def test_an_operand_that_others_read_is_written_and_not_computed_again() -> None:
    ahead = pointwise("a", "relu(x0)", x0="h/whole")
    assert several(graph(ahead, taking(), outputs=("mm",), **OPERANDS))
    assert several(graph(ahead, taking(), outputs=("mm", "a"), **OPERANDS)) == {}
    square = computing("mm", "gemm:m=64,n=64,k=16,dtype=f32,trans=nt", a="a", b="a", c="mm")
    assert several(graph(ahead, square, outputs=("mm",), **{**OPERANDS, "mm": (64, 64)})) == {}
    copied = dataclasses.replace(taking(), copied=4096)
    scaled = pointwise("a", "x0*x1", x0="h/whole", x1="g/vector")
    assert several(graph(scaled, copied, outputs=("mm",), **OPERANDS)) == {}
    assert several(graph(ahead, copied, outputs=("mm",), **OPERANDS))


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
def test_a_convolution_may_have_both_as_well(layout: str, place: str) -> None:
    layer = f"{LAYER},layout={layout}"
    made = graph(
        Node(name="h", target="aten.cat", reads=("p", "q"), writes=("h",), joins=("p", "q")),
        pointwise("a", "relu(x0*x1+x2)", x0="h/whole", x1=f"g/{place}", x2=f"s/{place}"),
        computing("conv", layer, x="a", w="w", y="conv"),
        pointwise("after", "relu(x0+x1)", x0="conv/whole", x1=f"bias/{place}"),
        outputs=("after",),
        **IMAGES,
    )
    found = several(made)
    assert found["a", "conv"] == f"{layer},pre=relu(x*scale+shift)"
    assert found["a", "conv", "after"] == f"{layer},epilogue=bias+relu,pre=relu(x*scale+shift)"
    other = {"vector": "channel", "channel": "vector"}[place]
    scaled = pointwise("a", "x0*x1", x0="h/whole", x1=f"g/{other}")
    conv = computing("conv", layer, x="a", w="w", y="conv")
    assert several(graph(scaled, conv, outputs=("conv",), **IMAGES)) == {}
    gradient = computing("conv", f"{layer},direction=dgrad", dy="a", w="w", dx="conv")
    assert (
        several(graph(pointwise("a", "relu(x0)", x0="h/whole"), gradient, outputs=("conv",), **IMAGES)) == {}
    )


SUM = "reduction:rows=64,cols=32,dtype=f32,expression=x0,reduce=sum,axis=rows"


def test_a_chain_before_a_reduction_is_reduced_by_the_way() -> None:
    nodes = (
        pointwise("a", "square(x0)", x0="h/whole"),
        pointwise("b", "x0*x1", x0="a/whole", x1="bias/vector"),
        computing("total", SUM, x0="b", out="total"),
    )
    made = graph(*nodes, outputs=("total",), total=(32,), **SHAPES)
    found = several(made)
    assert found["a", "b", "total"] == SUM.replace("x0", "square(x0)*x1,vectors=x1")
    assert found["b", "total"] == SUM.replace("x0", "x0*x1,vectors=x1")
    kept = graph(*nodes, outputs=("total", "b"), total=(32,), **SHAPES)
    assert [names for names in several(kept) if "total" in names] == []


def test_what_is_the_same_for_a_row_is_a_column() -> None:
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


def test_a_group_that_would_wait_for_itself_is_none() -> None:
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
            name="sort", target="aten.sort", reads=("gelu",), writes=("sorted",), reason="no operator of ours"
        ),
        outputs=("sorted",),
        **SHAPES,
    )


@pytest.mark.parametrize("name", ["h100-sxm", "a100-80-sxm"])
def test_the_plan_is_the_cheapest_and_tells_what_it_saves(name: str) -> None:
    found = plan(chain(), described()[name])
    assert [len(offer.group.nodes) for offer in found.chosen] == [3, 1]
    (fused,) = found.fused
    assert fused.group.workloads == (f"{GEMM},epilogue=bias+gelu",)
    assert found.partition.exact
    assert found.us == pytest.approx(found.partition.cost_us)
    assert found.alone_us - found.us == pytest.approx(fused.saved_us)
    assert fused.saved_us > 0
    assert fused.saved_bytes == 4 * 64 * 32 * 4  # both inner tensors are written and read no more
    assert 0 < found.coverage < 1
    assert found.problems == {f"{GEMM},epilogue=bias+gelu": 1}
    assert json.loads(json.dumps(found.to_json()))["groups"][0]["nodes"] == ["mm", "add", "gelu"]


def test_what_may_be_behind_one_product_or_ahead_of_the_next_is_behind() -> None:
    made = graph(
        computing("first", GEMM.replace("n=32", "n=16"), a="x", b="v", c="first"),
        pointwise("relu", "relu(x0)", x0="first/whole"),
        computing("mm", GEMM, a="relu", b="w", c="mm"),
        outputs=("mm",),
        **{**SHAPES, "v": (16, 16), "first": (64, 16), "relu": (64, 16)},
    )
    assert {("first", "relu"), ("relu", "mm")} <= several(made).keys()
    (fused,) = plan(made, described()["h100-sxm"]).fused
    assert [made.nodes[index].name for index in fused.group.nodes] == ["first", "relu"]


def test_with_torch_preferred_nothing_is_grouped() -> None:
    found = plan(chain(), described()["h100-sxm"], preferred="torch")
    assert {offer.price.by for offer in found.chosen} == {"torch"}
    assert len(found.chosen) == 4


def test_the_suite_has_each_problem_once_with_its_count() -> None:
    import tomllib

    once, twice = plan(chain(), described()["h100-sxm"]), plan(chain(), described()["h100-sxm"])
    layers = tomllib.loads(suite_of([once, twice]))["layer"]
    assert layers == {"gemm_1": {"workload": f"{GEMM},epilogue=bias+gelu", "count": 2, "scales": "m"}}


# -- files -------------------------------------------------------------------------------------------------


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
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
def test_what_is_no_graph_is_refused(damage: Any, tmp_path: Path) -> None:
    data = chain().to_json()
    data = json.loads(json.dumps(data))
    damage(data)
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"graph\.json is no graph"):
        Graph.load(file)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        Graph.load(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(InputError, match="is no graph"):
        Graph.load(tmp_path / "text.json")


def test_groups_of_one_come_first_and_in_order() -> None:
    found: tuple[FusedGroup, ...] = groups(chain())
    assert [group.nodes for group in found[:4]] == [(0,), (1,), (2,), (3,)]
    assert found[3] == FusedGroup(nodes=(3,), kind="torch")
    assert dataclasses.replace(found[0], roles={}).workloads == (GEMM,)


def gated(up: str) -> Graph:
    first = computing("gate", GEMM, a="x", b="w", c="gate")
    second = computing("up", GEMM, a=up, b="v", c="up")
    after = pointwise("after", "x0*silu(x1)", x0="up/whole", x1="gate/whole")
    return graph(first, second, after, outputs=("after",), v=(32, 16), other=(64, 16), **SHAPES)


def test_products_of_one_input_gate_each_other() -> None:
    (group,) = [g for g in groups(gated("x")) if g.kind == "gated"]
    assert group.workloads == ("gated_gemm:m=64,n=32,k=16,dtype=f32,trans=nt",)
    assert group.roles == {"a": "x", "b_gate": "w", "b_up": "v", "c": "after"}
    assert not [g for g in groups(gated("other")) if g.kind == "gated"]


def test_what_torch_took_for_a_group_is_shared_out_and_beliefs_do_not_beat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Known of the fused product: ours takes 50 us, and torch five times as long."""
    monkeypatch.setattr(
        "tunebench.graph.price.timed", known := FakeTimes({f"{GEMM},epilogue=bias+gelu": 50.0})
    )
    found = plan(chain(), device := described()["h100-sxm"], measured_only=True)
    assert known.asked
    assert sum(price.us for price in found.library[:3]) == pytest.approx(250.0)
    assert {price.how for price in found.library[:3]} == {"measured"}
    assert [offer.price.us for offer in found.fused] == [50.0]
    assert {price.by for price in found.fused[0].alone} == {"torch"}
    believed = plan(chain(), device)  # groups that may be worth tuning are offered all the same
    assert {price.by for offer in believed.fused for price in offer.alone} == {"torch"}
    monkeypatch.setattr("tunebench.graph.price.timed", FakeTimes({f"{GEMM},epilogue=bias+gelu": 50.0}, 0.5))
    slower = plan(chain(), device, measured_only=True)
    assert slower.fused == ()
    assert {offer.price.by for offer in slower.chosen} == {"torch"}


class FakeTimes:
    """Stands in for what the database knows: times of ours, and torch's as so many times those."""

    def __init__(self, times: Mapping[str, float], ratio: float = 5.0) -> None:
        self.times, self.ratio, self.asked = times, ratio, 0

    def __call__(self, text: str, *, device: Any) -> Any:
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


def test_without_torch_it_is_said_before_the_models_file_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit('it was run')")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="torch"):
        load_factory(f"{file}:make")
