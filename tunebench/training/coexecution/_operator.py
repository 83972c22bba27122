"""What operators of ATen do besides computing: write memory, draw random numbers, raise errors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from tunebench.training.coexecution._call import Constant, Operation, Value, flat

__all__ = [
    "allocates",
    "allocation",
    "cost_us",
    "depends_on_data",
    "filling",
    "indices",
    "is_random",
    "may_raise",
    "scales",
    "written",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_HIDDEN_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Arguments that operators write although their schemas do not say so."""

_DIVIDE = _names(
    "div floor_divide remainder fmod pow __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift"
)
"""Elementwise operators that raise for some integers."""

_SAFE = _names(
    """mm addmm bmm baddbmm mv addmv dot convolution convolution_backward native_layer_norm
    native_layer_norm_backward native_batch_norm native_batch_norm_backward native_group_norm
    native_group_norm_backward _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    sum mean amax amin max min argmax argmin var std var_mean std_mean norm linalg_vector_norm prod cat
    stack clone copy copy_ _to_copy empty empty_like empty_strided new_empty new_empty_strided zeros
    zeros_like new_zeros ones ones_like new_ones full full_like new_full arange fill fill_ zero zero_
    constant_pad_nd max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d upsample_bilinear2d_backward gelu_backward threshold_backward sigmoid_backward
    tanh_backward hardtanh_backward leaky_relu_backward elu_backward silu_backward softplus_backward
    logsigmoid_backward select_backward slice_backward embedding_dense_backward nll_loss_backward
    nll_loss2d_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward triu tril roll
    flip cumsum any all unfold_backward repeat logsumexp _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward lift_fresh detach view _unsafe_view reshape
    _reshape_alias log_sigmoid_forward log_sigmoid_backward _foreach_norm _foreach_mul_ _foreach_add_
    _foreach_clamp_max_ bernoulli_ normal_ uniform_ rand randn rand_like randn_like
    _weight_norm_interface _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl sort topk eye
    linspace tril_indices triu_indices split split_with_sizes unsafe_split unsafe_split_with_sizes
    unsafe_chunk _safe_softmax binary_cross_entropy_with_logits slice_scatter select_scatter"""
)
"""Operators that raise only for sizes and types."""

_SCALING = _names(
    """add sub mul div rsub lt le gt ge eq ne pow add_ sub_ mul_ div_ clamp clamp_ clamp_min clamp_max
    clamp_min_ clamp_max_ maximum minimum addcmul addcdiv addcmul_ addcdiv_ lerp lerp_ leaky_relu fill_
    masked_fill masked_fill_"""
)
"""Elementwise operators whose numbers are factors, summands and thresholds: they decide no size or type."""

_ALLOCATING = _names("empty empty_like empty_strided new_empty new_empty_strided")


@functools.cache
def _base(operator: Any) -> str:
    return str(operator.name()).removeprefix("aten::").split(".")[0]


@functools.cache
def is_random(operator: Any) -> bool:
    """Return whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def allocates(operator: Any) -> bool:
    """Return whether an operator makes a tensor without contents."""
    return _base(operator) in _ALLOCATING


def scales(operator: Any) -> bool:
    """Return whether the numbers of an operator only scale or shift its results or compare with them."""
    return _base(operator) in _SCALING


def written(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operator writes."""
    tensors: list[Tensor] = []
    for position, name in _written_arguments(operator):
        value = args[position] if position < len(args) else kwargs.get(name)
        tensors += [
            each for each in (value if isinstance(value, (list, tuple)) else [value]) if each is not None
        ]
    for position in _HIDDEN_WRITES.get(_base(operator), ()):
        if args[5] and args[position] is not None:
            tensors.append(args[position])
    return tensors


@functools.cache
def _written_arguments(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operator writes, according to its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def depends_on_data(operation: Operation, reads: Sequence[torch.dtype]) -> bool:
    """Return whether the sizes of an operation's results depend on the values of its arguments."""
    tags = operation.operator.tags
    if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return True
    return _base(operation.operator) == "index" and any(
        dtype in (torch.bool, torch.uint8) for dtype in reads[1:]
    )


def indices(operation: Operation) -> tuple[int, int, int | None] | None:
    """Return the indices that an operation requires to be in range (see `Bound`), or None if it has none.

    Returns:
        Index of the value that holds the indices, index of the value whose axis they address, and the index
        that the operation ignores.
    """
    name = _base(operation.operator)
    if name == "embedding":
        return operation.args[1].index, operation.args[0].index, None
    if name in ("nll_loss_forward", "nll_loss2d_forward"):
        return operation.args[1].index, operation.args[0].index, operation.args[4].value
    return None


def may_raise(operation: Operation, dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether an operation raises an error for some values of its arguments."""
    operator = operation.operator
    name = _base(operator)
    if operator.namespace == "profiler" or operator.is_view or name in _SAFE:
        return False
    if torch.Tag.pointwise not in operator.tags:
        return True
    integers = any(not dtype.is_floating_point and dtype is not torch.bool for dtype in dtypes)
    return integers and name.rstrip("_") in _DIVIDE


_CALL_US = 2.0
_BYTES_PER_US = 8_000
_FLOPS_PER_US = 20_000
"""Overhead, bandwidth and speed of a usual processor core: they decide only where segments are cut."""


def cost_us(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return a rough time of an operator on one core in microseconds."""
    if operator.is_view:
        return 0.5
    size = sum(each.nbytes for each in flat((args, kwargs, result)) if isinstance(each, Tensor))
    count = flop_registry.get(operator.overloadpacket)
    flops: float = count(*args, **kwargs, out_val=result) if count is not None else 0
    return _CALL_US + float(max(size / _BYTES_PER_US, flops / _FLOPS_PER_US))


def allocation(tensor: Tensor, outputs: tuple[int | None, ...]) -> Operation:
    """Return the operation that allocates memory like that of a tensor."""
    return Operation(
        operator=torch.ops.aten.empty_strided.default,
        args=([*map(Constant, tensor.shape)], [*map(Constant, tensor.stride())]),
        kwargs=(("dtype", Constant(tensor.dtype)),), outputs=outputs, is_list=False,
    )  # fmt: skip


_FILLING = {
    "aten::rand_like": torch.ops.aten.uniform_.default,
    "aten::randn_like": torch.ops.aten.normal_.default,
}


def filling(operator: Any, outputs: tuple[int | None, ...]) -> Operation | None:
    """Return the operation that fills allocated memory as an operator does; None if there is none."""
    index, *others = outputs
    if index is None or others or operator.name() not in _FILLING:
        return None
    return Operation(
        operator=_FILLING[operator.name()], args=(Value(index),), kwargs=(), outputs=outputs, is_list=False,
        writes=(index,), is_random=True,
    )  # fmt: skip
