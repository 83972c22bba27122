"""Passes of one pipeline stage, which hold only the memory that a schedule accounts for.

The stages of torch allocate receive buffers of all micro-batches before the first step and keep inputs and
outputs of a micro-batch until its backward pass. Here a buffer exists from the receive on, and autograd alone
decides what is kept: tensors without elements take the places of inputs and outputs in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import PipelineStage, _RecvInfo

from tunebench.training.pipeline_runtime.saved_activations import SavedActivations, storages_of

__all__ = ["Stage", "is_sharded", "unchanged_buffers"]


class Stage(PipelineStage):  # type: ignore[misc]
    """One stage of a pipeline.

    Args:
        module: The part of the model.
        index: Index of the stage.
        stages: Number of stages.
        device: Device of the module.
        group: Process group.

    Attributes:
        saved: What autograd saved for each micro-batch whose activations the schedule evicts.
        evicted_bytes: Bytes of each storage that an eviction copies; known after `prepare_forward`.
    """

    def __init__(
        self, module: nn.Module, index: int, stages: int, device: torch.device, group: Any = None
    ) -> None:
        super().__init__(module, index, stages, device, group=group)
        self.saved: dict[int, SavedActivations] = {}
        self.evicted_bytes: tuple[int, ...] = ()
        self._received: dict[int, list[Tensor]] = {}
        self._received_grads: dict[int, list[Tensor | None]] = {}
        self._leaves: dict[int, list[Any]] = {}
        self._outputs: dict[int, list[Tensor]] = {}
        self._own_storages: frozenset[int] = frozenset()

    # ------------------------------------------------------------------------------------ transfers

    def input_buffers(self) -> list[Tensor]:
        """Return empty tensors for the inputs of a micro-batch."""
        return [self._buffer(meta) for meta in self._stage_meta.inputs]

    def gradient_buffers(self) -> list[Tensor | None]:
        """Return empty tensors for the gradients of a micro-batch's outputs; none for those without."""
        return [None if meta is None else self._buffer(meta) for meta in self._stage_meta.output_grads]

    def set_input(self, microbatch: int, tensors: Sequence[Tensor]) -> None:
        """Set the inputs of a forward pass."""
        self._received[microbatch] = list(tensors)

    def set_output_gradients(self, microbatch: int, tensors: Sequence[Tensor | None]) -> None:
        """Set the gradients of the outputs for a backward pass."""
        self._received_grads[microbatch] = list(tensors)

    def take_outputs(self, microbatch: int) -> list[Tensor]:
        """Return the outputs of a forward pass, once; dense."""
        metas = self._stage_meta.outputs
        return [
            _as_received(*output_with_meta)
            for output_with_meta in zip(self._outputs.pop(microbatch), metas, strict=True)
        ]

    def take_input_gradients(self, microbatch: int) -> list[Tensor | None]:
        """Return the gradients of the inputs after a backward pass, once; dense, or none."""
        gradients: list[Tensor | None] = []
        metas = self._stage_meta.input_grads
        for grad, meta in zip(self.bwd_cache.pop(microbatch), metas, strict=True):
            if meta is None:
                gradients.append(None)
            elif grad is None:
                gradients.append(self._buffer(meta).zero_())
            else:
                gradients.append(_as_received(grad, meta))
        return gradients

    # --------------------------------------------------------------------------------------- passes

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the forward pass of a micro-batch."""
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        outputs, inputs = self.fwd_cache[fwd_chunk_id]
        leaves = self._leaves.pop(fwd_chunk_id, [])
        if not self.is_last:
            self._outputs[fwd_chunk_id] = [tensor.detach() for tensor in outputs]
            outputs = tuple(
                _EmptyOutput.apply(tensor) if tensor.requires_grad else _empty_like(tensor)
                for tensor in outputs
            )
        if self.has_backward:
            self.fwd_cache[fwd_chunk_id] = outputs, [*leaves, *inputs[len(leaves) :]]
        else:
            del self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, **keywords: Any) -> None:
        """Run the backward pass of a micro-batch, or the part of it for the input."""
        super().backward_one_chunk(bwd_chunk_id, **keywords)
        if bwd_chunk_id in self.backward_state and not self.is_first:
            for leaf in self.backward_state[bwd_chunk_id][0][: len(self._stage_meta.inputs)]:
                if leaf is not None:
                    leaf.grad = None  # it is in bwd_cache

    def clear_runtime_states(self) -> None:
        """Forget the micro-batches of the last step."""
        super().clear_runtime_states()
        for states in (self._received, self._received_grads, self._leaves, self._outputs, self.saved):
            states.clear()
        for states in (self.bwd_cache, self.backward_state, self.dw_runner):
            states.clear()

    @contextmanager
    def recording(self, microbatch: int, not_evicted: frozenset[int]) -> Iterator[None]:
        """Make what autograd saves within the context evictable.

        Args:
            microbatch: The micro-batch.
            not_evicted: Identities of storages that stay on this rank.
        """
        self.saved[microbatch] = SavedActivations(not_evicted)
        with self.saved[microbatch].recording():
            yield

    # ---------------------------------------------------------------------------- overrides of torch

    def prepare_eviction(self, not_evicted: frozenset[int]) -> None:
        """Make the first forward pass, which finds shapes, find the storages that an eviction copies too."""
        self._own_storages = not_evicted

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        """Run the forward pass that finds the shapes of outputs; buffers keep their values."""
        inputs = (*(args if self.is_first else ()), *kwargs.values())
        saved = SavedActivations(self._own_storages | storages_of(inputs))
        with unchanged_buffers(module), saved.recording():
            outputs = super()._compute_outputs(*args, module=module, **kwargs)
        self.evicted_bytes = saved.nbytes
        return outputs

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        without = tuple(map(_without_buffer, vars(self)["args_recv_info"][0]))
        self.args_recv_info = dict.fromkeys(range(num_microbatches), without)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        without = tuple(map(_without_buffer, vars(self)["grad_recv_info"][0]))
        self.chunks = num_microbatches
        self.grad_recv_info = dict.fromkeys(range(num_microbatches), without)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        activations, leaves = [], []
        trains = self.has_backward and torch.is_grad_enabled()
        for tensor, meta in zip(self._received.pop(fwd_chunk_id), self._stage_meta.inputs, strict=True):
            if trains and meta.requires_grad:
                leaf = _empty_like(tensor).requires_grad_()
                activations.append(_Input.apply(leaf, tensor))
                leaves.append(leaf)
            else:
                activations.append(tensor)
                leaves.append(None)
        self._leaves[fwd_chunk_id] = leaves
        return tuple(activations)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return tuple(self._received_grads.pop(bwd_chunk_id))

    def _buffer(self, meta: Any) -> Tensor:
        return torch.empty_strided(meta.shape, _strides(meta), dtype=meta.dtype, device=self.device)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` divided a module or a part of it."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore the buffers of a module, such as running statistics, at the end of the context."""
    values = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)


class _Input(torch.autograd.Function):  # type: ignore[misc]
    """A received tensor, whose gradient is that of an empty leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, received: Tensor) -> Tensor:
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _EmptyOutput(torch.autograd.Function):  # type: ignore[misc]
    """A tensor of the shape of an output without its elements."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return _empty_like(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type with the memory of one element."""
    return torch.empty_strided(tensor.shape, (0,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _without_buffer(info: Any) -> Any:
    """Return the description of an input without memory for it."""
    return _RecvInfo(info.input_name, info.source, None, info.tensor_meta, is_root_arg=info.is_root_arg)


def _strides(meta: Any) -> tuple[int, ...]:
    """Return the strides of a message: those of the tensor if it is dense, else contiguous ones."""
    extent = 1
    for size, stride in sorted(zip(meta.shape, meta.stride, strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride != extent:
            return torch.empty(meta.shape, device="meta").stride()  # type: ignore[no-any-return]
        extent *= size
    return tuple(meta.stride)


def _as_received(tensor: Tensor, meta: Any) -> Tensor:
    """Return a tensor with the strides of its message."""
    strides = _strides(meta)
    if tensor.stride() == strides:
        return tensor.detach()
    dense = torch.empty_strided(meta.shape, strides, dtype=meta.dtype, device=tensor.device)
    return dense.copy_(tensor)
