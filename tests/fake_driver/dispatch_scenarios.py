"""Dispatch of kernels on the driver of `fake_driver.cpp`; prints the results as JSON."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
from cuda.core import Device as CudaDevice

from tests.fake_driver.variants import Calls, Mapped, MappedPixels, fake_binary
from tests.toy_variants import CONFIG, NumbaToy, Toy, TritonToy
from tunebench.dispatch import GpuKernel
from tunebench.errors import DeviceError, InputError
from tunebench.measure._gpu import Gpu

N = 1000


class Memory:
    """Device memory of x and y for one thread."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu, self.x = gpu, np.random.default_rng(seed).standard_normal(N).astype(np.float32)
        self.at_x, self.at_y, self.scratch = (gpu.allocate(4 * N) for _ in range(3))
        gpu.upload(self.at_x, self.x)
        self.clear()

    def clear(self) -> None:
        self.gpu.upload(self.at_y, np.zeros(N, np.float32))

    def holds(self, factor: float) -> bool:
        y = np.empty(N, np.float32)
        self.gpu.download(self.at_y, y)
        return bool(np.array_equal(y, self.x * np.float32(factor)))

    def run(self, kernel: GpuKernel, factor: float, stream: int) -> None:
        kernel(self.at_x, factor, self.at_y, stream=stream, scratch=self.scratch)


def kernel(variant: Any) -> GpuKernel:
    return GpuKernel(Toy(n=N), variant, CONFIG, fake_binary(variant), 0)


def captured(gpu: Gpu, memory: Memory, served: GpuKernel) -> dict[str, bool]:
    """Call the kernel during stream capture: it must not run before the graph is launched."""
    device = CudaDevice(0)
    builder, stream = device.create_graph_builder(), device.create_stream()
    builder.begin_building()
    memory.clear()
    memory.run(served, 3.0, int(builder.stream.handle))
    builder.end_building()
    seen = {"before": memory.holds(3.0)}
    memory.run(served, 5.0, int(stream.handle))  # the graph keeps its own parameters
    seen["another call"] = memory.holds(5.0)
    builder.complete().launch(stream)
    return {**seen, "after": memory.holds(3.0)}


def in_threads(gpu: Gpu, served: GpuKernel, stream: int) -> int:
    """Return how many calls of 8 threads, each with its own memory, had a wrong result."""
    sys.setswitchinterval(1e-6)  # forces thread switches within calls
    wrong = []
    together = threading.Barrier(8)
    memories = [Memory(gpu, seed) for seed in range(8)]

    def work(memory: Memory, factor: float) -> None:
        together.wait()
        for _ in range(200):
            memory.run(served, factor, stream)
            if not memory.holds(factor):
                wrong.append(factor)

    threads = [threading.Thread(target=work, args=(m, 1.5 + i)) for i, m in enumerate(memories)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


def scenarios() -> dict[str, Any]:
    gpu = Gpu(0)
    first, second = Memory(gpu, 1), Memory(gpu, 2)
    stream_object = CudaDevice(0).create_stream()  # the handle is valid only while the stream object lives
    stream = int(stream_object.handle)
    seen: dict[str, Any] = {}
    variants = {
        "right": Calls("right"),
        "scratch": Calls("right", scratch=True),
        "numba": NumbaToy(),
        "triton": TritonToy(),
        "mapped": Mapped(),
        "pixels": MappedPixels("pixels"),
    }
    for name, variant in variants.items():
        served = kernel(variant)
        for memory, factor in ((first, 2.0), (second, 4.0), (first, 0.5)):
            memory.run(served, factor, stream)
            seen[f"{name} {factor:g}"] = memory.holds(factor)
    right = kernel(Calls("right"))
    seen["captured"] = captured(gpu, first, right)
    seen["wrong in threads"] = in_threads(gpu, right, stream)
    seen["scratch bytes"] = kernel(Calls("right", scratch=True)).scratch_bytes
    try:
        kernel(Calls("right", scratch=True))(first.at_x, 1.0, first.at_y)
    except InputError as error:
        seen["no scratch"] = str(error)
    try:
        kernel(Calls("large", smem_bytes=240_000))
    except DeviceError as error:
        seen["refused"] = str(error)
    try:
        kernel(Calls("right", block=2048)).run(first.at_x, 1.0, first.at_y)
    except DeviceError as error:
        seen["refused at launch"] = str(error)
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scenarios()))
