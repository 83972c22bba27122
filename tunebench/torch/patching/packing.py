"""`pack`: linear layers whose weights exist only in oneDNN's blocked layout.

oneDNN converts a plain weight to its blocked layout in each call. A cached conversion could become stale
unnoticed, since torch's version counter misses changes such as ``weight.data.mul_(2)``. So `pack` caches
nothing: the packed weight replaces the parameter, to which no other reference may exist.
"""

from __future__ import annotations

import secrets
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunebench.errors import InputError
from tunebench.torch.functional.custom_op import LIBRARY
from tunebench.torch.patching.model import SkippedModule

__all__ = ["PackReport", "PackedLinear", "pack", "unpack"]


class _PackedWeight:
    """A weight in oneDNN's blocked layout: (out features, in features) f32."""

    __slots__ = ("__weakref__", "blocked")

    def __init__(self, blocked: Tensor) -> None:
        self.blocked = blocked


_weights: weakref.WeakValueDictionary[int, _PackedWeight] = weakref.WeakValueDictionary()
"""Packed weights by their number, which traced graphs hold."""


def _new_number() -> int:
    """Return a random number: an exported graph must not find the weight of another layer elsewhere."""
    return secrets.randbits(62)


def _run(x: Tensor, number: int, features: int, bias: Tensor | None) -> Tensor:
    weight = _weights.get(number)
    if weight is None:
        raise InputError("a packed layer of this graph does not exist any more: compile the model again")
    linear = torch.ops.mkldnn._linear_pointwise.default
    return linear(x, weight.blocked, bias, "none", [], "")


def _fake(x: Tensor, number: int, features: int, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


LIBRARY.define("packed_linear(Tensor x, int number, int features, Tensor? bias) -> Tensor")
LIBRARY.impl("packed_linear", _run, "CPU")
torch.library.register_fake("tunebench::packed_linear", _fake, lib=LIBRARY)


def _blocked(weight: Tensor, rows: int) -> _PackedWeight:
    with torch.no_grad():
        return _PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows))


class PackedLinear(nn.Linear):  # type: ignore[misc]
    """A linear layer with a packed weight, for inference; `pack` converts linear layers to it.

    The layer has no attribute `weight`. `state_dict` returns the plain weight, and `load_state_dict` packs a
    new one. Copies and pickles have weights of their own. Conversions to other types or devices raise.
    """

    rows: int
    """Number of input rows for which oneDNN chooses the layout."""
    _number: int
    _packed: _PackedWeight
    _requires_grad: bool
    """Whether the parameter required gradients."""

    def _pack(self, weight: Tensor) -> None:
        self._packed = _weights[self._number] = _blocked(weight, self.rows)

    def dense(self) -> Tensor:
        """Return a copy of the weight, (out features, in features)."""
        with torch.no_grad():
            return self._packed.blocked.to_dense()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's
        """Return (..., out features) of an input (..., in features), without gradients.

        Raises:
            InputError: if gradients are recorded, or the input is not f32 on a processor.
        """
        if torch.is_grad_enabled():
            raise InputError("packed layers have no gradients: call the model under torch.no_grad()")
        if input.dtype != torch.float32 or input.device.type != "cpu":
            raise InputError(f"expected an f32 tensor on a processor, got {input.dtype} on {input.device}")
        return torch.ops.tunebench.packed_linear(input, self._number, self.out_features, self.bias)

    # -- the weight ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; raise AttributeError if its name is `weight`."""
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        super().register_parameter(name, param)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.dense()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        name = f"{prefix}weight"
        _, _, missing, _, errors = arguments
        without_weight = {key: value for key, value in state_dict.items() if key != name}
        super()._load_from_state_dict(without_weight, prefix, *arguments)
        weight, shape = state_dict.get(name), (self.out_features, self.in_features)
        if weight is None:
            missing.append(name)
        elif weight.shape != shape:
            errors.append(f"size mismatch for {name}: expected {shape}, got {tuple(weight.shape)}")
        else:
            self._pack(weight.to(device="cpu", dtype=torch.float32))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        weight = fn(self.dense())
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise InputError("a packed layer is f32 on a processor: call tunebench.torch.unpack(model) first")
        self._pack(weight)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": self.dense()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state["_packed"]
        super().__setstate__({**state, "_number": _new_number()})
        self._pack(weight)


_NO_WEIGHT = (
    "a packed layer has no attribute 'weight': state_dict() returns a copy, load_state_dict() packs a new "
    "one, and tunebench.torch.unpack(model) restores parameters"
)


# -- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PackReport:
    """Result of `pack`.

    Attributes:
        packed: Names of the layers that have packed weights.
        left: Linear layers that were left unchanged, each with the reason.
    """

    packed: tuple[str, ...]
    left: tuple[SkippedModule, ...]


def pack(model: nn.Module, rows: int = 1) -> PackReport:
    """Pack the weights of a model's f32 linear layers on a processor, for inference.

    A layer is left unchanged if a few timed calls show that torch is as fast, or if another reference to its
    weight exists: a tied layer, an optimizer, a variable, a view. Through such a reference, the weight could
    be changed without its packed layout. `unpack` restores the layers.

    Args:
        model: The model, changed in place.
        rows: Typical number of input rows of a layer, such as tokens. It affects speed, not results.

    Raises:
        InputError: if torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise InputError("weights are packed by oneDNN, which this build of torch does not have")
    packed, left = [], []
    ratios: dict[tuple[Any, ...], float] = {}
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or isinstance(layer, PackedLinear):
            continue
        reason = _refusal(layer) or _slower(layer, rows, ratios)
        if reason:
            left.append(SkippedModule(name, type(layer).__name__, reason))
        else:
            _replace_weight(layer, rows)
            packed.append(name)
    return PackReport(tuple(packed), tuple(left))


def _replace_weight(layer: nn.Linear, rows: int) -> None:
    weight = layer._parameters.pop("weight")
    assert weight is not None
    layer.__class__ = PackedLinear
    layer.rows, layer._number, layer._requires_grad = rows, _new_number(), weight.requires_grad
    layer._pack(weight)


ROUNDS = 7
"""Timed calls with a plain and with a packed weight; the fastest of each are compared."""
LEAST_RATIO = 1.03
"""Least ratio of torch's time to that with a packed weight for which a layer is packed."""


def _slower(layer: nn.Linear, rows: int, ratios: dict[tuple[Any, ...], float]) -> str:
    """Return why a layer is left to torch; empty if packing is faster. Layers of one size are timed once."""
    key = (*layer.weight.shape, layer.bias is None)
    if key not in ratios:
        ratios[key] = _ratio(layer, rows)
    return "" if ratios[key] >= LEAST_RATIO else f"torch takes {ratios[key]:.2f} times as long"


def _ratio(layer: nn.Linear, rows: int) -> float:
    """Return the time of a layer with its plain weight divided by that with a packed one."""
    number = _new_number()
    weight = _weights[number] = _blocked(layer.weight, rows)
    x, packed_linear = torch.randn(rows, layer.in_features), torch.ops.tunebench.packed_linear
    plain_ns, packed_ns = list[int](), list[int]()
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter_ns()
            functional.linear(x, layer.weight, layer.bias)
            between = time.perf_counter_ns()
            packed_linear(x, number, layer.out_features, layer.bias)
            plain_ns.append(between - began)
            packed_ns.append(time.perf_counter_ns() - between)
    del weight  # `_weights` refers to it weakly
    return min(plain_ns) / min(packed_ns)


def _refusal(layer: nn.Linear) -> str:
    """Return why a layer cannot be packed; empty if it can."""
    if type(layer) is not nn.Linear or "weight" not in layer._parameters:
        return "a layer of another class, or with a computed weight"
    weight = layer.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or type(weight) is not nn.Parameter:
        return "a weight of another type than f32, or on another device"
    del weight  # would count as another reference
    return "its weight is also referred to elsewhere" if _is_shared(layer) else ""


def _references(layer: nn.Linear) -> tuple[int, int]:
    """Return the numbers of references to a layer's weight, and to its memory."""
    weight = layer._parameters["weight"]
    assert weight is not None
    return sys.getrefcount(weight), torch._C._storage_Use_Count(weight.untyped_storage()._cdata)


def _is_shared(layer: nn.Linear) -> bool:
    """Return whether anything but a layer refers to its weight, or to the weight's memory."""
    weight = layer._parameters["weight"]
    assert weight is not None
    storage = weight.untyped_storage()
    is_foreign = not storage.resizable() or storage.is_shared() or weight.grad is not None
    is_whole = weight.is_contiguous() and storage.nbytes() == weight.nbytes
    del weight, storage  # would count as other references
    pairs = zip(_references(layer), _references(nn.Linear(1, 1)), strict=True)
    return is_foreign or not is_whole or any(count > unshared for count, unshared in pairs)


def unpack(model: nn.Module) -> int:
    """Restore the linear layers that `pack` changed, and return their number.

    Args:
        model: The model, changed in place.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    for layer in layers:
        weight = layer.dense()
        del layer._packed
        layer.__class__ = nn.Linear
        bias = layer._parameters.pop("bias")
        layer.weight, layer.bias = nn.Parameter(weight, layer._requires_grad), bias
    return len(layers)
