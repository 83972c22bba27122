"""Elementwise expressions: parsing, errors and canonical text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench import workloads
from tunebench.errors import InputError
from tunebench.expression import FUNCTIONS, MAX_LENGTH, Apply, Name, Number, canonical, names, parse, steps

X, Y = Name("x"), Name("y")


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("gelu( x + bias ) * y", "gelu(x+bias)*y"),
        ("(x + (y))", "x+y"),
        ("x - (y - 2.0)", "x-(y-2)"),
        ("(x*y)/z", "x*y/z"),
        ("x*(y/z)", "x*(y/z)"),
        ("- - x", "--x"),
        ("-(x+y)", "-(x+y)"),
        ("0.50*x+1e3", "0.5*x+1000"),
        ("max( x,min(y , 0.1))", "max(x,min(y,0.1))"),
        ("1e20*x", "1e+20*x"),
    ],
)
def test_equivalent_expressions_have_one_canonical_text(text: str, one: str) -> None:
    assert canonical(text) == one
    assert canonical(one) == one
    assert parse(text) == parse(one)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("clamp(x, 0, 6)", "min(max(x,0),6)"),
        ("gt(x,y)*ge(x,0)", "lt(y,x)*le(0,x)"),
        ("pow(x,2)", "square(x)"),
        ("pow(x,7)", "square(square(x)*x)*x"),
        ("pow(x+1,-2)", "1/square(x+1)"),
        ("pow(x,0.5)+pow(x,-0.5)", "sqrt(x)+rsqrt(x)"),
        ("pow(x,1.5)", "exp(1.5*log(x))"),
        ("pow(x,y)", "exp(y*log(x))"),
    ],
)
def test_shorthand_is_written_in_other_functions(text: str, meaning: str) -> None:
    assert canonical(text) == canonical(meaning)
    assert parse(text) == parse(meaning)


def test_precedence_follows_arithmetic() -> None:
    assert parse("x+y*2") == Apply("add", (X, Apply("mul", (Y, Number(2.0)))))
    assert parse("x-y-x") == Apply("sub", (Apply("sub", (X, Y)), X))
    assert parse("-x*y") == Apply("mul", (Apply("neg", (X,)), Y))


def test_names_and_steps_are_unique_and_ordered() -> None:
    tree = parse("gelu(b+a)*(b+a)")
    assert names(tree) == ("b", "a")
    assert [step.operation for step in steps(tree)] == ["add", "gelu", "mul"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "an expression must have 1 to 240 characters, got 0"),
        ("x+" * 120 + "x", "an expression must have 1 to 240 characters, got 241"),
        ("x^2", "position 2: unexpected '^'"),
        ("2x", "position 1: unexpected '2'"),
        ("x.y", "position 2: unexpected '.'"),
        ("__import__", "position 1: unexpected '_'"),
        ("x é", "position 3: unexpected 'é'"),
        ("x\ny", "position 2: unexpected '\\n'"),
        ("(x", "position 1: '(' was never closed"),
        ("x+", "position 3: invalid syntax"),
        ("x**2", "position 1: 'x**2': expected names, numbers"),
        ("x//2", "'x//2': expected"),
        ("+x", "'+x': expected"),
        ("x if y else x", "expected names, numbers"),
        ("x and y", "expected names, numbers"),
        ("(x,y)", "expected names, numbers"),
        ("True*x", "position 1: 'True': expected"),
        ("relu(*x)", "'*x': expected"),
        ("relu(x)(y)", "expected names, numbers"),
        ("x+relu", "position 3: 'relu': relu is a function, write relu(x)"),
        ("rellu(x)", "Did you mean 'relu'?"),
        ("relu(x,y)", "relu takes 1 argument(s), got 2"),
        ("max(x)", "max takes 2 argument(s), got 1"),
        ("1e39*x", "a number must be 0 or from"),
        ("1e-60*x", "a number must be 0 or from"),
        ("9" * 200, "a number must be 0 or from"),
    ],
)
def test_error_names_mistake_and_position(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert says in str(caught.value)


@given(st.text(alphabet="xy2.5e+-*/(), abgelurmax", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        canonical_text = canonical(text)
    except InputError:
        return
    assert parse(canonical_text) == parse(text)
    assert canonical(canonical_text) == canonical_text
    assert " " not in canonical_text


@pytest.mark.parametrize("text", ["-" * (MAX_LENGTH - 1) + "x", "(" * 119 + "x" + ")" * 119])
def test_deepest_allowed_expression_is_parsed(text: str) -> None:
    assert names(parse(canonical(text))) == ("x",)


INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
leaves: st.SearchStrategy[Any] = st.sampled_from([X, Y]) | st.floats(0.25, 4, width=16).map(Number)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Apply, st.sampled_from(["add", "sub", "mul", "div", "max", "min"]), st.tuples(inner, inner))
        | st.builds(Apply, st.just("neg") | st.sampled_from(sorted(FUNCTIONS)[:5]), st.tuples(inner))
    ),
    max_leaves=8,
).filter(
    lambda tree: all(
        len(step.arguments) == FUNCTIONS.get(step.operation, len(step.arguments)) for step in steps(tree)
    )
)


def written(tree: Any) -> str:
    """Write a tree with all its parentheses, independently of the parser."""
    if isinstance(tree, Name):
        return tree.name
    if isinstance(tree, Number):
        return repr(tree.value)
    arguments = [written(argument) for argument in tree.arguments]
    if tree.operation in FUNCTIONS:
        return f"{tree.operation}({' , '.join(arguments)})"
    if tree.operation == "neg":
        return f"(-{arguments[0]})"
    return f"({arguments[0]} {INFIX[tree.operation]} {arguments[1]})"


@given(trees)
def test_written_expression_round_trips(tree: Any) -> None:
    text = written(tree)
    if len(text) <= MAX_LENGTH:
        assert parse(text) == tree
        assert parse(canonical(text)) == tree


# -- as a dimension ------------------------------------------------------------------------------------------

COMMON = "elementwise:rows=4,cols=6,dtype=f16"


def test_equivalent_expressions_are_one_workload() -> None:
    workload = workloads.parse(f"{COMMON},vectors=b+a,expression=max( x , a)*b")
    assert str(workload) == f"{COMMON},expression=max(x,a)*b,vectors=a+b"
    assert workloads.parse(f"{COMMON},expression=max(x,a) * b,vectors=a+b") == workload
    assert workloads.parse(str(workload)) == workload
    assert (
        workloads.workload("elementwise", **{name: getattr(workload, name) for name in workload.dimensions()})
        == workload
    )


@pytest.mark.parametrize(
    ("dimensions", "says"),
    [
        ("expression=x^y", "elementwise: expression: 'x^y', position 2"),
        ("expression=max(x,y", "elementwise: expression: 'max(x,y', position 4: '(' was never closed"),
        ("expression=x+a,vectors=b", "vectors: no b in x+a; it has x, a"),
        ("expression=x+a,scalars=b", "scalars: no b in x+a"),
        ("expression=x+a,vectors=a,scalars=a", "a cannot be in vectors and in scalars"),
        ("expression=x+a,vectors=a+a", "vectors='a+a' must be names joined by +, each once"),
        ("expression=x+a,vectors=a-x", "must be names joined by +"),
        ("expression=x+out", "out is the result"),
        (
            "expression=2*a,vectors=a",
            "at least one input must be in none of vectors, scalars and columns",
        ),
        ("expression=3", "at least one input"),
        ("expression=log(x-y)", "log(x-y) may divide by 0"),
        ("expression=exp(x)*exp(y)*exp(z)*exp(x)*exp(y)*exp(exp(x))*1e4", "overflow f32 or f16"),
    ],
)
def test_invalid_chain_is_refused(dimensions: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        workloads.parse(f"{COMMON},{dimensions}")
    assert says in str(caught.value)


def test_usage_marks_text_dimensions() -> None:
    usage = workloads.operator("elementwise").usage()
    assert "expression=EXPRESSION,[vectors=NAME+NAME],[scalars=NAME+NAME]" in usage
