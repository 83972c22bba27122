"""Words of memory that change with Python objects."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tunebench.training.coexecution import _words
from tunebench.training.coexecution._words import (
    CachedValue,
    Word,
    Words,
    are_supported,
    hook_words,
    instance_words,
    list_words,
)

pytestmark = pytest.mark.skipif(not are_supported(), reason="no compiler, or not CPython 3.11")


class Scaled(nn.Module):  # type: ignore[misc]  # torch does not type it
    """A module with what the changes below change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.hooked = nn.Parameter(torch.ones(2))
        self.hooked.register_hook(lambda gradient: gradient).remove()
        self.items = [self.weight, 1]
        self.scale = 2.0
        captured = self.scale

        def function(x: float = 1.0, *, y: float = 2.0) -> float:
            return x * y * captured

        self.function = function


def _words_of(module: Scaled) -> list[Word]:
    function: Any = module.function
    return [
        *instance_words(module), *list_words(module.items), (module._forward_hooks, "tag"),
        *hook_words(module.weight), *hook_words(module.hooked), (Scaled, "version"),
        *((function, kind) for kind in ("code", "defaults", "kwdefaults")), (function.__closure__[0], "cell"),
    ]  # fmt: skip


def _set(name: str, value: Any) -> Callable[[Scaled], None]:
    return lambda module: setattr(module.function, name, value)


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "attribute": lambda module: setattr(module, "scale", 3.0),
    "class": lambda module: setattr(module, "__class__", nn.Identity),
    "replaced dictionary": lambda module: setattr(module, "__dict__", dict(vars(module))),
    "hook of a module": lambda module: module.register_forward_hook(lambda *args: None),
    "first hook": lambda module: module.weight.register_hook(lambda gradient: gradient),
    "another hook": lambda module: module.hooked.register_hook(lambda gradient: gradient),
    "hook after accumulation": lambda module: module.weight.register_post_accumulate_grad_hook(print),
    "appended": lambda module: module.items.append(1),
    "replaced item": lambda module: module.items.__setitem__(1, 2),
    "removed item": lambda module: module.items.pop(),
    "method": lambda module: setattr(Scaled, "added", 1),
    "code": lambda module: _set("__code__", Scaled().function.__code__.replace(co_name="other"))(module),  # type: ignore[attr-defined]
    "defaults": _set("__defaults__", (2.0,)),
    "keyword defaults": _set("__kwdefaults__", {"y": 3.0}),
    "variable": lambda module: setattr(module.function.__closure__[0], "cell_contents", 5),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_words_change(change: Callable[[Scaled], Any]) -> None:
    module = Scaled()
    words = Words(_words_of(module))
    assert words.hold()
    module.weight.grad = torch.ones(2)
    with torch.no_grad():
        module.weight.add_(1)
    assert words.hold()
    change(module)
    assert not words.hold()
    assert words.changed() or change is CHANGES["replaced item"]


@pytest.mark.parametrize("kind", ["tag", "version", "cell", "items", "code", "unknown"])
def test_objects_without_a_word_are_refused(kind: str) -> None:
    with pytest.raises(TypeError):
        Words([(3, kind)])


def test_values_are_known_until_a_word_changes() -> None:
    cached, owner = CachedValue(), collections.OrderedDict(a=1)
    assert cached.value() is None
    for value in range(20):
        cached.learn(value, lambda: [(owner, "tag")])
        assert cached.value() == (value if value < _words._CHANGES else None)
        owner["a"] = value + 10
        assert cached.value() is None
