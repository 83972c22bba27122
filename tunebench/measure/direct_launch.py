"""Launches through the driver API: cuda.core accepts only tensor maps that it has created itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tunebench.variant import TENSOR_MAP_TYPES, Launch, TensorMap

__all__ = ["DirectLaunch", "MappedTensor", "encode"]

_MAP_BYTES = 128
_ALIGNMENT = 128
"""Alignment of a tensor map, also among parameters. Source: `CUtensorMap` of cuda.h (64 before 13.0)."""
_SINCE_CUDA = 12000

_HEAD: tuple[Any, ...] = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
    *(ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_uint64)),
)
_TAIL: tuple[Any, ...] = (ctypes.POINTER(ctypes.c_uint32), *[ctypes.c_int] * 4)
_ENCODE_TILED = ctypes.CFUNCTYPE(ctypes.c_int, *_HEAD, ctypes.POINTER(ctypes.c_uint32), *_TAIL)
_ENCODE_IM2COL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *_HEAD,
    *(ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)),
    *(ctypes.c_uint32, ctypes.c_uint32),
    *_TAIL,
)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A parameter of a launch: a tensor map with the address of its tensor."""

    nbytes: ClassVar[int] = _MAP_BYTES

    tensor_map: TensorMap
    address: int


def encode(driver: Any, mapped: MappedTensor) -> tuple[Any, bytes]:
    """Encode a tensor map with the driver.

    The driver requires an aligned address for the result, which `cuTensorMapEncodeTiled` of the bindings does
    not provide: the function is called as the driver exports it.

    Args:
        driver: `cuda.bindings.driver`.
        mapped: The map; its address is a multiple of 16.

    Returns:
        The driver's status, and the `CUtensorMap` if the call succeeded.
    """
    tensor_map, rank = mapped.tensor_map, len(mapped.tensor_map.extents)
    name, prototype, form, strides = _form(tensor_map)
    status, function, _ = driver.cuGetProcAddress(name.encode(), _SINCE_CUDA, 0)
    if int(status):
        return status, b""
    kind = TENSOR_MAP_TYPES[tensor_map.dtype]
    swizzle = f"{tensor_map.swizzle_bytes}B" if tensor_map.swizzle_bytes else "NONE"
    memory, target = _aligned(_MAP_BYTES)
    code = prototype(int(function))(
        target,
        int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}")),
        rank,
        mapped.address,
        (ctypes.c_uint64 * rank)(*tensor_map.extents),
        (ctypes.c_uint64 * rank)(*tensor_map.strides_bytes),
        *form,
        (ctypes.c_uint32 * rank)(*strides),
        int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        # Tiles are read line by line: the bytes after a line's 128 belong to the next tile.
        int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B),
        int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    encoded = ctypes.string_at(target, _MAP_BYTES)
    del memory
    return driver.CUresult(code), encoded


def _form(tensor_map: TensorMap) -> tuple[str, Any, tuple[Any, ...], tuple[int, ...]]:
    """Return the driver's function, its prototype, its own arguments, and the strides between elements."""
    rank, pixels = len(tensor_map.extents), tensor_map.pixel_box
    if pixels is None:
        box = (ctypes.c_uint32 * rank)(*tensor_map.box)
        return "cuTensorMapEncodeTiled", _ENCODE_TILED, (box,), (1,) * rank
    corners = ((ctypes.c_int * (rank - 2))(*corner) for corner in (pixels.lower, pixels.upper))
    strides = (1, *pixels.strides, 1)
    return "cuTensorMapEncodeIm2col", _ENCODE_IM2COL, (*corners, *tensor_map.box), strides


def _aligned(nbytes: int) -> tuple[Any, int]:
    """Return a buffer, and an aligned address in it that is followed by `nbytes` bytes."""
    memory = ctypes.create_string_buffer(nbytes + _ALIGNMENT)
    return memory, -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT


class DirectLaunch:
    """A launch by `cuLaunchKernelEx`, with the bytes of all parameters.

    Args:
        driver: `cuda.bindings.driver`.
        kernel: The kernel of cuda.core; its module stays loaded as long as this object exists.
        launch: Block, shared memory and cluster.
        grid: Blocks in x, y, z.
        parameters: The bytes of each parameter, in order.
    """

    def __init__(
        self,
        driver: Any,
        kernel: Any,
        launch: Launch,
        grid: tuple[int, int, int],
        parameters: Sequence[bytes],
    ) -> None:
        self._driver, self._owner = driver, kernel
        self._kernel = driver.CUfunction(int(kernel.handle))
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = grid
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = launch.block
        self._config.sharedMemBytes = launch.smem_bytes
        if launch.cluster > 1:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = launch.cluster, 1, 1
            self._config.attrs, self._config.numAttrs = [attribute], 1
        self._bytes, self._pointers = _packed(parameters)

    def replace(self, index: int, parameter: bytes) -> None:
        """Replace the bytes of a parameter from the next launch on.

        Args:
            index: Position of the parameter.
            parameter: Its new bytes, of the same size.
        """
        ctypes.memmove(self._pointers[index], parameter, len(parameter))

    def __call__(self, stream: int) -> Any:
        """Enqueue the launch on a stream, given by its handle, and return the driver's status."""
        self._config.hStream = self._driver.CUstream(stream)
        (status,) = self._driver.cuLaunchKernelEx(
            self._config, self._kernel, ctypes.addressof(self._pointers), 0
        )
        return status


def _packed(parameters: Sequence[bytes]) -> tuple[Any, Any]:
    """Return a buffer with the parameters, each aligned like a tensor map, and pointers to them."""
    sizes = [-(-len(parameter) // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
    memory, at = _aligned(sum(sizes))
    addresses = []
    for parameter, size in zip(parameters, sizes, strict=True):
        ctypes.memmove(at, parameter, len(parameter))
        addresses.append(at)
        at += size
    return memory, (ctypes.c_void_p * len(addresses))(*addresses)
