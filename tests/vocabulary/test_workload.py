"""Workload grammar, tested with operators that have every kind of dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench import workloads
from tunebench.errors import InputError, UnknownName
from tunebench.workload import (
    MAX_SIZE,
    AllowedChanges,
    Count,
    Name,
    Reference,
    Size,
    Tensor,
    Tolerance,
    Traffic,
    Workload,
    defaults_to,
)


@dataclass(frozen=True, kw_only=True)
class ExpressionWorkload(Workload):
    """An elementwise chain, known by a registered name."""

    operator: ClassVar[str] = "chain"

    expr: Name
    rows: Size
    cols: Size
    dtype: Literal["f32", "tf32", "f16", "bf16"]
    out: Literal["f32", "f16", "bf16"] = defaults_to("dtype")

    def default_of(self, dimension: str, followed: Any) -> Any:
        return "f32" if followed == "tf32" else followed

    def inputs(self) -> tuple[Tensor, ...]:
        return (
            Tensor(name="x", shape=(self.rows, self.cols), dtype="f16"),
            Tensor(name="alpha", shape=(), dtype="f32"),
        )

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="y", shape=(self.rows, self.cols), dtype=self.out),)

    def flops(self) -> int:
        return self.rows * self.cols

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        y = inputs["x"] * inputs["alpha"]
        return {"y": Reference(value=y, scale=np.abs(y))}

    def tolerance(self) -> Tolerance:
        return Tolerance(eps_out=2**-11, eps_acc=2**-24, reason="one product")


@dataclass(frozen=True, kw_only=True)
class Attend(ExpressionWorkload):
    """Grouped-query attention: a flag without a default, and a count that follows another."""

    operator: ClassVar[str] = "attend"
    aliases: ClassVar[Mapping[str, str]] = {"num_heads": "heads"}

    heads: Size
    causal: bool
    window: Count = 0
    bias: bool = False
    kv_heads: Size = defaults_to("heads")

    def default_of(self, dimension: str, followed: Any) -> Any:
        return followed if dimension == "kv_heads" else super().default_of(dimension, followed)

    def check(self) -> None:
        if self.heads % self.kv_heads:
            raise InputError(f"attend: kv_heads={self.kv_heads} must divide heads={self.heads}")


CHAIN = "expr=bias+relu,rows=8,cols=4,dtype=f16"
ATTEND = f"{CHAIN},heads=8,causal=true"


def test_workload_text_round_trips() -> None:
    chain = ExpressionWorkload.parse_dimensions(CHAIN)
    assert chain == ExpressionWorkload(expr="bias+relu", rows=8, cols=4, dtype="f16")
    assert str(chain) == f"chain:{CHAIN}"


def test_dimensions_are_written_in_declared_order() -> None:
    shuffled = ",".join(reversed(CHAIN.split(",")))
    assert str(ExpressionWorkload.parse_dimensions(shuffled)) == f"chain:{CHAIN}"


def test_dimension_aliases_are_read_but_never_written() -> None:
    attend = Attend.parse_dimensions(f"{CHAIN},num_heads=8,causal=true")
    assert str(attend) == f"attend:{ATTEND}"
    dimensions = {name: getattr(attend, name) for name in Attend.dimensions() if name != "heads"}
    assert Attend.from_dimensions({**dimensions, "num_heads": 8}) == attend
    assert attend.changed(num_heads=4) == attend.changed(heads=4)
    with pytest.raises(InputError, match="dimension 'heads' is given twice"):
        Attend.parse_dimensions(f"{ATTEND},num_heads=8")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("elementwise:expr=relu(x),rows=8,cols=4,dtype=f32", "expression=relu(x)"),
        ("reduction:expr=x*x,reduce=sum,axis=cols,rows=8,cols=4,dtype=f32", "expression=x*x"),
        ("conv2d:batch=1,c=4,h=8,w=8,k=4,r=3,s=3,stride=1,padding=1,dtype=f32,layout=nhwc", "n=1,"),
    ],
)
def test_common_names_are_dimension_aliases(text: str, canonical: str) -> None:
    assert canonical in str(workloads.parse(text))
    assert workloads.parse(str(workloads.parse(text))) == workloads.parse(text)


def test_leeway_is_still_read_as_allowed_changes() -> None:
    from tunebench import workload as module

    with pytest.warns(FutureWarning, match="workload.Leeway is deprecated.*AllowedChanges"):
        leeway = module.Leeway(items=("rows",))
    with pytest.warns(FutureWarning, match=r"Old.leeway is deprecated.*use allowed_changes") as caught:

        class Old(ExpressionWorkload):
            leeway: ClassVar[Any] = AllowedChanges(items=("rows",))

    assert caught[0].filename == __file__
    assert Old.allowed_changes == leeway


def test_flag_has_one_written_form() -> None:
    for typed, written in (("1", "true"), ("True", "true"), ("0", "false"), ("false", "false")):
        attend = Attend.parse_dimensions(f"{CHAIN},heads=8,causal={typed}")
        assert str(attend) == f"attend:{CHAIN},heads=8,causal={written}"


@pytest.mark.parametrize(
    "default", ["out=f16", "kv_heads=8", "window=0", "bias=false", "bias=0,window=0,kv_heads=8,out=f16"]
)
def test_default_is_not_written(default: str) -> None:
    assert str(Attend.parse_dimensions(f"{ATTEND},{default}")) == f"attend:{ATTEND}"


@pytest.mark.parametrize("given", ["window=128", "bias=true", "kv_heads=2"])
def test_other_values_than_default_are_written(given: str) -> None:
    assert str(Attend.parse_dimensions(f"{given},{ATTEND}")) == f"attend:{ATTEND},{given}"


def test_default_that_follows_another_dimension_may_be_mapped() -> None:
    followed = ExpressionWorkload(expr="x", rows=1, cols=1, dtype="tf32")
    assert (followed.out, str(followed)) == ("f32", "chain:expr=x,rows=1,cols=1,dtype=tf32")
    assert str(ExpressionWorkload(expr="x", rows=1, cols=1, dtype="tf32", out="f16")).endswith(
        "dtype=tf32,out=f16"
    )


names = st.from_regex(r"[A-Za-z0-9_.+-]{1,12}", fullmatch=True)
sizes = st.integers(1, MAX_SIZE)
attends = st.builds(
    Attend,
    expr=names,
    rows=sizes,
    cols=sizes,
    dtype=st.sampled_from(["f32", "tf32", "f16", "bf16"]),
    out=st.sampled_from([None, "f32", "f16", "bf16"]),
    heads=st.just(12),
    causal=st.booleans(),
    window=st.integers(0, MAX_SIZE),
    bias=st.booleans(),
    kv_heads=st.sampled_from([None, 1, 2, 3, 4, 6, 12]),
)


@given(attends, st.randoms(use_true_random=False))
def test_every_workload_round_trips(attend: Attend, random: Any) -> None:
    items = str(attend).removeprefix("attend:").split(",")
    random.shuffle(items)
    parsed = Attend.parse_dimensions(",".join(items))
    assert parsed == attend
    assert str(parsed) == str(attend)
    assert hash(parsed) == hash(attend)


@given(attends)
def test_values_and_text_build_equal_workloads(attend: Attend) -> None:
    assert Attend.from_dimensions({name: getattr(attend, name) for name in Attend.dimensions()}) == attend


@given(attends)
def test_text_needs_no_quoting_in_a_shell(attend: Attend) -> None:
    assert not set(str(attend)) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-:=,")


@given(st.text(alphabet="exprowscldty=,-+ 0189\n", max_size=40))
def test_any_text_is_parsed_or_raises_input_error(text: str) -> None:
    try:
        chain = ExpressionWorkload.parse_dimensions(text)
    except InputError:
        return
    assert ExpressionWorkload.parse_dimensions(str(chain).removeprefix("chain:")) == chain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{CHAIN},row=1", "unknown dimension of chain 'row'. Did you mean 'rows'? Known: cols, dtype"),
        (CHAIN.replace("f16", "fp16"), "unknown value of chain dimension dtype 'fp16'. Did you mean"),
        (CHAIN.replace("rows=8,", ""), "chain: missing rows; usage: chain:expr=NAME,rows=N,cols=N,dtype="),
        ("", "chain: missing expr, rows, cols, dtype"),
        (f"{CHAIN},rows=8", "dimension 'rows' is given twice"),
        (f"{CHAIN},out", "expected dimension=value, got 'out'"),
        (f"{CHAIN},out=", "expected dimension=value, got 'out='"),
        (CHAIN.replace("rows=8", "rows=0"), "rows=0 must be a whole number from 1"),
        (CHAIN.replace("rows=8", "rows=-8"), "rows=-8 must be a whole number from 1"),
        (CHAIN.replace("rows=8", f"rows={MAX_SIZE + 1}"), "must be a whole number from 1"),
        (CHAIN.replace("rows=8", "rows=" + "9" * 5000), "must be a whole number up to"),
        (CHAIN.replace("rows=8", "rows=8.0"), "must be a whole number"),
        (CHAIN.replace("rows=8", "rows=²"), "must be a whole number"),
        (CHAIN.replace("bias+relu", "a b"), "must be a name of letters, digits"),
        (CHAIN.replace("bias+relu", "a;rm"), "must be a name of letters, digits"),
    ],
)
def test_error_names_mistake_and_remedy(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        ExpressionWorkload.parse_dimensions(text)
    assert says in str(caught.value)


def test_operators_check_combinations_of_dimensions() -> None:
    with pytest.raises(InputError, match="kv_heads=3 must divide heads=8"):
        Attend.parse_dimensions(f"{ATTEND},kv_heads=3")
    with pytest.raises(InputError, match="causal='maybe' must be true or false"):
        Attend.parse_dimensions(f"{CHAIN},heads=8,causal=maybe")
    with pytest.raises(InputError, match="window=-1 must be a whole number from 0"):
        Attend.parse_dimensions(f"{ATTEND},window=-1")


@pytest.mark.parametrize("value", [True, 1.0, None])
def test_size_built_in_python_must_be_integer(value: Any) -> None:
    with pytest.raises(InputError, match="rows="):
        ExpressionWorkload(expr="x", rows=value, cols=1, dtype="f32")


def test_flag_built_in_python_must_be_bool() -> None:
    with pytest.raises(InputError, match="causal=1 must be true or false"):
        Attend(expr="x", rows=1, cols=1, dtype="f32", heads=1, causal=1)  # type: ignore[arg-type]


def test_usage_shows_kinds_and_brackets_optional_dimensions() -> None:
    assert Attend.usage() == (
        "attend:expr=NAME,rows=N,cols=N,dtype=f32|tf32|f16|bf16,[out=f32|f16|bf16],"
        "heads=N,causal=true|false,[window=N],[bias=true|false],[kv_heads=N]"
    )


def test_unknown_name_error_lists_known_names() -> None:
    with pytest.raises(UnknownName) as caught:
        ExpressionWorkload.from_dimensions({"expr": "x", "rows": 1, "cols": 1, "dtype": "f64"})
    assert caught.value.known == ("bf16", "f16", "f32", "tf32")


def test_tensor_size_in_bytes() -> None:
    assert Tensor(name="x", shape=(3, 5), dtype="bf16").nbytes == 30
    assert Tensor(name="alpha", shape=(), dtype="f32").size == 1


def test_traffic_counts_every_array_once_and_no_scalars() -> None:
    traffic = ExpressionWorkload(expr="x", rows=8, cols=4, dtype="f16", out="f32").traffic()
    assert traffic == Traffic(read_bytes=8 * 4 * 2, write_bytes=8 * 4 * 4)
    assert traffic.total_bytes == 192


def test_drawn_inputs_are_repeatable_and_of_the_stored_type() -> None:
    chain = ExpressionWorkload(expr="x", rows=8, cols=4, dtype="f16")
    drawn = chain.draw(np.random.default_rng(7))
    repeated = chain.draw(np.random.default_rng(7))
    assert {name: (value.shape, str(value.dtype)) for name, value in drawn.items()} == {
        "x": ((8, 4), "float16"),
        "alpha": ((), "float32"),
    }
    assert all(np.array_equal(drawn[name], repeated[name]) for name in drawn)
    assert not np.array_equal(drawn["x"], chain.draw(np.random.default_rng(8))["x"])
