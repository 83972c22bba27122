"""Make what torch shows to no function mode visible to iterations, while a co-execution exists."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.eager_transforms
import torch._functorch.utils
import torch._functorch.vmap
import torch.utils.checkpoint
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tunebench.training.coexecution import _runner
from tunebench.training.coexecution._autograd import counting_hooks
from tunebench.training.coexecution._function import optimizer_classes, optimizer_functions
from tunebench.training.coexecution._iteration import Iteration
from tunebench.training.coexecution._modes import SETTERS

__all__ = ["THREAD", "has_hooks", "patch", "unpatch"]

THREAD = threading.local()
"""The co-execution that is active in a thread: a step within a step belongs to the outer one."""


_PATCHES: list[tuple[Any, str, Any, Any]] = []
"""Modules and classes of torch, names in them, the functions, and functions that iterations see."""

_TRANSFORMS = {
    torch._functorch.vmap: ("_vmap_increment_nesting",),
    torch._functorch.eager_transforms: (
        "_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting",
    ),
}  # fmt: skip
"""Functions that begin a transform of `torch.func`, by module. What it wraps must have values."""

_LOCK = threading.RLock()  # a finalizer can run within
_USERS = [0]


def patch() -> None:
    """Make functions that torch shows to no mode visible to iterations while a co-execution exists."""
    with _LOCK:
        _USERS[0] += 1
        if _USERS[0] > 1:
            return
        if not _PATCHES:
            _PATCHES.extend(_patches())
        for owner, name, _, visible in _PATCHES:
            setattr(owner, name, visible)
        torch.Tensor._make_subclass = _make_subclass
        torch.Tensor.as_subclass = _needing_values(torch._C.TensorBase.as_subclass, "as_subclass")


def unpatch() -> None:
    """Restore the functions of torch when no co-execution exists any more."""
    with _LOCK:
        _USERS[0] -= 1
        if _USERS[0] == 0:
            for owner, name, function, _ in _PATCHES:
                setattr(owner, name, function)
            del torch.Tensor._make_subclass, torch.Tensor.as_subclass
            _runner.forget()


def _patches() -> Iterator[tuple[Any, str, Any, Any]]:
    for module, name, function in optimizer_functions():
        yield module, name, function, _visible(function)
    for owner in optimizer_classes():
        if not getattr(owner.step, "hooked", False):  # as torch does for the first optimizer of the class
            owner.step = torch.optim.Optimizer.profile_hook_step(owner.step)
            owner.step.hooked = True
        yield owner, "step", owner.step, _native(owner.step, makes_states=owner is not torch.optim.SGD)
    for module, names in _TRANSFORMS.items():
        for name in names:
            begin = getattr(module, name)
            yield module, name, begin, _needing_values(begin, "a transform of functions")
    checkpoint, name = torch.utils.checkpoint, "_make_saved_tensor"
    if hasattr(checkpoint, name):
        yield checkpoint, name, getattr(checkpoint, name), _needing_values(getattr(checkpoint, name), name)
    for (owner, name), getter in SETTERS.items():
        yield owner, name, getattr(owner, name), _setting(getattr(owner, name), getter)
    mixin = torch.autograd.function._HookMixin  # of all hooks of nodes
    register = mixin._register_hook
    yield mixin, "_register_hook", staticmethod(register), staticmethod(counting_hooks(register))
    utils, name = torch._functorch.utils, "unwrap_dead_wrappers"  # torch.autograd.Function.apply calls it
    yield utils, name, getattr(utils, name), _applied(getattr(utils, name))
    optimizer = torch.optim.Optimizer
    yield optimizer, "zero_grad", optimizer.zero_grad, _clearing(optimizer.zero_grad)


def _active() -> Iteration | None:
    """Return the iteration of this thread that handles calls of torch, if there is one."""
    iteration = getattr(THREAD, "active", None)
    return iteration if isinstance(iteration, Iteration) else None


_MAKE_SUBCLASS = torch.Tensor._make_subclass


def _make_subclass(*args: Any, **kwargs: Any) -> Any:
    """Construct a tensor of another class, such as a parameter."""
    iteration = _active()
    if iteration is None:
        return _MAKE_SUBCLASS(*args, **kwargs)
    return iteration.construct(_MAKE_SUBCLASS, args, kwargs)


def _visible(function: Any) -> Any:
    """Return a function that updates parameters, as iterations see it."""

    @functools.wraps(function)
    def update(*args: Any, **kwargs: Any) -> Any:
        active = getattr(THREAD, "active", None)
        if active is None:
            return function(*args, **kwargs)
        return active.update(function, args, kwargs)

    return update


def _needing_values(function: Any, reason: str) -> Any:
    """Return a function whose tensors must have values, as iterations see it."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        iteration = _active()
        if iteration is not None:
            iteration.need_values(reason)
        return function(*args, **kwargs)

    return called


def _applied(unwrap: Any) -> Any:
    """Return what a Python function of autograd calls with its arguments, as iterations see it."""

    @functools.wraps(unwrap)
    def applied(args: tuple[Any, ...]) -> Any:
        iteration = _active()
        if (
            iteration is not None
            and torch.is_grad_enabled()
            and any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        ):
            iteration.need_values("a Python function of autograd")
        return unwrap(args)

    return applied


def _setting(setter: Any, getter: Any) -> Any:
    """Return a function that changes a setting of torch, as iterations see it."""

    @functools.wraps(setter)
    def set_to(*args: Any, **kwargs: Any) -> Any:
        iteration = _active()
        if iteration is not None and (any(kwargs.values()) or args != (getter(),)):
            iteration.change_setting(setter.__name__)
        return setter(*args, **kwargs)

    return set_to


def _native(step: Any, *, makes_states: bool) -> Any:
    """Return the step of an optimizer that reads attributes without a call of the mode for each.

    Its function that updates parameters is still a call of the iteration.

    Args:
        step: The method.
        makes_states: Whether its first call makes states of parameters.
    """

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs_others = args or kwargs or has_hooks(self)
        active = getattr(THREAD, "active", None)
        if not runs_others and active is not None and not isinstance(active, Iteration):
            return active.step_optimizer(self, step)
        if _active() is None or runs_others or (makes_states and not _has_states(self)):
            return step(self, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            return step(self)

    return stepped


def has_hooks(optimizer: Any) -> bool:
    """Return whether hooks run before or after a step of an optimizer."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _has_states(optimizer: Any) -> bool:
    state = optimizer.state
    return all(state.get(each) for group in optimizer.param_groups for each in group["params"])


def _clearing(zero_grad: Any) -> Any:
    """Return ``zero_grad`` of optimizers as one call of an iteration."""

    @functools.wraps(zero_grad)
    def cleared(self: Any, set_to_none: bool = True) -> None:
        iteration = _active()
        if iteration is None or not set_to_none:
            zero_grad(self, set_to_none)
            return
        with torch._C.DisableTorchFunction():
            parameters = [each for group in self.param_groups for each in group["params"]]
            iteration.clear_gradients([each for each in parameters if each.grad is not None])

    return cleared
