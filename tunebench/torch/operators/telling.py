"""Who runs a call, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tunebench.dispatch import Call, watching

__all__ = ["explain"]


def explain(function: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Call, ...]:
    """Run a function, and return who ran each call of ours in it, and why; printed, each is a line.

    Args:
        function: One of this package, or any that calls them.
        arguments: Its arguments.
        named: Likewise.
    """
    calls: list[Call] = []
    here = threading.get_ident()

    def note(call: Call) -> None:
        if threading.get_ident() == here:
            calls.append(call)

    with watching(note):
        function(*arguments, **named)
    return tuple(calls)
