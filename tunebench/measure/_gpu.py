"""Memory, stream, events and launches of one GPU; nothing here depends on tuning.

Kernels, launches, events and graphs use cuda.core. Memory uses the driver's bindings, one allocation per
tensor, so that memory checkers detect accesses past its end. Launches with tensor maps or clusters use the
bindings, too (see `direct_launch`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tunebench.device import Device, local_gpus
from tunebench.errors import DeviceError
from tunebench.measure._cache_flush import READ_MEMORY, VECTOR_BYTES
from tunebench.measure._library_gpu import LibraryLaunch
from tunebench.measure._sampler import Timing
from tunebench.measure.direct_launch import DirectLaunch, MappedTensor
from tunebench.measure.loader import CudaError, CudaRefused, KernelLoader, require_cuda_core, translated
from tunebench.variant import Launch

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["Gpu", "LaunchGraph", "Prepared", "open_gpu"]


class Prepared(NamedTuple):
    """A launch with the arguments of cuda.core."""

    kernel: Any
    config: Any
    arguments: tuple[Any, ...]


AnyPrepared = Prepared | DirectLaunch | LibraryLaunch


class LaunchGraph(NamedTuple):
    """Launches that the device runs one after the other without the host."""

    executable: Any
    repeats: int


def open_gpu(device: Device) -> Gpu:
    """Open the first GPU of this machine that is `device`.

    Raises:
        DeviceError: This machine has no such GPU.
        MissingDependency: cuda-core is not installed.
    """
    require_cuda_core()
    present = [(gpu.architecture, gpu.name, gpu.sm_count) for gpu in local_gpus()]
    asked = (device.architecture, device.name, device.sm_count)
    if asked not in present:
        names = ", ".join(f"{name} ({architecture}, {sms} SMs)" for architecture, name, sms in present)
        raise DeviceError(f"{device.name} is not on this machine, which has: {names or 'no NVIDIA GPU'}")
    return Gpu(present.index(asked))


def _launch_error(message: str) -> CudaError:
    refused = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" in message
    return (CudaRefused if refused else CudaError)(f"{message} (launching)")


class Gpu(KernelLoader):
    """One GPU, its primary context, and the one stream that all operations use.

    Args:
        ordinal: Position in the driver's order.

    Raises:
        CudaError: From the constructor and every method, if a CUDA call fails.
    """

    def __init__(self, ordinal: int) -> None:
        from cuda.core import Device, EventOptions, launch
        from cuda.core._utils.cuda_utils import CUDAError

        super().__init__(ordinal)
        self._launch, self._error = launch, CUDAError
        with translated("opening the device"):
            self._device = Device(ordinal)
            self._device.set_current()
            self._stream = self._device.create_stream()
            timing = EventOptions(timing_enabled=True)
            self._begin, self._end = self._device.create_event(timing), self._device.create_event(timing)
        self._stream_handle = self._stream.handle
        self._reads: dict[tuple[int, int], DirectLaunch] = {}

    # -- identity ------------------------------------------------------------------------------

    @property
    def ordinal(self) -> int:
        """Position in the driver's order."""
        return self._ordinal

    @property
    def pci_bus_id(self) -> str:
        """PCI bus address, which identifies the GPU to other libraries."""
        text: bytes = self._call("cuDeviceGetPCIBusId", 32, self._ordinal)
        return text.split(b"\0")[0].decode()

    @property
    def name(self) -> str:
        """Name of the GPU in the driver."""
        return str(self._device.name)

    def driver_version(self) -> str:
        """Return the highest CUDA version that the driver supports, such as ``"13.0"``."""
        number = int(self._call("cuDriverGetVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def lost(self) -> str | None:
        """Return the error that makes the device unusable for this process, or None if it still works."""
        (status,) = self._driver.cuCtxSynchronize()
        return str(status.name) if int(status) else None

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, aligned to 256 bytes."""
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        """Free memory."""
        self._call("cuMemFree", address)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        """Enqueue filling memory with a byte.

        Args:
            address: Address of the memory.
            byte: Value of every byte.
            nbytes: Size in bytes.
        """
        self._call("cuMemsetD8Async", address, byte, nbytes, self._stream_handle)

    def read(self, address: int, nbytes: int, stream: int | None = None) -> None:
        """Enqueue reading memory, past the first-level cache; nothing is written.

        Args:
            address: Address of the memory, aligned to 16 bytes.
            nbytes: Size in bytes, a multiple of 16.
            stream: Handle of another stream; None is the stream of this object.
        """
        launch = self._reads.get((address, nbytes))
        if launch is None:
            assert nbytes % VECTOR_BYTES == 0, nbytes
            launch = self.direct(self._load_reader(), READ_MEMORY, (address, nbytes))
            self._reads[address, nbytes] = launch
        if int(status := launch(int(self._stream_handle) if stream is None else stream)):
            raise _launch_error(status.name)

    def upload(self, address: int, array: Array) -> None:
        """Copy a C-contiguous array to the device, and wait until it is there."""
        assert array.flags.c_contiguous
        self._call("cuMemcpyHtoDAsync", address, array.ctypes.data, array.nbytes, self._stream_handle)
        self.synchronize()

    def download(self, address: int, array: Array) -> None:
        """Copy from the device into a C-contiguous array, after all enqueued work."""
        assert array.flags.c_contiguous
        self._call("cuMemcpyDtoHAsync", array.ctypes.data, address, array.nbytes, self._stream_handle)
        self.synchronize()

    # -- kernels -------------------------------------------------------------------------------

    def prepare(self, kernel: Any, launch: Launch, arguments: tuple[Any, ...]) -> AnyPrepared:
        """Prepare a launch.

        Args:
            kernel: From `load`.
            launch: Grid, block and shared memory.
            arguments: One per parameter: Python integers (64 bits: addresses, sizes), NumPy scalars, or
                `MappedTensor`.

        Raises:
            CudaError: The sizes of the arguments differ from the kernel's parameters, the device has not
                enough shared memory, or a tensor map is invalid.
        """
        from cuda.core import LaunchConfig

        if launch.cluster > 1 or any(isinstance(argument, MappedTensor) for argument in arguments):
            return self.direct(kernel, launch, arguments)
        self._check_parameters(kernel, launch, arguments)
        self._allow_smem(kernel, launch.smem_bytes)
        config = LaunchConfig(grid=self._grid(launch), block=launch.block, shmem_size=launch.smem_bytes)
        return Prepared(kernel, config, arguments)

    def launch(self, launches: Sequence[AnyPrepared]) -> None:
        """Enqueue launches, one after the other."""
        self._launch_on(self._stream, launches)

    def _launch_on(self, stream: Any, launches: Sequence[AnyPrepared]) -> None:
        """Enqueue launches on a stream, or in the graph that is being captured."""
        try:
            for prepared in launches:
                if isinstance(prepared, Prepared):
                    self._launch(stream, prepared.config, prepared.kernel, *prepared.arguments)
                    continue
                handle = int(getattr(stream, "stream", stream).handle)
                if isinstance(prepared, LibraryLaunch):
                    prepared(handle)
                elif int(status := prepared(handle)):
                    raise _launch_error(status.name)
        except self._error as error:
            raise _launch_error(str(error)) from error

    def graph(self, launches: Sequence[AnyPrepared], count: int) -> LaunchGraph:
        """Capture launches `count` times in a graph, which the device runs without the host."""
        if len(launches) == 1 and isinstance(launches[0], LibraryLaunch):
            return LaunchGraph(launches[0].graph(count, int(self._stream.handle)), count)
        with translated("recording a graph"):
            builder = self._device.create_graph_builder()
            builder.begin_building()
            for _ in range(count):
                self._launch_on(builder, launches)
            builder.end_building()
            executable = builder.complete()
            executable.upload(self._stream)
            builder.close()
        return LaunchGraph(executable, count)

    def replay(self, graph: LaunchGraph) -> None:
        """Enqueue a graph."""
        with translated("launching a graph"):
            graph.executable.launch(self._stream)

    # -- time ----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all enqueued work."""
        with translated("waiting for the device"):
            self._stream.sync()

    def time(
        self, before: Callable[[], None], work: Callable[[], None], during: Callable[[], None] = lambda: None
    ) -> Timing:
        """Time work on the device.

        Args:
            before: Enqueues untimed work that keeps the device busy while the host enqueues `work`. Otherwise
                the device would wait for the host, and that wait would be timed.
            work: Enqueues the work to time.
            during: Called while the device is busy with all this: reads its clock.
        """
        before()
        with translated("timing"):
            start = time.perf_counter()
            self._stream.record(self._begin)
            work()
            self._stream.record(self._end)
            host_us = (time.perf_counter() - start) * 1e6
            during()
            self._end.sync()
            return Timing(float(self._end - self._begin) * 1e3, host_us)
