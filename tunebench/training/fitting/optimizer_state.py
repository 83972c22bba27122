"""States of optimizers: their bytes, and states in host memory that come to the device for the update.

    states = HostStates(optimizer)
    states.place(3, store, device, room_bytes)   # the three largest states are in host memory from now on
    optimizer.step()                             # copies them in, updates, and copies them out, in buckets

The update runs on the device by the optimizer itself, so that weights are bit for bit those of states on the
device. Between updates, `optimizer.state` has tensors in host memory: state dicts work as before.
"""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tunebench.errors import InputError
from tunebench.training.fitting.host_store import HostStore, view_of

__all__ = ["HostStates", "state_bytes"]

_FEW = 8
"""Extent of the parameter on which states of an optimizer are measured."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's states after its first step.

    States of the class are measured on a parameter of few elements, and scaled.

    Args:
        optimizer: The optimizer; it is not changed.

    Raises:
        InputError: The optimizer's step fails for such a parameter, for example because it needs a closure.
    """
    return sum(size for _, size in _parameter_state_bytes(optimizer))


def _parameter_state_bytes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, int]]:
    """Yield each parameter of an optimizer with the bytes of its states after the first step."""
    for group in filter(_has_parameters, optimizer.param_groups):
        small = _small_parameters(1, group)
        try:
            small_optimizer = _like(optimizer, group, small)
            small_optimizer.step()
        except Exception as error:  # a foreign optimizer may raise anything
            raise InputError(
                f"the states of {type(optimizer).__name__} are not known, because a step of a small one with "
                f"the same options fails: {error}. Pass their bytes by other_bytes"
            ) from error
        states = [leaf for leaf in tree_leaves(small_optimizer.state[small[0]]) if isinstance(leaf, Tensor)]
        elements = small[0].numel()
        per_element = sum(leaf.numel() for leaf in states if leaf.numel() >= elements) / elements
        for parameter in group["params"]:
            yield parameter, int(per_element * parameter.numel()) * parameter.itemsize


def _has_parameters(group: dict[str, Any]) -> bool:
    return bool(group["params"])


def _small_parameters(count: int, group: dict[str, Any]) -> list[nn.Parameter]:
    """Return parameters of few elements, with gradients, on the device of a group's parameters."""
    device = group["params"][0].device
    parameters = [nn.Parameter(torch.ones(_FEW, _FEW, device=device)) for _ in range(count)]
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.linspace(-1, 1 + place, _FEW * _FEW, device=device).reshape(_FEW, _FEW)
    return parameters


def _like(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class with the options of a group, for other parameters."""
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in group.items() if name in accepted and name != "params"}
    return type(optimizer)(parameters, **options)


def require_separate_updates(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError unless an optimizer updates each parameter by its own gradient and states.

    Two small parameters are updated together, and one by one.

    Args:
        optimizer: The optimizer; it is not changed.
    """
    name = type(optimizer).__name__
    for group in filter(_has_parameters, optimizer.param_groups):
        together, alone = _small_parameters(2, group), _small_parameters(2, group)
        try:
            for parameters in (together, alone[:1], alone[1:]):
                small, hook_calls = _like(optimizer, group, parameters), list[Any]()
                small.register_step_pre_hook(lambda *_, calls=hook_calls: calls.append(None))
                for _ in range(2):
                    small.step()
                states = [small.state.get(parameter, {}) for parameter in parameters]
        except Exception as error:  # a foreign optimizer may raise anything
            raise InputError(
                f"host_states needs an optimizer that updates each parameter by itself, such as AdamW; a "
                f"small {name} with the same options fails: {error}"
            ) from error
        if not all(map(torch.equal, together, alone)):
            raise InputError(
                f"host_states needs an optimizer that updates each parameter by itself, such as AdamW; "
                f"{name} updates two parameters together otherwise than one by one"
            )
        elements = alone[0].numel()
        if not any(isinstance(leaf, Tensor) and leaf.numel() >= elements for leaf in tree_leaves(states)):
            raise InputError(
                f"host_states needs states as large as their parameters in optimizer.state, and {name} has "
                "none there: leave it out"
            )
        if len(hook_calls) > 2:
            raise _calls_base_step(optimizer)


def _calls_base_step(optimizer: torch.optim.Optimizer) -> InputError:
    return InputError(
        f"host_states needs an optimizer whose step runs its hooks once: that of {type(optimizer).__name__} "
        "calls the step of a class it extends, which runs them again"
    )


@dataclass(slots=True)
class _Bucket:
    """Parameters that are updated at once.

    Attributes:
        parameters: The parameters.
        size_bytes: Bytes of their states.
        host: Copies of the states that are on their way to the host, by parameter and name.
    """

    parameters: list[Tensor]
    size_bytes: int
    host: dict[tuple[Tensor, str], tuple[Tensor, Tensor]]


_managed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""Optimizers with states in host memory."""


class HostStates:
    """States of an optimizer, of which those of some parameters are in host memory between updates.

    Parameters are ordered by the bytes of their states, largest first.

    Args:
        optimizer: The optimizer.

    Attributes:
        optimizer: The optimizer.
        sizes: Bytes of the states of each parameter.
        count: Number of parameters whose states are in host memory.

    Raises:
        InputError: The optimizer does not update each parameter by itself, or has no states.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in _managed:
            raise InputError("the optimizer has states in host memory for another model: make one for each")
        require_separate_updates(optimizer)
        self.optimizer = optimizer
        ordered = sorted(_parameter_state_bytes(optimizer), key=lambda item: -item[1])
        self._parameters = [parameter for parameter, _ in ordered]
        self.sizes = tuple(size for _, size in ordered)
        self.count = 0
        self._store: HostStore | None = None
        self._device = torch.device("cpu")
        self._room_bytes = 0
        self._on_host: dict[tuple[Tensor, str], tuple[Tensor, Tensor]] = {}
        """Bytes in host memory of each state, and the tensor of it that the optimizer has."""
        self._groups: list[list[Tensor]] = []
        """Parameters of the optimizer's groups, while it has none."""
        self._updates = False
        """Whether the optimizer's step runs for a part of its parameters."""

    def host_bytes(self, count: int) -> int:
        """Return the bytes of the states of the first parameters.

        Args:
            count: Number of parameters.
        """
        return sum(self.sizes[:count])

    def count_for(self, size_bytes: float) -> int:
        """Return the least number of parameters whose states have some bytes; all if they have fewer.

        Args:
            size_bytes: The bytes.
        """
        return next(
            (count for count in range(len(self.sizes) + 1) if self.host_bytes(count) >= size_bytes),
            len(self.sizes),
        )

    def place(self, count: int, store: HostStore, device: torch.device, room_bytes: int) -> None:
        """Keep the states of the first parameters in host memory from now on.

        Args:
            count: Number of parameters; those of an earlier call stay in host memory.
            store: The host memory.
            device: The device of the parameters.
            room_bytes: Bytes on the device for states that are there during the update only, at least those
                of the first parameter.
        """
        if self._store is None and count:
            _managed.add(self.optimizer)
            self.optimizer.register_step_pre_hook(self._update)
            self.optimizer.register_step_post_hook(self._restore_groups)
        self._room_bytes = min(room_bytes, self._room_bytes) if self.count else room_bytes
        self._store, self._device, self.count = store, device, max(count, self.count)
        for bucket in self._buckets():  # states of a run that is continued
            self._leave(bucket)
            self._left(bucket)

    def _buckets(self) -> list[_Bucket]:
        """Return the parameters with states in host memory, divided so that three buckets fit the room."""
        buckets = [_Bucket([], 0, {})]
        for parameter, size in zip(self._parameters[: self.count], self.sizes, strict=False):
            last = buckets[-1]
            if last.parameters and last.size_bytes + size > self._room_bytes // 3:
                buckets.append(last := _Bucket([], 0, {}))
            last.parameters.append(parameter)
            last.size_bytes += size
        return buckets

    def _update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Update all parameters before the call of `step`, which then has none."""
        if self._updates:
            raise _calls_base_step(optimizer)
        self._restore_groups()
        loss, closure = None, args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._groups = [group["params"] for group in optimizer.param_groups]
        try:
            self._update_host_states()
            on_host = set(self._parameters[: self.count])
            self._update_only(set(itertools.chain(*self._groups)) - on_host)
            self._select(())
        except BaseException:
            self._restore_groups()
            raise
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _update_host_states(self) -> None:
        """Copy the states of a bucket in while the one before is updated, and out while the next one is."""
        waiting, leaving = deque(self._buckets()), deque[_Bucket]()
        arrived: deque[_Bucket] = deque()
        on_device = 0
        while waiting or arrived:
            while waiting and len(arrived) < 2:
                if on_device and on_device + waiting[0].size_bytes > self._room_bytes:
                    if not leaving:
                        break
                    on_device -= leaving[0].size_bytes
                    self._left(leaving.popleft())
                    continue
                arrived.append(waiting.popleft())
                on_device += arrived[-1].size_bytes
                self._arrive(arrived[-1])
            bucket = arrived.popleft()
            self._wait_for(bucket)
            self._update_only(bucket.parameters)
            self._leave(bucket)
            leaving.append(bucket)
        for bucket in leaving:
            self._left(bucket)

    def _arrive(self, bucket: _Bucket) -> None:
        """Start to copy states to the device."""
        assert self._store is not None
        for parameter, name, value in self._states(bucket):
            host, view = self._on_host.get((parameter, name), (None, None))
            if host is not None and view is value:  # else the state is new, such as a loaded one
                bucket.host[parameter, name] = self._store.copy_in(host, self._device), value

    def _wait_for(self, bucket: _Bucket) -> None:
        """Give the optimizer the states that were copied to the device."""
        assert self._store is not None
        for (parameter, name), (memory, value) in bucket.host.items():
            self._store.wait(memory)
            layout = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
            self.optimizer.state[parameter][name] = view_of(memory, *layout)
        bucket.host.clear()

    def _leave(self, bucket: _Bucket) -> None:
        """Start to copy states to the host."""
        assert self._store is not None
        for parameter, name, value in self._states(bucket):
            if self._on_host.get((parameter, name), (None, None))[1] is not value:
                bucket.host[parameter, name] = self._store.copy_out(value), value

    def _left(self, bucket: _Bucket) -> None:
        """Give the optimizer the states in host memory, and release those on the device."""
        assert self._store is not None
        for (parameter, name), (host, value) in bucket.host.items():
            self._store.wait(host)
            layout = (value.dtype, tuple(value.shape), value.stride(), value.storage_offset())
            view = view_of(host, *layout)
            self._on_host[parameter, name] = host, view
            self.optimizer.state[parameter][name] = view
        bucket.host.clear()

    def _states(self, bucket: _Bucket) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield the states of a bucket that have at least as many elements as their parameter."""
        for parameter in bucket.parameters:
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.numel() >= max(2, parameter.numel()):
                    yield parameter, name, value

    def _update_only(self, parameters: Iterable[Tensor]) -> None:
        """Update some parameters by the optimizer's own step, without its hooks."""
        self._select(parameters)
        self._updates = True
        try:
            type(self.optimizer).step.__wrapped__(self.optimizer)
        finally:
            self._updates = False

    def _select(self, parameters: Iterable[Tensor]) -> None:
        """Leave some of their parameters in the optimizer's groups."""
        chosen = set(parameters)
        for group, all_parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
            group["params"] = [parameter for parameter in all_parameters if parameter in chosen]

    def _restore_groups(self, *_: Any) -> None:
        """Give the optimizer's groups their parameters again."""
        if self._groups:
            for group, all_parameters in zip(self.optimizer.param_groups, self._groups, strict=True):
                group["params"] = all_parameters
        self._groups = []
