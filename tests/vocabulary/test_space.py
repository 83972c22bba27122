"""Search spaces: ordered enumeration of all valid configurations, tables and checks."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.errors import ConfigError, InputError
from tunebench.space import Config, Parameter, Space, takes_config
from tunebench.workloads import parse

WORKLOAD = parse("gemm:m=64,n=64,k=64,dtype=f16")


def fits(bm: Any, bn: Any, stages: Any) -> Any:
    """The stages' tiles must fit in 96 units of shared memory."""
    return (bm + bn) * stages <= 96


SPACE = Space(
    (
        Parameter("bm", (16, 32, 64), "rows of a tile"),
        Parameter("bn", (16, 32, 64), "columns of a tile"),
        Parameter("stages", (1, 2, 3), "tiles in flight"),
        Parameter("load", ("cp.async", "plain"), "how tiles come in"),
        Parameter("scale", (0.5, 1.0), "a fraction"),
    ),
    (
        fits,
        lambda load, stages: (load == "cp.async") | (stages == 1),
        lambda bm, workload: bm <= workload.m,
    ),
)


def _every(space: Space) -> list[Config]:
    """Return every point of the unconstrained space in order."""
    values = itertools.product(*(parameter.values for parameter in space.parameters))
    return [Config(dict(zip(space.names, point, strict=True))) for point in values]


def _valid(config: Config, m: int) -> bool:
    return (
        (config["bm"] + config["bn"]) * config["stages"] <= 96
        and (config["load"] == "cp.async" or config["stages"] == 1)
        and config["bm"] <= m
    )


@pytest.mark.parametrize("m", [1, 16, 32, 64, 4096])
def test_enumeration_equals_filtered_product_in_order(m: int) -> None:
    workload = parse(f"gemm:m={m},n=64,k=64,dtype=f16")
    table = SPACE.enumerate(workload=workload, device=None)
    assert [table.config(row) for row in range(len(table))] == [c for c in _every(SPACE) if _valid(c, m)]


def test_workloads_share_a_table_if_the_same_constraints_hold() -> None:
    tables = {
        m: SPACE.enumerate(workload=parse(f"gemm:m={m},n=8,k=8,dtype=f32"), device=None)
        for m in (32, 33, 64, 99)
    }
    assert tables[32] is tables[33]
    assert tables[64] is tables[99]
    assert tables[33] is not tables[64]


def test_constraint_is_evaluated_once_for_equal_arguments() -> None:
    asked: list[int] = []

    def small(bm: Any, workload: Any) -> Any:
        asked.append(len(bm))
        return bm <= workload.m

    parameters = (*SPACE.parameters[1:], SPACE.parameters[0])
    space = Space(parameters, (small,))
    assert len(space.enumerate(workload=WORKLOAD, device=None)) == space.size
    assert asked == [3]


def test_enumeration_is_right_when_branches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebench.space.MOST_KEPT", 0)
    space = Space(SPACE.parameters, SPACE.constraints)
    for m in (16, 64, 16):
        table = space.enumerate(workload=parse(f"gemm:m={m},n=8,k=8,dtype=f32"), device=None)
        assert [table.config(row) for row in range(len(table))] == [c for c in _every(space) if _valid(c, m)]


@st.composite
def spaces(draw: st.DrawFn) -> tuple[Space, list[tuple[str, str, int, int]]]:
    """Draw a space of integers, and constraints of the form (a * x + y) % 3 != 0 as data."""
    count = draw(st.integers(1, 4))
    parameters = tuple(
        Parameter(f"p{i}", tuple(draw(st.lists(st.integers(-9, 9), min_size=1, max_size=4, unique=True))), "")
        for i in range(count)
    )
    names = st.sampled_from([parameter.name for parameter in parameters])
    rules = draw(st.lists(st.tuples(names, names, st.integers(0, 3), st.integers(0, 2)), max_size=3))
    return Space(parameters, tuple(_rule(*rule) for rule in rules)), rules


def _rule(x: str, y: str, a: int, rest: int) -> Any:
    """Return a constraint whose arguments are named like its parameters."""
    arguments = x if x == y else f"{x}, {y}"
    return eval(f"lambda {arguments}: ({a} * {x} + {y}) % 3 != {rest}")


@given(spaces())
def test_every_valid_configuration_is_enumerated_once(
    drawn: tuple[Space, list[tuple[str, str, int, int]]],
) -> None:
    space, rules = drawn
    table = space.enumerate()
    expected = [
        config
        for config in _every(space)
        if all((a * config[x] + config[y]) % 3 != rest for x, y, a, rest in rules)
    ]
    assert [table.config(row) for row in range(len(table))] == expected
    for row, config in enumerate(expected):
        assert table.row(config) == row
        assert space.check(config) == config
        assert space.parse(str(config)) == config
    for config in set(_every(space)) - set(expected):
        assert table.row(config) is None
        with pytest.raises(ConfigError, match="violates"):
            space.check(config)


@given(spaces(), st.randoms(use_true_random=False))
def test_subset_of_table_finds_its_rows(
    drawn: tuple[Space, list[tuple[str, str, int, int]]], random: Any
) -> None:
    table = drawn[0].enumerate()
    mask = np.array([random.random() < 0.5 for _ in range(len(table))], dtype=bool)
    part = table.take(mask)
    for row in range(len(table)):
        assert (part.row(table.config(row)) is not None) == mask[row]


def test_columns_support_every_kind_of_value() -> None:
    table = SPACE.enumerate(workload=WORKLOAD, device=None)
    for name in SPACE.names:
        assert table[name].tolist() == [table.config(row)[name] for row in range(len(table))]
    assert isinstance(table.config(0)["bm"], int)
    assert isinstance(table.config(0)["load"], str)
    assert isinstance(table.config(0)["scale"], float)


def test_unsatisfiable_constraint_gives_empty_table() -> None:
    space = Space((Parameter("a", (1, 2), ""), Parameter("b", (1, 2), "")), (lambda a: a > 2,))
    table = space.enumerate()
    assert len(table) == 0
    assert table.row(Config({"a": 1, "b": 1})) is None
    assert table["b"].shape == (0,)


def test_constraint_may_return_scalar() -> None:
    parameters = (Parameter("a", (1, 2), ""),)
    assert len(Space(parameters, (lambda workload: workload.m == 64,)).enumerate(workload=WORKLOAD)) == 2
    assert len(Space(parameters, (lambda workload: workload.m == 65,)).enumerate(workload=WORKLOAD)) == 0


def test_invalid_branches_are_not_expanded() -> None:
    """Each constraint receives only points that satisfy the earlier ones, out of two million."""
    seen: list[int] = []

    def narrow(a: Any, b: Any) -> Any:
        seen.append(len(a))
        return (a == 0) & (b == 0)

    def wide(c: Any) -> Any:
        seen.append(len(c))
        return c >= 0

    hundred = tuple(range(128))
    space = Space(tuple(Parameter(name, hundred, "") for name in "abc"), (wide, narrow))
    assert space.size == 128**3
    assert len(space.enumerate()) == 128
    assert seen == [128**2, 128]


def test_config_is_hashable_and_compares_by_value() -> None:
    config = Config({"bm": 16, "bn": 32})
    assert config == Config({"bm": 16, "bn": 32})
    assert len({config, Config({"bm": 16, "bn": 32})}) == 1
    assert config != {"bm": 16, "bn": 32, "stages": 1}
    assert pickle.loads(pickle.dumps(config)) == config
    assert (str(config), repr(config)) == ("bm=16,bn=32", "Config(bm=16,bn=32)")
    assert dict(config) == {"bm": 16, "bn": 32}
    with pytest.raises(TypeError):
        config["bm"] = 1  # type: ignore[index]


def test_check_orders_parameters() -> None:
    shuffled = {"scale": 0.5, "load": "plain", "stages": 1, "bn": 32, "bm": 16}
    checked = SPACE.check(shuffled, workload=WORKLOAD, device=None)
    assert str(checked) == "bm=16,bn=32,stages=1,load=plain,scale=0.5"
    assert tuple(checked) == SPACE.names


VALID = {"bm": 16, "bn": 16, "stages": 1, "load": "plain", "scale": 1.0}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bm": 64, "bn": 64}, "violates: The stages' tiles must fit in 96 units of shared memory."),
        ({"stages": 2}, 'violates: lambda load, stages: (load == "cp.async") | (stages == 1)'),
        ({"bm": 17}, "expected bm=16|32|64; bn=16|32|64; stages=1|2|3; load=cp.async|plain; scale=0.5|1.0"),
        ({"warps": 4}, "must set exactly: bm, bn, stages, load, scale"),
    ],
)
def test_check_names_violated_rule(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SPACE.check(VALID | changes, workload=WORKLOAD, device=None)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["", "bm=16", "bm=16,bn=16,stages=1,load=plain,scale=2.0", "x=1", "bm"])
def test_invalid_config_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        SPACE.parse(text)


def test_config_text_accepts_any_order() -> None:
    assert SPACE.parse("load=plain,scale=1.0,bn=16,stages=1,bm=16") == Config(VALID)


def test_space_can_be_restricted() -> None:
    narrow = SPACE.restrict(bm=(32,), load=("plain",))
    table = narrow.enumerate(workload=WORKLOAD, device=None)
    assert set(table["bm"].tolist()) == {32}
    assert set(table["load"].tolist()) == {"plain"}
    whole = SPACE.enumerate(workload=WORKLOAD, device=None)
    assert all(whole.row(table.config(row)) is not None for row in range(len(table)))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Parameter("a b", (1,), ""), "must be an identifier"),
        (lambda: Parameter("workload", (1,), ""), "must be an identifier other than"),
        (lambda: Parameter("a", (), ""), "needs at least one value and no duplicates"),
        (lambda: Parameter("a", (1, 1), ""), "needs at least one value and no duplicates"),
        (lambda: Space((Parameter("a", (1,), ""), Parameter("a", (2,), ""))), "must be unique, got a, a"),
        (lambda: Space((Parameter("a", (1,), ""),), (lambda b: b,)), r"has unknown arguments \['b'\]"),
        (
            lambda: Space(tuple(Parameter(f"p{i}", tuple(range(512)), "") for i in range(7))),
            r"fewer than 2\*\*63 points",
        ),
    ],
)
def test_inconsistent_space_is_refused(make: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()


def test_takes_config_passes_columns_as_a_mapping() -> None:
    @takes_config("m", "n")
    def small(config: dict[str, Any], workload: Any) -> Any:
        """The product of m and n must be small."""
        return config["m"] * config["n"] <= workload

    space = Space(
        (Parameter("m", (1, 2, 3), ""), Parameter("n", (1, 2), ""), Parameter("k", (1, 2), "")), (small,)
    )
    assert {(c["m"], c["n"]) for c in map(space.enumerate(workload=3).config, range(8))} == {
        (1, 1),
        (1, 2),
        (2, 1),
        (3, 1),
    }
    with pytest.raises(ConfigError, match="product of m and n must be small"):
        space.check({"m": 3, "n": 2, "k": 1}, workload=3)
    with pytest.raises(InputError, match="unknown"):
        Space((Parameter("m", (1,), ""),), (small,))
