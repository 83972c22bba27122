"""Kernels on CPUs: those of Numba, as shared objects or without its dispatcher, and calls of libraries."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.binary.compiled import Binary
from tunebench.compile.numba_cpu import compile_numba_cpu, key_numba_cpu, load_numba_cpu
from tunebench.dispatch.kernel import BoundKernel, cache
from tunebench.dispatch.numba_threads import started
from tunebench.dispatch.shared_kernel import SharedKernel, constants_of, find, shared_key, store
from tunebench.dtype import bits_dtype, numpy_dtype
from tunebench.errors import InputError
from tunebench.space import Config
from tunebench.variant import Argument, LibraryVariant, NumbaCpuVariant, Scalar
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = [
    "CpuKernel",
    "LibraryKernel",
    "SharedCpuKernel",
    "binary_of",
    "bind_cpu",
    "forked",
    "key_of_shared",
]

Entry = Callable[..., None]

_entries: dict[str, Entry] = {}
"""Loaded code by the key of its binary; workloads that differ only in sizes share it."""


@functools.cache
def _numba_was_imported() -> bool:
    """Return whether the process had imported Numba before it bound its first kernel."""
    return "numba" in sys.modules


def key_of_shared(workload: Workload, variant: NumbaCpuVariant[Any], config: Config) -> str | None:
    """Return the key of a kernel's shared object, or None if Numba loads kernels in this process.

    Args:
        workload: The workload.
        variant: The variant.
        config: A valid point of its space.
    """
    return None if _numba_was_imported() else shared_key(variant, workload, config)


def bind_cpu(
    workload: Workload, variant: NumbaCpuVariant[Any], config: Config, binary: Binary | None = None
) -> CpuKernel:
    """Return a configuration compiled for this processor and loaded (see `bind`).

    Unless the process used Numba before, a shared object of the cache is loaded, or stored for the next
    process.

    Args:
        workload: The workload.
        variant: The variant.
        config: A valid point of its space.
        binary: Its machine code, which must have the key that it has here; that of the cache by default.
    """
    shared = None if binary is not None else key_of_shared(workload, variant, config)
    kernel = None if shared is None else find(shared, cache())
    if kernel is not None:
        return SharedCpuKernel(workload, variant, config, kernel)
    return CpuKernel(workload, variant, config, _entry(workload, variant, config, binary, shared))


def _entry(
    workload: Workload,
    variant: NumbaCpuVariant[Any],
    config: Config,
    binary: Binary | None = None,
    shared: str | None = None,
) -> Entry:
    """Return a kernel loaded by Numba, and store it as a shared object if it gets a key for that."""
    _start_threads()
    key = key_numba_cpu(variant, workload, config)
    entry = _entries.get(key)
    if entry is None:
        loaded = binary_of(workload, variant, config) if binary is None else binary
        dispatcher: Any = load_numba_cpu(loaded, variant, workload, config)
        # Numba's dispatcher would select this only overload by the argument types, which are known.
        (overload,) = dispatcher.overloads.values()
        entry = _entries.setdefault(key, overload.entry_point)
        if shared is not None:
            store(shared, loaded, cache())
    return entry


def binary_of(workload: Workload, variant: NumbaCpuVariant[Any], config: Config) -> Binary:
    """Return the machine code of a configuration for this processor, from the cache or compiled now.

    Args:
        workload: The workload.
        variant: The variant.
        config: A valid point of its space.
    """
    key = key_numba_cpu(variant, workload, config)
    return cache().get_or_compile(key, lambda: compile_numba_cpu(variant, workload, config))


@functools.cache
def _start_threads() -> None:
    """Start Numba's threads and restore torch's thread count: both may share one OpenMP runtime."""
    from numba.np.ufunc import parallel

    torch = sys.modules.get("torch")
    count = torch.get_num_threads() if torch is not None else 0
    parallel._launch_threads()
    if torch is not None:
        torch.set_num_threads(count)


class CpuKernel(BoundKernel):
    """A kernel on NumPy arrays; it runs on all of Numba's threads and holds the GIL.

    Args:
        workload: The workload.
        variant: The variant.
        config: Its configuration.
        entry: The compiled function.
    """

    def __init__(
        self, workload: Workload, variant: NumbaCpuVariant[Any], config: Config, entry: Entry
    ) -> None:
        super().__init__(workload, variant, config)
        self._entry = entry
        scratch = variant.scratch(workload, config)
        self._scratch = tuple((tensor.shape, bits_dtype(tensor.dtype)) for tensor in scratch)
        arguments = variant.arguments(workload, config)
        names = [tensor.name for tensor in (*self.tensors, *scratch)]
        self._constants = tuple(_number(a) for a in arguments if isinstance(a, Scalar))
        positions, constant = [], len(names)
        for argument in arguments:
            if isinstance(argument, Scalar):
                positions.append(constant)
                constant += 1
            else:
                positions.append(names.index(argument))
        self._ordered = None if positions == list(range(len(names))) else itemgetter(*positions)

    def run(self, *tensors: Any, **options: Any) -> None:
        """Run on valid arrays: floats of 16 and 8 bits as integers, tensors without a shape as numbers."""
        if self._scratch:
            tensors = (*tensors, *(np.empty(shape, dtype) for shape, dtype in self._scratch))
        if self._ordered is None:
            self._entry(*tensors)
        else:
            self._entry(*self._ordered((*tensors, *self._constants)))

    def __call__(self, *arrays: Array | float) -> None:
        """Run on C-contiguous arrays of the workload's dtypes; floats of 16 and 8 bits may also be integers.

        Args:
            arrays: Inputs, then outputs.

        Raises:
            InputError: if an array differs from its tensor; the message names it.
        """
        self._count(len(arrays))
        self.run(*(_checked(tensor, array) for tensor, array in zip(self.tensors, arrays, strict=True)))


class SharedCpuKernel(CpuKernel):
    """A kernel of a shared object, which needs no Numba; others may run Python meanwhile.

    Args:
        workload: The workload.
        variant: The variant.
        config: Its configuration.
        shared: The loaded shared object.
    """

    def __init__(
        self, workload: Workload, variant: NumbaCpuVariant[Any], config: Config, shared: SharedKernel
    ) -> None:
        super().__init__(workload, variant, config, self._by_numba)
        self._function = shared.run
        tensors, arguments = variant.tensors(workload, config), variant.arguments(workload, config)
        passed = [None if isinstance(argument, Scalar) else tensors[argument] for argument in arguments]
        self._arrays = tuple(tensor if tensor is not None and tensor.shape else None for tensor in passed)
        self._array_constants = constants_of([tensor for tensor in self._arrays if tensor is not None])
        self._pack = struct.Struct("".join(_code(argument, tensors) for argument in arguments)).pack

    def run(self, *tensors: Any, **options: Any) -> None:
        """Run on valid arrays: floats of 16 and 8 bits as integers, tensors without a shape as numbers."""
        self.run_at(
            *[_address(t) if tensor.shape else t for t, tensor in zip(tensors, self.tensors, strict=True)]
        )

    def run_at(self, *values: Any) -> None:
        """Run on the addresses of valid arrays, and numbers for tensors without a shape."""
        if self._scratch:
            scratch = [np.empty(shape, dtype) for shape, dtype in self._scratch]
            values = (*values, *map(_address, scratch))
        ordered = values if self._ordered is None else self._ordered((*values, *self._constants))
        if self._function(self._array_constants, self._pack(*ordered)):
            self._retry(ordered)

    def _retry(self, values: Sequence[Any]) -> None:
        """Run by Numba what failed, for its message."""
        arrays = [
            value if tensor is None else _array_at(value, tensor)
            for value, tensor in zip(values, self._arrays, strict=True)
        ]
        self._entry(*arrays)

    def _by_numba(self, *arguments: Any) -> None:
        assert isinstance(self.variant, NumbaCpuVariant)
        _entry(self.workload, self.variant, self.config)(*arguments)


def _code(argument: Argument, tensors: Mapping[str, Tensor]) -> str:
    """Return how `struct` packs an argument: an address or an integer, or a double."""
    if isinstance(argument, Scalar):
        return "d" if argument.ctype == "float" else "q"
    return "q" if tensors[argument].shape else "d"


_HEADER_BYTES = object.__basicsize__
_pointer_at = ctypes.c_void_p.from_address


def _address(array: Array) -> int | None:
    """Return the address of an array's first element, in a third of the time that its attributes take.

    Source: `PyArrayObject_fields` of NumPy's ABI begins with it.
    """
    return _pointer_at(id(array) + _HEADER_BYTES).value


def _array_at(address: int, tensor: Tensor) -> Array:
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(address)
    return np.ndarray(tensor.shape, bits_dtype(tensor.dtype), memory)


class LibraryKernel(BoundKernel):
    """A call of a library, on NumPy arrays or on dense tensors of torch in the order of their memory.

    On a GPU it takes tensors of torch, and works on torch's current stream.

    Args:
        workload: The workload.
        variant: The variant.
        config: Its configuration.

    Attributes:
        results: `LibraryVariant.results` of the configuration.
        is_traceable: `LibraryVariant.is_traceable` of the configuration.

    Raises:
        InputError: The library of the configuration is not installed.
    """

    def __init__(self, workload: Workload, variant: LibraryVariant[Any], config: Config) -> None:
        super().__init__(workload, variant, config)
        if variant.version(config) is None:
            raise InputError(f"{variant.package(config)} is not installed")
        self._takes_arrays = variant.device_kind == "cpu"
        self._call = functools.partial(variant.call, workload, config)
        self._names = tuple(tensor.name for tensor in self.tensors)
        self.results = variant.results(workload, config)
        self.is_traceable = variant.is_traceable(workload, config)

    def run(self, *tensors: Any, **options: Any) -> None:
        """Run on valid arrays or tensors of the workload's types, and numbers for tensors without a shape."""
        self._call(dict(zip(self._names, tensors, strict=True)))()

    def __call__(self, *arrays: Array | float) -> None:
        """Run on C-contiguous arrays of the workload's dtypes; 16-bit floats may also be passed as uint16.

        Args:
            arrays: Inputs, then outputs.

        Raises:
            InputError: if an array differs from its tensor; the message names it. Or the library runs on a
                GPU, where only tensors of torch are passed to it, by `tunebench.torch`.
        """
        self._count(len(arrays))
        if not self._takes_arrays:
            raise InputError(f"{self.variant.key} takes tensors of torch on a GPU: call tunebench.torch")
        pairs = zip(self.tensors, arrays, strict=True)
        self.run(*(_typed(tensor, _checked(tensor, array)) for tensor, array in pairs))


def _typed(tensor: Tensor, array: Any) -> Any:
    """Return an array of `_checked` with the type of its tensor."""
    return array.view(numpy_dtype(tensor.dtype)) if tensor.shape else array


def _number(scalar: Scalar) -> Any:
    return float(scalar.value) if scalar.ctype == "float" else int(scalar.value)


def _checked(tensor: Tensor, array: Any) -> Any:
    """Return an array as the compiled code expects it, or a number for a tensor without a shape."""
    if not tensor.shape:
        return float(array)
    dtype = bits_dtype(tensor.dtype)
    if not isinstance(array, np.ndarray):
        raise InputError(
            f"{tensor.name} must be a NumPy array of shape {tensor.shape}, got {type(array).__name__}"
        )
    if array.dtype != dtype and array.dtype == numpy_dtype(tensor.dtype):
        array = array.view(dtype)
    if array.shape != tensor.shape or array.dtype != dtype or not array.flags.c_contiguous:
        actual = f"shape {array.shape}, type {array.dtype}" + (
            "" if array.flags.c_contiguous else ", strided"
        )
        raise InputError(
            f"{tensor.name} must be C-contiguous with shape {tensor.shape}, type {tensor.dtype}; got {actual}"
        )
    return array


# -- forked processes --------------------------------------------------------------------------------

_forked = False


def forked() -> str | None:
    """Return why Numba's threads cannot run in this process, or None if they can."""
    if not _forked:
        return None
    return (
        "this process was forked after OpenMP threads were started for Numba, which do not survive a fork: "
        "start processes by spawn or forkserver, or set NUMBA_THREADING_LAYER=workqueue"
    )


def _after_fork() -> None:
    """Detect that the parent process had started GNU OpenMP: Numba would abort a child that uses it."""
    global _forked
    parallel, threads = sys.modules.get("numba.np.ufunc.parallel"), started()
    by_numba = parallel is not None and parallel._is_initialized and parallel.threading_layer() == "omp"
    if by_numba or (threads is not None and threads.layer == "omp"):
        _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
