"""Modules of torch that dispatch to tuned kernels; each computes the same as its base class.

`patch` only changes the class of a module: its parameters, hooks and state dict keys stay the same. A trace
by `torch.fx` has one call of each, as it has of torch's modules; `torch.jit.trace` records torch's operators.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from tunebench import torch as served
from tunebench.activation import ACTIVATIONS
from tunebench.dispatch import Dispatcher, dispatcher
from tunebench.dispatch.watch import is_watched
from tunebench.errors import InputError
from tunebench.torch._aten_workload import convolution, signature
from tunebench.torch._tensor import device_of
from tunebench.workloads import parse

__all__ = [
    "TUNED_MODULES",
    "TunedConv2d",
    "TunedCrossEntropyLoss",
    "TunedLayerNorm",
    "TunedLinear",
    "TunedLogSoftmax",
    "TunedMultiheadAttention",
    "TunedRMSNorm",
    "TunedSequential",
    "TunedSoftmax",
    "activation_of",
    "is_tuned",
    "may_fuse",
]


class _Tuned:
    """A patched module, which is not of the classes that `torch.jit.script` compiles."""

    def __prepare_scriptable__(self) -> Any:
        raise InputError(
            "torch.jit.script cannot compile patched modules: call tunebench.torch.unpatch(model) before it, "
            "or use torch.jit.trace"
        )


def _leaf(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Record a call with a proxy of `torch.fx` as one call of the module, as for modules of torch."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, fx.Proxy):
            return forward(self, *args, **kwargs)
        tracer = first.tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)

    return run


class TunedLinear(_Tuned, nn.Linear):  # type: ignore[misc]
    """A linear layer dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return served.linear(input, self.weight, self.bias)

    @property
    def qconfig(self) -> Any:
        """The configuration that `torch.ao.quantization` attached to this module."""
        if "qconfig" not in self.__dict__:
            raise AttributeError("qconfig")
        return self.__dict__["qconfig"]

    @qconfig.setter
    def qconfig(self, attached: Any) -> None:
        warnings.warn(
            "a patched Linear is not quantized: call tunebench.torch.unpatch(model) first",
            stacklevel=2,
        )
        self.__dict__["qconfig"] = attached

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["qconfig"]


class TunedConv2d(_Tuned, nn.Conv2d):  # type: ignore[misc]
    """A convolution of images dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return self._conv_forward(input, self.weight, self.bias)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, **fused: Any) -> Tensor:  # noqa: A002
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = functional.pad(input, self._padded(), mode=self.padding_mode), 0  # noqa: A001
        return served.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups, **fused)

    def _padded(self) -> Any:
        return self._reversed_padding_repeated_twice


class TunedLayerNorm(_Tuned, nn.LayerNorm):  # type: ignore[misc]
    """Layer normalisation dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return served.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class TunedRMSNorm(_Tuned, nn.RMSNorm):  # type: ignore[misc]
    """RMS normalisation dispatched to tuned kernels."""

    @_leaf
    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - torch's
        return served.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class TunedSoftmax(_Tuned, nn.Softmax):  # type: ignore[misc]
    """Softmax dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return served.softmax(input, self.dim, _stacklevel=5)


class TunedLogSoftmax(_Tuned, nn.LogSoftmax):  # type: ignore[misc]
    """Log-softmax dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return served.log_softmax(input, self.dim, _stacklevel=5)


class TunedCrossEntropyLoss(_Tuned, nn.CrossEntropyLoss):  # type: ignore[misc]
    """Cross entropy dispatched to tuned kernels."""

    @_leaf
    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002, D102 - torch's
        return served.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class TunedMultiheadAttention(_Tuned, nn.MultiheadAttention):  # type: ignore[misc]
    """Multi-head attention dispatched to tuned kernels; torch runs calls that return weights."""

    @_leaf
    def forward(  # noqa: D102 - torch's
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights or not self._is_plain(query, key, value):
            return super().forward(  # type: ignore[no-any-return]
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise RuntimeError("need attn_mask if specifying the is_causal hint")  # torch's message
        is_causal = is_causal and key_padding_mask is None
        mask = None if is_causal else self._mask(query, key_padding_mask, attn_mask)
        attended = self._attention(query, key, value, mask, is_causal)
        return served.linear(attended, self.out_proj.weight, self.out_proj.bias), None

    def _is_plain(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        return (
            self._qkv_same_embed_dim
            and self.bias_k is None
            and not self.add_zero_attn
            and not (self.training and self.dropout)
            and not query.is_nested
            and query.dim() == key.dim() == value.dim() == 3
            and key.shape == value.shape
            and query.shape[-1] == key.shape[-1] == self.embed_dim
        )

    def _mask(self, query: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Return the sum of both masks, which can be broadcast to the scores; None without masks."""
        padding, mask = (_summand(summand, query.dtype) for summand in (padding, mask))
        if mask is not None and mask.dim() == 3:  # (batch * heads, queries, keys)
            mask = mask.unflatten(0, (-1, self.num_heads))
        if padding is None:
            return mask
        padding = padding[:, None, None, :]
        return padding if mask is None else mask + padding

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Return the concatenated results of all heads, shaped like the query."""
        q, k, v = (self._heads(tensor) for tensor in self._projected(query, key, value))
        o = served.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        return o.permute(*((0, 2, 1, 3) if self.batch_first else (2, 0, 1, 3))).reshape(query.shape)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if query is key is value:
            return tuple(served.linear(query, weight, bias).chunk(3, dim=-1))
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return [
            served.linear(tensor, w, b)
            for tensor, w, b in zip((query, key, value), weight.chunk(3), biases, strict=True)
        ]

    def _heads(self, tensor: Tensor) -> Tensor:
        """Return a projection as (batch, heads, sequence, head)."""
        parted = tensor.unflatten(-1, (self.num_heads, self.head_dim))
        return parted.permute(*((0, 2, 1, 3) if self.batch_first else (1, 2, 0, 3)))


def _summand(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask of `nn.MultiheadAttention` as a float bias; a boolean mask hides keys where True."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


class TunedSequential(_Tuned, nn.Sequential):  # type: ignore[misc]
    """A sequence of modules; neighbours without hooks that one kernel computes run together."""

    def forward(self, input: Any) -> Any:  # noqa: A002, D102 - torch's
        if isinstance(input, fx.Proxy):
            return super().forward(input)
        chain = tuple(self._modules.values())
        index = 0
        while index < len(chain):
            fused, count = _fused(chain, index)
            input = chain[index](input) if fused is None else fused(input)  # noqa: A001
            index += count
        return input


TUNED_MODULES: dict[type, type] = {
    nn.Linear: TunedLinear,
    nn.Conv2d: TunedConv2d,
    nn.LayerNorm: TunedLayerNorm,
    nn.RMSNorm: TunedRMSNorm,
    nn.Softmax: TunedSoftmax,
    nn.LogSoftmax: TunedLogSoftmax,
    nn.CrossEntropyLoss: TunedCrossEntropyLoss,
    nn.MultiheadAttention: TunedMultiheadAttention,
    nn.Sequential: TunedSequential,
}
"""Class of tuned modules for each class of torch."""


# -- fusion of neighbours ---------------------------------------------------------------------------------

FusedModules = Callable[[Tensor], Tensor]

_FUSED = [(getattr(nn, record.module), record) for record in ACTIVATIONS.values() if record.module]
"""Modules that are computed with a linear layer before them, and their activations."""


def may_fuse(chain: Sequence[Any]) -> bool:
    """Return whether unpatched modules have neighbours that one kernel computes together."""
    pairs = itertools.pairwise(chain)
    return any(
        (type(module) is nn.Linear and module.bias is not None and activation_of(two) is not None)
        or (type(module) is nn.Conv2d and type(two) in (nn.BatchNorm2d, nn.ReLU))
        for module, two in pairs
    )


def _fused(chain: Sequence[Any], index: int) -> tuple[FusedModules | None, int]:
    """Return a function that runs the modules from a place together, and their number; else None and 1."""
    first = chain[index]
    kind = type(first)
    if kind not in (TunedLinear, TunedConv2d) or _has_hooks(first):
        return None, 1
    after = [module for module in chain[index + 1 : index + 3] if not _has_hooks(module)]
    if kind is TunedLinear:
        return _with_activation(first, after)
    return _with_norm(first, after)


def _with_activation(linear: Any, after: Sequence[Any]) -> tuple[FusedModules | None, int]:
    name = activation_of(after[0]) if after else None
    if name is None or linear.bias is None:
        return None, 1
    return lambda x: served.linear(x, linear.weight, linear.bias, activation=name), 2


def activation_of(module: Any) -> str | None:
    """Return the name of the activation that a module computes, if it is fused; else None."""
    for kind, record in _FUSED:
        if type(module) is kind and all(getattr(module, k) == value for k, value in record.arguments.items()):
            return record.name
    return None


def _with_norm(conv: Any, after: Sequence[Any]) -> tuple[FusedModules | None, int]:
    """Fuse a convolution with a normalisation by running statistics, or with its own bias, and a relu."""
    norm = after[0] if after and type(after[0]) is nn.BatchNorm2d else None
    if norm is not None and not _is_affine(norm):
        return None, 1
    rest = after[1:] if norm is not None else after
    relu = rest[0] if rest and type(rest[0]) is nn.ReLU else None
    if norm is None and (relu is None or conv.bias is None):
        return None, 1

    def run(x: Tensor) -> Tensor:
        if norm is None:
            return conv._conv_forward(x, conv.weight, conv.bias, relu=True)
        if not is_tuned(conv, x, "scale+bias+relu" if relu else "scale+bias"):
            y = norm(conv(x))
            return y if relu is None else relu(y)
        scale, bias = _folded(conv, norm)
        return conv._conv_forward(x, conv.weight, bias, scale=scale, relu=relu is not None)

    return run, 1 + (norm is not None) + (relu is not None)


_dispatchers: dict[Any, Dispatcher | None] = {}
_CACHE_SIZE = 4096


def is_tuned(conv: Any, x: Tensor, epilogue: str) -> bool:
    """Return whether a tuned kernel runs a convolution together with the normalisation after it.

    Without one, torch's batch normalisation is faster than a separate scale and bias. While calls are watched
    they are always fused, so that the profile contains the workload to tune.
    """
    if (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or conv.padding_mode != "zeros"
        or isinstance(conv.padding, str)
    ):
        return False
    if is_watched():
        return True
    placed = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups")}
    tf32 = torch.backends.cudnn.allow_tf32
    key = (*signature(x), *signature(conv.weight), *placed.values(), epilogue, tf32)
    if key not in _dispatchers:
        if len(_dispatchers) >= _CACHE_SIZE:
            _dispatchers.clear()
        text, where = convolution(x, conv.weight, placed, epilogue), device_of(x.device)
        is_there = text is not None and not isinstance(where, str)
        _dispatchers[key] = dispatcher(parse(text or ""), *where) if is_there else None
    tuned_dispatcher = _dispatchers[key]
    return tuned_dispatcher is not None and tuned_dispatcher.bound_choice().kernel is not None


def _is_affine(norm: Any) -> bool:
    """Return whether a batch normalisation is only a scale and a shift of each channel, in full precision.

    With batch statistics it depends on the images; with 16-bit weights the scale and the shift would be
    rounded.
    """
    if norm.training or norm.running_var is None or norm.weight is None:
        return False
    return norm.weight.dtype == torch.float32 and not torch._C._is_any_autocast_enabled()


def _folded(conv: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift of a normalisation, by operations that autograd can differentiate."""
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
    return scale, norm.bias - mean * scale


def _has_hooks(module: Any) -> bool:
    """Return whether hooks are called around a module; such a module is not fused."""
    everywhere = torch.nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )
