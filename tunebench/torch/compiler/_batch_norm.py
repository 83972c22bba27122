"""Batch normalisation by batch statistics: kernels that compute the statistics, then an expression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from tunebench._figure import significant
from tunebench.errors import InputError
from tunebench.expression import LARGEST, SMALLEST
from tunebench.graph.node import NodeOperand
from tunebench.torch._layout import channel_broadcast, is_dense
from tunebench.torch._tensor import DTYPES
from tunebench.workloads import workload

__all__ = ["batch_norm_fields", "batch_norm_gradient_fields"]

AddValue = Callable[[str, Tensor], str]
"""Adds a value to the graph, from its name and tensor, and returns its name."""
ValueOf = Callable[[fx.Node], str]
"""Returns the value of an FX node; statistics, whose type in torch may differ, as a value in f32."""

OTHER_TYPES = "weights or statistics that are not f32"
OTHER_LAYOUT = "images whose channels are not innermost in memory"


def batch_norm_fields(
    node: fx.Node, arguments: Mapping[str, Any], value_of: ValueOf, add_value: AddValue
) -> dict[str, Any]:
    """Return the fields of `graph.Node` for a batch normalisation in training.

    Args:
        node: The call; its results are the images, the mean and factor of each channel, and running
            statistics.
        arguments: Its arguments by name.
        value_of: Returns the value of an FX node.
        add_value: Adds the values of results.
    """
    weights = [arguments[name] for name in ("weight", "bias", "running_mean", "running_var")]
    x, results = arguments["input"], node.meta["val"]
    reason = _refusal((x,), weights, results[0])
    if not arguments["training"]:
        reason = "statistics that change from step to step"
    if reason or not SMALLEST <= arguments["eps"] <= LARGEST or not 0 < arguments["momentum"] <= 1:
        return {
            "reason": reason
            or f"eps={significant(arguments['eps'], 6)}, momentum={significant(arguments['momentum'], 6)}"
        }
    try:
        statistics = workload(
            "batchnorm_stats", **_sizes(x), eps=arguments["eps"], momentum=arguments["momentum"]
        )
    except InputError as error:
        return {"reason": str(error)}
    statistic_values = [add_value(f"{node.name}.{index}", results[index].float()) for index in range(1, 5)]
    roles = {"x": value_of(x), "running_mean": value_of(weights[2]), "running_var": value_of(weights[3])}
    roles |= dict(zip(("mean", "rstd", "new_mean", "new_var"), statistic_values, strict=True))
    return {
        "workloads": (str(statistics),),
        "roles": roles,
        "expression": "(x0-x1)*x2*x3+x4",
        "operands": _operands(
            (value_of(x),), (*statistic_values[:2], value_of(weights[0]), value_of(weights[1]))
        ),
    }


def batch_norm_gradient_fields(
    node: fx.Node, arguments: Mapping[str, Any], value_of: ValueOf, add_value: AddValue
) -> dict[str, Any]:
    """Return the fields of `graph.Node` for the gradients of a batch normalisation.

    Kernels compute the gradients of weight and bias; an expression computes the gradient of the images.

    Args:
        node: The call.
        arguments: Its arguments by name.
        value_of: Returns the value of an FX node.
        add_value: Adds the values of results.
    """
    dy, x = arguments["grad_out"], arguments["input"]
    vectors = [arguments[name] for name in ("weight", "save_invstd", "save_mean")]
    results = node.meta["val"]
    reason = _refusal((dy, x), vectors[:1], results[0])
    if not arguments["train"] or not all(arguments["output_mask"]):
        reason = "gradients by running statistics, or only some of the gradients"
    if reason:
        return {"reason": reason}
    sizes = _sizes(x)
    try:
        sums = workload("batchnorm_stats", **sizes, direction="backward")
    except InputError as error:
        return {"reason": str(error)}
    sum_values = [add_value(f"{node.name}.{index}", results[index]) for index in (1, 2)]
    weight, rstd, mean = map(value_of, vectors)
    return {
        "workloads": (str(sums),),
        "roles": {
            "dy": value_of(dy),
            "x": value_of(x),
            "mean": mean,
            "rstd": rstd,
            **dict(zip(("dgamma", "dbeta"), sum_values, strict=True)),
        },
        "expression": f"x2*x3*(x0-(x6+(x1-x4)*x3*x5)*{1.0 / sizes['rows']!r})",
        "operands": _operands((value_of(dy), value_of(x)), (weight, rstd, mean, *sum_values)),
    }


def _refusal(images: tuple[Any, ...], vectors: list[Any], result: Tensor) -> str:
    """Return why kernels cannot compute a batch normalisation; empty if they can."""
    if not all(isinstance(node, fx.Node) for node in (*images, *vectors)):
        return "without weights or running statistics"
    tensors = [node.meta["val"] for node in images]
    if any(node.meta["val"].dtype != torch.float32 for node in vectors):
        return OTHER_TYPES
    if result.dtype not in DTYPES or any(tensor.dtype != result.dtype for tensor in tensors):
        return OTHER_TYPES
    alike = is_dense(result) and all(tensor.stride() == result.stride() for tensor in tensors)
    return "" if alike and channel_broadcast(result) == "vector" else OTHER_LAYOUT


def _sizes(images: fx.Node) -> dict[str, Any]:
    tensor = images.meta["val"]
    channels = tensor.shape[1]
    return {"rows": tensor.numel() // channels, "cols": channels, "dtype": DTYPES[tensor.dtype]}


def _operands(wholes: tuple[str, ...], vectors: tuple[str, ...]) -> dict[str, NodeOperand]:
    operands = [
        *(NodeOperand(value, "whole") for value in wholes),
        *(NodeOperand(v, "vector") for v in vectors),
    ]
    return {f"x{index}": operand for index, operand in enumerate(operands)}
