"""Variants of the toy operator that launch the kernels of the fake driver (see fake_driver.cpp)."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.toy_variants import CONFIG, Toy, ToyVariant
from tunebench.binary.compiled import Binary
from tunebench.outcome import Resources, Result
from tunebench.space import Config
from tunebench.task import Task
from tunebench.variant import Launch, PixelBox, Scalar, TensorMap
from tunebench.workload import Tensor


def fake_binary(variant: Any, payload: bytes = b"fake") -> Binary:
    """Return a binary for the fake driver, which finds its kernels by the names of the entries."""
    launches = variant.launches(Toy(n=1000), CONFIG)
    entries = tuple(launch.entry.removesuffix("_toy") or "numba" for launch in launches)
    binary = Binary(key="", language=variant.language, target="sm_90a", payload=payload, entries=entries)
    if variant.language == "triton":
        used = Resources(dynamic_smem_bytes=512)
        return dataclasses.replace(binary, resources=used, threads=96, omitted=(3,), null_pointers=2)
    return binary


class Calls(ToyVariant):
    """Launches one kernel of the driver.

    Args:
        entry: Name of the kernel.
        block: Threads per block.
        smem_bytes: Dynamic shared memory in bytes.
        scratch: Whether to launch it twice, first with scratch as output.
        long: Whether to pass the count in a type that is too long.
    """

    def __init__(
        self, entry: str, *, block: int = 64, smem_bytes: int = 0, scratch: bool = False, long: bool = False
    ) -> None:
        super().__init__("", entry=entry, block=block, smem_bytes=smem_bytes)
        self._scratch, self._long = scratch, long

    def scratch(self, workload: Toy, config: Config) -> tuple[Tensor, ...]:
        return (Tensor(name="half", shape=(workload.n,), dtype="f32"),) if self._scratch else ()

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        (launch,) = super().launches(workload, config)
        if self._long:
            arguments = (*launch.arguments[:-1], Scalar("long long", workload.n))
            launch = dataclasses.replace(launch, arguments=arguments)
        first = dataclasses.replace(launch, arguments=("x", "half", *launch.arguments[2:]))
        return (first, launch) if self._scratch else (launch,)


class Mapped(Calls):
    """Passes x by a tensor map, to clusters of two persistent blocks; `tensor` is the mapped tensor."""

    def __init__(self, entry: str = "mapped", tensor: str = "x") -> None:
        super().__init__(entry)
        self._tensor = tensor

    def launches(self, workload: Toy, config: Config) -> tuple[Launch, ...]:
        (launch,) = super().launches(workload, config)
        arguments = (self.tensor_map(workload), *launch.arguments[1:])
        shape: dict[str, Any] = {"grid": (1000, 1, 1), "cluster": 2, "blocks_per_sm": 2}
        return (dataclasses.replace(launch, arguments=arguments, **shape),)

    def tensor_map(self, workload: Toy) -> TensorMap:
        """Return a map of lines of 8 elements."""
        return TensorMap(
            tensor=self._tensor,
            dtype="f32",
            extents=(8, workload.n // 8),
            strides_bytes=(32,),
            box=(8, 5),
            swizzle_bytes=32,
        )


class MappedPixels(Mapped):
    """Passes x by a map of pixels: one image of 5 x 25, with 8 channels."""

    def tensor_map(self, workload: Toy) -> TensorMap:
        return dataclasses.replace(
            super().tensor_map(workload),
            extents=(8, 25, 5, workload.n // 1000),
            strides_bytes=(32, 800, 4000),
            box=(8, 300),
            pixel_box=PixelBox(lower=(-1, -2), upper=(1, -3), strides=(2, 3)),
        )


def compile_fake(task: Task) -> Binary:
    """Return the binary of a task."""
    return fake_binary(task.variant)


def measure_and_name_gpu(task: Task, binary: Binary, abort_above_us: float | None) -> Result:
    """Return the result of a task, with the PCI address of its GPU in the conditions."""
    from tunebench.measure import worker
    from tunebench.measure._gpu import open_gpu

    result = worker.measure(task, binary, abort_above_us)
    return dataclasses.replace(result, conditions={"pci_bus_id": open_gpu(task.device).pci_bus_id})


def start_compiler() -> None:
    """Prepare a process that compiles."""
