"""Queries about a backward pass before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tunebench.training.coexecution._tensors import NotUnderstoodError

__all__ = ["HOOKED_NODES", "are_held", "counting_hooks", "leaves_of", "raises_again"]

HOOKED_NODES = [0]
"""Number of hooks that were added to nodes of autograd while a co-execution exists."""


def counting_hooks(register: Any) -> Any:
    """Return the function that adds a hook to a node of autograd, with a count of its calls."""

    def counted(*args: Any) -> Any:
        HOOKED_NODES[0] += 1
        return register(*args)

    return counted


def are_held(leaves: Iterable[Tensor]) -> bool:
    """Return whether a node that accumulates the gradient of a leaf exists, so that it can have hooks."""
    name = "tunebench"
    for leaf in leaves:
        get_gradient_edge(leaf).node.metadata[name] = True
        if get_gradient_edge(leaf).node.metadata.pop(name, False):
            return True
    return False


def leaves_of(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves of graphs of autograd.

    Raises:
        NotUnderstoodError: A backward pass would run Python functions, or a root is a leaf.
    """
    leaves: list[Tensor] = []
    pending, seen = [root.grad_fn for root in roots], set()
    if None in pending:
        raise NotUnderstoodError("backward of a leaf")
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaf = node.variable
            if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
                raise NotUnderstoodError("a leaf has hooks")
            leaves.append(leaf)
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            raise NotUnderstoodError(f"{type(node).__name__} is a Python function of autograd")
        pending += [following for following, _ in node.next_functions if following is not None]
    return leaves


def raises_again(node: Any) -> bool:
    """Return whether a second backward pass from a node of autograd raises before it changes anything."""
    while True:
        if any(name.startswith("_raw_saved_") for name in dir(node)):
            return True
        following = [each for each, _ in node.next_functions if each is not None]
        if len(following) != 1:
            return False
        (node,) = following
