"""Base classes of variants: errors of their methods, and deprecated names."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench.device import find
from tunebench.errors import VariantError
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Costs, dumped_tree


def test_miniature_is_still_read_as_emulation_workload() -> None:
    with pytest.warns(FutureWarning, match=r"Old.miniature is deprecated.*use emulation_workload") as caught:

        class Old(ToyVariant):
            def miniature(self, workload: Any, config: Config) -> Toy:
                return Toy(n=8)

    assert caught[0].filename == __file__
    assert Old("").emulation_workload(Toy(n=1024), CONFIG) == Toy(n=8)
    assert ToyVariant("").emulation_workload(Toy(n=1024), CONFIG) == Toy(n=1024)


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        raise error

    return method


@pytest.mark.parametrize(
    ("name", "method", "reason"),
    [
        ("limits", _raise(SystemExit(0)), r"limits raised SystemExit: 0 \(.*test_variant.py, line \d+\)"),
        ("limits", lambda *_: True, "limits must return str or None, got bool"),
        ("limits", _raise(_Unprintable()), r"limits raised _Unprintable: \(its text raises RuntimeError\)"),
        ("default", lambda *_: None, "default must return Mapping, got NoneType"),
        ("default", lambda *_: 7, "default must return Mapping, got int"),
        ("costs", lambda *_: None, "costs must return Costs, got NoneType"),
        ("costs", lambda *_: _costs(fma="many"), "costs must return fma as a number .* got 'many'"),
        ("costs", lambda *_: _costs(fma=[1.0, 2.0, 3.0]), "fma as a number of 0 or more, or a column of 1 "),
        ("costs", lambda *_: _costs(threads=float("nan")), "threads as a number of 0 or more"),
        ("costs", lambda *_: _costs(blocks=-1), "blocks as a number of 0 or more"),
        ("source", _raise(ValueError("\ud800 and \0")), r"source raised ValueError: \\ud800 and \\x00 \("),
        ("launches", lambda *_: "one", "launches must return tuple, got str"),
    ],
)
def test_method_that_fails_is_an_error_that_names_variant_and_method(
    name: str, method: Callable[..., Any], reason: str
) -> None:
    variant = type("Broken", (ToyVariant,), {name: _named(name, method)})("")
    workload, device = Toy(n=8), find("h100-sxm")
    arguments: dict[str, tuple[Any, ...]] = {
        "costs": (workload, variant.space.enumerate(), device),
        "source": (workload, CONFIG),
        "launches": (workload, CONFIG),
    }
    with pytest.raises(VariantError, match=f"{variant.key}: .*{reason}"):
        getattr(variant, name)(*arguments.get(name, (workload, device)))


def _named(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any) -> Any:
        return method(self, *arguments)

    call.__name__ = name
    return call


def _costs(**changed: Any) -> Costs:
    return Costs(**{"blocks": 1, "full_blocks": 0, "threads": 1, **changed})


def test_constraint_that_fails_is_an_error_that_names_it() -> None:
    def both(a: Any) -> Any:
        """Say what must hold."""
        raise SystemExit(0)

    for constraint in (both, lambda a: a == 1 and a == 2, lambda a: "abc", lambda a: [True] * 9):
        space = Space((Parameter("a", (1, 2, 3), "a"),), (constraint,))
        with pytest.raises(VariantError, match="must return a column of booleans: "):
            space.enumerate()


def test_syntax_tree_is_the_same_text_in_every_version_of_python() -> None:
    right = (
        "Module(body=[FunctionDef(name='f', args=arguments(posonlyargs=[], args=[arg(arg='x')], "
        "kwonlyargs=[], kw_defaults=[], defaults=[]), body=[Pass()], decorator_list=[]), "
        "ClassDef(name='A', bases=[], keywords=[], body=[Pass()], decorator_list=[])], type_ignores=[])"
    )
    assert dumped_tree(ast.parse("def f(x): pass\nclass A: pass")) == right
