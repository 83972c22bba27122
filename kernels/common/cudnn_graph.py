"""Plans of cuDNN for one graph of operations, in the order of its heuristics, by `nvidia-cudnn-frontend`.

Source: NVIDIA, cudnn-frontend 1.32.0, _pygraph.py (ranked plans), and its C++ validation of graphs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from tunebench.errors import InputError
from tunebench.libraries import Tensors
from tunebench.workload import Workload

__all__ = ["CUDNN_BINDING", "CUDNN_LIBRARIES", "CudnnPlan", "Operations", "described_graph"]

CUDNN_BINDING = "nvidia-cudnn-frontend"
CUDNN_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")

WORKSPACE_BYTES = 256 * 2**20
ALIGNMENT = 16
"""Alignment of addresses that graphs assume, in bytes."""

Operations = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
"""Adds operations to a graph: from the graph and its inputs by name to its outputs by name."""


def described_graph(
    workload: Workload, views: Tensors, operations: Operations, handle: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a graph of cuDNN, and its inputs and outputs by name.

    Args:
        workload: The workload, whose inputs and outputs the graph has.
        views: Tensors of torch by name, with the axes and strides that cuDNN sees.
        operations: Adds the operations.
        handle: Handle of cuDNN.
    """
    import cudnn

    single = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(intermediate_data_type=single, compute_data_type=single, handle=handle)
    nodes = {}
    for tensor in workload.inputs():
        view = views[tensor.name]
        shape, strides = list(view.shape), list(view.stride())
        nodes[tensor.name] = graph.tensor(
            dim=shape, stride=strides, data_type=_data_type(view), name=tensor.name
        )
    outputs = operations(graph, nodes)
    for name, node in outputs.items():
        view = views[name]
        node.set_output(True).set_data_type(_data_type(view)).set_name(name)
        node.set_dim(list(view.shape)).set_stride(list(view.stride()))
    return graph, {**nodes, **outputs}


def _data_type(view: Any) -> Any:
    import cudnn
    import torch

    types = cudnn.data_type
    return {torch.float32: types.FLOAT, torch.float16: types.HALF, torch.bfloat16: types.BFLOAT16}[view.dtype]


class CudnnPlan:
    """One plan for a workload.

    Args:
        workload: The workload.
        rank: Position of the plan in the list.
        tensors: Inputs and outputs by name.
        views_of: Returns views of the tensors with the axes and strides that cuDNN sees.
        operations: Adds the operations to a graph.

    Raises:
        InputError: The list is shorter, or a tensor is not aligned.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        tensors: Tensors,
        views_of: Callable[[Tensors], dict[str, Any]],
        operations: Operations,
    ) -> None:
        import cudnn

        if any(tensor.data_ptr() % ALIGNMENT for tensor in tensors.values()):
            raise InputError(f"cuDNN needs addresses that are multiples of {ALIGNMENT}")
        self._rank, self._views_of = rank, views_of
        device = tensors[workload.outputs()[0].name].device
        with _current(device):
            self._handle = cudnn.create_handle()
        weakref.finalize(self, cudnn.destroy_handle, self._handle).atexit = False
        self._graph, self._nodes = described_graph(workload, views_of(tensors), operations, self._handle)
        with _current(device):
            self._workspace_bytes = self._build(workload)

    def _build(self, workload: Workload) -> int:
        """Build the plan of the rank, and return the size of its temporary memory."""
        import cudnn

        graph, notes = self._graph, cudnn.numerical_note
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.deselect_workspace_greater_than(WORKSPACE_BYTES)
        dtype = getattr(workload, "dtype", None)
        inexact = [notes.DOWN_CONVERT_INPUTS, *([notes.TENSOR_CORE] if dtype == "f32" else [])]
        graph.deselect_numeric_notes(inexact)
        graph.check_support()
        count = graph.get_execution_plan_count()
        if self._rank >= count:
            raise InputError(f"cuDNN lists {count} plans, none of rank {self._rank}: {workload}")
        graph.build_plan_at_index(self._rank)
        return int(graph.get_workspace_size_plan_at_index(self._rank))

    def __call__(self, tensors: Tensors) -> None:
        """Enqueue the plan on torch's current stream."""
        import cudnn
        import torch

        views = self._views_of(tensors)
        pack = {node: views[name] for name, node in self._nodes.items()}
        device = next(iter(views.values())).device
        workspace = torch.empty(max(self._workspace_bytes, 1), dtype=torch.uint8, device=device)
        cudnn.set_stream(handle=self._handle, stream=_stream_of(device))
        self._graph.execute_plan_at_index(pack, workspace, index=self._rank, handle=self._handle)


def _current(device: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a device is that of new handles."""
    import torch

    context: contextlib.AbstractContextManager[Any] = torch.cuda.device(device)
    return context


def _stream_of(device: Any) -> int:
    """Return the handle of torch's current stream."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)
