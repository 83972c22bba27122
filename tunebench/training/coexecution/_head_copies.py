"""Copies of what a head of a step may write: how much they take, and how writes are taken back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tunebench.training.coexecution._head_record import PLAIN_TYPES
from tunebench.training.coexecution._head_update import optimizer_tensors, parameters_of
from tunebench.training.coexecution._memory import copies_reason
from tunebench.training.coexecution._run import same

__all__ = ["RepeatError", "leaves", "memory_reason", "restore", "taken_back"]


class RepeatError(BaseException):
    """A replayed head failed and was taken back: the step must be repeated in eager mode.

    No handler of the program for `Exception` sees it.
    """


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN_TYPES and tensor.is_cpu and tensor.layout is torch.strided


def leaves(args: Sequence[Any], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return leaves of autograd among arguments, and parameters of optimizers, without duplicates."""
    tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad and arg.is_leaf]
    tensors += [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _tensors(args: Sequence[Any], optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Return the tensors that a graph may write, without duplicates."""
    gradients = [parameter.grad for parameter in leaves(args, optimizers)]
    tensors = [arg for arg in (*args, *gradients, *optimizer_tensors(optimizers)) if isinstance(arg, Tensor)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def memory_reason(args: Sequence[Any], optimizers: Sequence[Optimizer]) -> str | None:
    """Return why a head cannot be checked on copies of what it writes, or None.

    Its check takes these copies and a second set of gradients.
    """
    tensors = _tensors(args, optimizers)
    if not all(map(_is_plain, tensors)):
        return "a tensor is no plain one of the processor"
    copies_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    gradients_bytes = sum(leaf.nbytes for leaf in leaves(args, optimizers))
    return copies_reason(copies_bytes + gradients_bytes)


def _copy(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage().clone()
    geometry = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, *geometry)


@contextmanager
def taken_back(args: Sequence[Any], optimizers: Sequence[Optimizer]) -> Iterator[dict[int, Tensor]]:
    """Take back what a graph wrote before an error, which the step in eager mode raises again.

    Yields:
        Copies of what it may write, by identity.
    """
    state = torch.get_rng_state()
    parameters = leaves(args, optimizers)
    gradients = [parameter.grad for parameter in parameters]
    tensors = _tensors(args, optimizers)
    if not all(map(_is_plain, tensors)):
        raise RepeatError("a tensor is no plain one of the processor")
    copies = {id(tensor): _copy(tensor) for tensor in tensors}
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    states = [{key: dict(value) for key, value in optimizer.state.items()} for optimizer in optimizers]
    modes = _Modes()
    try:
        yield copies
    except (Exception, RepeatError) as error:
        modes.restore()
        restore(list(zip(tensors, copies.values(), strict=True)), state)
        for tensor, version in zip(tensors, versions, strict=True):
            if not tensor.is_inference():  # eager mode's messages of errors contain versions
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for optimizer, values in zip(optimizers, states, strict=True):
            _restore_states(optimizer.state, values)
        if isinstance(error, RepeatError):
            raise
        raise RepeatError from error


class _Modes:
    """Modes of this thread that a graph changes, and that its error leaves changed."""

    def __init__(self) -> None:
        self._is_grad_enabled = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        self._is_cache_enabled = torch.is_autocast_cache_enabled()
        self._nesting = _autocast_nesting()

    def restore(self) -> None:
        """Set the modes as they were."""
        torch._C._set_grad_enabled(self._is_grad_enabled)
        if _autocast_nesting() == self._nesting:
            return
        enabled, dtype = self._autocast
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.set_autocast_cache_enabled(self._is_cache_enabled)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()


def _autocast_nesting() -> int:
    """Return the number of autocast contexts around this one."""
    torch.autocast_increment_nesting()
    nesting: int = torch.autocast_decrement_nesting()
    return nesting


def _restore_states(state: dict[Any, Any], before: dict[Any, dict[str, Any]]) -> None:
    for key in [key for key in state if key not in before]:
        del state[key]
    for key, values in before.items():
        for name in [name for name in state[key] if name not in values]:
            del state[key][name]
        state[key].update(values)


def restore(before: Sequence[tuple[Tensor, Tensor]], state: Tensor | None) -> None:
    with torch.no_grad():
        for tensor, copy in before:
            if not same(tensor, copy):
                tensor.copy_(copy)
    if state is not None:
        torch.set_rng_state(state)
