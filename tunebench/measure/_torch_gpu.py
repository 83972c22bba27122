"""torch on a GPU, timed by the same sampler as variants: same flush, cover, batches and clocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device, local_gpus
from tunebench.errors import DeviceError, MissingDependency
from tunebench.libraries import LibraryCall, torch_tensor
from tunebench.measure._cache_flush import FLUSHED_CACHES, Flush
from tunebench.measure._clock import Clock
from tunebench.measure._gpu import open_gpu
from tunebench.measure._sampler import Sampler, Timing
from tunebench.measure.timing import Protocol
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["TorchGpu"]


class TorchGpu:
    """One GPU used through torch, with the operations that `Sampler` needs.

    Args:
        device: A GPU of this machine.

    Raises:
        MissingDependency: torch or cuda-core is not installed.
        DeviceError: torch cannot use this GPU.
    """

    def __init__(self, device: Device) -> None:
        try:
            import torch
        except ImportError as error:
            raise MissingDependency("torch", "torch") from error
        keys = [gpu.key for gpu in local_gpus()]
        if device.key not in keys or not torch.cuda.is_available():
            raise DeviceError(f"torch {torch.__version__} cannot use {device.name} on this machine")
        self._torch = torch
        self._described = device
        self.device = torch.device("cuda", keys.index(device.key))
        torch.cuda.set_device(self.device)
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._gpu = open_gpu(device)
        self._clock = Clock(self._gpu.pci_bus_id)
        nbytes = FLUSHED_CACHES * device.l2_bytes
        self._flush = Flush(self._gpu.allocate(nbytes), nbytes)

    def tensors(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Return inputs as tensors on the device; those of shape `()` as numbers."""
        return {name: torch_tensor(np.asarray(value), self.device) for name, value in inputs.items()}

    def allow_for(self, workload: Workload) -> None:
        """Set the precision that the workload requests: full f32, or tf32 for a workload of dtype tf32.

        cuDNN chooses among its algorithms at the first call (`cudnn.benchmark`).
        """
        torch, in_tf32 = self._torch, workload.dtype == "tf32"
        torch.set_float32_matmul_precision("high" if in_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = in_tf32
        torch.backends.cudnn.benchmark = True

    def sampler(self, call: LibraryCall, protocol: Protocol) -> Sampler:
        """Run a call once, and return a sampler of it.

        Args:
            call: Enqueues one run.
            protocol: Whether to flush the cache before each sample.
        """

        def without_gradients() -> None:
            with self._torch.inference_mode():
                call()

        without_gradients()
        self._torch.cuda.synchronize()
        flush = self._flush if protocol.cache == "cold" else None
        mhz = self._described.max_clock_mhz
        return Sampler(self, self._clock, (without_gradients,), flush=flush, max_clock_mhz=mhz)

    # -- operations for the sampler ------------------------------------------------------------

    def launch(self, launches: Sequence[LibraryCall]) -> None:
        """Enqueue calls."""
        for call in launches:
            call()

    def read(self, address: int, nbytes: int) -> None:
        """Enqueue reading memory, on the stream of torch."""
        self._gpu.read(address, nbytes, int(self._torch.cuda.current_stream().cuda_stream))

    def graph(self, launches: Sequence[LibraryCall], count: int) -> Any:
        """Capture calls `count` times in a graph."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            for _ in range(count):
                self.launch(launches)
        return graph

    def replay(self, graph: Any) -> None:
        """Enqueue a graph."""
        graph.replay()

    def time(
        self, before: Callable[[], None], work: Callable[[], None], during: Callable[[], None] = lambda: None
    ) -> Timing:
        """Time work on the device (see `Gpu.time`)."""
        before()
        start = time.perf_counter()
        self._begin.record()
        work()
        self._end.record()
        host_us = (time.perf_counter() - start) * 1e6
        during()
        self._end.synchronize()
        return Timing(float(self._begin.elapsed_time(self._end)) * 1e3, host_us)
