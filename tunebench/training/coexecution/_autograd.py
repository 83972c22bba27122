"""Queries about a backward pass before it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._tensors import NotUnderstoodError

__all__ = ["leaves_of", "raises_again"]


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
