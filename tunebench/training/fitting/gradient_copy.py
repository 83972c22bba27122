"""Copies of gradients that autograd makes after the backward graph: `gradient_copy_bytes`.

The first gradient of a parameter becomes its `grad` as it is if nothing else refers to the tensor and its
strides are those of the parameter. Otherwise autograd copies it into the strides of the parameter, parameter
by parameter, and then releases it.

Source: PyTorch, `torch/csrc/autograd/functions/accumulate_grad.h` and
`torch/csrc/autograd/utils/grad_layout_contract.h`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

__all__ = ["gradient_copy_bytes", "is_dense"]


def gradient_copy_bytes(
    graph: fx.Graph,
    parameters: Collection[int],
    tensor_of: Mapping[fx.Node, int],
    sizes: Sequence[int],
    resident: Collection[int],
) -> int:
    """Return the most bytes that copies of gradients add to the memory at the end of the backward graph.

    Args:
        graph: The joint graph, with the descriptions of AOTAutograd.
        parameters: Places of the parameters among the inputs that Dynamo's graph has.
        tensor_of: Tensor of each node that has one: the memory that it shares.
        sizes: Bytes of each tensor.
        resident: Tensors that stay on the device.
    """
    (output,) = graph.find_nodes(op="output")
    results = [node for node in output.args[0] if isinstance(node, fx.Node)]
    gradients = _gradients(graph, output, parameters)
    uses = Counter(results)
    copied = Counter[int]()
    kept = {tensor_of[node] for node in results if node not in gradients and node in tensor_of}
    for node, variables in gradients.items():
        tensor = tensor_of[node]
        count = len(variables)
        # The last parameter to receive a tensor takes it: then no other refers to it.
        if uses[node] == count and _has_layout_of(node.meta["val"], variables[-1]):
            count -= 1
            kept.add(tensor)
        copied[tensor] += sum(variable.numel() * variable.itemsize for variable in variables[:count])
    freed = {tensor: 0 if tensor in kept or tensor in resident else sizes[tensor] for tensor in copied}
    # In the worst order, gradients whose copies are larger come first, and the largest bytes that exist only
    # until a gradient is released come last.
    grown = sum(max(0, nbytes - freed[tensor]) for tensor, nbytes in copied.items())
    return grown + max((min(nbytes, freed[tensor]) for tensor, nbytes in copied.items()), default=0)


def _gradients(graph: fx.Graph, output: fx.Node, parameters: Collection[int]) -> dict[fx.Node, list[Tensor]]:
    """Return the parameters that receive each gradient."""
    inputs = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    gradients = dict[fx.Node, list[Tensor]]()
    descriptions = tree_leaves(output.meta.get("desc"))
    for node, description in zip(output.args[0], descriptions, strict=False):
        variable: Any = getattr(description, "grad_of", None)
        if isinstance(node, fx.Node) and getattr(variable, "idx", None) in parameters:
            gradients.setdefault(node, []).append(inputs[variable].meta["val"])
    return gradients


def _has_layout_of(gradient: Tensor, variable: Tensor) -> bool:
    """Return whether a parameter may take a gradient as it is."""
    if not is_dense(variable):
        return bool(gradient.is_contiguous())
    dimensions = zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
    return all(size == 1 or stride == variable_stride for size, stride, variable_stride in dimensions)


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill its memory without gaps or overlaps."""
    dense_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != dense_stride:
                return False
            dense_stride *= size
    return True
