"""Saved activations that are kept with fewer bits until the backward pass reads them.

`compressed_graph` adds two operations for a tensor of the joint graph: one compresses it after the forward
pass has read it for the last time, one restores it for the backward pass. A plan of such a graph knows their
times and bytes, and may recompute or swap the compressed memory like any other. The forward pass reads exact
tensors, so that its results are those without compression; gradients have an error.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tunebench.training.fitting.gradient_copy import is_dense
from tunebench.training.fitting.joint_step import WORKSPACE_BYTES, JointStep
from tunebench.training.fitting.redundant_copy import value_computed_again

__all__ = ["FORMATS", "Compressible", "compress", "compressed_graph", "compressible", "restore"]

FORMATS = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
"""Types of compressed elements. Those of fp8 have a scale for each `_BLOCK` of them, in order of memory."""

LEAST_BYTES = 1 << 16
"""Bytes from which a tensor is compressed: below, the time of two calls is worth more than the memory."""

_BLOCK = 256
"""Elements that share a scale."""

_PARTS = 16
"""Parts in which a tensor is compressed, so that temporary tensors are small beside it."""

_LEAST_PART = 1 << 8
"""Least number of blocks of a part."""

_aten = torch.ops.aten
_TOLERANT = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.mul.Tensor, _aten.mul.Scalar, _aten.pow.Tensor_Scalar),
        *(_aten.convolution_backward.default, _aten._softmax_backward_data.default),
        *(_aten.native_layer_norm_backward.default, _aten.native_group_norm_backward.default),
        *(_aten.native_batch_norm_backward.default, _aten._fused_rms_norm_backward.default),
        *(_aten.gelu_backward.default, _aten.silu_backward.default),
    }
)
"""Operators of backward passes whose gradient has about the relative error of the activation that they
read. Not among them: comparisons such as that of ReLU, indices, quotients, exponentials of what was saved, as
in attention and log-softmax, and differences from one, as in tanh and sigmoid, which cancel near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressible:
    """A tensor of a joint step that may be compressed.

    Attributes:
        name: Name of the node that is its memory.
        saved_bytes: Bytes that compression saves.
    """

    name: str
    saved_bytes: int


def compressible(joint: JointStep, element: str) -> list[Compressible]:
    """Return the tensors that the backward pass reads and that may be compressed, largest saving first.

    These are floating tensors of at least `LEAST_BYTES`, which only tolerant operators of the backward pass
    read. Statistics, indices and masks are not among them: they are later results of their operations, or
    not floating.

    Args:
        joint: The joint step.
        element: Key in `FORMATS`.
    """
    chosen = []
    for operation in joint.step.operations[: joint.boundary]:
        for tensor in operation.outputs[:1]:
            use = _use(joint, tensor)
            if use is not None:
                value = use.base.meta["val"]
                saved_bytes = value.untyped_storage().nbytes() - _compressed_bytes(
                    value.numel(), FORMATS[element]
                )
                if saved_bytes > 0 and value.untyped_storage().nbytes() >= LEAST_BYTES:
                    chosen.append(Compressible(name=use.base.name, saved_bytes=saved_bytes))
    return sorted(chosen, key=lambda candidate: -candidate.saved_bytes)


def compressed_graph(joint: JointStep, names: Collection[str], element: str) -> fx.GraphModule:
    """Return the joint graph with compressed tensors; the graph of the joint step is not changed.

    Args:
        joint: The joint step.
        names: Names of tensors that `compressible` returned.
        element: Key in `FORMATS`.
    """
    copied: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    results = graph.graph_copy(joint.graph, copied)
    (output,) = joint.graph.find_nodes(op="output")
    graph.output(results).meta = dict(output.meta)
    tensors = {base.name: tensor for tensor, base in enumerate(joint.base) if base is not None}
    for name in names:
        use = _use(joint, tensors[name])
        if use is None:
            raise KeyError(name)
        _compress(graph, use, FORMATS[element], copied)
    assert joint.graph.owning_module is not None
    return fx.GraphModule(joint.graph.owning_module, graph)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """Where the step reads a tensor.

    Attributes:
        base: The node that is its memory.
        last: The last operation of the forward pass that reads it.
        reads: For each operation of the backward pass that reads it, nodes among its arguments that have its
            memory; each with the views that lead to it from the base, the last one first.
    """

    base: fx.Node
    last: fx.Node
    reads: dict[fx.Node, dict[fx.Node, list[fx.Node]]]


def _use(joint: JointStep, tensor: int) -> _Use | None:
    """Return where a tensor of the forward pass is read; none if it may not be compressed."""
    base = joint.base[tensor]
    value = None if base is None else base.meta.get("val")
    if base is None or not isinstance(value, Tensor) or not _is_whole(value) or joint.returns(tensor):
        return None
    if base.target is operator.getitem and base.args[1] != 0:
        return None
    forward = [node for node in joint.readers[tensor] if joint.operation_of[node] < joint.boundary]
    backward = [node for node in joint.readers[tensor] if joint.operation_of[node] > joint.boundary]
    # The last operation of the forward pass ends it: what follows it would belong to the backward pass.
    if not (forward and backward) or joint.operation_of[forward[-1]] >= joint.boundary - 1:
        return None
    reads: dict[fx.Node, dict[fx.Node, list[fx.Node]]] = {}
    for reader in backward:
        if reader.target not in _TOLERANT:
            return None
        reads[reader] = {}
        for argument in reader.all_input_nodes:
            if tensor in joint.tensors_of(argument):
                views = _views(joint, base, argument, tensor)
                if views is None:
                    return None
                reads[reader][argument] = views
    return _Use(base=base, last=forward[-1], reads=reads)


def _views(joint: JointStep, base: fx.Node, node: fx.Node, tensor: int) -> list[fx.Node] | None:
    """Return the views that lead from a base to a node, the node first; none if other operations do."""
    views = []
    while node is not base:
        sources = [source for source in node.all_input_nodes if tensor in joint.tensors_of(source)]
        if len(sources) != 1 or node in joint.operation_of:
            return None
        views.append(node)
        node = sources[0]
    return views


def _is_whole(value: Tensor) -> bool:
    """Return whether a floating tensor fills its memory."""
    nbytes = value.untyped_storage().nbytes()
    return value.is_floating_point() and is_dense(value) and value.numel() * value.itemsize == nbytes


def _compress(graph: fx.Graph, use: _Use, dtype: torch.dtype, copied: dict[fx.Node, fx.Node]) -> None:
    """Add the operations that compress and restore a tensor to a copy of the joint graph."""
    base, value = copied[use.base], use.base.meta["val"]
    mode: FakeTensorMode = value.fake_mode
    layout = (tuple(value.shape), value.stride(), value.dtype)
    with mode:
        memory = torch.empty(_compressed_bytes(value.numel(), dtype), dtype=torch.uint8, device=value.device)
        restored = torch.empty_strided(*layout[:2], dtype=value.dtype, device=value.device)
    traced = {name: use.base.meta[name] for name in _ORIGINS if name in use.base.meta}
    last_reader = copied[use.last]
    with graph.inserting_after(_last_item(last_reader)):
        small = graph.call_function(compress, (base, dtype))
    small.meta = {**traced, "val": memory, WORKSPACE_BYTES: _workspace_bytes(value.numel(), dtype)}
    readers = [copied[reader] for reader in use.reads]
    with graph.inserting_before(min(readers)):
        whole = graph.call_function(restore, (small, dtype, *layout))
    whole.meta = {**traced, "val": restored}
    for reader, arguments in use.reads.items():
        with graph.inserting_before(copied[reader]):
            for argument, views in arguments.items():
                new = whole
                for view in reversed(views):
                    source = next(s for s in view.all_input_nodes if s is use.base or s in views)
                    new = _view_again(graph, copied[view], copied[source], new)
                copied[reader].replace_input_with(copied[argument], new)


_ORIGINS = ("nn_module_stack", "stack_trace")
"""Entries of a node's `meta` that name its module and its line."""


def _last_item(node: fx.Node) -> fx.Node:
    """Return the last item of a call's results, behind which a new node may read them; or the call."""
    items = [user for user in node.users if user.target is operator.getitem]
    return max(items, default=node)


def _view_again(graph: fx.Graph, view: fx.Node, source: fx.Node, new_source: fx.Node) -> fx.Node:
    """Add a view of another node."""
    new = graph.node_copy(view, lambda node: new_source if node is source else node)
    new.meta["val"] = value_computed_again(new)
    return new


def _compressed_bytes(count: int, dtype: torch.dtype) -> int:
    scales = -(-count // _BLOCK) if _is_scaled(dtype) else 0
    return int(4 * scales + count * dtype.itemsize)


def _workspace_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the bytes of temporary tensors while a tensor is compressed: values in f32, and magnitudes."""
    blocks = min(_part_blocks(count), -(-count // _BLOCK))
    return 4 * (min(count, blocks * _BLOCK) + 2 * blocks) if _is_scaled(dtype) else 0


def _is_scaled(dtype: torch.dtype) -> bool:
    return bool(dtype.itemsize == 1)


def _part_blocks(count: int) -> int:
    return max(_LEAST_PART, -(-count // (_BLOCK * _PARTS)))


def compress(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of a tensor with fewer bits: scales in f32, and elements, of shape (bytes,) u8.

    Each block is divided by its largest magnitude over the largest number of the type. Blocks with infinities
    or NaN have NaN among their elements.

    Args:
        tensor: A floating tensor that fills its memory, of any order of strides.
        dtype: Type in `FORMATS`.
    """
    count = tensor.numel()
    memory = torch.empty(_compressed_bytes(count, dtype), dtype=torch.uint8, device=tensor.device)
    for values, elements, scales in _parts(tensor, memory, dtype):
        if scales is None:
            elements.copy_(values)
        else:
            _scale(values, elements, scales)
    return memory


def _scale(values: Tensor, elements: Tensor, scales: Tensor) -> None:
    """Write blocks divided by their scales, of shape (blocks, 1), and the scales."""
    wide = values.to(torch.float32, copy=True)
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=1, keepdim=True)
    torch.div(largest.clamp_(min=_SMALLEST), torch.finfo(elements.dtype).max, out=scales)
    elements.copy_(wide.div_(scales))


_SMALLEST = 1e-30
"""Least magnitude of a block's scale times the largest number: blocks of zeros have one."""


def restore(
    memory: Tensor,
    compressed: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Return the tensor whose memory `compress` returned.

    Args:
        memory: Scales and elements, of shape (bytes,).
        compressed: Type of the elements.
        shape: Extents of the tensor.
        strides: Its strides in elements.
        dtype: Its type.
    """
    tensor = torch.empty_strided(shape, strides, dtype=dtype, device=memory.device)
    for values, elements, scales in _parts(tensor, memory, compressed):
        values.copy_(elements)
        if scales is not None:
            values.mul_(scales)
    return tensor


def _parts(
    tensor: Tensor, memory: Tensor, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield parts of a tensor, of shape (blocks, elements), with their compressed elements and scales."""
    count = tensor.numel()
    flat = tensor.as_strided((count,), (1,))
    start = _compressed_bytes(count, dtype) - count * dtype.itemsize
    elements = memory[start:].view(dtype)
    scales = memory[:start].view(torch.float32)
    size = _part_blocks(count) * _BLOCK
    whole = count // _BLOCK * _BLOCK
    for begin, end, block in [
        *((begin, min(begin + size, whole), _BLOCK) for begin in range(0, whole, size)),
        *([(whole, count, count - whole)] if count > whole else []),
    ]:
        first = begin // _BLOCK
        blocks = (end - begin) // block
        block_scales = scales[first : first + blocks, None] if _is_scaled(dtype) else None
        yield flat[begin:end].view(blocks, block), elements[begin:end].view(blocks, block), block_scales
