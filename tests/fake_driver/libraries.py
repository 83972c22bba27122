"""torch on a GPU of the fake driver: its functions compute on the host, where that driver's memory is."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.toy_variants import Toy
from tunebench import variant as variants
from tunebench.compile import Binary, BinaryCache, compile_config
from tunebench.device import Device
from tunebench.dtype import storage
from tunebench.kernels.common import library, library_gpu
from tunebench.libraries import torch_type
from tunebench.measure import _library_gpu, worker
from tunebench.measure.worker import Setup
from tunebench.space import Config, Parameter, Space, Table
from tunebench.task import Task
from tunebench.variant import Costs, LibraryGpuVariant
from tunebench.workload import Tensor

__all__ = ["FakeLibraryDevice", "Program", "compiled", "install", "start", "start_compiler"]

VERSION = "9.9.9+cu130"
CALL_US, SHORT_US = 400.0, 4.0
HIDDEN_S = 0.03


class FakeLibraryDevice(_library_gpu.LibraryDevice):
    """The GPU: the driver counts the time of each call."""

    call_us = CALL_US

    def __init__(self, ordinal: int) -> None:
        self._driver, self.released = ctypes.CDLL("libcuda.so.1"), 0
        self._driver.fakeWork.argtypes = (ctypes.c_void_p, ctypes.c_double)

    def tensor(self, address: int, tensor: Tensor) -> Any:
        memory = (ctypes.c_char * tensor.nbytes).from_address(address)
        dtype = torch_type(storage(tensor.dtype))
        return torch.frombuffer(memory, dtype=dtype).view(tensor.shape)

    @contextlib.contextmanager
    def stream(self, handle: int) -> Iterator[None]:
        yield
        self._driver.fakeWork(handle, self.call_us)

    def graph(self, call: Callable[[], object], count: int, handle: int) -> Any:
        def replay() -> None:
            for _ in range(count):
                call()
            self._driver.fakeWork(handle, self.call_us * (count - 1))

        return type("Graph", (), {"replay": staticmethod(replay)})()

    def release(self) -> None:
        self.released += 1


class Program(LibraryGpuVariant[Toy]):
    """A library that computes y = factor * x of the toy operator, with an injected fault."""

    name, operator = "library_gpu", Toy
    faults = ("right", "short", "wrong", "raises", "past_the_end", "keeps", "hides")
    space = Space((Parameter("program", faults, "what it does"),))

    def default(self, workload: Toy, device: Device) -> Config:
        return Config({"program": "right"})

    def costs(self, workload: Toy, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=0, threads=1)

    def package(self, config: Config) -> str:
        return "torch"

    def calls(self, config: Config) -> str:
        return "torch.mul"

    def call(self, workload: Toy, config: Config, tensors: Mapping[str, Any]) -> Callable[[], object]:
        program, kept = config["program"], []

        def run() -> None:
            x, y = tensors["x"], tensors["y"]
            FakeLibraryDevice.call_us = SHORT_US if program == "short" else CALL_US
            if program == "raises":
                raise RuntimeError("no algorithm for this size")
            if program == "hides":  # work that no event times
                time.sleep(HIDDEN_S)
            torch.mul(x, tensors["factor"], out=y)
            if program == "keeps":  # the result of the first call
                kept.append(y.clone())
                y.copy_(kept[0])
            if program == "wrong":
                y[-1] += 1
            if program == "past_the_end":
                ctypes.c_float.from_address(y.data_ptr() + 4 * y.numel()).value = 1.0

        return run


def install() -> None:
    """Replace torch's GPU by the fake one in this process, and its version by that of a build with CUDA."""
    _library_gpu.LibraryDevice = FakeLibraryDevice  # type: ignore[misc]
    for module in (library, library_gpu, variants):
        module.installed_version = {"torch": VERSION, "nvmath-python": "1.0.0"}.get  # type: ignore[attr-defined]


def start(setup: Setup) -> None:
    """Prepare a process that measures."""
    install()  # first: the process finds later replacements
    worker.start(setup)


def compiled(task: Task) -> Binary:
    """Return the binary of a task."""
    install()
    cache = BinaryCache(Path(tempfile.gettempdir()))  # a library has none
    return compile_config(task.variant, task.workload, task.config, task.device, cache)


def start_compiler() -> None:
    """Prepare a process that compiles."""
