"""`patched_calls`: dispatch of a program's own calls of torch's functions to tuned kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tunebench import torch as served

__all__ = ["patched_calls"]


@contextmanager
def patched_calls() -> Iterator[None]:
    """Dispatch calls of torch's functions within this block, in this thread, to `tunebench.torch`.

    The functions are linear, conv2d, softmax, log_softmax, layer_norm, rms_norm, cross_entropy and
    scaled_dot_product_attention of `torch.nn.functional`, and `a @ b` as matmul.

    Functions called inside torch's own functions are not reached. Every torch function called in the block
    takes a few microseconds longer, so prefer `patch` for modules.
    """
    with _TunedFunctionMode():
        yield


def _softmax_of(name: str) -> Callable[..., Any]:
    function = getattr(served, name)

    def call(input: Tensor, dim: int, dtype: Any = None) -> Any:  # noqa: A002 - torch's name
        return function(input, dim, dtype=dtype)

    return call


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    functional.linear: served.linear,
    functional.conv2d: served.conv2d,
    functional.softmax: served.softmax,
    functional.log_softmax: served.log_softmax,
    functional.layer_norm: served.layer_norm,
    functional.rms_norm: served.rms_norm,
    functional.cross_entropy: served.cross_entropy,
    functional.scaled_dot_product_attention: served.scaled_dot_product_attention,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), served.matmul),
    **dict.fromkeys((torch.softmax, Tensor.softmax), _softmax_of("softmax")),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), _softmax_of("log_softmax")),
}
"""Function of tunebench.torch for each function of torch, with the same arguments."""


class _TunedFunctionMode(TorchFunctionMode):  # type: ignore[misc]
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        function = _FUNCTIONS.get(func)
        if function is None or "out" in kwargs:
            return func(*args, **kwargs)
        return function(*args, **kwargs)
