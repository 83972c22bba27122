"""A toy operator with correct and intentionally faulty kernels."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from tunebench.binary import cubin
from tunebench.device import Device
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import (
    Argument,
    Costs,
    CudaVariant,
    Launch,
    NumbaCudaVariant,
    Scalar,
    TritonVariant,
    ceil_div,
)
from tunebench.workload import Reference, Size, Tensor, Tolerance, Workload


def parameter_sizes(payload: bytes, symbol: str) -> list[int]:
    """Return the size of each parameter of a kernel, as its cubin has them (attribute EIATTR_KPARAM_INFO)."""
    (section,) = [s for s in cubin.elf_sections(payload) if s.name == f".nv.info.{symbol}"]
    sizes = {}
    for attribute, data in cubin.info_attributes(section.data):
        if attribute == 0x17:
            _, ordinal, _, packed = struct.unpack("<IHHI", data)
            sizes[ordinal] = packed >> 18
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def folder_of_header(name: str) -> Path:
    """Return the folder of a header that comes with the CUDA runtime, or skip the test."""
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return Path(str(file.locate())).parent
    pytest.skip(f"needs {name} of the package nvidia-cuda-runtime")


@dataclass(frozen=True, kw_only=True)
class Toy(Workload):
    """An operator from x (n,) f32 to y (n,) f32; each kernel defines its own result."""

    operator: ClassVar[str] = "toy"

    n: Size
    dtype: Literal["f32"] = "f32"

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.n,), dtype="f32"), Tensor(name="factor", shape=(), dtype="f32"))

    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="y", shape=(self.n,), dtype="f32"),)

    def flops(self) -> int:
        return self.n

    def reference(self, inputs: Mapping[str, Any]) -> dict[str, Reference]:
        value = inputs["x"] * inputs["factor"]
        return {"y": Reference(value=value, scale=np.abs(value))}

    def tolerance(self) -> Tolerance:
        return Tolerance(eps_out=1e-6, eps_acc=1e-6, reason="one product")


CONFIG = Config({"unused": 0})
"""The one configuration of toy variants."""

SPILLING = """
__global__ void __launch_bounds__(1024, 2) toy(const float* x, float* y, float factor, int n) {
  float kept[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) kept[i] = x[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) y[i * n] = kept[63 - i] * kept[i * 7 % 64];
}
"""
"""Source of a kernel that needs more registers than its launch bounds allow."""


class _OneConfig:
    """A search space of one configuration, and one launch of a given block."""

    operator = Toy
    space = Space((Parameter("unused", (0,), "nothing"),))
    _block: int

    def default(self, workload: Toy, device: Device) -> Config:
        return CONFIG

    def costs(self, workload: Toy, table: Table, device: Device) -> Costs:
        return Costs(blocks=1, full_blocks=1, threads=self._block)

    def _launch(self, workload: Toy, grid: int = 1, **changes: Any) -> Launch:
        arguments: tuple[Argument, ...] = ("x", "y", "factor", Scalar("int", workload.n))
        return Launch(grid=(grid, 1, 1), block=(self._block, 1, 1), arguments=arguments, **changes)


class ToyVariant(_OneConfig, CudaVariant[Toy]):
    """A variant that runs a given kernel `toy(const float* x, float* y, float factor, int n)`.

    Args:
        text: CUDA C++ source of the kernel.
        block: Threads per block.
        smem_bytes: Dynamic shared memory in bytes.
        grid: Number of blocks.
    """

    name = "toy"

    def __init__(
        self, text: str, *, block: int = 64, smem_bytes: int = 0, entry: str = "toy", grid: int = 1
    ) -> None:
        self._text, self._block, self._smem_bytes, self._entry = text, block, smem_bytes, entry
        self._grid = grid

    def source(self, workload: Toy, config: Config) -> str:
        return self._text

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        return (self._launch(workload, self._grid, entry=self._entry, smem_bytes=self._smem_bytes),)


class NumbaToy(_OneConfig, NumbaCudaVariant[Toy]):
    """y = factor x through shared memory, in Numba-CUDA.

    Args:
        fault: ``"unknown name"`` or ``"out of bounds"``, or nothing.
        block: Threads of the single block.
    """

    name = "numba_toy"

    def __init__(self, fault: str = "", *, block: int = 64) -> None:
        self._fault, self._block = fault, block

    def kernel(self, workload: Toy, config: Config) -> Callable[..., None]:
        from numba import cuda, float32

        block, past = self._block, 1000 if self._fault == "out of bounds" else 0

        def unknown(x: Any, y: Any, factor: Any, n: Any) -> None:
            y[0] = no_such_name  # type: ignore[name-defined]  # noqa: F821 - on purpose

        def toy(x: Any, y: Any, factor: Any, n: Any) -> None:
            shared = cuda.shared.array(block, float32)
            t = cuda.threadIdx.x
            if t < n:
                shared[t] = x[t + past]
            cuda.syncthreads()
            if t < n:
                y[n - 1 - t] = shared[n - 1 - t] * factor

        return unknown if self._fault == "unknown name" else toy

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        return (self._launch(workload),)


TRITON_TOY = """
import triton
import triton.language as tl


@triton.jit
def triton_toy(x, y, factor, one, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets * one, mask=offsets < n) * factor, mask=offsets < n)
"""


class TritonToy(_OneConfig, TritonVariant[Toy]):
    """y = factor x in Triton, with a size that is compiled in since it is 1.

    Args:
        text: Source, in place of `TRITON_TOY`.
        options: Values of options of the compiler, and of ``BLOCK``.
    """

    name = "triton_toy"
    _block = 128

    def __init__(self, text: str = TRITON_TOY, **options: int) -> None:
        self._text, self._options = text, {"BLOCK": 256, "num_ctas": 2, **options}

    def source(self, workload: Toy, config: Config) -> str:
        return self._text

    def constants(self, workload: Toy, config: Config) -> dict[str, int]:
        return {"BLOCK": self._options["BLOCK"]}

    def options(self, config: Config) -> dict[str, int]:
        return super().options(Config(self._options))

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        grid = (ceil_div(workload.n, self._options["BLOCK"]), 1, 1)
        sizes = (Scalar("int", 1), Scalar("int", workload.n))
        return (self.launch(config, entry="triton_toy", grid=grid, arguments=("x", "y", "factor", *sizes)),)
