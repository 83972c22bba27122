"""Report of which implementation runs each call, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tunebench.dispatch import DispatchedCall, watching

__all__ = ["dispatch_report"]


def dispatch_report(
    function: Callable[..., Any], *arguments: Any, **named: Any
) -> tuple[DispatchedCall, ...]:
    """Run a function, and report which implementation ran each call of `tunebench.torch` in it.

    Args:
        function: A function of `tunebench.torch`, or any function that calls them.
        arguments: Its positional arguments.
        named: Its keyword arguments.

    Returns:
        The calls made in this thread, in their order; each prints as one line with the reason.
    """
    calls: list[DispatchedCall] = []
    caller = threading.get_ident()

    def note(call: DispatchedCall) -> None:
        if threading.get_ident() == caller:
            calls.append(call)

    with watching(note):
        function(*arguments, **named)
    return tuple(calls)
