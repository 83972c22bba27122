"""Calls of libraries on a GPU, on the memory and the stream that kernels are measured with.

torch works in the primary context of the device, which is also that of the runner. Its tensors are views of
the runner's memory, and its current stream is the runner's, so that the same events time its kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import bits_dtype, storage
from tunebench.errors import DeviceError, MissingDependency, describe_error
from tunebench.libraries import torch_type
from tunebench.measure.loader import CudaError
from tunebench.measure.task_limit import outside_limit
from tunebench.workload import Tensor

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["LibraryDevice", "LibraryLaunch", "library_device", "library_launch", "release_libraries"]


class LibraryDevice:
    """A GPU as torch uses it.

    Args:
        ordinal: Position in the driver's order.

    Raises:
        MissingDependency: torch is not installed.
        DeviceError: torch cannot use this GPU.
    """

    def __init__(self, ordinal: int) -> None:
        with outside_limit():  # torch takes seconds to import
            try:
                import torch
            except ImportError as error:
                raise MissingDependency("torch", "torch") from error
            if not torch.cuda.is_available() or ordinal >= torch.cuda.device_count():
                raise DeviceError(f"torch {torch.__version__} cannot use GPU {ordinal} of this machine")
        self._torch, self._device = torch, torch.device("cuda", ordinal)

    def tensor(self, address: int, tensor: Tensor) -> Any:
        """Return memory as a contiguous tensor of torch, without a copy.

        Args:
            address: Address of the memory.
            tensor: Its shape and type.
        """
        bits = bits_dtype(tensor.dtype)
        kind = "u1" if tensor.dtype == "bool" else np.dtype(bits).str[1:].replace("u", "i")
        interface = {"shape": tensor.shape, "typestr": f"<{kind}", "data": (address, False), "version": 3}
        view = type("DeviceMemory", (), {"__cuda_array_interface__": interface})()
        return self._torch.as_tensor(view, device=self._device).view(torch_type(storage(tensor.dtype)))

    def stream(self, handle: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which torch enqueues its work on a stream of the driver."""
        context: contextlib.AbstractContextManager[Any] = self._torch.cuda.stream(self._external(handle))
        return context

    def graph(self, call: Callable[[], object], count: int, handle: int) -> Any:
        """Capture calls in a graph of torch, whose temporary memory stays reserved as long as it exists."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph, stream=self._external(handle)):
            for _ in range(count):
                call()
        return graph

    def release(self) -> None:
        """Free the device memory that torch keeps for later tensors."""
        self._torch.cuda.empty_cache()

    def _external(self, handle: int) -> Any:
        return self._torch.cuda.ExternalStream(handle, device=self._device)


class LibraryLaunch:
    """A call of a library in place of the launch of a kernel.

    Args:
        device: The GPU.
        call: Enqueues the call on torch's current stream.
    """

    def __init__(self, device: LibraryDevice, call: Callable[[], object]) -> None:
        self._device, self._call = device, call

    def __call__(self, stream: int) -> None:
        """Enqueue the call on a stream, given by its handle.

        Raises:
            CudaError: The library refuses the call.
        """
        with _translated(), self._device.stream(stream):
            self._call()

    def graph(self, count: int, stream: int) -> LibraryGraph:
        """Capture the call `count` times in a graph.

        Raises:
            CudaError: The library cannot be captured.
        """
        with _translated():
            return LibraryGraph(self._device, self._device.graph(self._call, count, stream))


class LibraryGraph:
    """A graph of calls of a library, launched like a graph of cuda.core.

    Args:
        device: The GPU.
        graph: The graph of torch.
    """

    def __init__(self, device: LibraryDevice, graph: Any) -> None:
        self._device, self._graph = device, graph

    def launch(self, stream: Any) -> None:
        """Enqueue the graph on a stream of cuda.core."""
        with self._device.stream(int(stream.handle)):
            self._graph.replay()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise `CudaError` for anything that a library raises: it may raise any exception."""
    try:
        yield
    except CudaError:
        raise
    except Exception as error:
        raise CudaError(f"the library refuses the call: {describe_error(error)}") from error


_DEVICES: dict[int, LibraryDevice] = {}
"""GPUs that libraries have used in this process, by ordinal."""


def library_device(ordinal: int) -> LibraryDevice:
    """Return a GPU as torch uses it; the same object every time.

    Args:
        ordinal: Position in the driver's order.
    """
    if ordinal not in _DEVICES:
        _DEVICES[ordinal] = LibraryDevice(ordinal)
    return _DEVICES[ordinal]


def release_libraries() -> None:
    """Free the device memory that libraries keep in this process, for the kernels measured next."""
    for device in _DEVICES.values():
        device.release()


def library_launch(
    call_of: Callable[[Mapping[str, Any]], Callable[[], object]],
    ordinal: int,
    tensors: Mapping[str, Tensor],
    addresses: Mapping[str, int],
    inputs: Mapping[str, Array],
) -> LibraryLaunch:
    """Return the launch of a library on memory of the device.

    Args:
        call_of: Returns the call on tensors of torch, and numbers for those without a shape.
        ordinal: Position of the GPU in the driver's order.
        tensors: Inputs and outputs by name.
        addresses: Address of each tensor with a shape.
        inputs: The inputs, for the numbers.

    Raises:
        CudaError: The library refuses the workload.
        MissingDependency, DeviceError: as `LibraryDevice`.
    """
    device = library_device(ordinal)
    with _translated():
        arguments = {
            name: device.tensor(addresses[name], tensor) if tensor.shape else float(inputs[name])
            for name, tensor in tensors.items()
        }
        return LibraryLaunch(device, call_of(arguments))
