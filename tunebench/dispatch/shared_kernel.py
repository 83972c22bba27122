"""Kernels of the cache folder as shared objects, which a serving process runs without importing Numba.

An entry is stored when a kernel is bound through Numba, in a process that did not use Numba before. Its key
has everything that decides the machine code, and can be computed without Numba: all source files of kernels
and workloads, versions, the processor and the number of threads.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import os
import secrets
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tunebench
from tunebench import kernels, workloads
from tunebench.binary.compiled import Binary, CompileError
from tunebench.compile.cache import BinaryCache, binary_key
from tunebench.compile.shared_object import THREADING, shared_object
from tunebench.dispatch.numba_threads import default_count, threads
from tunebench.dtype import itemsize
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant, Scalar, installed_version
from tunebench.workload import Tensor, Workload

__all__ = ["SharedKernel", "call_text", "constants_of", "find", "load", "shared_key", "store"]

_IMPORTED_NS = time.time_ns()
_PACKAGES = ("numba", "llvmlite", "numpy")
_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
"""Lines of /proc/cpuinfo that decide the machine code."""


@dataclass(frozen=True, slots=True)
class SharedKernel:
    """A loaded shared object (see `tunebench.compile.shared_object`).

    Attributes:
        key: Key of its entry.
        run: Its function `tunebench_run`, which takes constants and values; other threads of Python run
            meanwhile.
    """

    key: str
    run: Any


_loaded: dict[str, SharedKernel] = {}
_table: Any = None


def shared_key(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str | None:
    """Return the key of a configuration's shared object on this processor, or None if it has none.

    Variants of users have none: their kernels may depend on anything.

    Args:
        variant: The variant.
        workload: The workload.
        config: A valid point of its space.
    """
    machine = _machine()
    if machine is None or not type(variant).__module__.startswith("tunebench.kernels."):
        return None
    return binary_key("shared object 2", machine, variant.key, str(workload), str(config))


@functools.cache
def _machine() -> str | None:
    """Return a hash of what all kernels of this process depend on; None if Numba itself must say."""
    count, source, processor = default_count(), _source(), _processor()
    versions = [installed_version(package) for package in _PACKAGES]
    if sys.platform != "linux" or None in (count, source, processor, *versions):
        return None
    parts = (sys.version, *map(str, versions), str(count), str(source), str(processor))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _source() -> str | None:
    """Return a hash of the source of kernels; None if a file has changed since it was imported."""
    digest = hashlib.sha256(tunebench.__version__.encode())
    folders = [Path(folder) for package in (kernels, workloads) for folder in package.__path__]
    package = Path(__file__).parents[1]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    for path in sorted((*files, *package.glob("*.py"), *(package / "compile").glob("*.py"))):
        content = path.read_bytes()
        if path.stat().st_mtime_ns > _IMPORTED_NS:
            return None
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _processor() -> str | None:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            first = file.read(2**14).partition("\n\n")[0]
    except OSError:
        return None
    lines = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    values = {name.strip(): value.strip() for name, value in lines.items()}
    stated = [f"{name}: {values[name]}" for name in _PROCESSOR if name in values]
    return "\n".join((os.uname().machine, *stated)) if stated else None


def find(key: str, cache: BinaryCache) -> SharedKernel | None:
    """Return a kernel of the cache, loaded; None if it is missing or cannot be loaded here.

    Args:
        key: From `shared_key`.
        cache: The cache.
    """
    kernel = _loaded.get(key)
    if kernel is None:
        entry = cache.get(key)
        kernel = None if entry is None else load(entry)
    return kernel


def load(entry: Binary) -> SharedKernel | None:
    """Load a shared object, whose code can then run; None if it or Numba's threads cannot be loaded here.

    Args:
        entry: The entry of the cache, or of a file that is trusted as the cache is.
    """
    table = _threading()
    if table is None:
        return None
    try:
        library = _library(entry.payload)
        library.tunebench_bind(table)
        run = library.tunebench_run
    except (OSError, AttributeError):
        return None
    run.argtypes, run.restype = (ctypes.c_char_p, ctypes.c_char_p), ctypes.c_int
    return _loaded.setdefault(entry.key, SharedKernel(entry.key, run))


def _library(content: bytes) -> ctypes.CDLL:
    """Load a shared object from a file of its own: the loader returns an earlier one of the same name."""
    with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:  # only this user may write it
        path = Path(folder, f"{secrets.token_hex(16)}.so")
        path.write_bytes(content)
        return ctypes.CDLL(str(path))


def _threading() -> Any:
    """Return the table of Numba's functions, or None."""
    global _table
    pool = threads()
    if _table is None and pool is not None:
        addresses = [pool.functions.get(name) for name in THREADING]
        if None not in addresses:
            _table = (ctypes.c_void_p * len(addresses))(*addresses)
    return _table


def store(key: str, binary: Binary, cache: BinaryCache) -> None:
    """Store the shared object of a kernel, unless it is there or cannot be made.

    Args:
        key: From `shared_key`.
        binary: Numba's binary of the kernel.
        cache: The cache.
    """
    if not binary.payload or cache.get(key) is not None:
        return
    try:
        payload = shared_object(binary)
    except CompileError:  # the next process uses Numba, too
        return
    cache.put(dataclasses.replace(binary, key=key, payload=payload))


def constants_of(tensors: Sequence[Tensor]) -> bytes:
    """Return the constants of `tunebench_run` for C-contiguous arrays.

    Args:
        tensors: The arrays, in the order of the arguments.
    """
    words: list[int] = []
    for tensor in tensors:
        strides: list[int] = []
        size = stride = itemsize(tensor.dtype)
        for extent in reversed(tensor.shape):
            strides.insert(0, stride)
            stride *= extent
        words += (stride // size, size, *tensor.shape, *strides)
    return struct.pack(f"{len(words)}q", *words)


def call_text(variant: NumbaCpuVariant[Any], workload: Workload, config: Config) -> str:
    """Return how a program calls a kernel's shared object (`saved_model.hpp` of saved models reads it).

    Args:
        variant: The variant.
        workload: The workload.
        config: A valid point of its space.

    Returns:
        The number of constants, these, the number of arguments, and these: ``t0`` the first tensor of inputs
        and outputs, ``n0`` its number, ``i5`` an integer, ``f0.5`` a float, ``s64`` 64 bytes of scratch.
    """
    tensors, named = variant.tensors(workload, config), (*workload.inputs(), *workload.outputs())
    names = [tensor.name for tensor in named]
    words: list[str] = []
    arrays: list[Tensor] = []
    for argument in variant.arguments(workload, config):
        if isinstance(argument, Scalar):
            words.append(f"{'f' if argument.ctype == 'float' else 'i'}{argument.value!r}")
            continue
        tensor = tensors[argument]
        if tensor.shape:
            arrays.append(tensor)
        if argument not in names:
            words.append(f"s{tensor.nbytes}")
        else:
            words.append(f"{'t' if tensor.shape else 'n'}{names.index(argument)}")
    content = constants_of(arrays)
    constants = struct.unpack(f"{len(content) // 8}q", content)
    return " ".join(map(str, (len(constants), *constants, len(words), *words)))
